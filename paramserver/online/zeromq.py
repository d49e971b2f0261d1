"""pyzmq, or one sentence that it is not there. Whoever talks over the network here takes ``zmq`` from this module."""

from paramserver.errors import UnsupportedConfiguration

try:
    import zmq as zmq
except ImportError as error:
    raise UnsupportedConfiguration("online training needs pyzmq; install paramserver[online]") from error
