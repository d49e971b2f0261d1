"""Fixtures of all tests. A test that does not leave the process as it found it fails.

The modules of ``tests/helpers`` are imported by their bare names, here as in the processes of a run, which find the
tasks of the tests by path: the folder is on ``sys.path`` and is no package.
"""

import gc
import os
import signal
import sys
from importlib.util import find_spec
from pathlib import Path

import fast_disk
import fast_tier
import launching
import leaks
import pytest
import slurm_cluster
import torch
from c_client import missing
from forkserver import close_shared_server
from launching import FinishedRun, write_config
from leaks import ProcessSnapshot

from paramserver.distributed.store_relay import disable_name_lookups
from paramserver.process_utils import STOP_SIGNALS
from tests.measure.look_at_report import NOT_THERE, find_chromium

CPU_BEGAN = pytest.StashKey[float]()


def pytest_xdist_auto_num_workers(config):
    """Workers for a run of many files; none for a few, which end before a worker has imported torch.

    More than cores, as tests wait for processes and sockets; but not for the fast ones, which compute. Each gets whole
    files (``--dist loadfile``): what the fixtures of a module build, as a cluster of Ray or the site, is built once.
    """
    files = {file for argument in config.args for file in Path(argument.partition("::")[0]).rglob("test_*.py")}
    cores = os.cpu_count() or 1
    workers = cores if config.option.markexpr == "fast" else max(cores * 3 // 2, 3)
    return min(workers, 8) if len(files) > 20 else 0


def pytest_addoption(parser):
    parser.addoption("--claims", default="", help="only the tests of these claims (see tests/claims.py)")
    parser.addoption("--all_cases", action="store_true", help="all cases of the tests that run a sample of theirs")


def pytest_ignore_collect(collection_path, config):
    """With ``-m fast`` no file is imported that has no fast test."""
    return True if config.option.markexpr == "fast" and not fast_tier.may_be_fast(collection_path) else None


@pytest.hookimpl(tryfirst=True)  # before the selection by marker
def pytest_collection_modifyitems(config, items):
    """Mark the fast tests, and select those of the claims that were asked for; a report carries its claims."""
    if not config.getoption("--all_cases"):
        chosen = fast_tier.sample(items, only_fast=config.option.markexpr == "fast")
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = [item for item in items if item in chosen]
    fast_tier.order(items)
    for item in items:
        if fast_tier.is_fast(item):
            item.add_marker("fast")
        item.user_properties += [("claim", name) for mark in item.iter_markers("claim") for name in mark.args]
    if asked := set(filter(None, config.getoption("--claims").split(","))):
        selected = [item for item in items if asked & {value for _, value in item.user_properties}]
        config.hook.pytest_deselected(items=[item for item in items if item not in selected])
        items[:] = selected


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    item.stash[CPU_BEGAN] = fast_tier.cpu_time()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    if call.when == "teardown" and item.get_closest_marker("fast"):
        item.user_properties.append(("fast_cpu_s", fast_tier.cpu_time() - item.stash[CPU_BEGAN]))
    return (yield)


class FailedTests:
    """Names each failed test at once: a run that is ended by a limit prints no summary."""

    def __init__(self, config):
        self.config = config

    def pytest_runtest_logreport(self, report):
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            reason = str(report.longrepr if crash is None else crash.message).strip().splitlines()[:1]
            terminal = self.config.pluginmanager.get_plugin("terminalreporter")
            terminal.ensure_newline()
            terminal.write_line(f"{report.when} of {report.nodeid} failed: {' '.join(reason)}")


def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(fast_tier.CpuTime())
        config.pluginmanager.register(FailedTests(config))
    fast_disk.install()
    disable_name_lookups()  # for the tests that make a store of their own, as a rank does before it makes one
    # Tensors of the tests are small, and several workers share the cores: more threads only wait for each other.
    torch.set_num_threads(1)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    gc.disable()  # nearly all objects that are made meanwhile stay
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish():
    # Objects of imported modules live as long as the process: no later collection needs to visit them.
    gc.collect()
    gc.freeze()


def pytest_report_header():
    """Name what is not collected on this machine, and why."""
    left_out = [] if find_chromium() else [f"{NOT_THERE}: the report is not looked at in a browser."]
    left_out += [text] if (text := missing(fortran=True)) else []
    if slurm_cluster.MISSING:
        left_out.append(f"{slurm_cluster.REASON}: no run under SLURM.")
    absent = [name for name in ("lightning", "ray") if find_spec(name) is None]
    left_out += [f"{' and '.join(absent)} (extra peers) not installed: not tested."] if absent else []
    return left_out + (["torchx (extra torchx) not installed: not tested."] if find_spec("torchx") is None else [])


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef):
    """What a fixture of several tests changes for good is no test's own: ``nothing_left_behind`` cannot see it."""
    before = leaks.variables() if fixturedef.scope != "function" else None
    found = yield
    if before is not None and (changed := leaks.changed_variables(before)):
        pytest.fail(f"the fixture {fixturedef.argname} changed {', '.join(changed)}", pytrace=False)
    return found


@pytest.fixture(scope="module", autouse=True)
def _no_collection_visits_what_other_files_left():
    """What files before this one cached, as syntax trees, made each collection a second long."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_left_behind():
    before = ProcessSnapshot.take()
    yield
    left = before.leaks()
    before.restore_environ()
    if left:
        pytest.fail(f"this test left behind: {'; '.join(left)}", pytrace=False)


@pytest.fixture(scope="session", autouse=True)
def _close_fork_server():
    yield
    close_shared_server()


@pytest.fixture(scope="session")
def fork_server():
    """The process that runs are forked from."""
    return launching.fork_server()


@pytest.fixture
def own_environ(nothing_left_behind):
    """For tests of code that changes the environment: it is restored before leaks are looked for."""
    before = ProcessSnapshot.take()
    yield
    before.restore_environ()


@pytest.fixture
def terminal_closes(nothing_left_behind):
    """SIGHUP has its default, also where the tests were started by nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def call(capsys, monkeypatch, own_environ):
    """The command line in this process."""
    monkeypatch.setattr(sys, "path", list(sys.path))

    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}

    from paramserver.launch import main

    def called(run_dir, *arguments):
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as error:
            code = error.code
        finally:  # a rank without a supervisor keeps its handlers until its process ends
            for number, handler in handlers.items():
                signal.signal(number, handler)
        out, err = capsys.readouterr()
        return FinishedRun(code, out + err, run_dir)

    return called


@pytest.fixture
def start(call, tmp_path):
    def started(*flags, folder=tmp_path, prepare=None, **config):
        file = write_config(folder, **{"logging": {"progress": "off"}, **config})
        if prepare is not None:
            prepare(folder)
        return call(folder / "runs" / "run", "--config", file, "--set", "logging.name=run", *flags)

    return started
