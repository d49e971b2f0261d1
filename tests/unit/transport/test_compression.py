"""The codec of the wire, and versions and gradients of several servers through the rpc transports."""

import threading

import pytest
import torch
from mixed_model import MixedModel
from torch import nn

from paramserver.config import ServerConfig
from paramserver.consistency import PushId
from paramserver.parameters.flat import FlatLayout, gradient_leaf, trainable_parameters
from paramserver.parameters.sharding import full_shard, plan_shards, split_ranges
from paramserver.server.shard import ParameterShard
from paramserver.transport.compression import CastCodec, make_codec
from paramserver.transport.messages import ApplyRequest
from paramserver.transport.rpc import RpcTrainerTransport


class Owned:
    """In the place of ``ShardUpdater``: the memory of a shard."""

    def __init__(self, shard, version):
        self.shard, self.ranges = shard, shard.copy_flats(version)
        self.leaves = [gradient_leaf(flat) for flat in self.ranges]

    def clone(self):
        return [flat.clone() for flat in self.ranges]


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_the_configuration_chooses_the_codec(name):
    codec = make_codec(ServerConfig(wire_dtype=name))
    assert codec.dtype == getattr(torch, name)


EVERY_TYPE = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex128)


@pytest.mark.claim("wire-dtype")
@pytest.mark.parametrize("dtype", EVERY_TYPE)
def test_nothing_is_rounded_unless_it_is_asked_for(dtype):
    layout = FlatLayout.of([("weight", torch.zeros(3, dtype=dtype)), ("bias", torch.zeros(2))])
    codec, flats = make_codec(ServerConfig()), layout.allocate()
    assert codec.wire_layout(layout) == layout
    assert codec.encode(layout, flats) is flats
    assert codec.encode_one(layout, 0, flats[0]).dtype == dtype


@pytest.mark.claim("wire-dtype")
@pytest.mark.parametrize("dtype", EVERY_TYPE)
def test_float32_that_is_asked_for_rounds_float64_alone(dtype):
    layout = FlatLayout.of([("weight", torch.zeros(3, dtype=dtype))])
    wire = make_codec(ServerConfig(wire_dtype="float32")).wire_layout(layout)
    assert wire.dtypes == (torch.float32 if dtype == torch.float64 else dtype,)


def test_flats_of_the_wires_type_are_not_copied():
    layout = FlatLayout.of([("weight", torch.ones(3))])
    flats = layout.allocate()
    assert CastCodec(torch.float32).encode(layout, flats) is flats


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("flat_bytes", [float("inf"), 20_000])
@pytest.mark.parametrize("bucket_bytes", [None, 512, 20_000])
@pytest.mark.parametrize("servers", [1, 2, 3])
def test_versions_and_gradients_are_those_of_one_server(servers, bucket_bytes, flat_bytes, dtype):
    torch.manual_seed(servers)
    model, codec = MixedModel(), CastCodec(dtype)
    parameters = trainable_parameters(model)
    layout = FlatLayout.of(parameters.items(), flat_bytes)
    shards = plan_shards(layout, servers, splittable=True)
    assert (servers > 1) is any(not s.is_whole(p, layout) for s in shards for p in s.slices)
    if bucket_bytes is not None:
        shards = tuple(split_ranges(shard, layout, bucket_bytes) for shard in shards)
    version = [torch.randn(size).to(kind) for size, kind in zip(layout.sizes, layout.dtypes, strict=True)]
    trainer = RpcTrainerTransport(layout, shards, codec, list(parameters.values()))
    servers, push = [], PushId(0, 1, 1, 1)
    for index, shard in enumerate(shards):
        servers.append(ParameterShard(Owned(shard, version), codec, threading.RLock(), 0, server_index=index))
    pulled = [flat for server in servers for flat in server.pull(push, 0)]
    trainer.load(pulled)
    expected = codec.encode(layout, version)
    for name, view in layout.views(expected).items():
        assert torch.equal(parameters[name], view.to(parameters[name].dtype))

    gradients = [torch.randn(size).to(kind) for size, kind in zip(layout.sizes, layout.dtypes, strict=True)]
    for view, gradient in zip(trainer.gradient_views, layout.views(gradients).values(), strict=True):
        view.copy_(gradient)
    for bucket in trainer.buckets:
        servers[bucket.server_index].receive_bucket(push, 0, bucket.flat_index, trainer.bucket_tensor(bucket))
    trainer.backward_root(pulled).backward()
    sent = [g.to(kind) for g, kind in zip(codec.encode(layout, gradients), layout.dtypes, strict=True)]
    request = ApplyRequest(1, ((push, None),), (1.0,), None, None, frozenset())
    for shard, server in zip(shards, servers, strict=True):
        server.report_push(push, 0)
        got = shard.layout.views(server.take_gradients(request)[push])
        wanted = shard.layout.views(shard.slice_flats(sent))
        assert all(torch.equal(got[name], wanted[name]) for name in wanted)


def test_a_tensor_with_gaps_keeps_its_strides_with_one_server():
    """Only a parameter that servers share must be dense."""
    gappy = nn.Parameter(torch.randn(4, 8)[:, ::2])
    layout = FlatLayout.of([("gappy", gappy)])
    trainer = RpcTrainerTransport(layout, [full_shard(layout)], CastCodec(torch.float32), [gappy])
    assert gappy.stride() == (8, 2)
    trainer.load([torch.arange(layout.sizes[0], dtype=torch.float32)])
    assert gappy.flatten().tolist() == [float(i) for i in range(16)]
