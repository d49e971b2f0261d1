"""Import of user code: which file or module a reference names, and the message where there is none."""

import gc
import importlib
import logging
import pickle
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from paramserver import importing, launch
from paramserver.errors import TaskError, UnsupportedConfiguration
from paramserver.importing import (
    PICKLED_TASK,
    check_torch_version,
    class_reference,
    code_folders,
    load_object,
    pickle_class,
    source_file,
    torch_import_without_gc,
)

CLASS = "class Digits:\n    where = {where!r}\n"


@pytest.fixture(autouse=True)
def import_state():
    """sys.path and sys.modules as they were."""
    path, modules = list(sys.path), dict(sys.modules)
    yield
    sys.path[:] = path
    for name in sys.modules.keys() - modules.keys():
        del sys.modules[name]


def write(folder: Path, name: str, text: str | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / name
    file.write_text(CLASS.format(where=folder.name) if text is None else text)
    return file


def test_a_file_is_looked_for_in_the_folders_in_their_order(tmp_path):
    write(tmp_path / "second", "digits_task.py")
    folders = [tmp_path / "first", tmp_path / "second"]
    assert load_object("digits_task.py:Digits", "task", folders).where == "second"
    del sys.modules["digits_task"]
    write(tmp_path / "first", "digits_task.py")
    assert load_object("digits_task.py:Digits", "task", folders).where == "first"


@pytest.fixture
def no_former_name(monkeypatch):
    """A process that has not imported the name ``trainers``."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "trainers"]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.claim("users-trainers")
@pytest.mark.parametrize("file", ["trainers/__init__.py", "trainers/digits.py", "trainers.py"])
@pytest.mark.parametrize("position", [0, -1], ids=["first", "last"])
def test_a_module_of_the_user_precedes_the_former_name_of_the_trainers(
    tmp_path, monkeypatch, no_former_name, caplog, file, position
):
    top = Path(importing.__file__).parents[1]  # in a checkout it has a folder of this name
    monkeypatch.setattr(sys, "path", [str(top), *sys.path])
    sys.path.insert(len(sys.path) if position else 0, str(tmp_path))
    file = write(tmp_path, "trainers.py") if file == "trainers.py" else write(tmp_path / "trainers", Path(file).name)
    name = ".".join(file.relative_to(tmp_path).with_suffix("").parts).removesuffix(".__init__")
    assert load_object(f"{name}:Digits", "task").where == file.parent.name
    assert Path(sys.modules[name].__file__) == file
    from paramserver.trainers import Trainer

    assert Trainer.__module__ == "paramserver.trainers.base"
    assert caplog.messages == []


@pytest.mark.claim("old-trainers-import")
@pytest.mark.parametrize("reference", ["trainers:RpcTrainer", "trainers.rpc:RpcTrainer"])
def test_the_former_name_of_the_trainers_is_the_same_module(no_former_name, caplog, reference):
    found = load_object(reference, "trainer")
    from paramserver.trainers import RpcTrainer

    assert found is RpcTrainer
    assert (
        load_object("trainers.ddp:DdpTrainer", "trainer") is importlib.import_module("paramserver.trainers").DdpTrainer
    )
    assert pickle.loads(b"ctrainers.push\nGradientBuckets\n.").__module__.startswith("paramserver.")
    assert sys.modules["trainers.ddp"] is sys.modules["paramserver.trainers.ddp"]
    assert sys.modules["trainers"].__spec__.name == "paramserver.trainers"
    (line,) = caplog.messages
    assert "paramserver.trainers" in line


def test_a_file_may_be_absolute_or_in_a_sub_folder(tmp_path):
    file = write(tmp_path / "sub", "deep_task.py")
    assert load_object(f"{file}:Digits", "task").where == "sub"
    assert load_object("sub/deep_task.py:Digits", "task", [tmp_path]) is load_object(f"{file}:Digits", "task")


def test_a_file_is_imported_once(tmp_path):
    file = write(tmp_path, "counted_task.py", "import sys\nsys.counted = getattr(sys, 'counted', 0) + 1\nclass A: pass")
    try:
        assert load_object(f"{file}:A", "task") is load_object("counted_task.py:A", "task", [tmp_path])
        assert load_object("counted_task:A", "task", [tmp_path]) is load_object(f"{file}:A", "task")
        assert sys.counted == 1
    finally:
        del sys.counted


def test_a_file_with_the_name_of_a_module_does_not_replace_it(tmp_path):
    loaded = load_object("json.py:Digits", "task", [write(tmp_path, "json.py").parent])
    import json

    assert loaded.where == tmp_path.name
    assert json.dumps([1]) == "[1]"


@pytest.mark.parametrize("form", ["{}:Digits", "{}.py:Digits"])
@pytest.mark.parametrize("end", ["", "raise ValueError"])
def test_code_that_changes_the_current_folder_changes_no_path_of_the_run(tmp_path, monkeypatch, caplog, form, end):
    monkeypatch.chdir(tmp_path)
    text = f"import os\nos.chdir({str(tmp_path / 'task')!r})\nclass Digits: ...\n{end}\n"
    write(tmp_path / "task", "moving_task.py", text)
    with pytest.raises(TaskError) if end else nullcontext():
        load_object(form.format("moving_task"), "task", [tmp_path / "task"])
    assert Path.cwd() == tmp_path
    (line,) = caplog.messages
    assert line.startswith(f"task: its code changed the current folder, which is {tmp_path} again")


def test_code_that_configures_logging_does_not_disable_the_log_of_the_run(tmp_path, caplog):
    text = "import logging.config\nlogging.config.dictConfig({'version': 1})\nclass Digits: ...\n"
    loggers = [logging.getLogger(name) for name in ("paramserver", "paramserver.publisher", "not_paramserver")]
    try:
        load_object(f"{write(tmp_path, 'logging_task.py', text)}:Digits", "task")
        assert [logger.disabled for logger in loggers] == [False, False, True]
    finally:
        for logger in loggers:
            logger.disabled = False


def test_a_file_may_import_its_neighbours(tmp_path):
    write(tmp_path, "neighbour_of_task.py", "VALUE = 7\n")
    file = write(tmp_path, "with_neighbour.py", "from neighbour_of_task import VALUE\nclass A: value = VALUE\n")
    assert load_object(f"{file}:A", "task").value == 7


def test_a_module_is_found_in_the_folders(tmp_path):
    write(tmp_path / "one" / "pack_of_tasks", "mod.py")
    write(tmp_path / "two" / "pack_of_tasks", "mod.py")
    folders = [tmp_path / "one", tmp_path / "two"]
    assert load_object("pack_of_tasks.mod:Digits", "task", folders).where == "pack_of_tasks"
    assert Path(sys.modules["pack_of_tasks.mod"].__file__).parts[-3] == "one"


def test_a_module_of_another_folder_that_was_loaded_before_is_not_taken_for_it(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "own_task_module.py").write_text(CLASS.format(where=name))
    assert load_object("own_task_module:Digits", "task", [tmp_path / "a"]).where == "a"
    assert load_object("own_task_module:Digits", "task", [tmp_path / "a", tmp_path / "b"]).where == "a"
    with pytest.raises(
        TaskError, match=r"module own_task_module must be \S+/b/own_task_module.py, and this process has"
    ):
        load_object("own_task_module:Digits", "task", [tmp_path / "b"])


def test_the_folders_come_first_also_where_one_is_searched_already(tmp_path, monkeypatch):
    write(tmp_path / "one" / "pack_found_twice", "mod.py")
    write(tmp_path / "two" / "pack_found_twice", "mod.py")
    folders = [tmp_path / "one", tmp_path / "two"]
    monkeypatch.setattr(sys, "path", [str(folders[1]), str(folders[0]), *sys.path])
    load_object("pack_found_twice.mod:Digits", "task", folders)
    assert Path(sys.modules["pack_found_twice.mod"].__file__).parts[-3] == "one"


def test_a_file_does_not_get_what_another_program_imported_under_the_name_of_a_file_beside_it(tmp_path):
    program = "from {module} import WHERE\nimport os.path\nclass Digits:\n    where = WHERE\n"
    for folder in ("first", "second"):
        write(tmp_path / folder, "beside_the_task.py", f"WHERE = {folder!r}\n")
        write(tmp_path / folder, "json.py", "raise OSError\n")  # of the name of a library that is loaded
        write(tmp_path / folder, f"{folder}_task.py", program.format(module="beside_the_task") + "import json\n")
    assert load_object("first_task.py:Digits", "task", [tmp_path / "first"]).where == "first"
    with pytest.raises(TaskError, match=r"module beside_the_task must be .*second.*has loaded .*first"):
        load_object("second_task.py:Digits", "task", [tmp_path / "second"])
    write(tmp_path / "third", "third_task.py", program.format(module="beside_the_task"))
    assert load_object("third_task.py:Digits", "task", [tmp_path / "third"]).where == "first"  # as it has none


@pytest.mark.parametrize(
    "line",
    ["# coding: latin-1\nimport gr\u00f6sse".encode("latin-1"), "import gro\u0308sse".encode()],
    ids=["latin-1", "decomposed"],
)
def test_it_is_found_in_any_encoding_and_normal_form(tmp_path, line):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "gr\u00f6sse.py").touch()
    first = tmp_path / "first" / "gr\u00f6sse.py"
    load_object(f"{first}:__name__", "task")
    (tmp_path / "second" / "imports_it.py").write_bytes(line)
    with pytest.raises(TaskError, match=r"module gr\u00f6sse must be .*second.*has loaded .*first"):
        load_object(f"{tmp_path / 'second' / 'imports_it.py'}:__name__", "task")


def test_a_reference_is_relative_to_where_it_was_written(tmp_path, monkeypatch):
    current, config, recorded = tmp_path, tmp_path / "project" / "config.yaml", tmp_path / "recorded"
    monkeypatch.chdir(current)
    here = ["seed=1", "simulations.sampler=mine.py:Sampler"]
    assert code_folders(config) == [config.parent, current]
    assert code_folders(config, here) == [current, config.parent]
    assert code_folders(None, ["seed=1"], [recorded]) == [recorded, current]
    assert code_folders(config, here, [recorded]) == [current, config.parent, recorded]
    assert code_folders(None, [], [current]) == [current]


@pytest.mark.parametrize("reference", ["Digits", ":Digits", "a.py:", "a.py:Di gits", "a.py:1st", ""])
def test_a_reference_has_a_place_and_a_name(reference):
    with pytest.raises(UnsupportedConfiguration, match=r'must read "module:Class" or "path/to/file\.py:Class"'):
        load_object(reference, "trainer")


def test_a_missing_file_is_refused_with_the_folders_searched(tmp_path):
    with pytest.raises(TaskError) as caught:
        load_object("sub/none.py:Digits", "task", [tmp_path / "a", tmp_path / "b"])
    assert str(caught.value) == (
        f"task: there is no file sub/none.py; looked in {tmp_path / 'a' / 'sub'}, {tmp_path / 'b' / 'sub'}"
    )


def test_a_missing_name_is_refused_with_the_classes_and_functions_of_the_module(tmp_path):
    text = "from os.path import join\nfrom pathlib import Path\nclass B: pass\nclass A: pass\ndef inputs(): pass\n"
    file = write(tmp_path, "several.py", text)
    with pytest.raises(TaskError, match=r"several\.py has no Digits; it has A, B, inputs$"):
        load_object(f"{file}:Digits", "task")
    with pytest.raises(TaskError, match=r"it has no classes or functions$"):
        load_object(f"{write(tmp_path, 'bare.py', '')}:Digits", "task")


@pytest.mark.parametrize("module", ["no_such_module", "no_such_module.below", "json.no_such_part"])
def test_a_missing_module_is_named(module):
    with pytest.raises(TaskError, match=r"^task: there is no module (no_such_module|json\.no_such_part); the current"):
        load_object(f"{module}:Digits", "task")


def test_a_module_with_a_failing_import_has_another_message(tmp_path):
    write(tmp_path, "lacks_something.py", "import not_installed_anywhere\n")
    with pytest.raises(TaskError, match="importing lacks_something failed: No module named 'not_installed_anywhere'"):
        load_object("lacks_something:Digits", "task", [tmp_path])


@pytest.mark.parametrize(
    ("text", "kind"),
    [("1 / 0", "ZeroDivisionError"), ("class", "SyntaxError"), ("import sys\nsys.exit('no data')", "SystemExit")],
)
@pytest.mark.parametrize("form", ["{}", "{}.py"])
def test_an_error_during_import_is_described_and_chained(tmp_path, text, kind, form):
    write(tmp_path, "broken_task.py", text)
    with pytest.raises(TaskError, match=f"importing .*broken_task.* raised {kind}: ") as caught:
        load_object(f"{form.format('broken_task')}:Digits", "task", [tmp_path])
    assert type(caught.value.__cause__).__name__ == kind
    assert "broken_task" not in sys.modules  # so that the corrected file is imported


def test_a_module_that_reads_a_command_line_while_it_is_imported_gets_a_cure(tmp_path):
    file = write(tmp_path, "reads_flags.py", "import argparse\nargparse.ArgumentParser().parse_args(['--rank'])\n")
    with pytest.raises(TaskError, match=r'SystemExit: 2 \(\S+reads_flags.py:2\); .* under if __name__ == "__main__":$'):
        load_object(f"{file}:Digits", "task")


def test_any_object_may_be_named(tmp_path):
    assert load_object("json:loads", "task")("7") == 7


# From a class to its reference.


class AtTheTop:
    class Inside:
        pass


def test_a_class_at_the_top_of_a_module_has_a_reference():
    assert class_reference(AtTheTop) == (f"{__name__}:AtTheTop", [Path(__file__).parents[__name__.count(".")]])
    assert load_object(f"{__name__}:AtTheTop", "task") is AtTheTop
    assert class_reference(TaskError) == ("paramserver.errors:TaskError", [])
    assert class_reference(pytest.Session) == ("_pytest.main:Session", [])  # of an installed package


@pytest.mark.parametrize("module", ["sub_task", "pack_of_sub.deep.task", "pack_of_sub.deep"])
def test_a_folder_that_a_program_adds_to_its_path_is_searched_by_other_processes(tmp_path, monkeypatch, module):
    """That of the module, or above its packages; a program adds it by any path."""
    added = tmp_path / "lib"
    text = "class Found: ...\n"
    write(added, "sub_task.py", text)
    write(added / "pack_of_sub" / "deep", "__init__.py", text)
    write(added / "pack_of_sub" / "deep", "task.py", text)
    (tmp_path / "scripts").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path / "scripts" / ".." / "lib"))
    found = load_object(f"{module}:Found", "task")
    assert class_reference(found) == (f"{module}:Found", [added])


def test_a_class_that_other_processes_cannot_import_is_refused():
    def maker() -> type:
        class Local:
            pass

        return Local

    for hidden in (AtTheTop.Inside, maker()):
        with pytest.raises(TaskError, match="must be defined at the top of a module"):
            class_reference(hidden)


def test_a_class_of_a_program_from_standard_input_has_no_reference(monkeypatch):
    piped = main_class(monkeypatch, "<stdin>")
    assert class_reference(piped) == (None, [])


def main_class(monkeypatch: pytest.MonkeyPatch, file: str | Path, spec: str | None = None) -> type:
    """Return a class of the program ``file``, which was started with ``-m`` if it has a ``spec``."""
    main, made = sys.modules["__main__"], type("Digits", (), {"__module__": "__main__", "__qualname__": "Digits"})
    monkeypatch.setattr(main, "Digits", made, raising=False)
    monkeypatch.setattr(main, "__file__", str(file), raising=False)
    monkeypatch.setattr(main, "__spec__", None if spec is None else importlib.machinery.ModuleSpec(spec, None))
    return made


def test_a_class_without_a_file_is_sent_with_what_it_uses(tmp_path, monkeypatch):
    scope = {"__name__": "__main__", "WIDTH": 3}
    exec(
        "class Base: ...\nclass Metric(Base): ...\nclass Kept: ...\nKEPT = Kept()\n"
        "class Typed:\n    def width(self):\n        return WIDTH\n"
        "    @staticmethod\n    def made():\n        return [Metric(), KEPT]\n",
        scope,
    )
    (tmp_path / PICKLED_TASK).write_bytes(pickle_class(scope["Typed"]))
    loaded = load_object(f"{PICKLED_TASK}:Typed", "task", [tmp_path])
    assert loaded().width() == 3
    assert source_file(loaded) is None
    # Ranks send what it makes to each other, such as a metric, whose class they have all loaded.
    for made in loaded.made():
        assert type(pickle.loads(pickle.dumps(made))) is type(made)


def test_a_class_that_cannot_be_sent_is_named(tmp_path, monkeypatch):
    with (tmp_path / "file").open("w") as file:
        scope = {"__name__": "__main__", "FILE": file}
        exec("class Typed:\n    def write(self):\n        FILE.write('')\n", scope)
        with pytest.raises(TaskError, match=r"^Typed cannot be sent to other processes: .*; put it into a \.py file"):
            pickle_class(scope["Typed"])
    large = {"__name__": "__main__", "DATA": bytes(2**20)}
    exec("class Large:\n    def read(self):\n        return DATA\n", large)
    assert len(pickle_class(large["Large"])) > 2**20
    with pytest.raises(TaskError, match=r"^Large cannot be sent to other processes: .*uses more than 1,048,576 bytes"):
        pickle_class(large["Large"], max_bytes=2**20)
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(TaskError, match=r"^Typed was defined in a notebook.*install the extra notebook.*mode: local$"):
        pickle_class(scope["Typed"])


def test_a_damaged_pickled_task_is_named(tmp_path):
    (tmp_path / PICKLED_TASK).write_bytes(b"not a pickle")
    with pytest.raises(TaskError, match=r"^task: loading .*task\.pkl raised "):
        load_object(f"{PICKLED_TASK}:Typed", "task", [tmp_path])


def test_a_class_of_the_script_is_found_by_its_file(tmp_path, monkeypatch):
    script = write(tmp_path, "script.py")
    typed = main_class(monkeypatch, script)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert class_reference(typed) == (f"{script}:Digits", [tmp_path])
    monkeypatch.delattr(sys.modules["__main__"], "__file__")
    assert class_reference(typed) == (None, [])


def test_a_class_of_a_program_that_was_started_with_m_is_found_by_the_name_of_its_module(tmp_path, monkeypatch):
    """A file alone cannot have relative imports."""
    for name in ("train", "__main__"):
        program = write(tmp_path / "pack", f"{name}.py")
        typed = main_class(monkeypatch, program, f"pack.{name}")
        monkeypatch.setattr(sys, "path", [str(tmp_path)])
        assert class_reference(typed) == (f"pack.{name}:Digits", [tmp_path])
    assert class_reference(main_class(monkeypatch, program, "__main__"))[0] == f"{program}:Digits"  # python FOLDER


def test_a_class_of_a_program_that_another_one_runs_is_not_searched_in_that_one(tmp_path, monkeypatch):
    typed = main_class(monkeypatch, write(tmp_path, "profiler.py", ""), "profiler")
    monkeypatch.delattr(sys.modules["__main__"], "Digits")
    assert class_reference(typed) == (None, [])
    assert source_file(typed) is None


def test_a_class_of_another_main_module_is_named_with_the_cure():
    with pytest.raises(TaskError, match=r"task \(__main__:Lost\) must name .* --set task=path/to/file\.py:Lost"):
        load_object("__main__:Lost", "task")


def test_a_module_that_starts_a_run_while_it_is_imported_is_refused(tmp_path):
    file = write(tmp_path, "starts_a_run.py", "import paramserver\nparamserver.run('no task')\n")
    with pytest.raises(TaskError, match=r'paramserver\.run was called while .* under if __name__ == "__main__"'):
        load_object(f"{file}:Digits", "task")


@pytest.mark.parametrize("error", [None, ValueError("while it was imported")])
def test_torch_is_imported_without_collecting_garbage(monkeypatch, error):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    frozen = gc.get_freeze_count()
    try:
        with pytest.raises(ValueError) if error else nullcontext(), torch_import_without_gc():
            assert not gc.isenabled()
            if error:
                raise error
        assert gc.isenabled()
        assert gc.get_freeze_count() > frozen
    finally:
        gc.unfreeze()


def test_garbage_collection_is_unchanged_if_torch_is_imported_or_it_is_disabled(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", sys)
    with torch_import_without_gc():
        assert gc.isenabled()
    monkeypatch.delitem(sys.modules, "torch")
    gc.disable()
    frozen = gc.get_freeze_count()  # by an earlier test of this process
    try:
        with torch_import_without_gc():
            assert not gc.isenabled()
        assert not gc.isenabled()
        assert gc.get_freeze_count() == frozen
    finally:
        gc.enable()


@pytest.mark.parametrize("version", ["2.13.0", "2.13.1+cu130", "2.13.0a0+git1f2e3d4", "2.13.0.dev20260101"])
def test_a_release_of_torch_in_the_range_is_accepted(version, monkeypatch):
    monkeypatch.setattr(importing, "TORCH_FROM", "2.9")
    monkeypatch.setattr(importing, "TORCH_BELOW", "2.14")
    check_torch_version(version)
    for refused in ("2.8.1", "1.99", "2.14.0.dev20260101", "3.0.0"):
        with pytest.raises(
            UnsupportedConfiguration, match=r"must be at least 2\.9 and below 2\.14, .*pip install 'torch>"
        ):
            check_torch_version(refused)


def test_a_run_with_another_release_of_torch_is_refused_in_one_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(importing, "TORCH_BELOW", "1.0")
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")  # which main sets
    config = tmp_path / "config.yaml"
    config.write_text("task: task.py:Task\nmode: local\n")
    assert launch.main(["--config", str(config)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: torch (")
    assert list(tmp_path.iterdir()) == [config]


def test_torch_without_metadata_is_of_an_unknown_release(monkeypatch):
    def missing(package):
        raise importing.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importing.metadata, "version", missing)
    check_torch_version()
    monkeypatch.setattr(importing.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedConfiguration, match="torch must be installed; run: "):
        check_torch_version()


def test_a_current_folder_that_was_removed_is_one_sentence(tmp_path, monkeypatch):
    (tmp_path / "removed").mkdir()
    monkeypatch.chdir(tmp_path / "removed")
    (tmp_path / "removed").rmdir()
    for config_file in (None, Path("config.yaml"), tmp_path / "config.yaml"):
        with pytest.raises(UnsupportedConfiguration, match=r"^the current folder must exist, and was removed; change"):
            code_folders(config_file)
