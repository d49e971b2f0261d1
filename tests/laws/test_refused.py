"""docs/refused.md is the list of all sentences that refuse input. ``python tests/laws/test_refused.py`` writes it."""

import ast
import re
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

from source_tree import modules  # noqa: E402

from paramserver.config import checks  # noqa: E402
from paramserver.config.schema import format_value  # noqa: E402

PAGE = ROOT / "docs" / "refused.md"
CLASSES = {"UnsupportedConfiguration", "TaskError", "CheckpointError", "ModelIsElsewhere", "NoSuchMember"}
HEADER = """# What is refused

Every sentence with which wrong input ends a command (exit code 2), a task or a client's program: name, value, rule and
cure. `…` stands for what is filled in. The rules of single keys are in the [table of keys](configuration.md). Written
by `python tests/laws/test_refused.py` from the code.
"""
SUBJECTS = {
    "Config": "config",
    "Command line, processes and hosts": "launch cli cluster context devices distributed elastic process_utils runtime",
    "Tasks and models": "task api importing parameters rng trainers limits consistency",
    "Data and buffers": "sources buffers",
    "Optimizers and servers": "optim server transport",
    "Runs and checkpoints": "runs checkpoint fileio evaluate predict",
    "Records": "metrics",
    "Simulations and clients": "online client run_simulation",
    "Lightning": "integrations",
    "Benchmarks and reports": "bench prediction report",
    "Faults": "chaos",
}


def subject_of(module):
    unit = module.name.removeprefix("paramserver.").removeprefix("tools.").partition(".")[0]
    return next((subject for subject, units in SUBJECTS.items() if unit in units.split()), "Other commands")


def text_of(node):
    """The text of a string in the code; None if it is no literal."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or "…" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = text_of(node.left), text_of(node.right)
        return None if left is None and right is None else f"{left or '…'}{right or '…'}"
    return None


def served(call):
    """The sentence of a relation that a call of ``_served`` makes."""
    key, allowed, reason, cure, *_ = (eval(ast.unparse(argument), vars(checks)) for argument in call.args)
    rule = " or ".join(map(format_value, allowed))
    return f"{key} (…) must be {rule} with server.compute server, where {reason}; {cure}"


def sentences(module):
    """What a module refuses, in the order of its lines."""
    found, of_checks = [], module.name == checks.__name__
    template = next(
        (f for f in module.tree.body if of_checks and getattr(f, "name", "") == checks._served.__name__), None
    )
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and node.args:
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
            found += [(node.lineno, text_of(node.args[0]))] if name in CLASSES else []
            found += [(node.lineno, served(node))] if of_checks and name == checks._served.__name__ else []
        elif isinstance(node, ast.Return) and node.value is not None and of_checks and node not in ast.walk(template):
            found.append((node.lineno, text_of(node.value)))
    # One that consists of what is filled in has no words of its own.
    return [text for _, text in sorted(found, key=lambda one: one[0]) if text and len(re.findall(r"\w{3,}", text)) > 2]


def bullet(text):
    escaped = re.sub(r"([*<\[\]\\`])|__", lambda found: "".join(f"\\{letter}" for letter in found[0]), text)
    words = " ".join(escaped.replace("……", "…").split())
    return textwrap.fill(words, 119, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False) + "\n"


def page():
    by_subject = {subject: [] for subject in (*SUBJECTS, "Other commands")}
    for module in modules():
        if not module.is_init:
            by_subject[subject_of(module)] += sentences(module)
    parts = [
        f"\n## {subject}\n\n" + "".join(bullet(text) for text in dict.fromkeys(found))
        for subject, found in by_subject.items()
        if found
    ]
    return HEADER + "".join(parts)


def test_the_page_has_every_sentence():
    assert page() == PAGE.read_text(), "write it by: python tests/laws/test_refused.py"


def test_the_search_finds_sentences_of_all_kinds():
    text = " ".join(PAGE.read_text().split())
    for part in (
        "cluster.spares (…) must be 0 with cluster.max_restarts (0)",
        "trainer.all_gather must have trainers that step together",
        "the sampler (…) must be iterable; return a sampler, or a list of indices",
        "server.transport (…) must be auto or rpc with server.compute server, where no parameters are sent",
    ):
        assert part in text


if __name__ == "__main__":
    PAGE.write_text(page())
