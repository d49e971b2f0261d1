"""The rendezvous: a real store on the loopback, with ranks as threads of this process."""

import dataclasses
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path

import pytest
from torch._C._distributed_c10d import HashStore, TCPStore

from paramserver.cluster import ProcessIdentity, bind_listener
from paramserver.cluster.network import JobToken
from paramserver.config import (
    ClusterConfig,
    Config,
    DeviceConfig,
    LoggingConfig,
    ServerConfig,
    TrainingConfig,
    dump_yaml,
    with_trainers,
)
from paramserver.distributed import rendezvous as rendezvous_module
from paramserver.distributed.remote_error import RemoteError
from paramserver.distributed.rendezvous import (
    LeftRun,
    Rendezvous,
    compare_config,
    enter_attempt,
    fetch_config,
    host_identity,
    join_rendezvous,
    publish_config,
)
from paramserver.distributed.resize import OVER, ResizeRequest, mark_carried_out, pending_requests, refuse
from paramserver.distributed.timeouts import poll_until
from paramserver.errors import (
    DeadlineExceeded,
    Evicted,
    Interrupted,
    MissingRanks,
    PeerLost,
    RunEnded,
    UnsupportedConfiguration,
)

HOST = "127.0.0.1"
# Far more than a loaded machine needs; no test waits this long.
LONG_S = 60.0
SHORT_S = 0.5
TOKEN = JobToken("PARAMSERVER_TOKEN", bytes(range(32)))


def config(timeout_s: float = LONG_S, **sections) -> Config:
    return Config(task="module:Task", cluster=ClusterConfig(timeout_s=timeout_s), **sections)


def joined(
    rank,
    world_size,
    port,
    timeout_s=LONG_S,
    interrupted=None,
    listener=None,
    of=None,
    hosted=False,
    job="test",
    launch="",
    servers=None,
    token=None,
    job_step="",
    **session,
) -> Rendezvous:
    event = threading.Event() if interrupted is None else interrupted
    identity = ProcessIdentity(rank, world_size, rank, world_size, 0, HOST, port, hosted, job, "flags", launch)
    identity = dataclasses.replace(identity, servers=servers, token=token, job_step=job_step)
    if token is None:
        return join_rendezvous(of or config(timeout_s), identity, event, listener, **session)
    with ExitStack() as resources:
        return join_rendezvous(of or config(timeout_s), identity, event, listener, resources=resources, **session)


@contextmanager
def threads(count: int):
    with ThreadPoolExecutor(count, thread_name_prefix="rank") as pool:
        yield pool


def set_first_view(store: TCPStore, values: dict[str, str]) -> None:
    """Set what rank 0 would have set, in the first generation."""
    store.set("paramserver/test/view", "1")
    for name, value in {"trainers": "[1]", "job_step": "", **values}.items():
        store.set(f"paramserver/test/1/{name}", value)


@contextmanager
def agents_store():
    """A store that another process serves already, such as torchrun's agent."""
    yield TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=LONG_S))


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_all_ranks_join_and_share_values(world_size):
    listener = bind_listener(HOST, 0)
    port = listener.getsockname()[1]
    with threads(world_size) as pool:
        later = [pool.submit(joined, rank, world_size, port) for rank in range(1, world_size)]
        first = joined(0, world_size, port, listener=listener)
        others = [future.result(LONG_S) for future in later]
        first.set("run", "digits-1")
        assert [other.get("run") for other in others] == ["digits-1"] * (world_size - 1)
        assert [m.identity.global_rank for m in (first, *others)] == list(range(world_size))
        assert {m.host for m in (first, *others)} == {host_identity()}
        assert "process" in first.host_and_pid


def test_a_rank_waits_for_a_rank_zero_that_starts_later(monkeypatch):
    polled = threading.Event()
    reachable = rendezvous_module._reachable

    def poll(host: str, port: int) -> bool | None:
        answer = reachable(host, port)
        if answer is None:
            polled.set()
        return answer

    monkeypatch.setattr(rendezvous_module, "_reachable", poll)
    listener = socket.socket()
    listener.bind((HOST, 0))  # bound, but not listening yet
    port = listener.getsockname()[1]
    with threads(1) as pool:
        other = pool.submit(joined, 1, 2, port)
        assert polled.wait(LONG_S)
        listener.listen()
        first = joined(0, 2, port, listener=listener)
        assert other.result(LONG_S).get("rank/0") == first.host_and_pid


def test_rank_zero_binds_its_port_where_none_is_bound():
    with bind_listener(HOST, 0) as probe:
        port = probe.getsockname()[1]
    alone = joined(0, 1, port)
    assert alone.get("config") == dump_yaml(config())
    assert rendezvous_module._reachable(HOST, port)


def test_rank_zero_waits_for_its_own_name(monkeypatch):
    """That of a container may be known only after its start."""
    failures, real = [2], socket.getaddrinfo

    def lookup(name, *args, **options):
        if name == "localhost" and failures[0]:
            failures[0] -= 1
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return real(name, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    with bind_listener(HOST, 0) as probe:
        port = probe.getsockname()[1]
    identity = ProcessIdentity(0, 1, 0, 1, 0, "localhost", port, False, "test", "flags")
    assert join_rendezvous(config(), identity, threading.Event()).get("rank/0")
    failures[0] = 10**6
    with pytest.raises(UnsupportedConfiguration, match=r"\(localhost\) has no address: Name or service not known"):
        join_rendezvous(config(SHORT_S), identity, threading.Event())


def test_a_busy_port_is_refused_at_once():
    with bind_listener(HOST, 0) as other:
        port = other.getsockname()[1]
        with pytest.raises(UnsupportedConfiguration, match=rf"cluster\.master_port \({port}\) .* cannot be opened"):
            joined(0, 2, port)


def test_the_store_listens_at_its_address_and_not_on_all_interfaces():
    first = joined(0, 1, 0)
    port = first.store.underlying_store.port
    tables = [Path("/proc/self/net", name) for name in ("tcp", "tcp6")]
    lines = [line.split() for table in tables if table.exists() for line in table.read_text().splitlines()]
    addresses = {f[1] for f in lines if len(f) > 3 and f[3] == "0A" and f[1].endswith(f":{port:04X}")}
    assert addresses == {f"0100007F:{port:04X}"}


@pytest.mark.parametrize("loopback", [True, False])
def test_a_store_that_is_open_to_other_hosts_is_named_in_a_warning(monkeypatch, caplog, loopback):
    monkeypatch.setattr(rendezvous_module, "is_loopback", lambda host: loopback)
    joined(0, 1, 0)
    warned = ["127.0.0.1 is open to all that reach it, as there is no job token" in text for text in caplog.messages]
    assert warned == ([] if loopback else [True])


# Claims.


def test_a_rank_that_is_taken_is_refused_with_the_name_of_its_holder():
    with agents_store() as store:
        set_first_view(store, {"config": dump_yaml(config()), "rank/1": "node7, process 42"})
        with pytest.raises(UnsupportedConfiguration, match=r"^rank 1 is taken by node7, process 42; give each process"):
            joined(1, 2, store.port, hosted=True)
        of_role = r"^trainer 0 \(rank 1\) is taken by node7, process 42; give each process its own --index$"
        with pytest.raises(UnsupportedConfiguration, match=of_role):
            joined(1, 2, store.port, hosted=True, servers=1)


def test_two_attempts_on_one_store_do_not_see_each_other():
    with agents_store() as store:
        earlier = joined(0, 1, store.port, hosted=True, job="job-0")
        earlier.set("run", "digits-1")
        later = joined(0, 1, store.port, hosted=True, job="job-1", of=config(seed=3))
        assert not later.store.check(["run"])
        assert (earlier.get("config"), later.get("config")) == (dump_yaml(config()), dump_yaml(config(seed=3)))


def test_a_store_that_an_agent_serves_is_used_by_all():
    with agents_store() as store, threads(1) as pool:
        other = pool.submit(joined, 1, 2, store.port, hosted=True)
        joined(0, 2, store.port, hosted=True).set("run", "a")
        assert other.result(LONG_S).get("run") == "a"
        assert store.get("paramserver/test/1/run") == b"a"


# Attempts of a launcher whose store outlives its ranks.


@pytest.fixture
def started(monkeypatch):
    """Starts threads that stand for processes of torchrun, and returns their futures."""
    current = threading.local()
    monkeypatch.setattr(rendezvous_module, "_host_and_pid", lambda: current.name)

    def run(name, rank, world_size, port, interrupted):
        current.name = name
        return joined(rank, world_size, port, interrupted=interrupted, hosted=True, launch="job7")

    with threads(9) as pool:
        yield lambda *where, interrupted=None: pool.submit(run, *where, interrupted)


def wait_for(store, key):
    assert poll_until(time.monotonic() + LONG_S, lambda: store.check([key]) or None, threading.Event())


def test_a_rank_that_starts_again_before_the_world_is_full_is_waited_for(started):
    """Its agent counts a restart, those of the other hosts none."""
    with agents_store() as store:
        others = [started(f"process {rank}", rank, 4, store.port) for rank in (0, 1)]
        dies = threading.Event()
        first = started("process 2", 2, 4, store.port, interrupted=dies)
        wait_for(store, "paramserver/test-0/1/rank/2")
        dies.set()
        with pytest.raises(Interrupted):
            first.result(LONG_S)
        second = started("process 2b", 2, 4, store.port)
        # Earlier, the last would fill the world of the process that died, whose loss only a heartbeat shows.
        assert poll_until(
            time.monotonic() + LONG_S,
            lambda: store.get("paramserver/job7/attempt") == b"1" or None,
            threading.Event(),
        )
        last = started("process 3", 3, 4, store.port)  # only now
        all_ranks = [one.result(LONG_S) for one in (*others, second, last)]
        assert {one.identity.job for one in all_ranks} == {"test-1"}
        assert all_ranks[0].holder_of_rank(2) == "process 2b"


def test_a_rank_that_died_before_the_rendezvous_joins_those_that_wait(started):
    with agents_store() as store:
        zero = started("process 0", 0, 2, store.port)
        wait_for(store, "paramserver/test-0/1/rank/0")
        assert started("process 1b", 1, 2, store.port).result(LONG_S).identity.job == "test-0"
        zero.result(LONG_S)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_a_new_attempt_after_a_loss_sees_nothing_of_the_earlier_one(started, order):
    with agents_store() as store:
        for attempt in range(3):
            ranks = [started(f"process {rank} of attempt {attempt}", rank, 3, store.port) for rank in order]
            (zero,) = (one.result(LONG_S) for one in ranks if one.result(LONG_S).identity.global_rank == 0)
            assert {one.result().identity.job for one in ranks} == {f"test-{attempt}"}
            assert not zero.store.check(["run"])
            zero.set("run", f"digits-{attempt}")


def test_a_process_that_joins_again_stays_in_its_attempt(started):
    with agents_store() as store:
        jobs = [started("process 0", 0, 1, store.port).result(LONG_S).identity.job for _ in range(2)]
        assert jobs == ["test-0", "test-0"]


def test_a_process_with_the_id_of_its_predecessor_begins_another_attempt(monkeypatch):
    """A container that starts again, perhaps on another node, may give its process the same id."""
    starts = iter([1000, 1000, 2000])
    monkeypatch.setattr(rendezvous_module, "start_ticks", lambda pid: next(starts))
    with agents_store() as store:
        identity = ProcessIdentity(0, 2, 0, 2, 0, HOST, store.port, True, "test", "torchrun", "job7")
        assert [enter_attempt(store, identity).job for _ in range(3)] == ["test-0", "test-0", "test-1"]


# Views and replacements.


def test_a_later_view_sees_nothing_of_an_earlier_one():
    with agents_store() as store, threads(1) as pool:
        first = joined(0, 1, store.port, hosted=True)
        first.set("run", "digits-1")
        other = pool.submit(joined, 1, 2, store.port, hosted=True, generation=2)  # the first generation is lost for it
        again = joined(0, 2, store.port, hosted=True, generation=2, store=first.base)
        assert not again.store.check(["run"])
        assert (first.generation, again.generation, other.result(LONG_S).generation) == (1, 2, 2)
        assert first.get("run") == "digits-1"


def test_rank_zero_keeps_its_store_in_a_later_view():
    first = joined(0, 1, 0)
    again = joined(0, 1, 0, generation=2, store=first.base)
    assert again.base is first.base


@pytest.mark.claim("dead-rank-0")
def test_a_rank_waits_for_the_view_that_it_may_join():
    with agents_store() as store:
        set_first_view(store, {"config": dump_yaml(config()), "rank/0": "rank 0"})
        with pytest.raises(
            DeadlineExceeded,
            match=r"^rank 0 did not start again within cluster\.timeout_s \(0\.5 s\); look for its own error",
        ):
            joined(1, 2, store.port, SHORT_S, hosted=True, generation=2)
        assert not store.check(["paramserver/test/1/rank/1"])


def test_an_interrupted_rank_does_not_wait_for_a_later_view():
    interrupted = threading.Event()
    with agents_store() as store:
        set_first_view(store, {})
        interrupted.set()
        started = time.monotonic()
        with pytest.raises(Interrupted, match=r"interrupted while waiting for .*rank 0"):
            joined(1, 2, store.port, interrupted=interrupted, hosted=True, generation=2)
    assert time.monotonic() - started < LONG_S / 2


def test_a_replacement_takes_the_rank_of_a_dead_process():
    with agents_store() as store:
        set_first_view(store, {"config": dump_yaml(config()), "full": "", "rank/1": "node7, process 42"})
        replacement = joined(1, 2, store.port, hosted=True, replaces=True)
        assert replacement.holder_of_rank(1) == replacement.host_and_pid


def test_a_rank_that_is_released_can_be_taken():
    with agents_store() as store:
        set_first_view(store, {"config": dump_yaml(config()), "rank/1": "node7, process 42"})
        zero = joined(0, 2, store.port, hosted=True)
        zero.release_rank(1, "node7, process 42")
        assert joined(1, 2, store.port, hosted=True).holder_of_rank(1) == zero.host_and_pid


def test_a_rank_that_another_process_has_taken_is_not_released():
    with agents_store() as store:
        set_first_view(store, {"config": dump_yaml(config()), "rank/1": "node8, process 43"})
        zero = joined(0, 2, store.port, hosted=True)
        zero.release_rank(1, "node7, process 42")
        assert zero.holder_of_rank(1) == "node8, process 43"


def test_rank_zero_knows_whether_another_process_has_a_rank_than_before():
    """Of trainers that were in the earlier generation and were not lost in it."""
    with agents_store() as store, threads(1) as pool:
        zero = pool.submit(joined, 0, 2, store.port, hosted=True)
        own = joined(1, 2, store.port, hosted=True).host_and_pid
        assert zero.result(LONG_S).replaced({1: "node7, process 42", 2: "node7, process 43"}) == [1]
        assert zero.result(LONG_S).replaced({1: own}) == zero.result(LONG_S).replaced({}) == []


def test_a_process_that_joins_a_run_that_has_started_waits_for_no_lost_rank():
    with agents_store() as store:
        set_first_view(store, {"config": dump_yaml(config()), "full": ""})
        assert joined(1, 3, store.port, hosted=True).generation == 1


# Other trainers in a later generation.


def test_a_later_view_begins_without_a_trainer_that_does_not_come_back():
    with agents_store() as store, threads(1) as pool:
        # All that is waited for is rank 1, but rank 2 must connect and join within this limit, also on a busy machine.
        zero = pool.submit(joined, 0, 3, store.port, 2.0, hosted=True, generation=2, trainer_ranks=(1, 2))
        other = joined(2, 3, store.port, 2.0, hosted=True, generation=2)
        assert (zero.result(LONG_S).generation, zero.result(LONG_S).trainer_ranks) == (3, (2,))
        assert (other.generation, other.trainer_ranks) == (3, (2,))


def test_a_newcomer_that_does_not_come_is_waited_for_a_short_time():
    short = dataclasses.replace(config(), server=ServerConfig(lost_after_s=SHORT_S))
    with agents_store() as store, threads(1) as pool:
        session = {"generation": 2, "trainer_ranks": (1, 7), "newcomers": {7}}
        zero = pool.submit(joined, 0, 3, store.port, hosted=True, of=short, **session)
        assert joined(1, 3, store.port, hosted=True, of=short, generation=2).trainer_ranks == (1,)
        assert zero.result(LONG_S).generation == 3


@pytest.mark.parametrize(("left", "error"), [("1", LeftRun), ("", Evicted)])
def test_a_trainer_that_takes_no_part_any_more_learns_why(left, error):
    with agents_store() as store:
        set_first_view(store, {"config": dump_yaml(config()), "trainers": "[2]"})
        store.set("paramserver/test/left/1", left)
        with pytest.raises(error):
            joined(1, 3, store.port, hosted=True)


def first_requests(store):
    """Wait for requests to join or leave."""
    deadline = time.monotonic() + LONG_S
    while not (requests := pending_requests(store)):
        assert time.monotonic() < deadline
    return requests


def test_a_trainer_asks_to_join_until_a_view_includes_it():
    with agents_store() as store, threads(1) as pool:
        set_first_view(store, {"rank/1": "node7, process 42"})
        zero = joined(0, 2, store.port, hosted=True, trainer_ranks=(1,))
        asking = pool.submit(joined, 5, 6, store.port, hosted=True, joins=True)
        requests = first_requests(zero.root)
        assert list(requests.values()) == [ResizeRequest("join", 5)]
        mark_carried_out(zero.root, requests)
        later = joined(0, 1, store.port, hosted=True, generation=2, store=zero.base, trainer_ranks=(5,))
        assert asking.result(LONG_S).trainer_ranks == later.trainer_ranks == (5,)


@pytest.mark.parametrize(("reason", "error"), [("the reason", UnsupportedConfiguration), (OVER, RunEnded)])
def test_a_trainer_that_is_refused_says_why(reason, error):
    with agents_store() as store, threads(1) as pool:
        set_first_view(store, {"rank/1": "node7, process 42"})
        zero = joined(0, 2, store.port, hosted=True, trainer_ranks=(1,))
        asking = pool.submit(joined, 5, 6, store.port, hosted=True, joins=True)
        requests = first_requests(zero.root)
        refuse(zero.root, requests, reason)
        with pytest.raises(error, match=f"^{reason}$"):
            asking.result(LONG_S)


def test_the_run_of_an_earlier_attempt_is_found_in_the_store_of_the_launcher():
    with agents_store() as store:
        earlier = joined(0, 1, store.port, hosted=True, job="job-0", launch="launch")
        assert earlier.earlier_run() is None
        earlier.record_run("digits-1")
        later = joined(0, 1, store.port, hosted=True, job="job-1", launch="launch")
        assert later.earlier_run() == "digits-1"
        assert joined(0, 1, store.port, hosted=True, job="job-2").earlier_run() is None


# One configuration.


def with_config_of_rank_zero(mine: Config, theirs: Config, rank: int = 1) -> tuple[TCPStore, Exception | None]:
    """Join after rank 0; return the store and the refusal, if any."""
    with agents_store() as store:
        set_first_view(store, {"config": dump_yaml(theirs), "full": ""})
        try:
            joined(rank, 2, store.port, hosted=True, of=mine)
        except UnsupportedConfiguration as error:
            return store, error
        return store, None


def test_differing_keys_are_named_with_both_values():
    mine = config(training=TrainingConfig(batch_size=16), seed=3)
    _, error = with_config_of_rank_zero(mine, config(training=TrainingConfig(batch_size=32)))
    assert str(error).startswith("rank 1 has another configuration than rank 0 (")
    for word in ("training.batch_size", "16", "32", "seed", "start all ranks with the same one"):
        assert word in str(error)


@pytest.mark.parametrize(("trainers", "differs"), [(1, False), (2, True)])
def test_what_follows_from_the_trainers_of_a_later_generation_may_differ(trainers, differs):
    """Rank 0 may have started again with the config that it stored when there was one trainer."""
    cluster = ClusterConfig(num_servers=1, num_trainers=2)
    first = Config(task="module:Task", cluster=cluster, server=ServerConfig(backup_trainers=1))
    store, stored = HashStore(), with_trainers(first, 1)
    publish_config(store, stored, ProcessIdentity(0, 3, 0, 3, 0, HOST, 0, False, "job", "flags"))
    identity = ProcessIdentity(2, 3, 2, 3, 0, HOST, 0, False, "job", "flags")
    with pytest.raises(UnsupportedConfiguration, match="backup_trainers: 0 -> 1") if differs else nullcontext():
        compare_config(store, first, identity, 5.0, trainers)


def test_keys_of_a_host_may_differ():
    mine = config(
        device=DeviceConfig(kind="cpu", num_gpus=2), logging=LoggingConfig(run_dir="elsewhere", progress="off")
    )
    own = {"master_addr": "::1", "master_port": 7, "interface": "ib0", "token_file": "elsewhere/token"}
    mine = dataclasses.replace(mine, cluster=dataclasses.replace(mine.cluster, **own))
    assert with_config_of_rank_zero(mine, config())[1] is None


def test_other_keys_of_the_same_sections_must_agree():
    for mine in (config(logging=LoggingConfig(name="other")), config(timeout_s=LONG_S / 2)):
        assert with_config_of_rank_zero(mine, config())[1] is not None


def test_a_refused_rank_leaves_its_rank_unclaimed():
    store, error = with_config_of_rank_zero(config(seed=3), config())
    assert error is not None
    assert not store.check(["paramserver/test/1/rank/1"])


@pytest.mark.parametrize(
    ("mine", "theirs", "joins"), [("1", "1", True), ("", "1", True), ("2", "", True), ("2", "1", False)]
)
def test_a_rank_of_another_step_of_a_scheduler_is_refused(mine, theirs, joins):
    """Two runs whose ports follow from their steps may have the same one. A rank started by hand has no step."""
    listener = bind_listener(HOST, 0)
    port = listener.getsockname()[1]
    stops = threading.Event()
    with threads(1) as pool:
        zero = pool.submit(joined, 0, 2, port, listener=listener, interrupted=stops, job_step=theirs)
        if joins:
            assert joined(1, 2, port, job_step=mine).store.check(["rank/1"])
        else:
            with pytest.raises(UnsupportedConfiguration, match=rf"rank 1 is of 2, and rank 0 at .*:{port} of 1; give"):
                joined(1, 2, port, job_step=mine)
            stops.set()
            with pytest.raises(Interrupted):
                zero.result(LONG_S)
        stops.set()


def test_the_config_of_rank_zero_is_fetched_before_a_rank_joins():
    with agents_store() as store:
        identity = ProcessIdentity(1, 2, 1, 2, 0, HOST, store.port, True, "test", "flags")
        set_first_view(store, {"config": "seed: 3"})
        assert fetch_config(identity, LONG_S) == "seed: 3"
        assert not store.check(["paramserver/test/1/rank/1"])


# Bounded waits.


def test_a_world_that_never_fills_names_the_missing_ranks():
    with agents_store() as store:
        set_first_view(store, {"rank/2": "another process"})
        with pytest.raises(DeadlineExceeded) as caught:
            joined(0, 4, store.port, 2.0, hosted=True)  # the connection itself takes part of it
    assert str(caught.value) == (
        "rank 0 waited cluster.timeout_s (2 s) for a world of 4; missing: rank 1, 3. Start them, or lower --world_size"
    )


def test_claims_of_all_ranks_are_no_full_world_without_rank_zero():
    """A claim may be of a process that is dead, for which rank 0 waits in a later attempt."""
    with agents_store() as store:
        of_all = {"rank/0": "a process", "rank/2": "a dead process"}
        set_first_view(store, {"config": dump_yaml(config(SHORT_S)), **of_all})
        with pytest.raises(DeadlineExceeded, match=r"a world of 3; missing: rank 0\. Start them"):
            joined(1, 3, store.port, SHORT_S, hosted=True)


@pytest.mark.parametrize(
    ("world_size", "servers", "expected"),
    [
        (1004, None, "rank 0 waited .* of 1004; missing: rank 1, 3-1003. Start them, or lower --world_size"),
        (1004, 1, r"server 0 \(rank 0\) waited .*; missing: trainer 0, 2-1002 \(rank 1, 3-1003\). Start them, or "
         "correct --num_trainers"),
        (4, 2, r"server 0 .*; missing: server 1 \(rank 1\) and trainer 1 \(rank 3\). Start them, or correct "
         "--num_servers and --num_trainers"),
    ],
)  # fmt: skip
def test_missing_ranks_are_named_as_they_are_started(world_size, servers, expected):
    with agents_store() as store:
        set_first_view(store, {"rank/2": "another process"})
        with pytest.raises(DeadlineExceeded, match=f"^{expected}$"):
            joined(0, world_size, store.port, SHORT_S, hosted=True, servers=servers)


def test_a_missing_rank_zero_is_reported_with_its_address():
    with socket.socket() as silent:
        silent.bind((HOST, 0))
        port = silent.getsockname()[1]
        with pytest.raises(DeadlineExceeded, match=rf"rank 1 found no rank 0 at 127\.0\.0\.1:{port} within cluster"):
            joined(1, 2, port, SHORT_S)
        of_role = r"^trainer 0 \(rank 1\) found no server 0 \(rank 0\) at .*; start server 0 \(rank 0\), or correct --m"
        with pytest.raises(DeadlineExceeded, match=of_role):
            joined(1, 2, port, SHORT_S, servers=1)


def test_a_name_of_rank_zero_that_is_not_known_is_reported_with_the_reason(monkeypatch):
    def unknown(*args, **options):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    identity = ProcessIdentity(1, 2, 1, 2, 0, "node7", 29500, False, "test", "flags")
    with pytest.raises(
        MissingRanks, match=r"rank 0 at node7:29500 .*: the name node7 is not known here \(Name or serv"
    ):
        join_rendezvous(config(SHORT_S), identity, threading.Event())


@pytest.mark.claim("wrong-port", "dead-rank-0")  # as where a supervisor keeps the port of a rank 0 that has died
@pytest.mark.parametrize("token", [None, TOKEN])
def test_a_connection_to_a_silent_address_is_given_up(token):
    """A process listens there that is frozen, or is no store."""
    with bind_listener(HOST, 0) as silent:
        port = silent.getsockname()[1]
        began = time.monotonic()
        expected = rf"^rank 1 found no rank 0 at {HOST}:{port} within cluster.timeout_s \({SHORT_S:g} s\): what listens"
        with pytest.raises(MissingRanks, match=expected):
            joined(1, 2, port, SHORT_S, token=token)
        assert time.monotonic() - began < SHORT_S + 10.0
    assert not [t for t in threading.enumerate() if t.name.startswith("within-the connection")]


ANSWERS = {
    "HTTP": (b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"),
    "SSH, which speaks first": (b"SSH-2.0-OpenSSH_9.6\r\n", b""),
    "a byte at a time": (b"", b"200 OK"),
    "binary": (b"", bytes(64)),
}


@pytest.mark.claim("wrong-port")
@pytest.mark.parametrize("token", [None, TOKEN])
@pytest.mark.parametrize("service", ANSWERS)
def test_another_service_at_the_port_of_rank_zero_is_reported_at_once(service, token):
    greeting, answer = ANSWERS[service]
    with bind_listener(HOST, 0) as other, threads(1) as pool:
        port = other.getsockname()[1]

        def serve():
            with other.accept()[0] as near:
                near.sendall(greeting)
                near.settimeout(LONG_S)
                near.recv(1)
                for start in range(len(answer)) if service.startswith("a byte") else ():
                    near.sendall(answer[start : start + 1])
                near.sendall(answer)
                while near.recv(1 << 16):
                    pass

        serving = pool.submit(serve)
        expected = (
            rf"^rank 1 found no rank 0 at {HOST}:{port}: what answers there is another service \(it begins with b'"
        )
        with pytest.raises(UnsupportedConfiguration, match=expected):
            joined(1, 2, port, LONG_S, token=token)
        with suppress(ConnectionError):
            serving.result(LONG_S)


@pytest.mark.claim("wrong-port")
def test_a_service_that_ends_each_connection_is_reported_at_the_deadline():
    """As TensorPipe does, which takes a ping for a length."""
    with bind_listener(HOST, 0) as other:
        port, done = other.getsockname()[1], threading.Event()
        other.settimeout(0.05)

        def serve():
            while not done.is_set():
                with suppress(TimeoutError), other.accept()[0] as near:
                    near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # as by a reset

        with threads(1) as pool:
            serving = pool.submit(serve)
            try:
                with pytest.raises(
                    MissingRanks, match=r"within cluster\.timeout_s .*: what listens there does not answer"
                ):
                    joined(1, 2, port, SHORT_S)
            finally:
                done.set()
            serving.result(LONG_S)


@pytest.mark.claim("wrong-port")
def test_the_store_of_another_run_is_reported_as_such():
    with agents_store() as store:
        expected = (
            rf"^the start of rank 0 did not come .*; the store at {HOST}:{store.port} answers, and may be that of ano"
        )
        with pytest.raises(MissingRanks, match=expected):
            joined(1, 2, store.port, SHORT_S, job="mine")


@pytest.mark.parametrize(("generation", "missing"), [(None, "the start of rank 0"), ("1", "the list of trainers")])
def test_a_value_of_rank_zero_that_never_comes_is_abandoned(generation, missing):
    with agents_store() as store:
        if generation is not None:
            store.set("paramserver/test/view", generation)
        with pytest.raises(DeadlineExceeded, match=f"^{missing} did not come within"):
            joined(1, 2, store.port, SHORT_S, hosted=True)


def test_the_wait_for_a_key_is_bounded():
    with agents_store() as store:
        mine = joined(0, 1, store.port, SHORT_S, hosted=True)
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded, match=r"the store's answer for run did not come within .* \(0\.5 s\)"):
            mine.get("run")
        assert SHORT_S * 0.9 <= time.monotonic() - started < LONG_S / 2
        assert not [t for t in threading.enumerate() if t.name.startswith("within-")]


@pytest.mark.parametrize("rank", [0, 1])
def test_an_interrupted_rank_ends_at_once(rank):
    interrupted = threading.Event()
    interrupted.set()
    listener = bind_listener(HOST, 0)
    started = time.monotonic()
    with listener:
        port = 0 if rank == 0 else 1  # no process listens there
        with pytest.raises(Interrupted, match="interrupted while waiting for"):
            joined(rank, 2, port, interrupted=interrupted, listener=listener if rank == 0 else None)
    assert time.monotonic() - started < LONG_S / 2


class _Proxy:
    """A proxy between a rank and the store, which can abort the connections."""

    def __init__(self, port: int) -> None:
        self.listener = bind_listener(HOST, 0)
        self.port = self.listener.getsockname()[1]
        self._target = port
        self._sockets = [self.listener]
        self._threads = [threading.Thread(target=self._accept, name="proxy", daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self.listener.accept()
                far = socket.create_connection((HOST, self._target))
                self._sockets += [near, far]
                for pair in ((near, far), (far, near)):
                    self._threads.append(threading.Thread(target=self._forward, args=pair, name="proxy", daemon=True))
                    self._threads[-1].start()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def abort(self) -> None:
        for one in self._sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for thread in self._threads:
            thread.join(LONG_S)


def test_the_death_of_rank_zero_is_reported_while_others_wait():
    with agents_store() as store, threads(1) as pool:
        set_first_view(store, {"config": dump_yaml(config())})
        proxy = _Proxy(store.port)
        waiting = pool.submit(joined, 1, 2, proxy.port, hosted=True)
        store.wait(["paramserver/test/1/rank/1"], timedelta(seconds=LONG_S))  # it has joined, and waits for rank 0
        proxy.abort()
        with pytest.raises(PeerLost, match=r"^rank 0 is gone, and its store with it"):
            waiting.result(LONG_S)


def test_a_failure_that_no_rank_can_be_informed_of_is_logged(caplog):
    """The report would raise an error of its own, which would hide why the rank failed."""
    with agents_store() as store, threads(1) as pool:
        set_first_view(store, {"config": dump_yaml(config()), "full": ""})
        proxy = _Proxy(store.port)
        rendezvous = pool.submit(joined, 1, 2, proxy.port, hosted=True).result(LONG_S)
        proxy.abort()
        deadline = time.monotonic() + LONG_S
        while not caplog.messages and time.monotonic() < deadline:  # the first bytes may still leave the host
            rendezvous.report_failure(RemoteError("PeerLost", "server 0 is lost"))
    assert "rank 0 is gone, and its store with it" in caplog.text
    assert "it was not informed of a failure here" in caplog.text
    with pytest.raises(PeerLost, match=r"^rank 0 is gone"):
        rendezvous.set("run", "other")
