"""The shutdown of an RPC agent."""

import threading

import pytest

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
