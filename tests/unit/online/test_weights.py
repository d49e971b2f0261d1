"""Versions of the model in bytes: what is laid out, sent as a difference, or refused."""

import json

import numpy as np
import pytest

from paramserver.online.protocol import MalformedMessage
from paramserver.online.weights import (
    BFLOAT16,
    EXACT,
    Description,
    TensorLayout,
    Version,
    Weights,
    WeightsRequest,
    apply_difference,
    encode_difference,
    offsets,
    rounded_layouts,
)

ABOUT = Description(
    "run", EXACT, (TensorLayout("w", "<f4", (2, 3)), TensorLayout("n", "<i8", ())), (Version(1, 0),), Version(1, 2)
)


def differing(size, changes, seed):
    """Two arrays of bytes that differ in some places."""
    generator = np.random.default_rng(seed)
    old = generator.integers(0, 256, size, dtype=np.uint8)
    new = old.copy()
    new[generator.choice(size, changes, replace=False)] += 1
    return old.tobytes(), new.tobytes()


@pytest.mark.parametrize("size", [1, 2, 255, 510, 511, 512, 513, 10_001, 200_000])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.2])
def test_a_difference_leads_to_the_same_bytes(size, share):
    old, new = differing(size, round(share * size), size)
    frames = encode_difference(old, new)
    if size > 500:  # zlib has a header
        assert frames is not None
    assert frames is None or apply_difference(old, frames) == new


@pytest.mark.parametrize("gap", [1, 254, 255, 256, 509, 510, 511, 765, 70_000])
def test_gaps_of_every_length_are_found_again(gap):
    """One byte has gaps below 255; a longer one takes several."""
    old = np.zeros(200_000, "<u2")
    new = old.copy()
    new[[0, gap, 2 * gap]] = 1, 65535, 256
    new[gap + 1] = 1
    assert apply_difference(old.tobytes(), encode_difference(old.tobytes(), new.tobytes())) == new.tobytes()


def test_a_difference_that_does_not_pay_is_none():
    old, new = differing(10_000, 9_000, 1)
    assert encode_difference(old, new) is None
    assert encode_difference(old, old[:-1]) is None


def test_few_changes_take_few_bytes():
    """About 7 bits a change: most of what is left are the places."""
    generator = np.random.default_rng(0)
    old = generator.integers(0, 65536, 1_000_000).astype("<u2")
    new = old.copy()
    new[generator.choice(len(new), 10_000, replace=False)] += 1
    frames = encode_difference(old.tobytes(), new.tobytes())
    assert sum(map(len, frames)) < old.nbytes / 100


@pytest.mark.parametrize(
    "frames", [[], [b""], [b"", b""], [b"x" * 20, b"y"], encode_difference(*differing(40_000, 50, 3))[:1] * 2]
)
def test_what_is_no_difference_is_refused(frames):
    with pytest.raises(MalformedMessage, match="no difference"):
        apply_difference(differing(2_000, 5, 2)[0], frames)


def test_a_difference_may_not_unpack_to_more_than_it_is_to():
    frames = encode_difference(*differing(400_000, 9_000, 3))
    with pytest.raises(MalformedMessage, match="too long"):
        apply_difference(bytes(1000), frames)


def test_a_description_is_read_again():
    assert Description.unpack(ABOUT.pack()) == ABOUT


@pytest.mark.parametrize(
    "changed",
    [
        {"tensors": [["w", "O", [1]]]},
        {"tensors": [["w", "<f4", [-1]]]},
        {"tensors": [["w", "<f4"]]},
        {"tensors": 3},
        {"starts": [[1]]},
        {"base": "x"},
        {"starts": None},
    ],
)
def test_a_description_that_is_none_is_refused(changed):
    fields = json.loads(ABOUT.pack()) | changed
    with pytest.raises(MalformedMessage):
        Description.unpack(json.dumps(fields).encode())


@pytest.mark.parametrize(
    "changed",
    [{"run": 1}, {"encoding": "int8"}, {"timeout_s": -1}, {"timeout_s": True}, {"waits": 1}, {"holds": None}],
)
def test_a_request_that_is_none_is_refused(changed):
    request = WeightsRequest("run", BFLOAT16, 3, True, False)
    assert WeightsRequest.unpack(request.pack()) == request
    with pytest.raises(MalformedMessage, match="GET must have"):
        WeightsRequest.unpack(json.dumps(vars(request) | changed).encode())


def test_weights_are_read_only_arrays_in_the_shapes_of_the_model():
    begins, size = offsets(ABOUT.tensors)
    data = bytearray(size)
    data[: 4 * 6] = np.arange(6, dtype="<f4").tobytes()
    data[begins[1] :] = np.int64(7).tobytes()
    weights = Weights(Version(1, 5), ABOUT, bytes(data))
    assert (list(weights), len(weights), weights.step, weights.run) == (["w", "n"], 2, 5, "run")
    np.testing.assert_array_equal(weights["w"], [[0, 1, 2], [3, 4, 5]])
    assert int(weights["n"]) == 7
    assert weights["w"].flags.writeable is False
    assert weights.state_dict()["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(KeyError):
        weights["x"]
    with pytest.raises(MalformedMessage, match="must have 72 bytes"):
        Weights(Version(1, 5), ABOUT, b"")


def test_values_in_bfloat16_are_float32_arrays():
    (layout,) = rounded_layouts([TensorLayout("w", "<f8", (2,))])
    assert layout == TensorLayout("w", BFLOAT16, (2,))
    weights = Weights(
        Version(1, 0), Description("run", BFLOAT16, (layout,), ()), np.array([0x3F80, 0xC000], "<u2").tobytes()
    )
    assert weights["w"].dtype == np.float32
    assert weights["w"].tolist() == [1.0, -2.0]


@pytest.mark.parametrize(
    ("version", "is_current"),
    [((1, 100), True), ((1, 101), False), ((2, 130), True), ((2, 131), False), ((3, 900), True)],
)
def test_versions_after_the_checkpoint_that_was_returned_to_are_taken_back(version, is_current):
    about = Description("run", EXACT, (), (Version(1, 0), Version(2, 100), Version(3, 130)))
    assert Weights(Version(3, 140), about, b"").is_current(Version(*version)) is is_current
