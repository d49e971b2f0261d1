"""Tasks that record the sockets on which the processes of their run listen."""

import json
from pathlib import Path

import psutil
from stream_tasks import Fed
from tasks import ReferenceTask


class _Records:
    def __init__(self, listeners, **options):
        super().__init__(**options)
        self.listeners = Path(listeners)

    def on_batch_end(self, batch_idx):
        super().on_batch_end(batch_idx)
        if batch_idx == 1 and self.trainer.trainer_index == 0:
            self.listeners.write_text(json.dumps(list(self._find())))

    @staticmethod
    def _find():
        """Addresses of all processes of this run, which have its working directory, with their ids."""
        for process in psutil.process_iter():
            try:
                if process.cwd() != str(Path.cwd()):
                    continue
                for connection in process.net_connections(kind="tcp"):
                    if connection.status == psutil.CONN_LISTEN:
                        yield process.pid, connection.laddr.ip
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue  # it ended meanwhile, or it is another user's


class Listening(_Records, ReferenceTask):
    pass


class ListeningToSimulations(_Records, Fed):
    pass
