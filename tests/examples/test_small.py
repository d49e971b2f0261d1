"""examples/quickstart and examples/digits, in their smallest form: both modes end with the same parameters."""

import pytest
from example_modules import EXAMPLES
from launching import FinishedRun, differing_tensors, environment

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    ("example", "steps"), [("quickstart", 16), ("digits", 23)]
)  # one pass over 1,024 and 1,437 samples in batches of 32 of two trainers
def test_both_modes_of_an_example_end_with_the_same_parameters(tmp_path, fork_server, example, steps):
    runs = {}
    for mode in ("rpc", "ddp"):
        arguments = ["--config", EXAMPLES / example / "config.yaml", "--mode", mode, "--set", "training.max_epochs=1"]
        arguments += ["--set", f"logging.name={mode}", "--set", "logging.tensorboard=false"]
        code, output = fork_server.run(arguments, tmp_path, 60, environment())
        assert code == 0, output
        runs[mode] = FinishedRun(code, output, tmp_path / "runs" / mode)
    assert {run.summary["steps"] for run in runs.values()} == {steps}
    assert differing_tensors(runs["rpc"].load("model"), runs["ddp"].load("model")) == []
    assert runs["rpc"].summary["validation"] == runs["ddp"].summary["validation"]
