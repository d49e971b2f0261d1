"""The versions of samples: which a trainer takes, and how old they are over the generations of a run."""

import numpy as np
import pytest
from fake_run import FakeRun
from online_fixtures import TOKEN, field, ingest_spec, open_message, sample_message

from paramserver.client import Client, SampleEncoder
from paramserver.config import SimulationsConfig
from paramserver.errors import ClientError, UnsupportedConfiguration
from paramserver.online.coordinator_protocol import RequestHandler
from paramserver.online.protocol import (
    VERSION_ROW,
    ArrayDescriptor,
    Header,
    MessageKind,
    TrainerDirectory,
    TrainerJoined,
)
from paramserver.online.received_log import ReceivedLog
from paramserver.online.spec import VERSION_COLUMN, IngestSpec
from paramserver.online.tracker import ExternalSimulations
from paramserver.online.validator import MessageRefused, MessageValidator, PartReceived, SampleAccepted
from paramserver.online.weights import SampleVersions, Version, effective_step

STARTS = (Version(1, 0), Version(2, 90), Version(4, 60))
PEER, OTHER = b"\0peer", b"\0other"


def replayed(version):
    """The step up to which a run has the version's updates, found by taking back step after step."""
    generation, step = version
    for start in STARTS:
        if start.generation > generation:
            step = min(step, start.step)
    return step


@pytest.mark.parametrize("generation", [0, 1, 2, 3, 4, 5])
def test_what_was_taken_back_counts_from_the_checkpoint(generation):
    for step in range(200):
        assert effective_step((generation, step), STARTS) == replayed((generation, step))


def test_an_older_version_never_counts_from_a_later_step():
    """So the oldest of the parts of a group is the least of them."""
    versions = sorted((generation, step) for generation in (1, 2, 4) for step in range(0, 200, 3))
    steps = [effective_step(version, STARTS) for version in versions]
    for generation in (1, 2, 4):
        of_generation = [step for version, step in zip(versions, steps, strict=True) if version[0] == generation]
        assert of_generation == sorted(of_generation)
    starts = dict(STARTS)
    real = [step for (g, s), step in zip(versions, steps, strict=True) if s >= starts[g]]
    assert real == sorted(real)


def test_a_step_that_no_model_has_is_not_kept_for_ever():
    versions = SampleVersions([Version(1, 0)], max_staleness=4)
    versions.step = 10
    assert versions.step_of({"version": np.array([1, 10**12])}) == 15
    assert versions.step_of({"version": np.array([1, 12])}) == 12
    versions.step = 20
    assert versions.oldest > 15


@pytest.mark.parametrize(
    ("version", "limit", "text"),
    [
        ((3, 70), None, "version (3, 70) must be one of this run, whose generations begin with (1, 0), (2, 90)"),
        ((5, 0), None, "version (5, 0) must be one of this run"),
        ((2, 89), None, "version (2, 89) must be one of this run"),
        ((1, -1), None, "version (1, -1) must be one of this run"),
        ((-1, 1), None, "version (-1, 1) must be one of this run"),
        ((4, 62), 61, "version (4, 62) must not be newer than the model (4, 61)"),
        ((0, 0), None, "version (0, 0) must be that of the weights with buffer.max_staleness"),
    ],
)  # fmt: skip
def test_a_version_that_the_run_has_not_had_is_refused(version, limit, text):
    versions = SampleVersions(STARTS, 3)
    versions.limit = limit
    assert text in versions.reason_to_refuse(version)
    assert versions.newest == (0, 0)


def test_other_versions_are_taken():
    versions = SampleVersions(STARTS, 3)
    versions.limit = 61
    for version in ((1, 0), (1, 500), (2, 90), (4, 61), (4, 60)):
        assert versions.reason_to_refuse(version) is None
    assert versions.newest == (4, 61)
    assert SampleVersions(STARTS, None).reason_to_refuse((0, 0)) is None


def test_staleness_is_counted_of_samples_with_a_version():
    versions = SampleVersions(STARTS, None)
    versions.step = 63
    versions.count_served(np.array([(4, 62), (4, 62), (1, 80), (0, 0), (4, 64), (1, 50)]))
    assert versions.pop_histogram() == {"0": 1, "1": 2, "3": 1, "13": 1}
    assert versions.pop_histogram() == {}
    assert versions.oldest is None


def spec(max_staleness=None, **keys):
    config = SimulationsConfig(**{"fields": {"u": [4, 3]}, "window": 100, **keys})
    return IngestSpec.from_config(config, (VERSION_COLUMN,), max_staleness)


def made(**keys):
    of_run = spec(**keys)
    return MessageValidator(of_run, ReceivedLog(), versions=SampleVersions(STARTS, of_run.max_staleness))


def message(step, version=None, rows=slice(None), **head):
    fields = {"u": field(0, step)[rows]}
    return sample_message(0, step, fields if version is None else {**fields, "version": np.array(version)}, **head)


def test_a_sample_has_the_version_that_was_sent_with_it():
    validator = made()
    validator.validate(PEER, open_message())
    samples = [validator.validate(PEER, message(*one)).sample for one in ((0, (2, 95)), (1,), (2, (0, 0)))]
    assert [sample["version"].tolist() for sample in samples] == [[2, 95], [0, 0], [0, 0]]
    assert list(samples[0]) == list(samples[1]) == ["simulation", "step", "parameters", "u", "version"]
    assert {sample["version"].dtype.str for sample in samples} == {"<i8"}


@pytest.mark.parametrize(
    ("made_by", "frames", "why", "text"),
    [
        ({}, message(0, (3, 1)), "version", "must be one of this run"),
        ({}, message(0, (1.0, 1.0)), "dtype", "version (<f8) must have the dtype <i8"),
        ({}, message(0, (1, 1, 1)), "shape", "version ([3]) must have the shape [2]"),
        ({}, [*message(0, (1, 1))[:-1], b"12"], "size", "version (2 bytes) must have 16"),
        ({}, message(0, (1, 1))[:-1], "malformed", "must have 4 frames, this one has 3"),
        ({"max_staleness": 2}, message(0), "field", "fields (u) must be u, version"),
        ({"max_staleness": 2}, message(0, (0, 0)), "version", "send weights.version"),
    ],
)
def test_a_wrong_version_is_refused_with_one_text(made_by, frames, why, text):
    validator = made(**made_by)
    validator.validate(PEER, open_message())
    outcome = validator.validate(PEER, frames)
    assert isinstance(outcome, MessageRefused)
    assert outcome.reason == why
    assert text in outcome.text
    assert isinstance(validator.validate(PEER, message(0, (1, 1))), SampleAccepted)


def test_a_run_without_publish_refuses_a_version():
    validator = MessageValidator(ingest_spec(window=100), ReceivedLog())
    validator.validate(PEER, open_message())
    outcome = validator.validate(PEER, message(0, (1, 1)))
    assert (outcome.reason, outcome.text) == ("malformed", "a message of this kind must have 3 frames, this one has 4")


@pytest.mark.parametrize(
    ("of_parts", "expected"),
    [([(2, 95), (1, 80)], [1, 80]), ([(2, 95), None], [2, 95]), ([None, (1, 80)], [1, 80]), ([None, None], [0, 0])],
)
def test_the_version_of_a_group_is_the_oldest_of_those_parts_that_have_one(of_parts, expected):
    validator = made(group_size=2)
    halves = [(PEER, 0, slice(0, 2)), (OTHER, 1, slice(2, 4))]
    for peer, member, _ in halves:
        validator.validate(peer, open_message(member=member, members=2))
    outcomes = [
        validator.validate(peer, message(0, version, rows, member=member, members=2))
        for version, (peer, member, rows) in zip(of_parts, halves, strict=True)
    ]
    assert [type(one) for one in outcomes] == [PartReceived, SampleAccepted]
    assert outcomes[1].sample["version"].tolist() == expected
    assert np.array_equal(outcomes[1].sample["u"], field(0, 0))


def test_a_field_may_have_the_name_only_where_samples_have_no_version():
    assert ingest_spec(fields={"version": [2]}).fields[0].name == "version"
    with pytest.raises(UnsupportedConfiguration, match=r"must not be one of simulation, .*, version;"):
        spec(fields={"version": [2]})


OWN = {"fields": {"u": [4, 3], "version": {"shape": [2], "dtype": "int64"}}}


@pytest.mark.parametrize(
    ("of_run", "expected"),
    [
        (ingest_spec(), {"u": (4, 3)}),
        (spec(), {"u": (4, 3)}),
        (spec(max_staleness=2), {"u": (4, 3)}),
        (ingest_spec(**OWN), {"u": (4, 3), "version": (2,)}),  # a field like any other, in a run that does not publish
    ],
)
def test_a_client_lists_the_fields_that_the_user_has_declared(of_run, expected):
    handler = RequestHandler(of_run, ExternalSimulations(of_run.config, 1, 60.0), 1, TOKEN, dict)
    handler.handle(PEER, [Header(MessageKind.JOIN).pack(), TOKEN, TrainerJoined("tcp://1", {}, {}).pack()], 0.0)
    ((_, (_, body)),) = handler.handle(OTHER, [Header(MessageKind.HELLO).pack(), b""], 0.0)
    told = TrainerDirectory.unpack(body)
    with FakeRun(trainers=1, fields=told.fields, optional=told.optional) as run, Client(run.address).open(0) as client:
        assert client.fields == expected
        values = {name: np.zeros(shape, "<i8" if name == "version" else "<f4") for name, shape in expected.items()}
        version = (1, 5) if of_run.columns else None
        client.send(0, values, version)
    ((_, sample),) = run.samples[0]
    assert list(sample) == [*expected, *(["version"] if version else [])]


U = ArrayDescriptor("u", "<f4", (2,))


@pytest.mark.parametrize("version", [(1, 2), Version(1, 2), [1, 2], np.array([1, 2])])
def test_a_client_encodes_a_version(version):
    for encoder in (SampleEncoder([U], 1, [VERSION_ROW]), SampleEncoder([U, VERSION_ROW], 1)):
        descriptor, _, last = encoder.encode(encoder.add_version({"u": [1.0, 2.0]}, version))
        assert descriptor == b'[["u", "<f4", [2]], ["version", "<i8", [2]]]'
        assert np.frombuffer(last, "<i8").tolist() == [1, 2]
    encoder = SampleEncoder([U], 1, [VERSION_ROW])
    assert len(encoder.encode(encoder.add_version({"u": [1.0, 2.0]}, None))) == 2


@pytest.mark.parametrize("fields", [np.ones(2), [1.0, 2.0], None, "u"])
@pytest.mark.parametrize("version", [None, (1, 2)])
def test_a_client_refuses_fields_without_names(fields, version):
    with pytest.raises(ClientError, match=r"^fields \(\w+\) must be a mapping of names to arrays; write {'u': array}$"):
        SampleEncoder([U], 1, [VERSION_ROW]).add_version(fields, version)


@pytest.mark.parametrize(
    ("declared", "optional", "version", "text"),
    [
        ([U], [VERSION_ROW], 5, "version (5) must be a pair of generation and step"),
        ([U], [VERSION_ROW], (1, 2, 3), "version ((1, 2, 3)) must be a pair"),
        ([U], [VERSION_ROW], (1, 0.5), "step (0.5) must be a whole number from 0"),
        ([U], [VERSION_ROW], (-1, 0), "generation (-1) must be a whole number from 0"),
        ([U], [], (1, 2), "version ((1, 2)) must be left out, as this run takes none: it has no section publish"),
        ([U, VERSION_ROW], [], None, "version (None) must be given, as this run has buffer.max_staleness"),
    ],
)
def test_a_client_refuses_what_is_no_version_before_it_sends(declared, optional, version, text):
    encoder = SampleEncoder(declared, 1, optional)
    with pytest.raises(ClientError) as error:
        encoder.encode(encoder.add_version({"u": [1.0, 2.0]}, version))
    assert text in str(error.value)
