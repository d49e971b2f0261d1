"""The laws of the house: who may import whom, and what is done in one place only."""

import ast
import os
import re
import subprocess
import sys
import threading

import pytest
from leaks import OUR_THREADS, ProcessSnapshot
from source_tree import (
    ROOT,
    comparisons_with,
    environment_uses,
    imported,
    inside,
    modules,
    on_import,
    sleeps,
)

from paramserver.config.schema import BUFFERS, CONSISTENCIES, TRANSPORTS, sends

# A folder, or a module of the top level, imports from its own layer and those above its line; no two import each other.
LAYERS = [
    "_commands _lazy _trainers errors fileio importing platform process_utils rng",
    "buffers checkpoint cluster config devices limits metrics",
    "client consistency context distributed online parameters run_simulation sources subscriber task",
    "optim transport",
    "runs server",
    "runtime simulator trainers",
    "api cli components elastic evaluate integrations launch predict ray_actors tools",
]
# What would change if torch dropped RPC (docs/torch-notes.md). The first asks whether torch has it.
ASKS_FOR_RPC = "paramserver.distributed.backends"
USE_RPC = {
    "paramserver.distributed.membership",
    "paramserver.distributed.rpc_agent",
    "paramserver.distributed.rpc_calls",
    "paramserver.distributed.session",
    "paramserver.server.shared_optimizer",
}
# Layers below know of no other process, except for the connections themselves and what measures them.
FIRST_DISTRIBUTED_LAYER = 3
CONNECTS = ("paramserver.distributed",)
MAY_USE_TOOLS = ("tools",)  # the table of commands has their names as text
LINUX = (
    *("pidfd_", "P_PIDFD", "memfd_", "MFD_", "F_ADD_SEALS", "F_SEAL_", "eventfd", "EFD_", "epoll", "EPOLL", "prctl"),
    *("sched_getaffinity", "MSG_CMSG_CLOEXEC", "SO_PEERCRED", "TCP_INFO", "sigtimedwait", "inotify", "signalfd"),
)
# No plain run needs them: hosts of the benchmark and faults, the checks of doctor, addresses of an interface that a
# config names, and programs that send samples.
LINUX_ONLY = {
    "paramserver.cluster.network",
    "paramserver.online.connections",
    "paramserver.online.process_guard",
    "paramserver.tools.bench.processes",
    "paramserver.tools.chaos.command",
    "paramserver.tools.chaos.faults",
    "paramserver.tools.doctor.machine",
}
MODES = frozenset({"rpc", "ddp", "local"})
NEEDS_NO_TORCH = (
    "paramserver",
    "paramserver.api",
    "paramserver.launch",
    "paramserver.evaluate",
    "paramserver.predict",
    "paramserver.benchmark",
    "paramserver.reporting",
    "paramserver.cli",
    "paramserver.config",
    "paramserver.cluster",
    "paramserver.tools.report",
)

MODULES = modules()
FILES = [module for module in MODULES if not module.is_init]
OWN = {module.name for module in MODULES} - {"paramserver", "paramserver.trainers"}
LAYER_OF = {f"paramserver.{unit}": number for number, units in enumerate(LAYERS) for unit in units.split()}


def unit_of(name: str) -> str:
    """The folder or the top-level module that a module belongs to."""
    return ".".join(name.split(".")[:2])


def own_imports(module) -> set[str]:
    """The modules of the package that this one imports, as files or folders."""
    return {name for name in imported(module.tree) if name in OWN and name != module.name}


def test_every_module_has_a_layer():
    assert {unit_of(module.name) for module in FILES} == set(LAYER_OF)


def test_imports_go_down():
    upwards = {}
    for module in FILES:
        unit = unit_of(module.name)
        others = {name for name in own_imports(module) if unit_of(name) != unit}
        upwards[module.name] = sorted(name for name in others if LAYER_OF[unit_of(name)] > LAYER_OF[unit])
    assert {name: found for name, found in upwards.items() if found} == {}, "imports from a higher layer"


def test_the_core_needs_no_tool():
    users = {unit_of(m.name) for m in FILES if any(inside(name, ("paramserver.tools",)) for name in imported(m.tree))}
    assert users == {f"paramserver.{unit}" for unit in MAY_USE_TOOLS}


def imports_of_modules() -> dict[str, set[str]]:
    return {module.name: own_imports(module) for module in FILES}


def imports_of_units() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for name, others in imports_of_modules().items():
        found.setdefault(unit_of(name), set()).update(unit_of(other) for other in others)
    return {unit: others - {unit} for unit, others in found.items()}


@pytest.mark.parametrize("imports_of", [imports_of_modules, imports_of_units], ids=["modules", "folders"])
def test_there_is_no_circle_of_imports(imports_of):
    edges = imports_of()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"circle: {' -> '.join((*path, name))}"
        for other in edges.get(name, ()) if name not in done else ():
            visit(other, (*path, name))
        done.add(name)

    done: set[str] = set()
    for name in edges:
        visit(name, ())
    assert done >= set(edges)


def test_folders_load_their_names_on_first_use():
    allowed = {
        "paramserver._commands",
        "paramserver._commands.install_command_modules",
        "paramserver._lazy",
        "paramserver._lazy.attach",
        "paramserver._trainers",
        "paramserver._trainers.install_finder",
    }
    eager = {
        f"{module.name}: {name}"
        for module in MODULES
        if module.is_init
        for statement in on_import(module.tree)
        for name in imported(statement)
        if inside(name, ("paramserver", "torch")) and name not in allowed
    }
    assert eager == set()


def rpc_users() -> set[str]:
    rpc = (
        "torch.distributed.rpc",
        "torch.distributed.autograd",
        "torch.distributed.optim",
        "torch._C._distributed_rpc",
    )
    return {m.name for m in MODULES if any(inside(name, rpc) for name in imported(m.tree))}


def test_a_run_without_servers_loads_no_module_that_uses_rpc(tmp_path):
    # torch itself imports torch.distributed.rpc.
    settings = ["cluster.num_trainers=1", "training.max_steps=2", f"logging.run_dir={tmp_path}"]
    task = ROOT / "tests" / "helpers" / "tasks.py"
    (tmp_path / "config.yaml").write_text(f"task: {task}:ReferenceTask\n")
    arguments = ["--config", str(tmp_path / "config.yaml"), "--rank", "0", "--world_size", "1", "--master_port", "0"]
    for setting in settings:
        arguments += ["--set", setting]
    program = f"""
import sys
from paramserver.launch import main
for mode in ("local", "ddp"):
    assert main([*{arguments}, "--set", f"mode={{mode}}"]) == 0
    print("loaded:", *sorted(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("loaded:")]
    for mode, loaded in zip(("local", "ddp"), map(set, lines), strict=True):
        assert f"paramserver.trainers.{mode}" in loaded
        assert loaded & rpc_users() == {ASKS_FOR_RPC}, mode


def test_rpc_is_used_where_it_may_be():
    assert rpc_users() == {ASKS_FOR_RPC, *USE_RPC}


def test_the_package_needs_no_library_of_tests():
    assert [m.name for m in MODULES if any(inside(name, ("unittest", "pytest")) for name in imported(m.tree))] == []


def test_low_layers_know_of_no_other_process():
    distributed = ("torch.distributed", "torch._C._distributed_c10d", "torch._C._distributed_rpc")
    low = [m for m in FILES if LAYER_OF[unit_of(m.name)] < FIRST_DISTRIBUTED_LAYER and not inside(m.name, CONNECTS)]
    assert [m.name for m in low if any(inside(name, distributed) for name in imported(m.tree))] == []


def test_the_mode_is_compared_in_one_table():
    places = {f"{m.name}:{line}" for m in FILES for line in comparisons_with(m.tree, MODES)}
    assert {place for place in places if not place.startswith("paramserver.config.modes:")} == set()


def test_a_consistency_a_buffer_or_a_transport_declares_what_holds_for_it():
    # The class is asked, or the table of the config: a comparison with a name would be wrong, in silence, for the next.
    names = frozenset((*CONSISTENCIES, *BUFFERS, *(name for name in TRANSPORTS if not sends(name))))
    assert [f"{m.name}:{line}" for m in FILES for line in comparisons_with(m.tree, names)] == []


def test_the_environment_is_touched_in_cluster_only():
    users = {m.name for m in MODULES if environment_uses(m.tree)}
    # Of the lowest layer: whether tests force the ways of other systems.
    assert {name for name in users if not name.startswith("paramserver.cluster.")} == {"paramserver.platform"}
    assert "paramserver.cluster.base" in users


def names_of_linux(tree: ast.AST) -> set[str]:
    """What a module names that only Linux has."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith(LINUX):
            found.add(node.attr)
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node.value.startswith(("/proc/", "/sys/"))
        ):
            found.add(node.value)
        if isinstance(node, ast.JoinedStr) and ast.unparse(node).lstrip("f")[1:].startswith("\\x00"):
            found.add("abstract address")
    return found


def test_what_only_linux_has_is_named_in_one_module():
    users = {m.name for m in MODULES if names_of_linux(m.tree)}
    assert users == {"paramserver.platform", *LINUX_ONLY}


def test_every_thread_has_a_name_by_which_a_leak_is_found():
    prefixes = []
    for module in MODULES:
        for call in (node for node in ast.walk(module.tree) if isinstance(node, ast.Call)):
            if ast.unparse(call.func).endswith("Thread"):
                (name,) = (keyword.value for keyword in call.keywords if keyword.arg == "name")
                first = name.values[0] if isinstance(name, ast.JoinedStr) else name
                if ast.unparse(first) != "self.thread_name":  # which each subclass has
                    prefixes.append(first.value)
        assigned = (node for node in ast.walk(module.tree) if isinstance(node, ast.Assign))
        prefixes += [node.value.value for node in assigned if ast.unparse(node.targets[0]) == "thread_name"]
    assert len(prefixes) >= 9
    waits = "within-"  # ends with the call that it makes, which may be later than the test
    ends_with_its_process = ("alive", "stacks", "fault-receiver", "exit-limit", "process-end", "parent-end")
    assert [p for p in prefixes if not p.startswith((*OUR_THREADS, *ends_with_its_process, waits))] == []


def test_nothing_sleeps():
    assert [f"{m.name}:{line}" for m in MODULES for line in sleeps(m.tree)] == []


def test_reports_import_nothing_that_runs():
    report = "paramserver.tools.report"
    pure = ("config", "metrics.records", "metrics.summary", "errors", "tools.report", "fileio")
    allowed = tuple(f"paramserver.{name}" for name in pure)
    running = {"torch", "numpy", "threading", "subprocess", "multiprocessing", "socket", "signal"}
    for module in (m for m in MODULES if inside(m.name, (report,)) and m.name != f"{report}.command"):
        names = imported(module.tree)
        assert {n for n in names if inside(n, ("paramserver",)) and not inside(n, allowed)} == set()
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
        (lambda t: comparisons_with(t, frozenset(BUFFERS)), "if kind != 'fifo': pass", "kind = 'fifo'"),
        (lambda t: comparisons_with(t, MODES), "match mode:\n case 'local': pass", "match mode:\n case 'one': pass"),
        (environment_uses, "import os\nx = os.environ['A']", "import os\nx = os.getpid()"),
        (environment_uses, "from os import getenv", "from os import getpid"),
        (sleeps, "import time\ntime.sleep(1)", "import time\ntime.time()"),
        (sleeps, "from time import sleep", "from time import time"),
        (names_of_linux, "os.pidfd_open(1)", "os.getpid()"),
        (names_of_linux, "open('/proc/self/stat')", "open('proc/self/stat')"),
        (names_of_linux, "s.bind(f'\\0{name}')", "s.bind(f'{name}\\0')"),
        (lambda t: "a.b.c" in imported(t), "def f():\n from a.b import c", "from a import d"),
        (lambda t: list(on_import(t)), "if x:\n import a", "if TYPE_CHECKING:\n import a"),
    ],
)
def test_a_search_finds_what_it_is_for(search, found, passed):
    assert search(ast.parse(found))
    assert not search(ast.parse(passed))


def test_what_is_left_behind_is_seen():
    before = ProcessSnapshot.take()
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
        child.communicate(b"\n", timeout=90)
        before.restore_environ()
    assert before.leaks() == []
    assert "LEFT_BEHIND" not in os.environ
