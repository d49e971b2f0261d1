"""The environment of the simulated server."""

import pytest

from paramserver.server import parameter_server
from paramserver.simulator.engine import Store, environment


def test_the_environment_is_restored_also_after_an_error():
    before = dict(vars(parameter_server))

    def fail_inside():
        with environment():
            assert parameter_server.ParameterStore is Store
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert vars(parameter_server) == before


def test_a_name_that_the_server_no_longer_has_is_an_error(monkeypatch):
    monkeypatch.delattr(parameter_server, "watch_peer")
    before = dict(vars(parameter_server))
    with pytest.raises(KeyError, match="watch_peer"), environment():
        pass
    assert vars(parameter_server) == before
