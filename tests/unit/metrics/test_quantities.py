"""A quantity that is declared once is sent, combined, recorded and shown under its names."""

from dataclasses import fields

import pytest

from paramserver.metrics import scalars
from paramserver.metrics.console import Progress
from paramserver.metrics.records import (
    MEASURED,
    QUANTITIES,
    RecordWindow,
    StepQuantities,
    StepReport,
    StepResult,
    StepTotals,
    combine,
)
from paramserver.tools.report.cases import FIGURES
from paramserver.tools.report.from_runs import learning_curves
from paramserver.transport.messages import OptimizerCall

VALUES = {one.name: float(number) for number, one in enumerate(MEASURED, start=3)}


def result(step, **values):
    return StepResult(step, 8 * step, 0.5, (0.1,), float(step), **{**VALUES, **values})


def record():
    window = RecordWindow()
    window.add(result(1))
    return window.to_record(0)


def test_public_names_stay_as_they_are():
    assert {(one.record, one.tag) for one in QUANTITIES} >= {
        ("loss", "train/loss"),
        ("local_steps", "rounds/local_steps"),
        ("drift", "rounds/drift"),
    }
    for names in (
        [one.record for one in QUANTITIES],
        [one.tag for one in QUANTITIES],
        [one.stored for one in QUANTITIES],
    ):
        assert len(set(names)) == len(names)


@pytest.mark.parametrize("carrier", [StepTotals, StepReport, StepResult, OptimizerCall])
def test_each_class_that_carries_a_step_has_all_quantities(carrier):
    assert issubclass(carrier, StepQuantities)
    assert {one.name for one in QUANTITIES} <= {one.name for one in fields(carrier)}


def test_each_quantity_is_in_the_record_on_tensorboard_in_the_progress_and_in_reports(capsys):
    train = record()
    assert {one.record: train[one.record] for one in MEASURED} == {one.record: VALUES[one.name] for one in MEASURED}
    assert {one.tag: VALUES[one.name] for one in MEASURED}.items() <= dict(scalars(train)).items()
    curves = learning_curves([train], {})
    assert {one.record: curves[one.record] for one in MEASURED} == {
        one.record: [[8, 1.0, VALUES[one.name]]] for one in MEASURED
    }
    assert {one.title for one in QUANTITIES} <= {figure.name for figure in FIGURES}


def test_the_progress_shows_a_quantity_by_its_format(tmp_path):
    with (tmp_path / "progress").open("w+") as stream:
        Progress(stream, "auto").write(record())
        stream.seek(0)
        text = stream.read()
    assert "train loss 0.5, 3 local steps" in text
    assert "drift" not in text


def test_a_record_lacks_a_quantity_whose_condition_is_zero():
    window = RecordWindow()
    window.add(result(1, inner_steps=0.0))
    assert not {"local_steps", "drift"} & window.to_record(0).keys()


def test_values_are_combined_as_declared():
    steps = [StepTotals(1.0, 8, drift=1.0, table_ids=4.0), StepTotals(3.0, 8, drift=2.0, table_ids=6.0)]
    assert combine(steps) == {"loss": 2.0, "inner_steps": 0.0, "drift": 1.5, "table_ids": 10.0, "table_rows": 0.0}


def test_negative_values_are_combined_without_the_zero_that_nothing_measured():
    window = RecordWindow()
    for loss in (-3.0, -1.0):
        window.add(StepResult(1, 8, loss, (0.1,), 1.0))
    assert window.to_record(0)["loss"] == -2.0


def test_a_stored_window_of_an_earlier_version_continues():
    earlier = {"samples_before": 8, "seconds_before": 1.0, "steps": 2, "losses": 3.0, "step": 3, "samples": 24}
    earlier |= {"seconds": 3.0, "lr": (0.1,), "by_optimizer": {}}
    window = RecordWindow.of_state(earlier)
    window.add(StepResult(4, 32, 0.0, (0.1,), 4.0))
    train = window.to_record(0)
    assert (train["loss"], "drift" in train) == (1.0, False)
    assert window.state_dict() == {
        **earlier,
        "steps": 3,
        "losses": 3.0,
        "step": 4,
        "samples": 32,
        "seconds": 4.0,
        **dict.fromkeys(VALUES, 0.0),
    }
