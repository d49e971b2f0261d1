"""Examples in docstrings run, and every public class and function has one."""

import doctest
import inspect
from importlib import import_module
from itertools import groupby
from typing import get_origin

import pytest
from source_tree import modules

MODULES = [module.name for module in modules()]
# What docs/interface.md and docs/api.md promise. Other folders export names for the rest of the package.
FOLDERS = ("buffers", "optim", "server", "sources", "trainers")
PACKAGES = ("paramserver", *(f"paramserver.{folder}" for folder in FOLDERS))
PUBLIC = [(package, name) for package in PACKAGES for name in import_module(package).__all__]
PUBLIC += [("paramserver.metrics", "Sink"), ("paramserver.metrics", "scalars")]
# The modules of each folder, as one test needs minutes for all of them on a busy machine.
UNITS = {unit: [*names] for unit, names in groupby(MODULES, lambda name: ".".join(name.split(".")[:2]))}
# Docstrings with an example that cannot run in a test, because it needs other processes.
ILLUSTRATIONS = {
    "paramserver.client.Client",
    "paramserver.client.finish",
    "paramserver.client.ping",
    "paramserver.evaluate.evaluate_run",
    "paramserver.predict.predict_run",
}


def examples_of(name: str) -> list[doctest.DocTest]:
    """The docstrings of a module that contain examples."""
    module = import_module(name)
    found = doctest.DocTestFinder(exclude_empty=True).find(module, name, globs=dict(vars(module)))
    return [test for test in found if test.examples]


@pytest.mark.parametrize("unit", UNITS)
def test_examples_give_what_they_show(unit, tmp_path_factory, monkeypatch):
    working = tmp_path_factory.mktemp("working")
    monkeypatch.chdir(working)
    for name in UNITS[unit]:
        for test in examples_of(name):
            # As in ``pytest --doctest-modules``; each docstring has a folder of its own.
            test.globs["getfixture"] = {"tmp_path": tmp_path_factory.mktemp("example")}.__getitem__
            output: list[str] = []
            result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=output.append)
            assert result.failed == 0, "".join(output)
            assert list(working.iterdir()) == [], f"the example of {test.name} leaves files"


def test_examples_that_do_not_run_are_listed():
    skipped = {
        test.name
        for name in MODULES
        for test in examples_of(name)
        if any(example.options.get(doctest.SKIP) for example in test.examples)
    }
    assert skipped == ILLUSTRATIONS


def test_every_public_class_and_function_has_an_example():
    exported = [getattr(import_module(package), name) for package, name in PUBLIC]
    # Python 3.10 calls an alias such as Mapping[str, Any] a class.
    callables = [e for e in exported if get_origin(e) is None and (inspect.isclass(e) or inspect.isfunction(e))]
    assert len(callables) > 30
    assert [f"{e.__module__}.{e.__qualname__}" for e in callables if "Example:" not in (e.__doc__ or "")] == []
