"""docs/architecture.md states what the tree has: folders and their sizes, layers, files, names, threads.

``python tests/laws/test_architecture.py`` writes the sizes of the folders.
"""

import ast
import re
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

if __name__ == "__main__":  # pytest adds this folder by itself
    sys.path.append(str(Path(__file__).parents[1] / "helpers"))

from source_tree import ROOT, modules

FILE = ROOT / "docs" / "architecture.md"
PAGE = FILE.read_text(encoding="utf-8")
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
PACKAGE = ROOT / "paramserver"
AT_THE_TOP = ("trainers/", "tests/", "docs/", "examples/")
MOST_WORDS = 4500
# The sizes may be off by this share, so that not every change has to write them anew.
TOLERANCE = 0.25

PATH = r"(?:\w+/)*\w+\.(?:py|c)\b"
NAME = r"`([A-Za-z_]\w*(?:\.\w+)*)(?:\(\w*\))?`"
# `Name`, `Name` and `Name` (`file.py`), or: of `file.py`, in `file.py`. A file may be followed by others.
BOUND = re.compile(rf"((?:{NAME}(?:,?\s+(?:and|or)\s+|,\s+)?)+)(?:\s+\(|\s+of\s+|\s+in\s+)`({PATH})`")
IN_DIAGRAM = re.compile(rf"\b([A-Z]\w+)(?: \(|<br/>)({PATH})")
# Classes of torch, and keys of the config without their section.
OF_OTHERS = {"DistributedDataParallel"}
KEYS = {"on_loss"}


def path_of(name):
    """The file that a path on the page names."""
    return (ROOT if name.startswith(AT_THE_TOP) else PACKAGE) / name


def section(title):
    """The text under a heading."""
    return re.search(rf"^## {title}$(.*?)(?=^## |\Z)", PAGE, re.M | re.S).group(1)


def rows(title, first_heading):
    """The cells of the table of a section whose first column has this heading."""
    table = re.search(rf"^\| {first_heading} \|.*\n\| ---.*\n((?:\|.*\n)+)", section(title), re.M).group(1)
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()]


# What each file defines.


class Definitions:
    """Functions, classes and constants of a file, and the members of each of its classes without those of its bases."""

    def __init__(self, tree):
        self.top = set()
        self.members = {}
        self.bases = {}
        for node in tree.body:
            self.top |= _names_of(node)
            for own in ast.walk(node) if isinstance(node, ast.If) else [node]:
                if isinstance(own, ast.ClassDef):
                    self.members[own.name] = _members_of(own)
                    self.bases[own.name] = [ast.unparse(base).partition("[")[0].split(".")[-1] for base in own.bases]


def _names_of(node):
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _members_of(owner):
    """Methods, fields, and attributes that a method assigns to ``self``; not those that are only read."""
    found = {name for node in owner.body for name in _names_of(node)}
    for node in ast.walk(owner):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
            found |= {node.attr} if node.value.id == "self" else set()
    return found


@cache
def definitions():
    return {module.path: Definitions(module.tree) for module in modules()}


@cache
def files_of_classes():
    found = defaultdict(set)
    for path, own in definitions().items():
        for name in own.members:
            found[name].add(path)
    return found


def has_member(path, owner, member):
    """Whether a class has a member, or inherits it from a class of the package."""
    own = definitions()[path]
    return member in own.members[owner] or any(
        has_member(file, base, member) for base in own.bases[owner] for file in files_of_classes()[base]
    )


def is_defined(path, name):
    """Whether a file defines a name: a class or a function, a member of a class as ``Class.member``, a constant."""
    own = definitions()[path]
    owner, _, member = name.partition(".")
    if member:
        return owner in own.members and has_member(path, owner, member)
    return name in own.top or any(name in members for members in own.members.values())


def why_unknown(name):
    """Return what is wrong with a name that has no file beside it; None if it is one thing, and exists."""
    owner, _, member = name.partition(".")
    places = files_of_classes()[owner]
    if not places:
        return f"there is no class {owner}"
    if len(places) > 1:
        return f"{owner} is in {len(places)} files; name the one that is meant after it"
    return None if not member or has_member(*places, owner, member) else f"{owner} has no {member}"


def names_with_files(text):
    """Every name on the page with the file that is named after it."""
    for names, _, file in BOUND.findall(text):
        yield from ((name, file) for name in re.findall(NAME, names))


PROSE = re.sub(r"^```.*?^```$", "", PAGE, flags=re.M | re.S)
DIAGRAMS = "".join(re.findall(r"^```mermaid$(.*?)^```$", PAGE, flags=re.M | re.S))


def test_it_can_be_read_in_half_an_hour():
    assert len(PAGE.split()) < MOST_WORDS


def test_lines_of_prose_are_short():
    assert [line for line in PROSE.splitlines() if len(line) > 120 and not line.startswith("|")] == []


# Folders and layers.


def sizes():
    """Number of files and lines of each folder, without ``__init__.py``."""
    found = defaultdict(lambda: [0, 0])
    for module in modules():
        folder = "/".join(module.path.relative_to(ROOT).parts[:-1][:2])
        if not module.is_init and folder != "paramserver":
            found[folder][0] += 1
            found[folder][1] += len(module.path.read_text(encoding="utf-8").splitlines())
    return dict(sorted(found.items()))


def test_the_folders_are_those_of_the_tree():
    assert [cells[0].strip("`") for cells in rows("Folders", "folder")] == list(sizes())


def test_the_sizes_of_the_folders_are_about_right():
    for (folder, own), cells in zip(sizes().items(), rows("Folders", "folder"), strict=True):
        for number, written in zip(own, cells[1].replace(",", "").split(";"), strict=True):
            is_close = abs(number - int(written)) <= max(TOLERANCE * number, 1)
            assert is_close, (
                f"{folder}: {own}, and the page has {cells[1]}; run python tests/laws/{Path(__file__).name}"
            )


def write_sizes():
    text = PAGE
    for folder, (files, lines) in sizes().items():
        text = re.sub(rf"^(\| `{folder}` \|) [\d; ,]+ \|", rf"\g<1> {files}; {lines:,} |", text, flags=re.M)
    FILE.write_text(text, encoding="utf-8")


def test_the_layers_are_those_of_the_law():
    from tests.laws.test_layers import LAYERS

    assert [cells[1].replace("`", "") for cells in rows("Folders", "layer")] == LAYERS


# Files and names.


def test_every_file_and_folder_that_is_named_exists():
    files = set(re.findall(rf"(?<![\w/.])({PATH})", PAGE)) - {"setup.py"}
    assert len(files) > 100
    assert sorted(name for name in files if not path_of(name).is_file()) == []
    folders = set(re.findall(r"`((?:\w+/)+)`", PAGE))
    assert sorted(name for name in folders if not path_of(name).is_dir() and not (ROOT / name).is_dir()) == []


def test_a_name_with_a_file_is_defined_there():
    found = [*names_with_files(PROSE), *IN_DIAGRAM.findall(DIAGRAMS)]
    assert len(found) > 100
    assert [f"{file} has no {name}" for name, file in found if not is_defined(path_of(file), name)] == []


def test_a_class_or_member_without_a_file_is_one_thing():
    bound = {name for name, _ in [*names_with_files(PAGE), *IN_DIAGRAM.findall(DIAGRAMS)]}
    named = set(re.findall(r"`([A-Z][a-z]\w+(?:\.\w+)?)(?:\(\))?`", PROSE + GLOSSARY))
    named |= set(re.findall(r"\b([A-Z][a-z]\w*[A-Z]\w*\.\w+|[A-Z][a-z]\w+\.[a-z_]\w+)\b", DIAGRAMS))
    problems = {name: why_unknown(name) for name in named - OF_OTHERS}
    assert {name: text for name, text in problems.items() if text and name not in bound} == {}


def test_a_function_or_attribute_that_is_named_exists():
    known = {name for own in definitions().values() for name in own.top.union(*own.members.values())}
    known |= {module.name.rpartition(".")[2] for module in modules()} | KEYS
    keys = set(re.findall(r"`(\w+)(?:\.\w+)+(?:: \w+)?`", PROSE))
    named = set(re.findall(r"`(_?[a-z]\w*_\w*)(?:\(\w*\))?`", PROSE)) | set(re.findall(r"\b([a-z]*_\w+)\b", DIAGRAMS))
    paths = set(re.findall(PATH, DIAGRAMS))
    in_paths = {part for path in paths for part in re.split(r"[/.]", path)}
    assert sorted(named - known - keys - in_paths) == []


# Threads.


def test_every_thread_has_a_row():
    table = "\n".join(cells[0] for cells in rows("Threads", "thread"))
    for module in modules():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("threading.Thread", "ThreadPoolExecutor"):
                options = {k.arg: k.value for k in node.keywords}
                name = options.get("name", options.get("thread_name_prefix"))
                if ast.unparse(name) == "self.thread_name":  # which each subclass has
                    continue
                text = name.value if isinstance(name, ast.Constant) else name.values[0].value
                assert f"`{text}" in table, f"{module.name} starts a thread {text}"
            elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "thread_name":
                assert f"`{node.value.value}`" in table, f"{module.name} starts a thread {node.value.value}"


LOCK = re.compile(r"(?:self\.)?(\w+) = threading\.(?:R?Lock|Condition)\(\)")


def locks():
    """The locks that the package makes, as ``Class.attribute`` or as names of a module, with their module."""
    for module in modules():
        lines = module.path.read_text(encoding="utf-8").splitlines()
        for node in module.tree.body:
            for name in LOCK.findall("\n".join(lines[node.lineno - 1 : node.end_lineno])):
                yield module, f"{node.name}.{name}" if isinstance(node, ast.ClassDef) else name


def test_every_lock_has_a_place():
    ordered = section("Threads").partition("Locks, the outermost first")[2]
    files = {f"paramserver.{file.removesuffix('.py').replace('/', '.')}" for file in re.findall(PATH, ordered)}
    # Taken for one act of a process that no other lock can be part of: its end, the fork of a rank, a fault in chaos.
    alone = {"paramserver.context", "paramserver.platform", "paramserver.tools.chaos.faults"}
    found = [(module.name, lock) for module, lock in locks() if module.name not in alone]
    assert len(found) > 25
    of_the_server = ["ServerRun.lock", "ShardServer._lock"]
    missing = [lock for name, lock in found if f"`{lock}`" not in ordered and ("." in lock or name not in files)]
    assert missing == of_the_server


# Links, and the searches themselves.


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([\w./-]+\.md)\)", PAGE):
        assert (ROOT / "docs" / target).is_file(), target
    headings = {"#" + re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in re.findall(r"^## (.*)$", PAGE, re.M)}
    assert set(re.findall(r"\]\((#[\w-]+)\)", PAGE)) == headings


def test_links_of_other_pages_have_their_headings():
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for file, anchor in re.findall(r"\]\((?:[\w./-]*/)?(architecture|glossary)\.md#([\w-]+)\)", page.read_text()):
            text = (ROOT / "docs" / f"{file}.md").read_text(encoding="utf-8")
            headings = {h.lower().replace(" ", "-") for h in re.findall(r"^#+ (.*)$", text, re.M)}
            assert anchor in headings, f"{page.name}: {file}.md#{anchor}"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("`Updates` (`server/updates.py`)", [("Updates", "server/updates.py")]),
        ("`A`, `b` and `C.d` of `x/y.py`", [("A", "x/y.py"), ("b", "x/y.py"), ("C.d", "x/y.py")]),
        ("`A` is in the way; see `x.py`", []),
    ],
)
def test_names_are_found_with_their_files(text, found):
    assert list(names_with_files(text)) == found


def test_a_name_that_is_elsewhere_is_found():
    updates = PACKAGE / "server" / "updates.py"
    assert is_defined(updates, "Updates.apply")
    assert not is_defined(updates, "Updates.push")
    assert not is_defined(updates, "Aggregator")
    assert not is_defined(PACKAGE / "server" / "client.py", "ServerClient._members")
    assert is_defined(ROOT / "trainers" / "rpc.py", "RpcTrainer.all_gather")  # inherited
    assert why_unknown("RankSession.after") is None
    assert all(why_unknown(name) for name in ("Session.after", "make_parser", "Nothing"))


if __name__ == "__main__":
    write_sizes()
