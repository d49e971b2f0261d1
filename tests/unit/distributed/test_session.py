"""The ids of RPC agents, and their shutdown."""

import threading
from types import SimpleNamespace

import pytest
from torch._C._distributed_c10d import HashStore, PrefixStore

from paramserver.distributed import session


def test_an_agent_that_does_not_shut_down_is_a_warning(monkeypatch, caplog):
    """The result of the run, or the reason of its failure, is kept."""
    released = threading.Event()
    monkeypatch.setattr(session, "_SHUTDOWN_S", 0.05)
    monkeypatch.setattr(session.rpc, "shutdown", lambda graceful: released.wait(20))
    with caplog.at_level("WARNING", "paramserver"):
        session._shutdown_agent()
    assert caplog.messages == [
        "the shutdown of the RPC agent did not finish within 0.05 s; the agent ends with this process"
    ]
    released.set()
    next(t for t in threading.enumerate() if t.name.startswith("within-")).join(20)


def test_an_error_of_the_shutdown_is_raised(monkeypatch):
    def fails(graceful):
        raise RuntimeError("on purpose")

    monkeypatch.setattr(session.rpc, "shutdown", fails)
    with pytest.raises(RuntimeError, match="on purpose"):
        session._shutdown_agent()


def draw(root, generation, process, servers=1):
    store = PrefixStore(str(generation), root)
    rendezvous = SimpleNamespace(store=store, root=root, generation=generation, host_and_pid=f"here, process {process}")
    return session._draw_worker_id(rendezvous, servers)


@pytest.mark.parametrize("servers", [1, 3])
def test_a_new_process_never_gets_the_id_of_one_of_an_earlier_view(monkeypatch, servers):
    """Also if it draws before those that continue with their ids, and if rank 0, and with it the store, is new."""
    monkeypatch.setattr(session, "autograd_id", lambda: None)
    ids, process, root = [], 0, HashStore()
    for generation, drawn in ((1, 300), (2, 40), (3, 1), (4, 0), (5, 900), (6, 40)):
        root = HashStore() if generation == 5 else root
        for _ in range(drawn):
            process += 1
            ids.append(draw(root, generation, process, servers))
    assert ids == sorted(set(ids)), "they grow"
    assert servers <= min(ids)
    assert max(ids) < 1 << 15, "they are 16 bits wide"


def test_a_process_keeps_its_id_in_the_next_view_and_draws_another_one_to_join_the_same_view_again(monkeypatch):
    root, own = HashStore(), None
    monkeypatch.setattr(session, "autograd_id", lambda: own)
    own = first = draw(root, 1, 1)
    assert draw(root, 2, 1) == first
    again = draw(root, 2, 1)
    monkeypatch.setattr(session, "autograd_id", lambda: None)
    assert len({first, again, draw(root, 2, 2)}) == 3
