"""What tests compare of runs that skip steps which are not finite."""

from launching import differing_tensors


def skipped(run):
    """Step, trainers, samples and cause of each ``skipped`` record."""
    return [[r[name] for name in ("step", "trainers", "samples", "cause")] for r in run.of_kind("skipped")]


def skipped_with_scale(run):
    """As ``skipped``, with the scale of the losses."""
    return [[*entry, record["scale"]] for entry, record in zip(skipped(run), run.of_kind("skipped"), strict=True)]


def assert_same(one, other):
    """Both runs made and skipped the same steps, and ended with the same model, optimizer and scale."""
    for name in ("model", "optimizer"):
        assert differing_tensors(one.load(name), other.load(name)) == []
    for name in ("steps", "samples", "samples_skipped", "validation"):
        assert one.summary[name] == other.summary[name], name
    assert skipped(one) == skipped(other)
    assert [r.get("scale") for r in one.of_kind("skipped")] == [r.get("scale") for r in other.of_kind("skipped")]
    assert one.load("run")["skipping"] == other.load("run")["skipping"]
    assert [r["loss"] for r in one.of_kind("train")] == [r["loss"] for r in other.of_kind("train")]
