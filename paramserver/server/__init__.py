"""The parameter server: handlers, aggregation of gradients, parameter versions, shard servers and the client."""

from typing import TYPE_CHECKING

from paramserver._lazy import attach

if TYPE_CHECKING:
    from paramserver.server.parameter_server import ParameterServer as ParameterServer
else:
    __getattr__, __dir__, __all__ = attach(__name__, __file__)
