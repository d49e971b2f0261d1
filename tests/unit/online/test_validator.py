"""What a trainer accepts as a sample: every message is validated against the spec."""

import json
import random
import struct

import numpy as np
import pytest
from online_fixtures import array_bytes, field, ingest_spec, open_message, sample_message

from paramserver.errors import UnsupportedConfiguration
from paramserver.online.protocol import (
    ArrayDescriptor,
    Header,
    MessageKind,
    pack_descriptor,
    pack_integers,
    pack_parameters,
    start_secret,
)
from paramserver.online.received_log import ReceivedLog
from paramserver.online.validator import (
    REASONS,
    DuplicateSample,
    MessageRefused,
    MessageValidator,
    PartReceived,
    SampleAccepted,
    SessionAlive,
    SessionOpened,
    StepsReported,
)

PEER, OTHER = b"\0peer", b"\0other"


def validator(**keys):
    return MessageValidator(ingest_spec(**{"window": 1000, **keys}), ReceivedLog())


def reason(outcome):
    return outcome.reason if isinstance(outcome, MessageRefused) else type(outcome)


def settle(outcome):
    """The buffer has got it."""
    if isinstance(outcome, SampleAccepted):
        for session, number in outcome.contributors:
            session.mark_processed(number)
    return outcome


def test_a_sample_carries_simulation_step_and_parameters():
    validate = validator(parameters={"a": [0, 1], "b": [0, 1]}).validate
    assert isinstance(validate(PEER, open_message(3, [0.25, 0.5])), SessionOpened)
    frames = sample_message(3, 7)
    outcome = validate(PEER, frames)
    assert isinstance(outcome, SampleAccepted)
    assert outcome.key == (3, 7)
    assert list(outcome.sample) == ["simulation", "step", "parameters", "u"]
    assert (outcome.sample["simulation"], outcome.sample["step"]) == (3, 7)
    assert outcome.sample["parameters"].tolist() == [0.25, 0.5]
    assert np.array_equal(outcome.sample["u"], field(3, 7))
    assert np.shares_memory(outcome.sample["u"], np.frombuffer(frames[2], np.uint8))  # no copy
    assert reason(validate(PEER, frames)) is DuplicateSample


def test_a_sample_is_validated_without_computing_a_size_of_the_spec(monkeypatch):
    # A window that was computed for each sample, from the sizes of its fields, took half of the time of its reception.
    validate = MessageValidator(ingest_spec(), ReceivedLog()).validate
    validate(PEER, open_message())
    assert reason(validate(PEER, sample_message(0, 0))) is SampleAccepted
    monkeypatch.setattr(ArrayDescriptor, "num_bytes", property(lambda found: pytest.fail(f"the size of {found.name}")))
    assert reason(validate(PEER, sample_message(0, 1))) is SampleAccepted


def test_fields_may_come_in_any_order():
    validate = validator(fields={"a": [2], "b": {"shape": [], "dtype": "int64"}}).validate
    validate(PEER, open_message())
    fields = {"b": np.array(5), "a": np.array([1.0, 2.0], np.float32)}
    sample = validate(PEER, sample_message(0, 0, fields)).sample
    assert list(sample)[3:] == ["a", "b"]
    assert (sample["a"].tolist(), sample["b"].item()) == ([1.0, 2.0], 5)


@pytest.mark.parametrize(
    ("frames", "why", "text"),
    [
        ([], "malformed", "a message must have a header"),
        ([b""], "malformed", "a header must have 28 bytes, this one has 0"),
        ([b"ps"], "malformed", "28 bytes"),
        (open_message(0)[:1], "malformed", "must have 2 frames, this one has 1"),
        ([Header(MessageKind.HELLO).pack()], "kind", "HELLO must not be sent to a trainer"),
        (
            [Header(MessageKind.HEARTBEAT, 8).pack()],
            "unopened",
            "simulation 8 (attempt 0, member 0) must be opened first",
        ),
        (sample_message(8, 0), "unopened", "must be opened first"),
        (sample_message(0, 0, attempt=1), "unopened", "attempt 1"),
        (sample_message(0, 0, members=2), "group", "members (2) must be simulations.group_size (1)"),
        (open_message(0, members=3), "group", "members (3)"),
        (sample_message(0, 10), "step", "step (10) must be below simulations.steps (10)"),
        (open_message(20), "simulation", "simulation (20) must be below simulations.count (20)"),
        (open_message(1, [1.0]), "parameters", "parameters (1 numbers) must be 2: a, b"),
        (open_message(1, [1.0, np.inf]), "parameters", "must be finite"),
        (open_message(0, [1.0, 1.0]), "parameters", "give other parameters another simulation id"),
        ([open_message(1)[0], b"1234"], "parameters", "parameters must be float64"),
        (sample_message(0, 0)[:2], "malformed", "must have 3 frames, this one has 2"),
        ([*sample_message(0, 0), b""], "malformed", "this one has 4"),
        (sample_message(0, 0, {"v": field(0, 0)}), "field", "fields (v) must be u"),
        (sample_message(0, 0, {"u\n\ud800": field(0, 0)}), "field", r"fields (u\n\ud800) must be u"),
        (sample_message(0, 0, {"u": field(0, 0).astype("f8")}), "dtype", "u (<f8) must have the dtype <f4"),
        (sample_message(0, 0, {"u": field(0, 0).T}), "shape", "u ([3, 4]) must have the shape [4, 3]"),
        ([*sample_message(0, 0)[:2], b"0" * 47], "size", "u (47 bytes) must have 48 for its shape"),
        (sample_message(0, 0, {"u": field(0, 0) * np.nan}), "values", "u must be finite"),
        ([sample_message(0, 0)[0], b"[[", b""], "malformed", "a descriptor must be JSON"),
    ],
)
def test_an_invalid_message_is_refused_with_one_text(frames, why, text):
    spec = ingest_spec(
        fields={"u": {"shape": [4, 3], "finite": True}},
        parameters={"a": [0, 1], "b": [0, 1]},
        steps=10,
        count=20,
        window=1000,
    )
    validate = MessageValidator(spec, ReceivedLog()).validate
    validate(PEER, open_message(0, [0.0, 0.0]))
    validate(PEER, sample_message(0, 1))
    outcome = validate(PEER, frames)
    assert outcome.reason == why
    assert text in outcome.text
    assert outcome.text.isprintable()
    assert why in REASONS
    assert isinstance(validate(PEER, sample_message(0, 0)), SampleAccepted)  # it does no harm to what follows


def test_a_managed_simulation_may_have_a_number_beyond_the_count():
    opened = open_message(5, secret=start_secret(b"", 5, 0))
    assert isinstance(validator(count=2, command="solve").validate(PEER, opened), SessionOpened)


@pytest.mark.parametrize("secret", [None, "", "\u00fc", start_secret(b"", 5, 0), start_secret(b"", 4, 1)])
def test_a_managed_simulation_is_opened_with_the_secret_of_its_start_only(secret):
    made = validator(count=2, command="solve")
    assert reason(made.validate(PEER, open_message(5, [1.0], secret, attempt=1))) == "secret"
    assert reason(made.validate(PEER, sample_message(5, 0, attempt=1))) == "unopened"
    right = open_message(5, [0.5], start_secret(b"", 5, 1), attempt=1)
    assert reason(made.validate(OTHER, right)) is SessionOpened
    assert made.validate(OTHER, sample_message(5, 0, attempt=1)).sample["parameters"].tolist() == [0.5]


@pytest.mark.parametrize("members", [1, 2])
def test_a_client_that_opens_a_simulation_and_sends_nothing_does_not_keep_the_real_one_out(members):
    """It sends later, too."""
    validate = validator(group_size=members).validate

    def opened(peer, parameters, attempt):
        heads = [{"member": i, "members": members, "attempt": attempt} for i in range(members)]
        outcomes = [validate(peer + b"%d" % i, open_message(0, parameters, **head)) for i, head in enumerate(heads)]
        return [reason(outcome) for outcome in outcomes]

    def sent(peer, step, attempt):
        rows = np.split(field(0, step), members)
        heads = [{"member": i, "members": members, "attempt": attempt} for i in range(members)]
        messages = [sample_message(0, step, {"u": part}, **head) for part, head in zip(rows, heads, strict=True)]
        return [validate(peer + b"%d" % i, message) for i, message in enumerate(messages)]

    assert opened(b"stranger", [9.0], 7) == [SessionOpened] * members
    assert opened(b"real", [0.5], 0) == [SessionOpened] * members
    assert [reason(outcome) for outcome in sent(b"stranger", 0, 7)] == ["parameters"] * members
    assert sent(b"real", 0, 0)[-1].sample["parameters"].tolist() == [0.5]
    assert opened(b"stranger", [9.0], 7) == ["parameters"] * members


def test_after_its_first_part_a_simulation_keeps_the_highest_attempt():
    validate = validator(group_size=2).validate
    for peer, attempt in ((PEER, 1), (OTHER, 1)):
        validate(peer, open_message(0, member=peer == OTHER, members=2, attempt=attempt))
    parts = halves(0, 0, attempt=1)
    assert reason(validate(PEER, parts[0])) is PartReceived
    validate(b"late", open_message(0, member=1, members=2, attempt=0))
    assert reason(validate(b"late", halves(0, 0)[1])) == "stale"
    assert reason(validate(OTHER, parts[1])) is SampleAccepted


def test_booleans_are_zero_or_one():
    validate = validator(fields={"b": {"shape": [4], "dtype": "bool"}}).validate
    validate(PEER, open_message())
    good = sample_message(0, 0, {"b": np.array([True, False, True, True])})
    assert reason(validate(PEER, [*good[:2], b"\1\0\2\0"])) == "values"
    assert validate(PEER, good).sample["b"].tolist() == [True, False, True, True]


def test_a_client_sends_what_it_opened_itself():
    validate = validator().validate
    validate(PEER, open_message(1))
    assert reason(validate(OTHER, sample_message(1, 0))) == "unopened"
    validate(OTHER, open_message(1))
    assert reason(validate(OTHER, sample_message(1, 0))) is SampleAccepted
    assert reason(validate(PEER, sample_message(1, 0))) is DuplicateSample


def test_refused_samples_are_counted_so_that_no_client_waits_forever():
    validate = validator().validate
    unopened = validate(PEER, sample_message(1, 0)).session
    validate(PEER, sample_message(1, 1))
    assert (unopened.received, unopened.processed) == (2, 2)
    assert validate(PEER, [Header(MessageKind.HEARTBEAT, 1).pack()]).to_ack == (unopened,)
    session = validate(PEER, open_message(1)).session
    assert session is not unopened
    settle(validate(PEER, sample_message(1, 0)))
    for frames in (sample_message(1, 0), sample_message(1, 1)[:2], sample_message(1, 1, {"v": field(0, 0)})):
        assert validate(PEER, frames).to_ack == (session,)
    assert (session.received, session.processed) == (4, 4)
    validate(PEER, sample_message(1, 1))
    assert (session.received, session.processed) == (5, 4)
    assert validate(PEER, open_message(1)).session is session  # opened again, it continues to count
    newer = validate(PEER, open_message(1, attempt=1)).session
    assert (newer.received, newer.processed) == (0, 0)


@pytest.mark.parametrize(
    ("field_mib", "given", "window"), [(0.001, None, 64), (1, None, 64), (20, None, 3), (100, None, 2), (100, 5, 5)]
)
def test_fewer_large_samples_wait_in_front_of_a_buffer(field_mib, given, window):
    spec = ingest_spec(fields={"u": {"shape": [int(field_mib * 2**20)], "dtype": "uint8"}}, window=given)
    assert spec.window == window


def test_more_than_the_window_is_refused():
    validate = validator(window=3).validate
    session = validate(PEER, open_message()).session
    sent = [validate(PEER, sample_message(0, step)) for step in range(5)]
    assert [reason(one) for one in sent] == [SampleAccepted] * 3 + ["window"] * 2
    settle(sent[0])
    assert reason(validate(PEER, sample_message(0, 3))) is SampleAccepted
    assert (session.received, session.processed) == (6, 3)


def test_the_least_recent_sessions_are_dropped(monkeypatch):
    monkeypatch.setattr("paramserver.online.validator._MAX_SESSIONS", 10)
    made = validator()
    first = made.validate(PEER, open_message(0)).session
    for simulation in range(1, 40):
        made.validate(b"%d" % simulation, open_message(simulation))
        assert (
            reason(made.validate(PEER, [Header(MessageKind.HEARTBEAT).pack()])) is SessionAlive
        )  # it is used again, and stays
    assert made.is_current(first)
    assert len(made.sessions()) == 10


# Groups.


def halves(simulation, step, **head):
    whole = field(simulation, step)
    return [
        sample_message(simulation, step, {"u": rows}, member=member, members=2, **head)
        for member, rows in enumerate((whole[:1], whole[1:]))
    ]


def test_parts_become_a_sample():
    validate = validator(group_size=2).validate
    givers = [validate(peer, open_message(0, member=i, members=2)).session for i, peer in enumerate((PEER, OTHER))]
    first, second = halves(0, 4)
    assert reason(validate(OTHER, second)) is PartReceived
    assert reason(validate(OTHER, second)) is DuplicateSample
    outcome = validate(PEER, first)
    assert np.array_equal(outcome.sample["u"], field(0, 4))
    assert [session for session, _ in outcome.contributors] == givers
    settle(outcome)
    assert [(one.received, one.processed) for one in givers] == [(1, 1), (2, 2)]
    assert reason(validate(PEER, first)) is DuplicateSample


def test_parts_of_an_older_attempt_are_dropped_and_refused():
    validate = validator(group_size=2).validate
    old = [validate(peer, open_message(0, member=i, members=2)).session for i, peer in enumerate((PEER, OTHER))]
    validate(PEER, halves(0, 0)[0])
    new = [b"new" + peer for peer in (PEER, OTHER)]
    opened = validate(new[0], open_message(0, member=0, members=2, attempt=1))
    assert opened.to_ack == (old[0],)
    assert old[0].processed == 1
    assert reason(validate(OTHER, halves(0, 0)[1])) == "stale"
    validate(new[1], open_message(0, member=1, members=2, attempt=1))
    parts = halves(0, 0, attempt=1)
    assert reason(validate(new[1], parts[1])) is PartReceived
    assert reason(validate(new[0], parts[0])) is SampleAccepted


def test_no_part_waits_for_one_that_is_refused():
    validate = validator(group_size=2, fields={"u": {"shape": [4, 3], "finite": True}}).validate
    givers = [validate(peer, open_message(0, member=i, members=2)).session for i, peer in enumerate((PEER, OTHER))]
    bad = {"u": np.full((2, 3), np.nan, np.float32)}
    assert reason(validate(PEER, halves(0, 0)[0])) is PartReceived
    outcome = validate(OTHER, sample_message(0, 0, bad, member=1, members=2))
    assert (outcome.reason, set(outcome.to_ack)) == ("values", set(givers))
    assert reason(validate(OTHER, sample_message(0, 1, bad, member=1, members=2))) == "values"
    late = validate(PEER, halves(0, 1)[0])
    assert (late.reason, late.text) == ("unfinished", "another part of step 1 was refused")
    assert [(one.received, one.processed) for one in givers] == [(2, 2), (2, 2)]


@pytest.mark.parametrize("had_first", [True, False])
def test_no_part_waits_for_one_that_an_earlier_receiver_had(had_first):
    """Both parts had arrived there, and one member has received the ACK before the trainer died."""
    made = validator(group_size=2)
    for member, peer in enumerate((PEER, OTHER)):
        made.validate(peer, open_message(0, member=member, members=2))
    had, part = had_message(0, [0], member=0, members=2), halves(0, 0)[1]
    outcomes = [made.validate(*one) for one in ([(PEER, had), (OTHER, part)][:: 1 if had_first else -1])]
    assert [session.header.member for one in outcomes for session in one.to_ack] == [1]
    assert (made.assembly.num_parts(), made.received_log.lost_counts()) == ({}, {0: 1})


def test_an_ack_releases_what_is_processed_without_a_gap():
    """A duplicate is processed at once, a new sample when it is stored: the client must not forget the new one."""
    made = validator()
    made.received_log.mark_received(0, 5)
    session = made.validate(PEER, open_message()).session
    new = made.validate(PEER, sample_message(0, 4))
    assert reason(made.validate(PEER, sample_message(0, 5))) is DuplicateSample
    assert (session.processed, session.released) == (1, 0)
    settle(new)
    assert (session.processed, session.released, session.ahead) == (2, 2, set())


def had_message(simulation, steps, **head):
    return [Header(MessageKind.HAD, simulation, **head).pack(), pack_integers(steps)]


def test_what_an_earlier_receiver_had_is_lost_until_it_is_received():
    made = validator(steps=10)
    made.received_log.mark_received(0, 1)
    assert reason(made.validate(PEER, had_message(0, [0]))) == "unopened"
    made.validate(PEER, open_message())
    assert reason(made.validate(PEER, had_message(0, [10]))) == "step"
    assert reason(made.validate(PEER, had_message(0, [-1]))) == "malformed"
    for _ in range(2):
        assert reason(made.validate(PEER, had_message(0, [0, 1, 2]))) is StepsReported
    assert made.received_log.lost_counts() == {0: 2}
    made.validate(PEER, sample_message(0, 2))
    assert made.received_log.lost_counts() == {0: 1}


def test_parts_that_do_not_fit_together_are_all_refused():
    validate = validator(group_size=2).validate
    givers = [validate(peer, open_message(0, member=i, members=2)).session for i, peer in enumerate((PEER, OTHER))]
    assert reason(validate(PEER, sample_message(0, 0, {"u": field(0, 0)}, member=0, members=2))) is PartReceived
    outcome = validate(OTHER, sample_message(0, 0, {"u": field(0, 0)}, member=1, members=2))
    assert outcome.reason == "shape"
    assert "u ([8, 3]) must have the shape [4, 3] when its parts are put together" in outcome.text
    assert set(outcome.to_ack) == set(givers)
    assert [one.processed for one in givers] == [1, 1]
    assert (
        reason(validate(PEER, sample_message(0, 1, {"u": np.ones((5, 3), np.float32)}, member=0, members=2))) == "shape"
    )


def test_a_number_cannot_be_sent_in_parts():
    with pytest.raises(UnsupportedConfiguration, match=r"simulations\.fields\.n\.shape \(\[\]\) must have a dimension"):
        ingest_spec(fields={"u": [4], "n": []}, group_size=2)
    assert ingest_spec(fields={"u": [4], "n": []}).fields[1].shape == ()


# Anything.

STEPS, SIMULATIONS = 50, 6
WIDE = {
    "u": {"shape": [4, 3], "finite": True},
    "v": {"shape": [2], "dtype": "float64"},
    "n": {"shape": [], "dtype": "int16"},
}
SHAPES = {"u": ("<f4", [4, 3], 48), "v": ("<f8", [2], 16), "n": ("<i2", [], 2)}


class Truth:
    """What must become of a message, found without the package: by the letters of the protocol, slowly."""

    def __init__(self):
        self.opened = {}
        self.openings = {}
        self.seen = set()

    def of(self, peer, frames):
        if not frames or len(frames[0]) != 28:
            return "malformed"
        magic, version, kind, simulation, step, member, members, attempt = struct.unpack("!2sBBqqHHI", frames[0])
        known = {int(kind) for kind in MessageKind}
        if magic != b"ps" or version != 1 or kind not in known or min(simulation, step) < 0 or member >= members:
            return "malformed"
        if kind == 33:
            return self.of_open(peer, frames, simulation, member, members, attempt)
        opened = self.opened.get((peer, simulation))
        if kind == 35:
            return "malformed" if len(frames) != 1 else "unopened" if opened is None else SessionAlive
        if kind == 36:
            return self.of_had(frames, opened, attempt, member)
        if kind != 34:
            return "kind"
        if opened is None:
            self.opened[peer, simulation] = "unopened"
        if opened in (None, "unopened") or opened[:2] != (attempt, member):
            return "unopened"
        if members != 1:
            return "group"
        return "step" if step >= STEPS else self.of_fields(frames, (simulation, step), opened[2])

    def of_had(self, frames, opened, attempt, member):
        if len(frames) != 2:
            return "malformed"
        if opened in (None, "unopened") or opened[:2] != (attempt, member):
            return "unopened"
        if len(frames[1]) % 8:
            return "malformed"
        steps = struct.unpack(f"<{len(frames[1]) // 8}q", frames[1])
        if min(steps, default=0) < 0:
            return "malformed"
        return "step" if max(steps, default=0) >= STEPS else StepsReported

    def of_open(self, peer, frames, simulation, member, members, attempt):
        if len(frames) != 2:
            return "malformed"
        if members != 1:
            return "group"
        if simulation >= SIMULATIONS:
            return "simulation"
        if len(frames[1]) != 16:
            return "parameters"
        numbers = struct.unpack("<2d", frames[1])
        if not all(abs(number) < float("inf") for number in numbers):
            return "parameters"
        opening = self.openings.setdefault(simulation, {"numbers": numbers, "has_sample": False})
        if opening["numbers"] != numbers:
            if opening["has_sample"]:
                return "parameters"
            opening["has_sample"] = None  # replaced
            self.openings[simulation] = opening = {"numbers": numbers, "has_sample": False}
        self.opened[peer, simulation] = (attempt, member, opening)
        return SessionOpened

    def of_fields(self, frames, key, opening):
        if not 2 <= len(frames) <= 5:
            return "malformed"
        try:
            rows = json.loads(frames[1])
        except (ValueError, RecursionError):
            return "malformed"
        if not isinstance(rows, list) or not rows or not all(self.is_row(row) for row in rows):
            return "malformed"
        names = [row[0] for row in rows]
        if len(set(names)) < len(names):
            return "malformed"
        if set(names) != set(SHAPES):
            return "field"
        for name, (dtype, shape, _) in SHAPES.items():
            row = rows[names.index(name)]
            if row[1] != dtype:
                return "dtype"
            if row[2] != shape:
                return "shape"
        if len(frames) != 5:
            return "malformed"
        for name, (_, _, size) in SHAPES.items():
            frame = frames[2 + names.index(name)]
            if len(frame) != size:
                return "size"
            if name == "u" and not all(abs(value) < float("inf") for value in struct.unpack("<12f", frame)):
                return "values"
        if opening["has_sample"] is None:
            return "parameters"
        opening["has_sample"] = True
        if key in self.seen:
            return DuplicateSample
        self.seen.add(key)
        return SampleAccepted

    @staticmethod
    def is_row(row):
        codes = {"|b1", "|i1", "|u1", "<i2", "<i4", "<i8", "<u2", "<u4", "<u8", "<f2", "<f4", "<f8"}
        return (
            isinstance(row, list)
            and len(row) == 3
            and isinstance(row[0], str)
            and row[0] != ""
            and isinstance(row[1], str)
            and row[1] in codes
            and isinstance(row[2], list)
            and len(row[2]) <= 16
            and all(type(size) is int and 0 <= size < 2**40 for size in row[2])
        )


class Mutator:
    """Valid messages, and what becomes of them in bad hands."""

    def __init__(self, seed, number=()):
        self.draw = random.Random(seed)
        self.number_shape = number
        self.values = np.random.default_rng(seed)
        self.step = 0

    def valid(self):
        """A sample that is mostly new."""
        self.step += 1
        step, simulation = divmod(self.step, SIMULATIONS)
        fields = {
            "u": self.values.standard_normal((4, 3)).astype("f4"),
            "v": self.values.standard_normal(2) * self.draw.choice([1, np.nan, np.inf]),
            "n": np.full(self.number_shape, self.draw.randint(-9, 9), "i2"),
        }
        order = self.draw.sample(list(fields), 3)
        head = {"attempt": 0}
        return sample_message(simulation, step % STEPS, {name: fields[name] for name in order}, **head)

    def sample_message(self):
        kind = self.draw.random()
        if kind < 0.03:
            frames = open_message(self.draw.randrange(SIMULATIONS + 1), [self.draw.choice([0.5, 0.5, 0.5, 1.0]), 2.0])
        elif kind < 0.05:
            frames = [Header(MessageKind.HEARTBEAT, self.draw.randrange(SIMULATIONS)).pack()]
        else:
            frames = self.valid()
        for _ in range(self.draw.choice([0, 0, 1, 1, 1, 2, 3])):
            frames = self.draw.choice(self.harms)(self, list(frames))
        return frames

    def flip(self, frames):
        """One bit anywhere."""
        at = self.draw.randrange(len(frames)) if frames else 0
        if frames and frames[at]:
            spoilt = bytearray(frames[at])
            spoilt[self.draw.randrange(len(spoilt))] ^= 1 << self.draw.randrange(8)
            frames[at] = bytes(spoilt)
        return frames

    def cut(self, frames):
        """Shorter or longer."""
        at = self.draw.randrange(len(frames)) if frames else 0
        if frames:
            length = self.draw.randrange(len(frames[at]) + 1)
            frames[at] = self.draw.choice([frames[at][:length], frames[at] + self.draw.randbytes(length + 1)])
        return frames

    def deal(self, frames):
        """Frames that are missing, twice there, or in another order."""
        if frames:
            at = self.draw.randrange(len(frames))
            frames = self.draw.choice(
                [frames[:at] + frames[at + 1 :], [*frames, frames[at]], self.draw.sample(frames, len(frames))]
            )
        return frames

    def noise(self, frames):
        """Random bytes in the place of a frame, or of all."""
        if frames and self.draw.random() < 0.8:
            frames[self.draw.randrange(len(frames))] = self.draw.randbytes(self.draw.choice([0, 1, 2, 16, 28, 48]))
            return frames
        return [self.draw.randbytes(self.draw.randrange(40)) for _ in range(self.draw.randrange(6))]

    def number(self, frames):
        """A number in the header."""
        if frames and len(frames[0]) == 28:
            head = list(struct.unpack("!2sBBqqHHI", frames[0]))
            at = self.draw.randrange(1, 8)
            top = {1: 256, 2: 256, 3: 2**63, 4: 2**63, 5: 2**16, 6: 2**16, 7: 2**32}[at]
            head[at] = self.draw.choice([0, 1, 2, 34, top - 1, self.draw.randrange(top)])
            frames[0] = struct.pack("!2sBBqqHHI", *head)
        return frames

    def words(self, frames):
        """A descriptor of something else, or the same in other words."""
        if len(frames) > 2:
            try:
                rows = json.loads(frames[1])
            except (ValueError, RecursionError):
                return frames
            frames[1] = self.draw.choice(self.other_words)(self, rows)
        return frames

    def changed(self, rows):
        if isinstance(rows, list) and rows and isinstance(rows[0], list) and rows[0]:
            row = self.draw.choice([row for row in rows if isinstance(row, list) and row])
            values = [
                "u",
                "w",
                "",
                "<f4",
                "<f8",
                ">f4",
                "O",
                [4, 3],
                [3, 4],
                [],
                [12],
                [-4, -3],
                [4.0, 3],
                [True],
                None,
            ]
            row[self.draw.randrange(len(row))] = self.draw.choice([*values, {"a": 1}, 2**70, "\ud800"])
        return json.dumps(rows).encode()

    harms = (flip, cut, deal, noise, number, words)
    other_words = (
        changed,
        changed,
        lambda self, rows: json.dumps(rows, indent=1).encode(),
        lambda self, rows: json.dumps({"fields": rows}).encode(),
        lambda self, rows: json.dumps(rows).encode("utf-16"),
        lambda self, rows: b"[" * 100_000,
        lambda self, rows: b"[" + b"9" * 5000 + b"]",
    )

    def spoil_values(self, frames):
        """A number that is none, where finite ones are asked."""
        at = next((i for i, frame in enumerate(frames) if len(frame) == 48), None)
        if at is not None:
            values = np.frombuffer(frames[at], "<f4").copy()
            values[self.draw.randrange(12)] = self.draw.choice([np.nan, np.inf, -np.inf, 3e38])
            frames[at] = values.tobytes()
        return frames

    harms = (*harms, spoil_values)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(10))
def test_of_a_hundred_thousand_messages_each_is_validated_correctly(seed):
    """Ten times ten thousand, mutated from valid ones."""
    spec = ingest_spec(fields=WIDE, steps=STEPS, count=SIMULATIONS, parameters={"a": [0, 1], "b": [0, 9]}, window=10**6)
    validate, truth, mutator = MessageValidator(spec, ReceivedLog()).validate, Truth(), Mutator(seed)
    found = {}
    for peer in (PEER, OTHER):
        for simulation in range(SIMULATIONS - 1):
            assert truth.of(peer, open_message(simulation, [0.5, 2.0])) is SessionOpened
            assert isinstance(validate(peer, open_message(simulation, [0.5, 2.0])), SessionOpened)
    for i in range(10_000):
        if i % 700 == 699:
            # A new run of the same simulations: or soon all would be duplicates.
            received_log = ReceivedLog()
            validate.__self__.received_log, truth.seen = received_log, set()
        peer, frames = mutator.draw.choice([PEER, OTHER]), mutator.sample_message()
        expected = truth.of(peer, frames)
        outcome = settle(validate(peer, frames))
        assert reason(outcome) == expected, (i, frames, getattr(outcome, "text", ""))
        if isinstance(outcome, SampleAccepted):
            rows = json.loads(frames[1])
            for name, (dtype, shape, _) in SHAPES.items():
                at = 2 + [row[0] for row in rows].index(name)
                assert outcome.sample[name].tobytes() == frames[at]
                assert (outcome.sample[name].dtype.str, list(outcome.sample[name].shape)) == (dtype, shape)
        found[expected] = found.get(expected, 0) + 1
    wanted = {SampleAccepted, DuplicateSample, SessionOpened, SessionAlive, *REASONS} - {
        "window",
        "stale",
        "secret",
        "unfinished",
        "version",
    }
    assert set(found) == wanted
    assert 0.15 < found[SampleAccepted] / 10_000 < 0.6


def test_the_reference_accepts_what_the_package_encodes():
    """The oracle reads the messages that the package makes."""
    fields = {"u": np.ones((4, 3), "f4"), "v": np.ones(2), "n": np.array(1, "i2")}
    truth = Truth()
    assert truth.of(PEER, open_message(0, [0.5, 2.0])) is SessionOpened
    assert (
        truth.of(
            PEER, [Header(MessageKind.SAMPLE, 0, 1).pack(), pack_descriptor(fields), *map(array_bytes, fields.values())]
        )
        is SampleAccepted
    )
    assert len(pack_parameters([0.5, 2.0])) == 16


@pytest.mark.parametrize("seed", range(3))
def test_mutated_messages_of_groups_never_raise(seed):
    """And of all that was sent, all is dealt with, or waits for other parts, or is with the buffer."""
    twice = {"u": [8, 3], "v": {"shape": [4], "dtype": "float64"}, "n": {"shape": [2], "dtype": "int16"}}
    spec = ingest_spec(fields=twice, steps=STEPS, count=SIMULATIONS, group_size=2, window=20)
    made, mutator, accepted = MessageValidator(spec, ReceivedLog()), Mutator(seed, (1,)), []
    for i in range(4000):
        if i % 500 == 0:
            made.received_log = ReceivedLog()
            for peer, member in ((PEER, 0), (OTHER, 1)):
                for simulation in range(SIMULATIONS):
                    made.validate(
                        peer, open_message(simulation, [0.5, 2.0], member=member, members=2, attempt=i // 500)
                    )
        frames = mutator.sample_message()
        for peer, member in ((PEER, 0), (OTHER, 1)):
            if frames and len(frames[0]) == 28:
                frames[0] = frames[0][:20] + struct.pack("!HHI", member, 2, i // 500)
            outcome = made.validate(peer, frames)
            assert isinstance(outcome, MessageRefused) == bool(reason(outcome) in REASONS)
            if isinstance(outcome, SampleAccepted):
                accepted.append(settle(outcome))
    assert len(accepted) > 500
    assert len(made.assembly) <= SIMULATIONS * 40
    for session in made.sessions():
        assert 0 <= session.processed <= session.received <= session.processed + 40
    for one in made.assembly._unfinished.copy():
        for part in made.assembly.drop(one):
            part.session.mark_processed(part.number)
    assert all(one.processed == one.received for one in made.sessions())
