"""A task that looks up the name of a host on each rank, servers included."""

import socket

from tasks import ReferenceTask

NAME, ADDRESS = "data.example", "192.0.2.7"


class LooksUpAName(ReferenceTask):
    def build_model(self):
        assert socket.gethostbyname(NAME) == ADDRESS
        return super().build_model()

    def on_train_start(self):
        super().on_train_start()
        assert socket.gethostbyname(NAME) == ADDRESS
