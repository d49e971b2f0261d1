"""The socket of a thread that serves many peers."""

from contextlib import closing

from paramserver.online.router import RouterSocket
from paramserver.platform import WakeupFd


def test_a_poll_returns_which_of_the_others_are_readable():
    router = RouterSocket("127.0.0.1", 0, None, max_parts=3, max_bytes=1000)
    with closing(router), closing(WakeupFd()) as wakeup:
        assert router.poll([wakeup.fileno()], 0.0) == []
        wakeup.set()
        assert router.poll([wakeup.fileno()], 20.0) == [wakeup.fileno()]
        wakeup.clear()
        assert router.poll([wakeup.fileno()], 0.0) == []
