"""What rank 0 publishes of the coordinator of simulations, and who is refused."""

from types import SimpleNamespace

import pytest

from paramserver.cluster import ProcessIdentity
from paramserver.config import Config, SimulationsConfig
from paramserver.context import ProcessContext
from paramserver.errors import UnsupportedConfiguration
from paramserver.runtime import online

COORDINATOR = SimpleNamespace(address="tcp://127.0.0.1:5555", token=b"secret", learns=False)


class Store(dict):
    """In place of a rendezvous."""

    set, get = dict.__setitem__, dict.__getitem__


def rank(number, trainer_index, address):
    config = Config(mode="rpc", simulations=SimulationsConfig(fields={"t": [2]}, address=address))
    identity = ProcessIdentity(number, 3, number, 3, 0, "node0", 29500, False, "job", "flags")
    role = SimpleNamespace(trainer_index=trainer_index)
    return ProcessContext(config, identity, role, trainers=2, placement=None)


@pytest.mark.parametrize(
    ("host", "address", "trainer", "refused"),
    [
        ("a", "127.0.0.1", 1, False),
        ("b", "127.0.0.1", 1, True),
        ("b", "localhost", 0, True),
        ("b", "127.0.0.1", None, False),  # another server
    ],
)
def test_a_trainer_that_does_not_reach_the_coordinator_is_refused_at_once(monkeypatch, host, address, trainer, refused):
    store = Store()
    monkeypatch.setattr(online, "host_number", lambda: "a")
    assert online.publish_endpoint(rank(0, None, address), COORDINATOR, None, store) is None
    monkeypatch.setattr(online, "host_number", lambda: host)
    process = rank(2, trainer, address)
    if refused:
        with pytest.raises(
            UnsupportedConfiguration, match=rf"^simulations\.address \({address}\) must be an address of"
        ):
            online.publish_endpoint(process, None, None, store)
    else:
        endpoint = online.publish_endpoint(process, None, None, store)
        assert (endpoint and endpoint.coordinator_address) == (None if trainer is None else COORDINATOR.address)
