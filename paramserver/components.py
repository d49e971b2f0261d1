"""Components of TorchX, which starts servers and trainers as two roles: ``torchx run paramserver.components.train``.

They need the extra ``torchx``. An entry point of the group ``torchx.components`` makes them known to it.
"""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from paramserver.cluster.network import DEFAULT_PORT
from paramserver.cluster.resolve import JOB_VARIABLE
from paramserver.config import check_servers, mode_of
from paramserver.errors import UnsupportedConfiguration
from paramserver.launch import parse, resolve_run

if TYPE_CHECKING:
    from torchx.specs import AppDef

# No postponed annotations: TorchX reads those of a component.


def train(
    *flags: str,
    config: str,
    servers: int = 1,
    trainers: int = 2,
    image: str = "paramserver",
    port: int = DEFAULT_PORT,
    cpu: int = 2,
    gpu: int = 0,
    memory_mb: int = 4096,
    max_retries: int = 0,
) -> "AppDef":
    """Train a task on servers and trainers, which are the two roles of the job.

    A process that the scheduler starts again takes its place in the run, or continues it from the last checkpoint.

    Args:
        flags: further flags of python -m paramserver.launch, after --
        config: the YAML file that describes the run, as the containers see it
        servers: number of parameter servers; 0 for mode ddp
        trainers: number of trainers
        image: container with the package, the config and the task; not used by local_cwd
        port: of rank 0
        cpu: cores of each process
        gpu: GPUs of each trainer
        memory_mb: memory of each process in MB
        max_retries: how often the scheduler starts a process again
    """
    from torchx import specs
    from torchx.specs import macros

    if trainers < 1:
        raise UnsupportedConfiguration(f"--trainers ({trainers}) must be at least 1; give the number of trainers")
    if Path(config).is_file():  # otherwise it is in the container only
        check_servers(mode_of(resolve_run(parse(["--config", config, "--master_port", str(port), *flags]))[0]), servers)
    roles = []
    for kind, count in (("server", servers), ("trainer", trainers)):
        if not count:
            continue
        # TorchX replaces macros; $$ stands for a $ that is none.
        words = shlex.join(["python", "-m", "paramserver.launch", "--config", config, *flags]).replace("$", "$$")
        # The shell is replaced, so that signals reach the rank.
        command = f"exec {words} --role {kind} --index {macros.replica_id} --num_trainers {trainers}"
        command += f" --num_servers {servers}" if servers else ""
        # The scheduler sets a variable with the host of the first process of the first role, which is rank 0.
        command += f' --master_addr "$${{{macros.rank0_env}:=localhost}}" --master_port {port}'
        role = specs.Role(
            name=kind,
            image=image,
            num_replicas=count,
            entrypoint="bash",
            args=["-c", command],
            env={JOB_VARIABLE: macros.app_id},
            port_map={"rank0": port},
            resource=specs.Resource(cpu=cpu, gpu=gpu if kind == "trainer" else 0, memMB=memory_mb),
            max_retries=max_retries,
            retry_policy=specs.RetryPolicy.REPLICA,
        )
        roles.append(role)
    return specs.AppDef(name="paramserver", roles=roles)
