"""examples/gan: two optimizers, in its smallest form."""

from pathlib import Path

from launching import run_in_process

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "gan"


def train(folder, epochs, **arguments):
    training = {"max_steps": None, "max_epochs": epochs, "batch_size": 64, "validate_every": 128}
    run = run_in_process(folder, task=f"{EXAMPLE / 'task.py'}:Gan", task_args=arguments, training=training)
    assert run.code == 0, run.output
    return run


def test_the_generator_learns_the_ring(tmp_path):
    run = train(tmp_path, 32, samples=1024, lr=4e-3)
    assert run.summary["steps"] == 2 * 32 * 1024 // 64
    first, *others = [record["values"]["distance"] for record in run.of_kind("validation")]
    assert min(others) < 0.5 * first
    assert sorted(run.load("optimizer")) == ["d", "g"]


def test_the_generator_is_stepped_in_every_third_batch(tmp_path):
    run = train(tmp_path, 3, samples=256, critic_steps=3)
    assert run.summary["steps"] == 12 + 12 // 3
    steps = [state["step"].item() for own in run.load("optimizer").values() for state in own["state"].values()]
    assert sorted(set(steps)) == [4, 12]
