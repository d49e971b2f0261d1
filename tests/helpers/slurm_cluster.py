"""A SLURM of several nodes on this machine: Debian's slurm-wlm and munge, in the foreground, in one folder."""

import os
import shutil
import socket
import subprocess
import time
from contextlib import ExitStack

NEEDED = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "sinfo")
MISSING = [name for name in NEEDED if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
REASON = f"{', '.join(MISSING)} must be on PATH (Debian: apt-get install slurm-wlm munge), as root"
START_S = 150.0

CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldPort={ports[0]}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1
MpiDefault=none
ReturnToService=2
JobRequeue=1
SlurmdParameters=config_overrides
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 State=UNKNOWN
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 State=UNKNOWN
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class SlurmCluster:
    """Two nodes. For ``with``; ``environ`` has what srun and sbatch need.

    Args:
        folder: an empty folder, which others may read.
        ports: three free ports.
    """

    def __init__(self, folder, ports):
        self.folder, self._processes = folder, []
        self.path = f"{os.environ['PATH']}:/usr/sbin"
        self.environ = {"SLURM_CONF": str(folder / "slurm.conf")}
        (folder / "slurm.conf").write_text(CONFIG.format(host=socket.gethostname(), folder=folder, ports=ports))

    def __enter__(self):
        with ExitStack() as stack:
            key = self.folder / "munge.key"
            key.write_bytes(os.urandom(1024))
            key.chmod(0o400)
            files = {"key-file": key, "socket": "munge.socket", "pid-file": "munged.pid", "seed-file": "munge.seed"}
            flags = [f"--{name}={self.folder / file}" for name, file in files.items()]
            self._start(stack, "munged", "--foreground", "--force", *flags)
            self._start(stack, "slurmctld", "-D")
            for node in ("node1", "node2"):
                self._start(stack, "slurmd", "-D", "-N", node)
            deadline = time.monotonic() + START_S
            while self.run("sinfo", "--noheader", "--format=%D %t").stdout.split() != ["2", "idle"]:
                assert time.monotonic() < deadline, (self.folder / "slurmctld.log").read_text()
                time.sleep(0.1)
            self._opened = stack.pop_all()
        return self

    def _start(self, stack, name, *flags):
        log = stack.enter_context((self.folder / f"{name}.log").open("ab"))
        environ = {**os.environ, **self.environ, "PATH": self.path}
        process = subprocess.Popen([name, *flags], stdout=log, stderr=log, env=environ)
        self._processes.append(process)
        stack.callback(self._end, process)

    def _end(self, process):
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def __exit__(self, *exception):
        for process in self._processes:  # each takes a second or more to end
            process.terminate()
        self._opened.close()

    def run(self, *words, timeout_s=120, folder=None, **environ):
        """Run a command of SLURM to its end."""
        return subprocess.run(
            words,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            cwd=folder,
            env={**os.environ, **self.environ, "PATH": self.path, **environ},
        )
