"""A wheel and an sdist, built from the tree, that install and run outside of it."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest
from source_tree import ROOT, modules

# Python 3.11.4 and 3.10.12 have it, and later ones warn without it.
FILTER = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}

pytestmark = pytest.mark.processes
# setuptools changes sys.argv.
BUILD = "import sys, setuptools.build_meta as backend; folder = sys.argv[1]; [make(folder) for make in (%s)]"
# Of the top folder: what work there leaves behind.
LEFT = {".git", ".venv", "build", "data", "dist", "runs"}


def run(*words, cwd, **variables):
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environ |= {"PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(words, cwd=cwd, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(tree, folder, *names):
    """The files that setuptools, the build backend of pyproject.toml, makes in ``folder``."""
    makers = ", ".join(f"backend.build_{name}" for name in names) + ","
    run(sys.executable, "-c", BUILD % makers, str(folder), cwd=tree)
    return sorted(folder.iterdir())


def not_source(folder, names):
    caches = {name for name in names if name == "__pycache__" or name.endswith(("_cache", ".egg-info"))}
    return caches | (LEFT & set(names) if folder == str(ROOT) else set())


def files_of(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return sorted(archive.namelist())


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder in which nothing but the wheel and the sdist is; they are built from a copy of the tree."""
    folder = tmp_path_factory.mktemp("release")
    tree = shutil.copytree(ROOT, folder / "tree", ignore=not_source, symlinks=True)
    (folder / "dist").mkdir()
    wheel, sdist = build(tree, folder / "dist", "wheel", "sdist")  # in the order of their names
    shutil.rmtree(tree)
    assert (wheel.suffix, sdist.suffix) == (".whl", ".gz")
    return folder, wheel, sdist


def test_the_sdist_makes_the_same_wheel_and_holds_what_its_tests_need(built, tmp_path):
    _, wheel, sdist = built
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, **FILTER)
    (tree,) = tmp_path.iterdir()
    for name in (
        "tests/unit",
        "tests/helpers/tasks.py",
        "examples/quickstart/config.yaml",
        "docs/interface.md",
        ".ci/run",
    ):
        assert (tree / name).exists(), name
    (tmp_path / "again").mkdir()
    (again,) = build(tree, tmp_path / "again", "wheel")
    assert files_of(again) == files_of(wheel)


def test_the_wheel_holds_every_module_and_nothing_else_of_the_tree(built):
    _, wheel, _ = built
    files = [name for name in files_of(wheel) if ".dist-info/" not in name]
    sources = [re.sub(r"^trainers/", "paramserver/trainers/", str(m.path.relative_to(ROOT))) for m in modules()]
    assert sorted(files) == sorted([*sources, "paramserver/py.typed"])


# Prints where the trainers are; fails unless both names are one module, and a user's module precedes it.
TRAINERS = """
import sys
import {first}
import paramserver
import trainers
from importlib.util import find_spec
from paramserver import trainers as own
assert trainers is own is sys.modules["paramserver.trainers"]
print(find_spec("paramserver.trainers.rpc").origin)
del sys.modules["trainers"]
sys.path.append(sys.argv[1])
import trainers.of_user
"""


@pytest.mark.claim("old-trainers-import")
@pytest.mark.claim("users-trainers")
def test_the_trainers_are_found_in_every_form_of_the_package(built, tmp_path):
    _, wheel, sdist = built
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, **FILTER)
    (unpacked,) = tmp_path.iterdir()
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    checkout = shutil.copytree(ROOT / "paramserver", tmp_path / "checkout" / "paramserver", symlinks=True).parent
    shutil.copytree(ROOT / "trainers", checkout / "trainers")
    users = tmp_path / "users" / "trainers"
    users.mkdir(parents=True)
    (users / "of_user.py").touch()
    for top, where, first in (
        (site, "paramserver/trainers", "paramserver"),
        (unpacked, "trainers", "trainers"),
        (checkout, "trainers", "trainers"),
    ):
        program = [sys.executable, "-c", TRAINERS.format(first=first), str(users.parent)]
        found = run(*program, cwd=tmp_path, PYTHONPATH=str(top))
        assert found == f"{top / where / 'rpc.py'}\n"


def test_the_installed_wheel_trains_the_quickstart_in_an_empty_folder(built):
    folder, wheel, _ = built
    site, work = folder / "site", folder / "work"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site)]
    run(*install, str(wheel), cwd=folder)
    work.mkdir()
    for name in ("task.py", "config.yaml"):
        shutil.copy(ROOT / "examples/quickstart" / name, work)
    found = run(sys.executable, "-c", "import paramserver as p; print(p.__file__)", cwd=work, PYTHONPATH=str(site))
    assert found.strip() == str(site / "paramserver" / "__init__.py")
    command = [str(site / "bin" / "paramserver"), "launch", "--config", "config.yaml", "--set", "training.max_epochs=1"]
    run(*command, "--set", "logging.name=first", cwd=work, PYTHONPATH=str(site))
    assert (work / "runs/first/summary.json").exists()
    page = [str(site / "bin" / "paramserver"), "report", "runs/first", "--out", "page"]
    run(*page, cwd=work, PYTHONPATH=str(site))
    assert any((work / "page").iterdir())
