"""What is used of torch that torch does not promise: it exists, and takes what it took when this was written."""

import configparser
import inspect
import math
import subprocess
import sys

import pytest
import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from packaging.requirements import Requirement
from source_tree import ROOT, modules, private_torch
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch._C._distributed_rpc import TensorPipeAgent
from torch._C._profiler import _ExperimentalConfig
from torch.distributed.algorithms.join import Join
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.rpc._utils import _update_group_membership
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _DDPJoinHook

from paramserver.distributed.rpc_calls import WORKER_THREADS, agent_options
from paramserver.importing import TORCH_BELOW, TORCH_FROM

# Module -> what it uses. A new line here needs a test below.
USED = {
    "paramserver.metrics.profile": {"torch._C._profiler._ExperimentalConfig"},
    "paramserver.optim.parallel_step": {
        "torch.optim.optimizer._global_optimizer_post_hooks",
        "torch.optim.optimizer._global_optimizer_pre_hooks",
    },
    "paramserver.rng": {"torch.utils._python_dispatch.TorchDispatchMode"},
    "paramserver.server.model_service": {"torch.utils._pytree.tree_flatten", "torch.utils._pytree.tree_unflatten"},
    "paramserver.distributed.store_relay": {"torch._C._distributed_c10d.TCPStore"},
    "paramserver.distributed.resize": {"torch._C._distributed_c10d.Store"},
    "paramserver.distributed.rendezvous": {
        "torch._C._distributed_c10d.PrefixStore",
        "torch._C._distributed_c10d.Store",
        "torch._C._distributed_c10d.TCPStore",
    },
    "paramserver.optim.shard_updater": {
        "torch._foreach_add_",
        "torch._foreach_mul_",
    },
    "paramserver.optim.clipping": {"torch._foreach_norm"},
    "paramserver.parameters.numerics": {"torch._foreach_div_", "torch._foreach_norm"},
    "paramserver.distributed.rpc_agent": {
        "torch._C._distributed_c10d.HashStore",
        "torch._C._distributed_c10d.Store",
        "torch._C._distributed_rpc.TensorPipeAgent",
        "torch.distributed.autograd._current_context",
        "torch.distributed.autograd._current_context()._context_id",
        "torch.distributed.autograd._init",
        "torch.distributed.autograd._is_valid_context",
        "torch.distributed.autograd._release_context",
        "torch.distributed.rpc._init_rpc_backend",
        "torch.distributed.rpc._utils._update_group_membership",
        "torch.distributed.rpc.api._init_rpc_states",
    },
    "paramserver.runtime.rank": {"torch._C._distributed_c10d.Store"},
    "paramserver.parameters.model_tree": {"torch._foreach_copy_"},
    "paramserver.transport.shared_memory": {"torch._foreach_copy_"},
    "paramserver.transport.rpc": {"torch._foreach_copy_"},
    "paramserver.trainers.server_forward": {
        "torch.utils._pytree.tree_leaves",
        "torch.utils._pytree.tree_flatten",
        "torch.utils._pytree.tree_map",
        "torch.utils._pytree.tree_unflatten",
    },
    "paramserver.tools.export": {"torch.utils._pytree.tree_leaves"},
    "paramserver.trainers.row_lookup": {"torch.utils._pytree.tree_leaves"},
    "paramserver.trainers.local_steps": {
        "torch._foreach_add_",
        "torch._foreach_copy_",
        "torch._foreach_neg_",
        "torch._foreach_norm",
    },
    "paramserver.transport.compression": {"torch._foreach_copy_"},
    "paramserver.trainers.push": {"torch._foreach_copy_"},
    "paramserver.trainers.ddp_control": {
        "torch._C._distributed_c10d.PrefixStore",
        "torch.distributed.distributed_c10d._set_pg_timeout",
    },
}


def names(function) -> list[str]:
    return list(inspect.signature(function).parameters)


def documented(native) -> list[str]:
    """The argument names of a native constructor, from the signature that its documentation begins with."""
    signature = native.__init__.__doc__.split("\n")[0]
    inner = signature[signature.index("(") + 1 : signature.rindex(") ->")]
    depth, argument, found = 0, "", []
    for letter in inner + ",":
        depth += (letter in "[(") - (letter in "])")
        if letter == "," and depth == 0:
            found.append(argument.split(":")[0].strip())
            argument = ""
        else:
            argument += letter
    return found


def test_torch_is_of_the_range_that_the_package_asks_for():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    lines = config["options"]["install_requires"].split()
    asked = next(r for r in map(Requirement, lines) if r.name == "torch")
    assert asked.specifier.contains(torch.__version__.split("+")[0])
    # Private calls need an upper end. It is checked again at the start of a run.
    assert {clause.operator: clause.version for clause in asked.specifier} == {">=": TORCH_FROM, "<": TORCH_BELOW}


def test_the_package_uses_no_other_private_names():
    found = {module.name: private_torch(module.tree) for module in modules()}
    assert {name: used for name, used in found.items() if used} == USED


def test_the_agent_is_made_as_before():
    assert documented(TensorPipeAgent) == [
        "self",
        "store",
        "name",
        "rank",
        "world_size",
        "rpc_backend_options",
        "reverse_device_maps",
        "devices",
    ]
    assert names(rpc._init_rpc_backend) == ["backend", "store", "name", "rank", "world_size", "rpc_backend_options"]
    assert names(rpc.api._init_rpc_states) == ["agent"]
    assert rpc.backend_registry.BackendType.TENSORPIPE.name == "TENSORPIPE"
    assert dist_autograd._init.__doc__.startswith("_init(arg0:")
    assert names(_update_group_membership) == ["worker_info", "my_devices", "reverse_device_map", "is_join"]


def test_the_agent_takes_transports_and_channels(monkeypatch):
    options = agent_options(7.0, same_host=True)
    assert (options.rpc_timeout, options.num_worker_threads) == (7.0, WORKER_THREADS)
    taken = names(rpc.TensorPipeRpcBackendOptions.__init__)
    monkeypatch.setattr(rpc, "TensorPipeRpcBackendOptions", lambda **options: options)
    near, far = agent_options(7.0, same_host=True), agent_options(7.0, same_host=False)
    assert set(near) <= set(taken)
    assert near["_transports"] == far["_transports"] == ["uv"]
    assert (near["_channels"], far["_channels"]) == (["cma", "mpt_uv", "basic"], ["basic"])


FIRST_AGENT = """
import torch.distributed.rpc as rpc
from torch._C._distributed_c10d import HashStore
from paramserver.distributed.rpc_agent import start_first_agent
from paramserver.distributed.rpc_calls import agent_options
store = HashStore()
start_first_agent(store, "server0", agent_options(10.0, same_host=True))
print(store.get("addrs/server0").decode() != "", rpc.get_worker_info().id, rpc.get_worker_info().name)
print(rpc.rpc_sync("server0", int, args=("7",)))
rpc.shutdown(graceful=False)
"""


def test_the_first_agent_publishes_its_address_where_a_star_agent_looks_for_it(own_environ):
    import os

    environ = {**os.environ, "TP_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FIRST_AGENT], capture_output=True, text=True, timeout=90, env=environ
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "0", "server0", "7"]


THREAD_STATES = """
import threading
import torch.distributed.rpc as rpc
from torch._C._distributed_c10d import HashStore
from paramserver.distributed.rpc_agent import start_first_agent
from paramserver.distributed.rpc_calls import agent_options, completed_future, register_server, send, send_deferred
class Server:
    own = threading.local()
    def is_new(self):
        found = not hasattr(self.own, "seen")
        self.own.seen = True
        return found
    def is_new_later(self):
        return completed_future(self.is_new())
start_first_agent(HashStore(), "server0", agent_options(10.0, same_host=True))
register_server(Server())
print(sum(send("server0", 10.0, Server.is_new).wait() for _ in range(40)))
print(sum(send_deferred("server0", Server.is_new_later).wait() for _ in range(40)))
rpc.shutdown(graceful=False)
"""


def test_threads_of_an_agent_keep_their_python_state(own_environ):
    """What belongs to a thread is found again in its next call."""
    import os

    environ = {**os.environ, "TP_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", THREAD_STATES], capture_output=True, text=True, timeout=90, env=environ
    )
    assert done.returncode == 0, done.stderr
    first, later = map(int, done.stdout.split())
    assert 1 <= first + later <= WORKER_THREADS


A_CONTEXT = """
import torch.distributed.autograd as dist_autograd
from paramserver.distributed.rpc_agent import autograd_id, current_context_id, init_autograd, release_context
init_autograd(5)
init_autograd(6)  # of a later generation: the ids of contexts keep the first
print(autograd_id())
context_id = dist_autograd._new_context()._context_id()
print(context_id >> 48, current_context_id() == context_id, dist_autograd._is_valid_context(context_id))
release_context(context_id)
release_context(context_id)  # it has ended
try:
    dist_autograd._is_valid_context(context_id)
except RuntimeError:
    print("ended")
"""


def test_a_context_is_found_and_released():
    """The server releases what it holds of a context whose trainer is lost."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", A_CONTEXT], capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["5", "5", "True", "None", "ended"]


def test_a_store_takes_a_socket_that_is_bound_already():
    arguments = documented(TCPStore)
    assert {"host_name", "port", "is_master", "timeout", "wait_for_workers", "master_listen_fd"} <= set(arguments)
    assert issubclass(TCPStore, Store)
    assert issubclass(PrefixStore, Store)
    assert issubclass(HashStore, Store)


CONNECTIONS = """
from datetime import timedelta
from torch._C._distributed_c10d import TCPStore
options = {"wait_for_workers": False, "timeout": timedelta(seconds=60)}
store = TCPStore("127.0.0.1", 0, is_master=True, **options)
for _ in range(3):
    TCPStore("127.0.0.1", store.port, is_master=False, **options)
"""


def test_a_store_looks_up_names_until_a_lookup_fails(monkeypatch):
    monkeypatch.setenv("RES_OPTIONS", "attempts:0")  # a lookup fails at once,
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "WARNING")  # and torch prints so
    done = subprocess.run([sys.executable, "-c", CONNECTIONS], capture_output=True, text=True, timeout=90, check=True)
    # Of four connections. The two ends of the first one are two threads, and both may begin before a lookup fails.
    assert done.stderr.count("The hostname of the client socket cannot be retrieved") in (1, 2)


def test_compare_set_takes_what_nobody_has():
    store = PrefixStore("here", HashStore())
    assert store.compare_set("rank/0", "", "first") == b"first"
    assert store.compare_set("rank/0", "", "second") == b"first"


def test_a_rank_without_data_takes_part_in_a_backward_as_before():
    """trainers/ddp.py makes these calls of ``join_hook``, and switches off every collective of a forward."""
    calls = [
        "ddp.reducer._rebuild_buckets()",
        "ddp._match_all_reduce_for_bwd_pass()",
        "if ddp.find_unused_parameters:ddp._match_unused_params_allreduce()",
        "ddp.reducer._push_all_rebuilt_params()",
    ]
    shadow = "".join(inspect.getsource(_DDPJoinHook.main_hook).split())
    places = [shadow.index("".join(call.split())) for call in calls]
    assert places == sorted(places)
    assert "self.reducer._get_local_used_map()" in inspect.getsource(
        DistributedDataParallel._match_unused_params_allreduce
    )
    assert "and self.forward_sync_buffers" in inspect.getsource(DistributedDataParallel.will_sync_module_buffers)
    assert "_comm_hooks.append(" in inspect.getsource(DistributedDataParallel.register_comm_hook)
    assert "self._has_rebuilt_buckets = True" in inspect.getsource(DistributedDataParallel._pre_forward)
    assert "if not join_config.is_first_joinable or not join_config.enable:" in inspect.getsource(
        Join.notify_join_context
    )


def test_a_forward_broadcasts_module_buffers_as_before():
    """trainers/ddp.py sets this attribute before each forward."""
    condition = inspect.getsource(DistributedDataParallel.will_sync_module_buffers)
    assert "self.require_forward_param_sync" in condition


def test_the_timeout_of_a_process_group_can_be_changed():
    assert names(_set_pg_timeout) == ["timeout", "group"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_tensors_are_copied_at_once(dtype):
    own, other = [torch.zeros(3, dtype=dtype), torch.zeros((), dtype=dtype)], [torch.ones(3), torch.tensor(2.0)]
    torch._foreach_copy_(own, other)
    assert [tensor.tolist() for tensor in own] == [[1.0, 1.0, 1.0], 2.0]


def test_many_tensors_are_added_and_scaled_in_place():
    own = [torch.ones(3), torch.tensor(2.0)]
    torch._foreach_add_(own, [torch.ones(3), torch.tensor(4.0)])
    torch._foreach_mul_(own, 0.5)
    torch._foreach_div_(own, 2.0)
    assert [norm.item() for norm in torch._foreach_norm([torch.tensor([3.0, 4.0]), torch.tensor(-2.0)])] == [5.0, 2.0]
    largest = torch._foreach_norm([torch.tensor([3.0, -4.0]), torch.tensor([1.0, math.nan])], math.inf)
    assert [str(value.item()) for value in largest] == ["4.0", "nan"]
    assert [tensor.tolist() for tensor in own] == [[0.5, 0.5, 0.5], 1.5]


def test_a_profile_has_the_events_of_all_threads():
    assert "profile_all_threads" in documented(_ExperimentalConfig)
