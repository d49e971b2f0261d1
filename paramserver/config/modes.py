"""The one table that says what a mode is. Nothing else in the package compares the name of a mode."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mode:
    """How the ranks of a run share the work.

    Args:
        name: the word of the key ``mode``.
        trainer_class: "module:Class" of the trainer, where the key ``trainer`` names no other.
        served_trainer_class: the same where the model's forward runs on the server (``server.compute: server``).
        has_servers: the first ``cluster.num_servers`` ranks are parameter servers.
        has_process_group: the trainers are one process group of torch.distributed.
        single_process: the world is one rank, whatever ``cluster.num_trainers`` says.
        summary: one line for listings.
    """

    name: str
    trainer_class: str
    served_trainer_class: str
    has_servers: bool
    has_process_group: bool
    single_process: bool
    summary: str

    @property
    def unused_prefixes(self) -> tuple[str, ...]:
        """How the names of the keys begin that mean nothing in this mode."""
        return (
            *(() if self.has_servers else ("server.", "cluster.num_servers")),
            *(() if self.has_process_group else ("ddp.",)),
            *(("cluster.",) if self.single_process else ()),
        )


MODES: dict[str, Mode] = {
    mode.name: mode
    for mode in (
        Mode(
            name="rpc",
            trainer_class="trainers:RpcTrainer",
            served_trainer_class="trainers:ServedTrainer",
            has_servers=True,
            has_process_group=False,
            single_process=False,
            summary="ranks 0 to num_servers - 1 are parameter servers, the others are trainers",
        ),
        Mode(
            name="ddp",
            trainer_class="trainers:DdpTrainer",
            served_trainer_class="trainers:DdpTrainer",
            has_servers=False,
            has_process_group=True,
            single_process=False,
            summary="every rank is a trainer; gradients are averaged by all-reduce",
        ),
        Mode(
            name="local",
            trainer_class="trainers:LocalTrainer",
            served_trainer_class="trainers:LocalTrainer",
            has_servers=False,
            has_process_group=False,
            single_process=True,
            summary="one process, no communication",
        ),
    )
}
