"""Tensors that are read by ranges of rows while a file is written."""

import io
import mmap
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from paramserver.checkpoint.serialization import load_archive, write_archive
from paramserver.checkpoint.staging import RowStream, concatenate


def stream_of(tensor):
    return RowStream(tuple(tensor.shape), tensor.dtype, lambda first, end: tensor[first:end].clone())


def written(state):
    file = io.BytesIO()
    write_archive(state, file)
    file.seek(0)
    return file


def assert_is_intact(file):
    """Every entry has its CRC-32, which zipfile checks, and the sizes that the directory names."""
    with zipfile.ZipFile(file) as archive:
        assert archive.testzip() is None
    file.seek(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.uint8])
@pytest.mark.parametrize("shape", [(300_001, 3), (7, 2), (1, 1), (5,), (3_000_000,), (2, 3, 4)])
def test_a_file_is_that_of_the_tensor_itself(dtype, shape):
    table = torch.arange(torch.Size(shape).numel()).to(dtype).view(shape)
    state = {"a": torch.ones(3), "step": 4, "list": [1, (2, torch.arange(5))]}
    file = written({**state, "table": stream_of(table), "last": torch.zeros(2)})
    assert_is_intact(file)
    plain = io.BytesIO()
    torch.save({**state, "table": table, "last": torch.zeros(2)}, plain)
    own, other = (zipfile.ZipFile(io.BytesIO(f.getvalue())) for f in (file, plain))
    # Apart from the id, which torch computes of the CRC-32 of what it has seen.
    names = [name for name in own.namelist() if not name.endswith("serialization_id")]
    assert own.namelist() == other.namelist()
    assert [(name, own.read(name)) for name in names] == [(name, other.read(name)) for name in names]
    assert torch.equal(load_archive(file)["table"], table)


def test_a_stream_that_is_in_two_places_is_stored_once():
    table = torch.randn(1000, 4)
    stream = stream_of(table)
    loaded = load_archive(written({"a": stream, "b": stream, "c": stream_of(table)}))
    assert loaded["a"].data_ptr() == loaded["b"].data_ptr() != loaded["c"].data_ptr()
    assert torch.equal(loaded["b"], table)
    assert torch.equal(loaded["c"], table)


def test_a_state_without_streams_is_passed_on_as_it_is(monkeypatch):
    seen = []
    monkeypatch.setattr(torch, "save", lambda obj, file: seen.append((obj, file)))
    state, file = OrderedDict(a=[1, (2, {"b": torch.ones(1)})]), io.BytesIO()
    write_archive(state, file)
    assert seen[0][0] is state
    assert seen[0][1] is file


def test_classes_and_attributes_of_a_state_dict_are_kept():
    state = torch.nn.Linear(2, 2).state_dict()
    state["weight"] = stream_of(torch.ones(2, 2))
    loaded = load_archive(written(state))
    assert type(loaded) is OrderedDict
    assert loaded._metadata == state._metadata
    assert type(state["weight"]) is RowStream


@pytest.mark.parametrize("start", [b"PK\1\2", b"PK\3\4", b"PK\7\10"])
@pytest.mark.parametrize("size", [4, 16, 24, 30, 46, 100])
def test_content_that_looks_like_a_part_of_an_archive_is_not_changed(start, size):
    lookalike = torch.frombuffer(bytearray((start + bytes(size))[:size]), dtype=torch.uint8)
    table = torch.randn(50, 2)
    file = written({"before": lookalike, "table": stream_of(table), "after": lookalike.clone()})
    assert_is_intact(file)
    loaded = load_archive(file)
    assert torch.equal(loaded["before"], lookalike)
    assert torch.equal(loaded["after"], lookalike)


def test_tensors_without_elements():
    loaded = load_archive(written({"a": stream_of(torch.zeros(0, 4)), "b": stream_of(torch.ones(3, 2))}))
    assert loaded["a"].shape == (0, 4)
    assert loaded["b"].sum() == 6


def test_the_error_of_a_stream_is_raised():
    def read(first, end):
        raise ConnectionError("server 1 is gone")

    with pytest.raises(ConnectionError, match="server 1 is gone"):
        written({"table": RowStream((10, 2), torch.float32, read)})


def test_parts_are_read_in_the_order_of_their_rows():
    tables = [torch.randn(rows, 3) for rows in (4, 0, 1, 700_000)]
    stream = concatenate([stream_of(table) for table in tables])
    assert stream.shape == (700_005, 3)
    assert torch.equal(torch.cat(list(stream.ranges())), torch.cat(tables))
    assert torch.equal(load_archive(written({"t": stream}))["t"], torch.cat(tables))


def test_the_memory_of_a_placeholder_is_not_written_to(monkeypatch):
    with_fill = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        before = resident_bytes()
        placeholder = RowStream((2**26, 4), torch.float32, lambda first, end: None).placeholder()
        assert placeholder.nbytes == 2**30
        assert resident_bytes() - before < 2**24
    finally:
        torch.use_deterministic_algorithms(with_fill)


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
