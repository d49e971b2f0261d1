"""Compressors agree with a plain reference, and error feedback loses nothing over many pushes."""

from itertools import accumulate, pairwise

import numpy as np
import pytest
import torch

from paramserver.errors import NotFinite
from paramserver.transport.compression import COMPRESSORS, ErrorFeedback, Int4Compressor, Int8Compressor

BLOCK_COMPRESSORS = {"int8": 127, "int4": 7}
BLOCKS = (1, 3, 7, 256)
LENGTHS = [(), (0,), (1,), (5,), (512,), (0, 1, 0, 5, 700, 256, 0, 2, 257, 0)]
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def random_values(size, dtype=torch.float32, seed=0):
    """Values of many magnitudes, with zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(size, generator=generator, dtype=torch.float64)
    values *= 10 ** (4 * torch.rand(size, generator=generator, dtype=torch.float64) - 3)
    values[torch.rand(size, generator=generator) < 0.1] = 0
    values[10:30] = 0  # whole blocks
    return values.to(dtype)


def reference(values, lengths, block, levels):
    """Return the scales, the integers and the decoded values, computed block by block."""
    exact = np.float64 if values.dtype == torch.float64 else np.float32
    numbers = values.to(torch.float64).numpy().astype(exact)
    scales, integers, decoded = [], [], []
    for start, end in pairwise(accumulate(lengths, initial=0)):
        for first in range(start, end, block):
            part = numbers[first : min(first + block, end)]
            scale = np.float32(np.abs(part).max() / exact(levels))
            scales.append(scale)
            for number in part:
                rounded = round(float(number / exact(scale))) if scale else 0  # half to even
                integers.append(min(max(rounded, -levels), levels))
                decoded.append(exact(integers[-1]) * exact(scale))
    return scales, integers, torch.from_numpy(np.array(decoded, exact)).to(values.dtype)


def message_of(scales, integers, name):
    """Return the bytes of a message, written value by value."""
    content = np.array(scales, np.float32).tobytes()
    if name == "int8":
        return content + bytes(number % 256 for number in integers)
    low = integers[: (len(integers) + 1) // 2]
    high = integers[len(low) :] + [0] * (len(integers) % 2)
    return content + bytes(a % 16 + 16 * (b % 16) for a, b in zip(low, high, strict=True))


def same_bits(one, other):
    same_signs = torch.equal(one.signbit(), other.signbit())  # of zeros too
    return one.dtype == other.dtype and torch.equal(one, other) and same_signs


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("name", BLOCK_COMPRESSORS)
def test_blocks_are_those_of_the_reference(name, block, dtype):
    for lengths in LENGTHS:
        values, compressor = random_values(sum(lengths), dtype), COMPRESSORS[name](block)
        scales, integers, decoded = reference(values, lengths, block, BLOCK_COMPRESSORS[name])
        encoded = compressor.encode(values, lengths)
        assert encoded.numpy().tobytes() == message_of(scales, integers, name)
        result = compressor.decode(encoded, lengths, dtype)
        assert same_bits(result, decoded)


def test_bfloat16_is_rounded_as_torch_does():
    values, compressor = random_values(100), COMPRESSORS["bfloat16"](1)
    decoded = compressor.decode(compressor.encode(values, (60, 40)), (60, 40), torch.float32)
    assert same_bits(decoded, values.bfloat16().float())
    assert not torch.equal(decoded, values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", COMPRESSORS)
def test_every_compressor_keeps_the_contract(name, dtype):
    for block in BLOCKS:
        compressor = COMPRESSORS[name](block)
        assert compressor.name == name
        for lengths in LENGTHS:
            values = random_values(sum(lengths), dtype)
            before = values.clone()
            encoded = compressor.encode(values, lengths)
            assert (encoded.dtype, encoded.dim()) == (torch.uint8, 1)
            assert encoded.untyped_storage().nbytes() == len(encoded)  # RPC sends storages
            assert same_bits(values, before)
            decoded = compressor.decode(encoded, lengths, dtype)
            assert decoded.dtype == dtype
            largest = max(values.abs().max().double().item(), 1e-3) if len(values) else 0
            assert bool(((decoded.double() - values.double()).abs() <= largest / 13.9).all())
            # The message may be at any offset of another one, and is not what is returned.
            longer = torch.cat([torch.zeros(1, dtype=torch.uint8), encoded])
            again = compressor.decode(longer[1:], lengths, dtype)
            assert same_bits(again, decoded)
            longer.zero_()
            assert same_bits(again, decoded)


@pytest.mark.parametrize("name", COMPRESSORS)
def test_tensors_without_elements_have_any_strides(name):
    """Those of numpy have the stride 0, and torch views none of them in another type."""
    gradient, message = torch.from_numpy(np.array([], np.float32)), torch.from_numpy(np.array([], np.uint8))
    assert gradient.stride() == message.stride() == (0,)
    for lengths in [(), (0, 0)]:
        assert len(COMPRESSORS[name](4).encode(gradient, lengths)) == 0
        assert len(COMPRESSORS[name](4).decode(message, lengths, torch.float32)) == 0


@pytest.mark.parametrize("block", [1, 8, 250])
@pytest.mark.parametrize("name", COMPRESSORS)
def test_values_do_not_depend_on_how_a_parameter_is_divided(name, block):
    values, compressor = random_values(1000), COMPRESSORS[name](block)
    whole = compressor.decode(compressor.encode(values, (1000,)), (1000,), torch.float32)
    half = 500 // block * block
    for lengths in [(half, 1000 - half), (block, 0, 1000 - block), (block,) * (1000 // block)]:
        together = compressor.decode(compressor.encode(values, lengths), lengths, torch.float32)
        alone = [compressor.decode(compressor.encode(p, (len(p),)), (len(p),), p.dtype) for p in values.split(lengths)]
        assert same_bits(together, whole)
        assert same_bits(torch.cat(alone), whole)
    if block == 250 and name != "bfloat16":  # a cut elsewhere is another division into blocks
        other = compressor.decode(compressor.encode(values, (100, 900)), (100, 900), torch.float32)
        assert not torch.equal(other, whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "levels"), BLOCK_COMPRESSORS.items())
def test_a_value_changes_by_half_a_scale_at_most(name, levels, dtype):
    values, lengths, compressor = random_values(1024, dtype), (1024,), COMPRESSORS[name](64)
    decoded = compressor.decode(compressor.encode(values, lengths), lengths, dtype)
    halves = values.view(-1, 64).abs().amax(1, keepdim=True) / levels / 2
    relative = (decoded - values).view(-1, 64).abs() / halves
    assert 0.9 < relative.max() <= 1 + 1e-5  # the bound is reached


@pytest.mark.parametrize("name", COMPRESSORS)
def test_zeros_stay_zeros(name):
    compressor, lengths = COMPRESSORS[name](4), (4, 4)
    encoded = compressor.encode(torch.tensor([0.0] * 4 + [0.0, 1.0, -0.0, 0.0]), lengths)
    assert compressor.decode(encoded, lengths, torch.float32).tolist() == [0.0] * 4 + [0.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(("name", "levels"), BLOCK_COMPRESSORS.items())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tiny_values_have_a_coarse_scale_or_are_zeros(name, levels, dtype):
    smallest, compressor, lengths = 2.0**-149, COMPRESSORS[name](3), (3,)
    for multiple in (1, 3, levels // 2, levels, 190, 1000):
        values = torch.tensor([multiple * smallest, -smallest, 0.0], dtype=dtype)
        scales, integers, expected = reference(values, lengths, 3, levels)
        assert bool(scales[0]) is (multiple > levels // 2)
        encoded = compressor.encode(values, lengths)
        assert encoded.numpy().tobytes() == message_of(scales, integers, name)
        decoded = compressor.decode(encoded, lengths, dtype)
        assert same_bits(decoded, expected)
        if multiple == levels:  # 190, as int8, is clamped
            assert same_bits(decoded, values)
    beyond = torch.tensor([5e-324, -1e-60, 0.0], dtype=torch.float64)
    assert not bool(compressor.encode(beyond, lengths).any())


def test_a_value_of_float64_may_be_larger_than_those_of_float32():
    values, compressor = torch.tensor([1e40, -3e39], dtype=torch.float64), Int8Compressor(2)
    decoded = compressor.decode(compressor.encode(values, (2,)), (2,), torch.float64)
    assert torch.allclose(decoded, values, rtol=0.02)


FLOAT32_MAX = torch.finfo(torch.float32).max
REFUSED = [
    *((name, torch.float32, value) for name in COMPRESSORS for value in (float("nan"), float("inf"), -float("inf"))),
    *((name, torch.float64, 1e300) for name in COMPRESSORS),
    ("bfloat16", torch.float32, FLOAT32_MAX),
    ("bfloat16", torch.float16, 65504.0),
    ("int8", torch.float32, FLOAT32_MAX),  # its scale is rounded up
]


@pytest.mark.parametrize(("name", "dtype", "value"), REFUSED)
def test_values_that_cannot_be_decoded_are_refused(name, dtype, value):
    values, lengths = torch.ones(12, dtype=dtype), (3, 0, 5, 4)
    values[5] = -1e3  # in the same block
    values[6] = value
    names = ["a.weight", "a.bias", "b.weight", "b.bias"]
    sentence = (
        rf"^parameter b\.weight has a value of {abs(value):.4g}, which {name} does not represent; "
        r"use a smaller learning rate, or send gradients without compression$"
    ).replace("+", r"\+")
    with pytest.raises(NotFinite, match=sentence):
        COMPRESSORS[name](256).encode(values, lengths, lambda piece: f"parameter {names[piece]}")
    with pytest.raises(NotFinite, match=r"^piece 2 has a value"):
        COMPRESSORS[name](2).encode(values, lengths)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("int4", torch.float32), ("int8", torch.float16), ("int4", torch.float16), ("int8", torch.bfloat16)],
)
def test_the_largest_value_of_a_type_is_sent_where_its_decoding_is_finite(name, dtype):
    values, compressor = torch.tensor([torch.finfo(dtype).max, 0.0]).to(dtype), COMPRESSORS[name](2)
    assert torch.equal(compressor.decode(compressor.encode(values, (2,)), (2,), dtype), values)


SHAPES = [(5, 0, 300), (64,), ()]


def feedback_of(compressor):
    return ErrorFeedback(compressor, SHAPES)


def gradients_of(step, dtype=torch.float64):
    return [random_values(sum(lengths), dtype, seed=10 * step + n) for n, lengths in enumerate(SHAPES)]


@pytest.mark.parametrize("name", COMPRESSORS)
def test_what_is_received_differs_from_the_sum_by_the_residual(name):
    compressor = COMPRESSORS[name](16)
    feedback = feedback_of(compressor)
    sent = [torch.zeros(sum(lengths), dtype=torch.float64) for lengths in SHAPES]
    received = [torch.zeros_like(flat) for flat in sent]
    for step in range(50):
        for index, gradient in enumerate(gradients_of(step)):
            before = gradient.clone()
            encoded = feedback.encode(index, gradient)
            assert torch.equal(gradient, before)
            sent[index] += gradient
            received[index] += compressor.decode(encoded, SHAPES[index], gradient.dtype)
        feedback.commit()
    residuals = feedback.state_dict()
    assert sorted(residuals) == [0, 1, 2]
    for index, total in enumerate(sent):
        assert torch.allclose(received[index] + residuals[index], total, rtol=0, atol=1e-12)
    assert not torch.allclose(received[0], sent[0], rtol=0, atol=1e-9)


def committed(dtype=torch.float32):
    """Return feedback after one push that was applied, and its residuals."""
    feedback = feedback_of(Int4Compressor(8))
    for index, gradient in enumerate(gradients_of(0, dtype)):
        feedback.encode(index, gradient)
    feedback.commit()
    before = {index: residual.clone() for index, residual in feedback.state_dict().items()}
    assert bool(before[0].any())
    return feedback, before


def assert_residuals(feedback, expected):
    state = feedback.state_dict()
    assert state.keys() == expected.keys()
    assert all(same_bits(state[index], expected[index]) for index in expected)


def test_a_push_that_is_discarded_leaves_the_residuals():
    feedback, before = committed()
    first = [feedback.encode(index, gradient) for index, gradient in enumerate(gradients_of(1))]
    assert_residuals(feedback, before)  # nothing is taken before it is applied
    feedback.discard()
    feedback.commit()  # of nothing
    assert_residuals(feedback, before)
    again = [feedback.encode(index, gradient) for index, gradient in enumerate(gradients_of(1))]
    assert all(same_bits(one, other) for one, other in zip(first, again, strict=True))


def test_a_revised_gradient_replaces_the_first():
    feedback, before = committed()
    other = feedback_of(Int4Compressor(8))
    other.load_state_dict(before)
    gradient, revised = gradients_of(1, torch.float32)[0], gradients_of(2, torch.float32)[0]
    first = feedback.encode(0, gradient)
    assert same_bits(feedback.encode(0, gradient), first)
    assert not same_bits(second := feedback.encode(0, revised), first)
    assert same_bits(other.encode(0, revised), second)
    feedback.commit()
    other.commit()
    assert_residuals(feedback, other.state_dict())
    assert same_bits(feedback.state_dict()[1], before[1])  # a range that was not encoded


def test_a_gradient_that_is_refused_changes_nothing():
    feedback, before = committed()
    gradient = gradients_of(1, torch.float32)[0]
    broken = gradient.clone()
    broken[7] = float("nan")
    with pytest.raises(NotFinite, match=r"^the gradient of piece 2 has a value of nan, which int4"):
        feedback.encode(0, broken)
    with pytest.raises(NotFinite, match=r"^w has a value of nan"):
        feedback.encode(0, broken, lambda piece: "w")
    assert_residuals(feedback, before)
    feedback.commit()
    assert_residuals(feedback, before)


def test_a_state_is_not_changed_by_later_pushes_nor_by_its_owner():
    feedback, before = committed()
    state = feedback.state_dict()
    other = feedback_of(Int4Compressor(8))
    other.encode(0, gradients_of(5, torch.float32)[0])
    other.load_state_dict(state)
    other.commit()  # a push from before the load is discarded
    for index, gradient in enumerate(gradients_of(1, torch.float32)):
        assert same_bits(feedback.encode(index, gradient), other.encode(index, gradient))
    feedback.commit()
    assert all(same_bits(state[index], before[index]) for index in before)
    assert not same_bits(feedback.state_dict()[0], before[0])
    other.discard()
    for residual in state.values():
        residual.zero_()
    assert_residuals(other, before)


def test_a_piece_without_a_gradient_is_sent_as_zeros_and_keeps_its_residual():
    compressor, lengths = Int8Compressor(4), (5, 3)
    feedback = ErrorFeedback(compressor, [lengths])
    feedback.encode(0, torch.arange(8.0) / 3)
    feedback.commit()
    before = feedback.state_dict()[0].clone()
    assert before[5:].abs().sum() > 0
    encoded = feedback.encode(0, torch.cat([torch.ones(5), torch.zeros(3)]), without=[1])
    assert torch.equal(compressor.decode(encoded, lengths, torch.float32)[5:], torch.zeros(3))
    feedback.commit()
    after = feedback.state_dict()[0]
    assert torch.equal(after[5:], before[5:])
    assert not torch.equal(after[:5], before[:5])
