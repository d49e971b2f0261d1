"""Every config key with its default, its rule and one line of help, as frozen dataclasses (docs/interface.md).

A `Config` that is built by hand is not checked; `paramserver.config.load_config` and ``config_from_mapping`` check.

What the value of a config key must be: one `Rule` per key, for checks, listing and documentation alike.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from paramserver.config.modes import MODES

Kind = Literal["int", "float", "bool", "str", "mapping"]

# The names from the top to a key; those of free dictionaries need not be text until they are checked.
KeyPath = tuple[Any, ...]

NOUNS: dict[Kind, str] = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "mapping": "a mapping of names to values",
}


@dataclass(frozen=True)
class Rule:
    """The values that a key accepts.

    Args:
        kind: the type. A bool is no number; a whole number is a float as well, and 1e6 is a whole number.
        nullable: null is accepted.
        choices: the words that a text may be; empty = any.
        minimum, maximum: bounds of a number, included.
        above: bound of a number, excluded.
        pattern: a regular expression that the whole text matches, said in words by `form` and shown by `example`.
    """

    kind: Kind
    nullable: bool = False
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    pattern: str = ""
    form: str = ""
    example: str = ""

    def wanted(self) -> str:
        """Say the rule in a few words: "a positive whole number, or null"."""
        return self._wanted() + (", or null" if self.nullable else "")

    def _wanted(self) -> str:
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        if self.minimum is not None and self.maximum is not None:
            return f"{NOUNS[self.kind]} from {format_value(self.minimum)} to {format_value(self.maximum)}"
        if self.minimum == 1 or self.above == 0:
            return NOUNS[self.kind].replace("a ", "a positive ")
        if self.minimum == 0:
            return NOUNS[self.kind].replace("a ", "0 or a positive ")
        return self.form or NOUNS[self.kind]


def integer(minimum: int, maximum: int | None = None, *, nullable: bool = False) -> Rule:
    return Rule("int", nullable=nullable, minimum=minimum, maximum=maximum)


def positive_number(*, nullable: bool = False) -> Rule:
    return Rule("float", nullable=nullable, above=0)


def boolean() -> Rule:
    return Rule("bool")


def one_of(*words: str) -> Rule:
    return Rule("str", choices=words)


def string(pattern: str = "", form: str = "", example: str = "", *, nullable: bool = False) -> Rule:
    return Rule("str", nullable=nullable, pattern=pattern, form=form, example=example)


def mapping(*, nullable: bool = False) -> Rule:
    return Rule("mapping", nullable=nullable)


REQUIRED: Any = dataclasses.MISSING


def key(default: Any, rule: Rule, help: str) -> Any:
    """Make a dataclass field that is a config key; a ``default`` of ``REQUIRED`` means none."""
    metadata = {"rule": rule, "help": help}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata, hash=False)
    return dataclasses.field(default=default, metadata=metadata)


def section(kind: type, help: str, *, nullable: bool = False) -> Any:
    """Make a dataclass field that is a section of keys; a nullable one is null until one of its keys is given."""
    metadata = {"section": kind, "nullable": nullable, "help": help}
    if nullable:
        return dataclasses.field(default=None, metadata=metadata)
    return dataclasses.field(default_factory=kind, metadata=metadata)


def format_value(value: Any, limit: int | None = None, depth: int = 4) -> str:
    """Write a value as YAML would, on one line, cut after ``limit`` characters."""
    if value is None or isinstance(value, bool):
        line = {None: "null", True: "true", False: "false"}[value]
    elif isinstance(value, str):
        line = value if value and value.isprintable() and value == value.strip() else repr(value)
    elif isinstance(value, (Mapping, list, tuple)):
        line = _show_nested(value, depth)
    else:
        line = str(value)
    return line if limit is None or len(line) <= limit else line[: limit - 3] + "..."


def _show_nested(value: Any, depth: int) -> str:
    if depth == 0:
        return "..."
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{format_value(k)}: {format_value(v, depth=depth - 1)}" for k, v in value.items()) + "}"
    return "[" + ", ".join(format_value(v, depth=depth - 1) for v in value) + "]"


def closest_match(word: str, known: Sequence[str]) -> str | None:
    """Find the known word that ``word`` was probably meant to be."""
    return next(iter(difflib.get_close_matches(word, known, n=1, cutoff=0.6)), None)


def origin_prefix(origin: str) -> str:
    """Begin a message with the place where the value was given."""
    return f"{origin}: " if origin else ""


# ruff: noqa: RUF009 - key() and section() make dataclass fields


_CLASS = string(
    r"[^:\s][^:\n]*:[^:\s]+", "module:Class or path/to/file.py:Class", "examples/digits.py:Digits", nullable=True
)
_HOST = string(r"\S+", "a host name or address", "127.0.0.1")
_INTERFACE = string(r"\S+", "the name of a network interface", "eth0", nullable=True)
_FOLDER = string(r"(?!\.{1,2}$)[^/\0\n]+", "the plain name of a folder, without /", "digits-1", nullable=True)


# The kinds of a family, as the config names them. A test compares each with the registry that builds the objects.
CONSISTENCIES = ("sync", "bounded", "async")
BUFFERS = ("fifo", "firo", "reservoir")

# Two defaults wait for their feature: cluster.max_restarts (to be 3) and server.on_loss (to be continue).


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    num_servers: int = key(1, integer(1), "parameter servers; rpc only")
    num_trainers: int = key(2, integer(1), "trainers, where the world size is not given otherwise")
    master_addr: str = key("127.0.0.1", _HOST, "host of rank 0")
    master_port: int = key(0, integer(0, 65535), "0 = a free port (all ranks on this machine), 29500 otherwise")
    interface: str | None = key(None, _INTERFACE, "null = loopback when all ranks are on this machine")
    backend: str = key("auto", one_of("auto", "gloo", "nccl"), "backend of ddp")
    timeout_s: float = key(60.0, positive_number(), "bounds every wait that has no key of its own, in seconds")
    max_restarts: int = key(0, integer(0), "restarts per rank by the local supervisor")
    elastic: bool = key(False, boolean(), "rpc: trainers beyond the first world may join a running job")
    token_file: str | None = key(None, string(nullable=True), "file with the job token of joiners")


@dataclass(frozen=True, kw_only=True)
class DeviceConfig:
    kind: str = key("auto", one_of("auto", "cpu", "cuda"), "device of the trainers")
    server: str = key("auto", one_of("auto", "cpu", "cuda"), "device where the parameters live")
    num_gpus: int | None = key(None, integer(0, nullable=True), "GPUs that one process may spread its model over")


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    max_epochs: int | None = key(None, integer(1, nullable=True), "limit: passes over a map-style source")
    max_steps: int | None = key(None, integer(1, nullable=True), "limit: global steps, exact")
    max_samples: int | None = key(None, integer(1, nullable=True), "limit: samples applied, over all trainers")
    max_seconds: float | None = key(None, positive_number(nullable=True), "limit: seconds of training")
    patience: int | None = key(
        None, integer(1, nullable=True), "limit: validations without improvement of checkpoint.best"
    )
    batch_size: int = key(32, integer(1), "samples per trainer and batch")
    validation_batch_size: int | None = key(None, integer(1, nullable=True), "null = batch_size")
    accumulate_batches: int = key(1, integer(1), "batches of each trainer per global step")
    clip_grad_norm: float | None = key(None, positive_number(nullable=True), "largest norm of all gradients of a step")
    precision: str = key("float32", one_of("float32", "bfloat16"), "bfloat16 = autocast")
    validate_every: int = key(100, integer(0), "global steps; 0 = at the end only")
    uneven_inputs: str = key(
        "stop", one_of("stop", "join"), "stop = all stop when one trainer has no data; join = every trainer drains"
    )
    loader_workers: int = key(0, integer(0), "processes that decode samples of a map-style source")


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    consistency: str = key("sync", one_of(*CONSISTENCIES), "who may go on when")
    staleness_bound: int = key(4, integer(0), "bounded: clocks that a trainer may start ahead of the slowest")
    backup_trainers: int = key(0, integer(0), "sync: an update goes on without the slowest ones, so many")
    stale_scaling: str = key("none", one_of("none", "inverse"), "inverse = gradient / (1 + staleness)")
    compute: str = key("trainer", one_of("trainer", "server"), "where the forward runs")
    transport: str = key("auto", one_of("auto", "rpc", "shared_memory"), "how tensors travel")
    wire_dtype: str = key("float32", one_of("float32", "bfloat16", "float16"), "type of what travels over rpc")
    bucket_mb: float = key(
        4.0, positive_number(), "gradients leave over rpc in groups of so many MB, while backward goes on"
    )
    heartbeat_s: float = key(1.0, positive_number(), "seconds between the signs of life of a trainer")
    lost_after_s: float = key(5.0, positive_number(), "seconds of silence after which a trainer is lost")
    on_loss: str = key("fail", one_of("continue", "rollback", "fail"), "rpc: what follows when a trainer is lost")

    @property
    def bucket_bytes(self) -> float:
        return self.bucket_mb * 2**20

    @property
    def shares_memory(self) -> bool:
        """Whether parameters may travel through memory where both ends are on one host."""
        return self.transport in ("auto", "shared_memory") and self.compute == "trainer"


@dataclass(frozen=True, kw_only=True)
class DdpConfig:
    find_unused_parameters: bool = key(False, boolean(), "see DistributedDataParallel")
    static_graph: bool = key(False, boolean(), "see DistributedDataParallel")
    gradient_as_bucket_view: bool = key(True, boolean(), "see DistributedDataParallel")
    bucket_cap_mb: float | None = key(
        None, positive_number(nullable=True), "null = 25, and 1 for the first bucket, so that it starts early"
    )
    comm_hook: str = key("none", one_of("none", "fp16", "bf16", "powersgd"), "compression of the gradients")
    extra: dict[str, Any] = key({}, mapping(), "further arguments of DistributedDataParallel")


@dataclass(frozen=True, kw_only=True)
class BufferConfig:
    kind: str = key("fifo", one_of(*BUFFERS), "order in which samples are served")
    capacity: int = key(4096, integer(1), "samples per trainer")
    watermark: int = key(0, integer(0), "samples held before the first get")
    pseudo_epochs: int = key(1, integer(1), "fifo, firo: every sample is served so often")
    max_bytes: int | None = key(None, integer(1, nullable=True), "a second capacity, in bytes")
    min_new_per_batch: int = key(0, integer(0), "reservoir: unseen samples per batch while data still arrives")


@dataclass(frozen=True, kw_only=True)
class SimulationsConfig:
    command: str | None = key(
        None,
        string(nullable=True),
        "starts one simulation; {simulation} and names of parameters are filled in",
    )
    function: str | None = key(None, _CLASS, "the same, a Python function of (parameters, client)")
    count: int | None = key(None, integer(1, nullable=True), "simulations in all; null = until somebody says the last")
    at_once: int = key(1, integer(1), "simulations that run at the same time")
    steps: int | None = key(None, integer(1, nullable=True), "samples of each simulation; null = not known")
    fields: dict[str, Any] = key({}, mapping(), "of a sample: {name: [sizes]} or {name: {shape, dtype, finite}}")
    parameters: dict[str, Any] = key({}, mapping(), "what a simulation is given: {name: [low, high]}")
    sampler: str = key("uniform", string(), "uniform | lhs | halton | module:Class of your own")
    group_size: int = key(
        1, integer(1, 65535), "processes of one simulation, each of which sends a part of each sample"
    )
    deal: str = key("round_robin", one_of("round_robin", "simulation"), "which trainer gets a sample")
    address: str = key("127.0.0.1", _HOST, "where clients reach rank 0; trainers listen on the way to it")
    port: int = key(0, integer(0, 65535), "of rank 0 for clients; 0 = a free one")
    keys: str | None = key(
        None, string(nullable=True), "folder of keys made by paramserver keys; needed beyond loopback"
    )
    window: int = key(64, integer(1), "samples on their way from one process to one trainer")
    timeout_s: float = key(60.0, positive_number(), "silence after which a simulation is started again")
    max_restarts: int = key(2, integer(0), "starts again of one simulation, before another takes its place")
    launcher: str = key("auto", one_of("auto", "local", "srun"), "auto = srun inside a SLURM allocation")


@dataclass(frozen=True, kw_only=True)
class BestConfig:
    metric: str = key(REQUIRED, string(), "the name of a value that validation_step returns")
    mode: str = key("max", one_of("min", "max"), "whether the smallest or the largest value is the best")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    every: int | None = key(None, integer(0, nullable=True), "global steps; null = validate_every; 0 = at the end only")
    keep: int = key(3, integer(1), "newest checkpoints that are kept")
    best: BestConfig | None = section(BestConfig, "the best checkpoint is kept too", nullable=True)
    background: bool = key(True, boolean(), "write while training goes on")


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    run_dir: str = key("runs", string(), "folder of the runs")
    name: str | None = key(None, _FOLDER, "null = <task>-<mode>-<time>")
    log_every: int = key(10, integer(1), "global steps between two records")
    tensorboard: bool = key(True, boolean(), "write TensorBoard events")
    progress: str = key("auto", one_of("auto", "on", "off"), "progress bar; auto = on a terminal")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that a run was told. Equal configs describe the same run."""

    task: str | None = key(None, _CLASS, "required: what is trained")
    task_args: dict[str, Any] = key({}, mapping(), "keyword arguments of the task's class")
    trainer: str | None = key(None, _CLASS, "a trainer of your own; null = the mode's")
    mode: str = key("rpc", one_of(*MODES), "how the ranks share the work")
    seed: int = key(0, integer(0, 2**63 - 1), "seed of every random number")
    init_from: str | None = key(None, string(nullable=True), "weights to start from: a model.pt or a run")
    cluster: ClusterConfig = section(ClusterConfig, "processes and how they meet")
    device: DeviceConfig = section(DeviceConfig, "where tensors live")
    training: TrainingConfig = section(TrainingConfig, "limits and batches; the first limit reached ends the run")
    server: ServerConfig = section(ServerConfig, "parameter servers; rpc only")
    ddp: DdpConfig = section(DdpConfig, "DistributedDataParallel; ddp only")
    buffer: BufferConfig = section(BufferConfig, "samples held per trainer")
    simulations: SimulationsConfig | None = section(
        SimulationsConfig, "online training: who produces samples", nullable=True
    )
    checkpoint: CheckpointConfig = section(CheckpointConfig, "what is saved, and when")
    logging: LoggingConfig = section(LoggingConfig, "what is recorded, and where")

    def to_mapping(self) -> dict[str, Any]:
        """Return a nested dict of plain values, of its own: ``config_from_mapping`` gives this config back."""
        return dataclasses.asdict(self)
