"""docs/torch-notes.md and the code agree: files, definitions and tests that a note names exist, and so do notes."""

import ast
import re

from source_tree import ROOT, modules

NOTES = ROOT / "docs" / "torch-notes.md"
FOLDERS = ("paramserver/", "trainers/", "tests/", "examples/", "docs/")
FILES = ("setup.cfg", "constraints.txt")


def notes() -> dict[str, str]:
    """Heading -> text of each note."""
    parts = re.split(r"^### (.+)\n", re.sub(r"^## .+\n", "", NOTES.read_text(), flags=re.MULTILINE), flags=re.MULTILINE)
    headings, texts = parts[1::2], parts[2::2]
    assert len(set(headings)) == len(headings), "two notes have the same heading"
    return dict(zip(headings, texts, strict=True))


def places(text: str) -> list[str]:
    """The files that a note names, perhaps with ``::test``."""
    return [word for word in re.findall(r"`([^`\s]+)`", text) if word.startswith(FOLDERS) or word in FILES]


def defined_in(path: str) -> set[str]:
    """The functions, classes and constants of a Python file."""
    nodes = list(ast.walk(ast.parse((ROOT / path).read_text())))
    found = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    targets = [target for node in nodes if isinstance(node, ast.Assign) for target in node.targets]
    return found | {target.id for target in targets if isinstance(target, ast.Name)}


def test_every_file_and_test_that_a_note_names_exists():
    missing = []
    for heading, text in notes().items():
        for path, _, test in (place.partition("::") for place in places(text)):
            if not (ROOT / path).is_file() or (test and test not in defined_in(path)):
                missing.append(f"{heading}: {path} {test}")
    assert missing == []


def test_every_definition_that_a_note_names_is_in_its_file():
    """A note names one as "`name` in `file`"."""
    named = [
        (heading, name, path)
        for heading, text in notes().items()
        for name, path in re.findall(r"`(\w+)`\s+in\s+`([^`]+\.py)`", text)
    ]
    assert len(named) > 10
    assert [place for place in named if place[1] not in defined_in(place[2])] == []


def test_every_note_names_a_file_that_depends_on_it():
    found = {
        heading: [place for place in places(text) if not place.startswith("tests/")]
        for heading, text in notes().items()
    }
    assert [heading for heading, depending in found.items() if not depending] == []


def test_every_note_that_the_code_points_to_exists():
    pointers = set()
    for module in modules():
        text = re.sub(r"\s+(?:#\s*)?", " ", module.path.read_text())
        pointers |= {(module.name, heading) for heading in re.findall(r'docs/torch-notes\.md, "([^"]+)"', text)}
    headings = notes()
    assert len(pointers) > 5
    assert {pointer for pointer in pointers if pointer[1] not in headings} == set()
