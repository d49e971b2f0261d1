"""What code of the user raises, or gives in a form that cannot be used: one sentence with the call and the value."""

import re
from pathlib import Path

import numpy as np
import pytest
import raising_tasks
import torch
from cli_errors import error_message
from launching import launch

from paramserver.parameters.numerics import to_number

TASKS = Path(raising_tasks.__file__)
SHORT = {"training": {"max_steps": 4, "max_epochs": None, "batch_size": 8, "validate_every": 2}, "mode": "local"}


def task(name, **arguments):
    return {"task": f"{TASKS}:{name}", "task_args": arguments}


def first_line(finished):
    return finished.output.partition("error: ")[2].splitlines()[0]


ITEM = "OSError: the image is damaged"
RAISING = {
    "item": rf"trainer 0: the source raised at sample \d+, index 17 of the data set: {ITEM}$",
    "items": rf"trainer 0: the source raised at sample \d+, one of the indices .*\b17\b.*: {ITEM}",
    "length": r"trainer 0: train_source, or what it returned, raised KeyError: 'no index file' \(.*:\d+\)",
    "hook": r"trainer 0: train_source, or what it returned, raised ZeroDivisionError: no data today \(.*:\d+\)",
    "process": r"trainer 0, batch \d+: process_sample raised for index 17: KeyError: 'label' \(.*:\d+\)",
    "collate": r"trainer 0, batch \d+: collate raised for index .*\b17\b.*: KeyError: 'label' \(.*:\d+\)",
    "sampler": r"the sampler \(RaisingSampler\), in pass 1, raised LookupError",
}
VALIDATING = {
    "item": r"validation_source, index 17 of the data set, position 17, raised OSError: the image is dam.* \(.*:\d+\)",
    "items": r"validation_source, one of the indices .*\b17\b.* raised OSError: the image is damaged \(.*:\d+\)",
    "length": r"what validation_source returned raised KeyError: 'no index file' \(.*:\d+\)",
    "hook": r"validation_source raised ZeroDivisionError: no data today \(.*:\d+\)",
    "process": r"process_sample or collate, for a batch of validation_source, raised KeyError: 'label' \(.*:\d+\)",
    "collate": r"process_sample or collate, for a batch of validation_source, raised KeyError: 'label' \(.*:\d+\)",
}


@pytest.mark.claim("failing-item")
@pytest.mark.parametrize("what", RAISING)
def test_an_error_of_the_data_names_the_call_and_the_sample(start, what):
    finished = start(**SHORT | {"training": SHORT["training"] | {"max_steps": 40}}, **task("Raises", what=what))
    assert finished.code == 1
    assert re.match(RAISING[what], first_line(finished)), finished.output


@pytest.mark.sampled(5)
@pytest.mark.parametrize("mode", ["local", "ddp", "rpc"])
@pytest.mark.parametrize(
    "what",
    ["build_model", "train_source", "item", "collate", "training_step", "validation_step", "on_checkpoint"],
)
def test_an_error_whose_message_cannot_be_read_is_named_by_its_class(tmp_path, mode, what):
    finished = launch(tmp_path, **SHORT | {"mode": mode}, **task("RaisesUnreadable", what=what))
    assert finished.code == 1, finished.output
    assert "UnreadableError: (its message cannot be read: __str__ raises AttributeError)" in first_line(finished)


@pytest.mark.claim("failing-item")
@pytest.mark.parametrize("what", VALIDATING)
def test_an_error_of_the_validation_data_names_the_call_and_the_sample(start, what):
    finished = start(**SHORT, **task("Raises", what=what, where="validation"))
    assert finished.code == 1
    assert re.match(VALIDATING[what], first_line(finished).partition("SourceError: ")[2] or first_line(finished))


@pytest.mark.claim("failing-item")
@pytest.mark.processes
@pytest.mark.usefixtures("forked_loaders")
@pytest.mark.parametrize(("mode", "workers"), [("ddp", 0), ("rpc", 2)])
def test_an_error_of_another_rank_names_its_sample_too(tmp_path, mode, workers):
    finished = launch(
        tmp_path,
        mode=mode,
        cluster={"num_trainers": 2},
        training={**SHORT["training"], "max_steps": 40, "loader_workers": workers},
        **task("Raises", what="item"),
    )
    assert finished.code == 1
    message = rf"rank \d \(trainer (\d)\): trainer \1: the source raised at .*, index 17 of the data set.*: {ITEM}"
    assert re.match(message, first_line(finished)), finished.output


@pytest.mark.claim("cyclic-state")
@pytest.mark.parametrize(
    ("what", "holds"),
    [
        ("task", r"itself \(at \['x'\]\)"),
        ("list", r"itself \(at \['values'\]\[1\]\['inner'\]\)"),
        ("callback", r"itself \(at \['paramserver\.callbacks'\]\['Keeps'\]\['again'\]\[0\]\)"),
        ("deep", r"more nested levels than can be copied"),
        ("gather", r"itself \(at \[1\]\)"),
    ],
)
def test_a_state_that_contains_itself(start, what, holds):
    message = error_message(start(**SHORT, **task("StoresItself", what=what)))
    owner = r"the value of trainer\.all_gather" if what == "gather" else r"the state of StoresItself\.on_checkpoint, .*"
    assert re.match(rf"{owner} holds {holds}; store tensors, numbers, strings, and lists or dicts of them", message)


@pytest.mark.claim("logged-vector")
@pytest.mark.parametrize("value", raising_tasks.VALUES)
@pytest.mark.parametrize("validation", [False, True])
def test_a_value_that_is_no_number_is_named(start, value, validation):
    message = error_message(start(**SHORT, **task("Logs", value=value, validation=validation)))
    shown = {
        "vector": r"\(3,\)",
        "empty": r"\(0,\)",
        "array": r"\(2, 2\)",
        "list": r"\[1\.0\]",
        "dictionary": r"\{'mean': 1\.0\}",
        "none": "None",
        "text": "'0.5'",
        "complex": "complex64",
        "number": "1j",
        "huge": "1000",
        "meta": r"\(\)",
    }[value]
    assert re.match(r"validation_step, batch 0: gradient" if validation else r"self\.log\('gradient', value\)", message)
    assert re.search(shown, message), message
    assert "must be one" in message, message


@pytest.mark.claim("logged-vector")
def test_a_number_of_any_library_is_logged():
    values = (2, 2.0, True, np.float32(2), np.array([2.0]), torch.tensor(2), torch.tensor([[2.0]], requires_grad=True))
    assert [to_number(value, "x", "y") for value in values] == [2, 2, 1, 2, 2, 2, 2]


@pytest.mark.claim("complex-loss")
def test_a_complex_loss(start):
    message = error_message(start(**SHORT, **task("ComplexLoss")))
    assert re.match(
        r"training_step, trainer 0, batch 0: returned a complex number \(torch\.complex64\); the loss must", message
    )
