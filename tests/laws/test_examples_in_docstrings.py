"""Examples in docstrings run, and every public class and function has one."""

import doctest
import inspect
from importlib import import_module
from typing import get_origin

import pytest
from source_tree import modules

MODULES = [module.name for module in modules()]
# What docs/interface.md and docs/api.md promise. Other folders export names for the rest of the package.
PACKAGES = ("paramserver", "paramserver.buffers", "paramserver.server", "paramserver.sources", "paramserver.trainers")
PUBLIC = [(package, name) for package in PACKAGES for name in import_module(package).__all__]
PUBLIC += [("paramserver.metrics", "Sink"), ("paramserver.metrics", "scalars")]
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


@pytest.mark.parametrize("name", MODULES)
def test_examples_give_what_they_show(name, request, tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("working")
    monkeypatch.chdir(folder)
    for test in examples_of(name):
        test.globs["getfixture"] = request.getfixturevalue  # as in ``pytest --doctest-modules``
        output: list[str] = []
        result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=output.append)
        assert result.failed == 0, "".join(output)
    assert list(folder.iterdir()) == [], "an example leaves no files"


def test_examples_that_do_not_run_are_listed():
    skipped = {
        test.name
        for name in MODULES
        for test in examples_of(name)
        if any(example.options.get(doctest.SKIP) for example in test.examples)
    }
    assert skipped == ILLUSTRATIONS


@pytest.mark.parametrize(("package", "name"), PUBLIC, ids=lambda part: part)
def test_every_public_class_and_function_has_an_example(package, name):
    exported = getattr(import_module(package), name)
    # Python 3.10 calls an alias such as Mapping[str, Any] a class.
    if get_origin(exported) is None and (inspect.isclass(exported) or inspect.isfunction(exported)):
        assert "Example:" in (exported.__doc__ or ""), f"{exported.__module__}.{exported.__qualname__}"
