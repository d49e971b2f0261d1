"""The table of modes. Nothing else in the package compares the name of a mode; a test enforces it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mode:
    """How the ranks of a run share the work.

    Args:
        trainer_class: "module:Class" of the trainer, unless the key ``trainer`` names another.
        served_trainer_class: the trainer where the forward runs on the server (``server.compute: server``); needs
            servers.
        has_servers: the first ``cluster.num_servers`` ranks are parameter servers.
        single_process: the world is one rank, regardless of ``cluster.num_trainers``.
        modules: what its ranks import until their first step, in addition to what those of every mode do.
    """

    name: str
    trainer_class: str
    summary: str
    served_trainer_class: str = ""
    has_servers: bool = False
    has_process_group: bool = False
    single_process: bool = False
    modules: tuple[str, ...] = ()

    @property
    def unused_prefixes(self) -> tuple[str, ...]:
        """The prefixes of keys that have no effect in this mode."""
        return (
            *(() if self.has_servers else ("server.", "cluster.num_servers", "cluster.colocate")),
            *(() if self.has_process_group else ("ddp.",)),
            *(("cluster.",) if self.single_process else ()),
        )


MODES: dict[str, Mode] = {
    mode.name: mode
    for mode in (
        Mode(
            name="rpc",
            trainer_class="paramserver.trainers:RpcTrainer",
            served_trainer_class="paramserver.trainers:ServedTrainer",
            has_servers=True,
            modules=(
                "paramserver.server.build",
                "paramserver.server.model_service",
                "paramserver.server.shard_process",
                "paramserver.transport.segments",
                "paramserver.trainers.rpc",
                "paramserver.trainers.server_forward",
                "torch.distributed.rpc.rref_proxy",
            ),
            summary="ranks 0 to num_servers - 1 are parameter servers, the others are trainers",
        ),
        Mode(
            name="ddp",
            trainer_class="paramserver.trainers:DdpTrainer",
            has_process_group=True,
            modules=("paramserver.trainers.ddp", "paramserver.trainers.ddp_control", "torch.nn.parallel"),
            summary="every rank is a trainer; gradients are averaged by all-reduce",
        ),
        Mode(
            name="local",
            trainer_class="paramserver.trainers:LocalTrainer",
            single_process=True,
            modules=("paramserver.trainers.local",),
            summary="one process, no communication",
        ),
    )
}
