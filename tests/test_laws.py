"""The laws of the house: who may import whom, and what is done in one place only."""

import ast
import os
import re
import subprocess
import sys
import threading

import pytest
from helpers.hygiene import Snapshot
from helpers.source import (
    comparisons_with,
    environment_uses,
    imported,
    inside,
    modules,
    on_import,
    sleeps,
)

# A module imports from lower floors only. The whole number is the floor of the design, what follows the stair on it.
FLOORS = {
    0: "errors first_use version",
    1.0: "buffers checkpoint config courier deadlines draws edge flat leaving link loading parent records roles",
    1.1: "cluster finite limits links rundir shards",
    1.15: "opening resuming undo",
    1.2: "attempts claim consistency coupling slicing",
    1.25: "crew",
    1.3: "online protocol",
    1.4: "client",
    1.5: "worker",
    2.0: "report resharding sinks sources",
    2.1: "channel console",
    3.0: "task",
    3.1: "portion updater",
    4.0: "devices transport",
    4.1: "hosting meeting membership process",
    4.2: "modelling session star",
    5.0: "keeper shard_server sharing versions",
    5.1: "conductor deposits forwards posting tutorial",
    5.2: "rounds",
    5.25: "server",
    5.4: "remote",
    5.5: "serving",
    6: "optimizer",
    7.0: "trainers.agreement trainers.counters trainers.data trainers.departures trainers.hooks trainers.validation",
    7.1: "trainers.collection trainers.overridable trainers.remote_model",
    7.2: "trainers.standing",
    7.3: "trainers.base",
    8.0: "trainers.ddp trainers.local trainers.rpc",
    8.1: "trainers.served",
    9.0: "dry_run rank supervisor",
    9.1: "launch",
    9.2: "api evaluate outside reporting",
    9.3: "bench",
    9.4: "benchmark",
    10: "cli",
}
# The rooms that are folders, from their base upwards.
FOLDERS = {
    "bench": "slow cases network predict stamps window goal watch commands task probe measured progress",
    "buffers": "batch checks order codec layout storage redistribute contents exchange base counted fifo firo "
    "reservoir factory",
    "checkpoint": "disk manifest layout archive storable pieces memory copies best read store retention writer",
    "cluster": "network producer base listener flags torchrun resolve slurm",
    "consistency": "words together base sync free stale backup staleness factory",
    "config": "modes rules schema table values reading settings overrides world checks printing loading",
    "online": "zeromq messages fields plan keys numbering line presence desk_line postman parcel delivery "
    "sampler simulation study started outside leash command runner clerk door desk "
    "identities assembly verdicts inspector moments pending post tally ear reception",
    "report": "outcome summary results learning figures writing case groups causes words conditions compare document "
    "curves drawing plots tables page target runs",
    "sinks": "base jsonlines progress tensorboard",
    "sources": "base share dataset iterable stream factory feeder",
    "transport": "wire agent cutting echo ends over_rpc over_servers ring memory pages segments shelves over_memory",
}
MAY_USE_RPC = [
    f"paramserver.{m}"
    for m in ("session", "membership", "transport", "server", "shard_server", "hosting", "remote", "tutorial")
]
MAY_USE_RPC += ["paramserver.optimizer", "trainers.rpc", "trainers.served"]
# Where distributed training begins; below, nothing knows of other processes.
FIRST_DISTRIBUTED_FLOOR = 4
MODES = frozenset({"rpc", "ddp", "local"})
NEEDS_NO_TORCH = (
    "paramserver",
    "paramserver.api",
    "paramserver.launch",
    "paramserver.evaluate",
    "paramserver.outside",
    "paramserver.benchmark",
    "paramserver.reporting",
    "paramserver.cli",
    "paramserver.config",
    "paramserver.cluster",
    "paramserver.report",
)

MODULES = modules()
FILES = [module for module in MODULES if not module.is_init]
FLOOR_OF = {
    unit if unit.startswith("trainers.") else f"paramserver.{unit}": floor
    for floor, units in FLOORS.items()
    for unit in units.split()
}


def unit_of(name: str) -> str:
    return ".".join(name.split(".")[:2])


def own_imports(module) -> set[str]:
    """The modules of the package that this one imports, as files or folders."""
    names = {m.name for m in MODULES} - {"paramserver", "trainers"}
    return {name for name in imported(module.tree) if name in names and name != module.name}


def height(name: str) -> tuple[float, int]:
    """Floor and place in the folder; a folder as such lies above all that is in it."""
    unit = unit_of(name)
    folder = FOLDERS.get(unit.removeprefix("paramserver."), "").split()
    leaf = name.rpartition(".")[2]
    return FLOOR_OF[unit], folder.index(leaf) if name != unit else len(folder)


def test_every_module_has_a_floor():
    assert {unit_of(module.name) for module in FILES} == set(FLOOR_OF)
    for folder, leaves in FOLDERS.items():
        prefix = f"paramserver.{folder}."
        assert sorted(leaves.split()) == sorted(m.name[len(prefix) :] for m in FILES if m.name.startswith(prefix))


@pytest.mark.parametrize("module", FILES, ids=lambda module: module.name)
def test_imports_go_down(module):
    upwards = []
    for name in own_imports(module):
        same_folder = unit_of(name) == unit_of(module.name)
        down = height(name) < height(module.name) if same_folder else height(name)[0] < height(module.name)[0]
        if not down:
            upwards.append(name)
    assert not upwards, f"{module.name} imports from its own or a higher floor"


def test_there_is_no_circle_of_imports():
    edges = {module.name: own_imports(module) for module in FILES}

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"circle: {' -> '.join((*path, name))}"
        for other in edges.get(name, ()) if name not in done else ():
            visit(other, (*path, name))
        done.add(name)

    done: set[str] = set()
    for name in edges:
        visit(name, ())
    assert done >= set(edges)


@pytest.mark.parametrize("module", [m for m in MODULES if m.is_init], ids=lambda module: module.name)
def test_folders_load_their_names_on_first_use(module):
    eager = {name for statement in on_import(module.tree) for name in imported(statement)}
    assert {name for name in eager if inside(name, ("paramserver", "trainers", "torch"))} <= {
        "paramserver.first_use",
        "paramserver.first_use.on_first_use",
        "paramserver.version",
        "paramserver.version.__version__",
    }


def test_rpc_is_used_where_it_may_be():
    rpc = (
        "torch.distributed.rpc",
        "torch.distributed.autograd",
        "torch.distributed.optim",
        "torch._C._distributed_rpc",
    )
    users = {m.name for m in MODULES if any(inside(name, rpc) for name in imported(m.tree))}
    assert {name for name in users if not inside(name, MAY_USE_RPC)} == set()
    assert {"paramserver.server", "trainers.rpc", "paramserver.transport.agent"} <= users  # the search finds something


def test_low_floors_know_of_no_other_process():
    distributed = ("torch.distributed", "torch._C._distributed_c10d", "torch._C._distributed_rpc")
    low = [m for m in FILES if FLOOR_OF[unit_of(m.name)] < FIRST_DISTRIBUTED_FLOOR]
    assert [m.name for m in low if any(inside(name, distributed) for name in imported(m.tree))] == []


def test_the_mode_is_compared_in_one_table():
    places = {f"{m.name}:{line}" for m in FILES for line in comparisons_with(m.tree, MODES)}
    assert {place for place in places if not place.startswith("paramserver.config.modes:")} == set()


def test_the_environment_is_touched_in_cluster_only():
    users = {m.name for m in MODULES if environment_uses(m.tree)}
    assert {name for name in users if not name.startswith("paramserver.cluster.")} == set()
    assert "paramserver.cluster.base" in users


def test_nothing_sleeps():
    assert [f"{m.name}:{line}" for m in MODULES for line in sleeps(m.tree)] == []


def test_reports_import_nothing_that_runs():
    pure = ("config", "records", "errors", "report", "checkpoint.disk")
    allowed = tuple(f"paramserver.{name}" for name in pure)
    running = {"torch", "numpy", "threading", "subprocess", "multiprocessing", "socket", "signal"}
    for module in (m for m in MODULES if inside(m.name, ("paramserver.report",))):
        names = imported(module.tree)
        assert {n for n in names if inside(n, ("paramserver", "trainers")) and not inside(n, allowed)} == set()
        assert not {name.split(".")[0] for name in names} & running


def test_a_launch_needs_no_torch_before_it_starts_a_rank():
    program = "import sys, {}; print(*sorted({{'torch', 'numpy', 'tensorboard'}} & set(sys.modules)))"
    command = [sys.executable, "-c", program.format(", ".join(NEEDS_NO_TORCH))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == ""


# The searches themselves: each finds what it is for.


@pytest.mark.parametrize(
    ("search", "found", "passed"),
    [
        (lambda t: comparisons_with(t, MODES), "if config.mode == 'rpc': pass", "mode = 'rpc'"),
        (lambda t: comparisons_with(t, MODES), "if mode in ('ddp', 'local'): pass", "f(get('mode', 'ddp') in modes)"),
        (lambda t: comparisons_with(t, MODES), "match mode:\n case 'local': pass", "match mode:\n case 'one': pass"),
        (environment_uses, "import os\nx = os.environ['A']", "import os\nx = os.getpid()"),
        (environment_uses, "from os import getenv", "from os import getpid"),
        (sleeps, "import time\ntime.sleep(1)", "import time\ntime.time()"),
        (sleeps, "from time import sleep", "from time import time"),
        (lambda t: "a.b.c" in imported(t), "def f():\n from a.b import c", "from a import d"),
        (lambda t: list(on_import(t)), "if x:\n import a", "if TYPE_CHECKING:\n import a"),
    ],
)
def test_a_search_finds_what_it_is_for(search, found, passed):
    assert search(ast.parse(found))
    assert not search(ast.parse(passed))


def test_what_is_left_behind_is_seen():
    before = Snapshot.take()
    go_on = threading.Event()
    thread = threading.Thread(target=go_on.wait, args=(60,), name="feeder-9", daemon=True)
    other = threading.Thread(target=go_on.wait, args=(60,), name="a library's", daemon=True)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        thread.start()
        other.start()
        os.environ["LEFT_BEHIND"] = "1"
        assert [re.sub(r"\d+ \(.*", "", leak) for leak in before.leaks()] == [
            "thread feeder-9",
            "child process ",
            "variable LEFT_BEHIND",
        ]
    finally:
        go_on.set()
        thread.join(10)
        other.join(10)
        child.communicate(b"\n", timeout=30)
        before.restore_environ()
    assert before.leaks() == []
    assert "LEFT_BEHIND" not in os.environ
