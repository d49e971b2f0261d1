"""The schema of the config: every key with its default, its rule and one line of help, as frozen dataclasses.

`Config` and its sections are the single source of the keys: checks (`parsing`), dotted names (`layers`) and the tables
in docs/configuration.md are derived from them. A `Config` that is constructed directly is not checked;
`paramserver.config.load_config` and ``config_from_mapping`` check.
"""

# ruff: noqa: RUF009 - key() and section() make dataclass fields

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from paramserver.config.modes import MODES
from paramserver.platform import SHARES_MEMORY

Kind = Literal["int", "float", "bool", "str", "list", "mapping"]

# The names from the top level to a key. Names in free dictionaries are arbitrary objects until they are checked.
KeyPath = tuple[Any, ...]

KIND_NAMES: dict[Kind, str] = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "list": "a list of texts",
    "mapping": "a mapping of names to values",
}


@dataclass(frozen=True)
class Rule:
    """The values that a key accepts. A bound ``above`` is exclusive; without ``choices`` any text is accepted.

    Args:
        kind: the type. A bool is not a number; an int is accepted as a float, and 1e6 is accepted as an int.
        above: exclusive lower bound of a number.
        pattern: a regular expression that the whole string, or each of a list, must match; `form` describes the value
            and `example` matches it.
        cures: what to write instead of a word that is not among the choices: pairs of a regular expression, which the
            whole word must match in any case, and the cure.
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
    cures: tuple[tuple[str, str], ...] = ()

    def describe(self) -> str:
        """Describe the rule in a few words, for messages and for the table of keys."""
        noun = KIND_NAMES[self.kind]
        if self.choices:
            text = f"one of {', '.join(self.choices)}"
        elif self.above == 0 and self.maximum is not None:
            text = f"{noun.replace('a ', 'a positive ')} up to {format_value(self.maximum)}"
        elif self.minimum is not None and self.maximum is not None:
            text = f"{noun} from {format_value(self.minimum)} to {format_value(self.maximum)}"
        elif self.minimum == 1 or self.above == 0:
            text = noun.replace("a ", "a positive ")
        elif self.minimum == 0:
            text = noun.replace("a ", "0 or a positive ")
        else:
            text = self.form or noun
        return text + (", or null" if self.nullable else "")


def format_value(value: Any, limit: int | None = None, depth: int = 4) -> str:
    """Format a value as YAML on one line, truncated to ``limit`` characters and ``depth`` levels of nesting."""
    if value is None or isinstance(value, bool):
        line = {None: "null", True: "true", False: "false"}[value]
    elif isinstance(value, str):
        line = value if value and value.isprintable() and value == value.strip() else repr(value)
    elif isinstance(value, (Mapping, list, tuple)):
        line = _format_nested(value, depth)
    elif isinstance(value, int) and value.bit_length() > 2048:
        line = hex(value)  # str() refuses a number of more than sys.get_int_max_str_digits() digits
    else:
        line = str(value)
    return line if limit is None or len(line) <= limit else line[: limit - 3] + "..."


def _format_nested(value: Any, depth: int) -> str:
    if depth == 0:
        return "..."
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{format_value(k)}: {format_value(v, depth=depth - 1)}" for k, v in value.items()) + "}"
    return "[" + ", ".join(format_value(v, depth=depth - 1) for v in value) + "]"


def closest_match(word: str, known: Sequence[str]) -> str | None:
    """Return the known word that is most similar to ``word``; None where none is similar."""
    return next(iter(difflib.get_close_matches(word, known, n=1, cutoff=0.6)), None)


def origin_prefix(origin: str) -> str:
    """Return the beginning of a message: the place where the value was given, if it is known."""
    return f"{origin}: " if origin else ""


# Constructors of rules and fields.


def integer(minimum: int, maximum: int | None = None) -> Rule:
    return Rule("int", minimum=minimum, maximum=maximum)


def one_of(*choices: str, cures: Mapping[str, str] | None = None) -> Rule:
    return Rule("str", choices=choices, cures=tuple((cures or {}).items()))


def string(pattern: str = "", form: str = "", example: str = "") -> Rule:
    return Rule("str", pattern=pattern, form=form, example=example)


REQUIRED: Any = dataclasses.MISSING


def key(default: Any, rule: Rule, help: str) -> Any:
    """Return a dataclass field for a config key.

    ``REQUIRED`` as ``default`` makes the key mandatory; null as ``default`` makes it accept null.
    """
    if default is None:
        rule = dataclasses.replace(rule, nullable=True)
    metadata = {"rule": rule, "help": help, "default": default}
    if isinstance(default, dict):
        # A dict is not hashable. Equal configs still have equal hashes, because fewer fields are hashed.
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata, hash=False)
    return dataclasses.field(default=default, metadata=metadata)


def section(kind: type, help: str, *, nullable: bool = False) -> Any:
    """Return a dataclass field for a section of keys; a nullable section is null until one of its keys is given."""
    metadata = {"section": kind, "nullable": nullable, "help": help}
    if nullable:
        return dataclasses.field(default=None, metadata=metadata)
    return dataclasses.field(default_factory=kind, metadata=metadata)


LOADER_KEYS = ("batch_size", "loader_workers")
"""Keys of the section ``training`` that a DataLoader of the task replaces, unless they were given."""

# The names that torch, Lightning, transformers, accelerate, DeepSpeed and keras give to precisions.
_FLOAT32 = r"(torch\.)?(float|f(p|loat)?32|32(-true|-full)?|single|full|no|none|null|false)"
_BFLOAT16 = r"(torch\.)?(bf16|bfloat16|mixed_bfloat16|bf16-(mixed|true|full)|amp_bf16|amp|mixed)"
_FLOAT16 = r"(torch\.)?(f(p|loat)?16|half|16(-mixed|-true)?|mixed_float16|amp_fp16|fp16-mixed)"
_TFLOAT32 = r"tf32|tensorfloat-?32|high|medium|highest"
_FLOAT64 = r"(torch\.)?(double|f(p|loat)?64|64(-true)?)"
_PRECISIONS = {
    _BFLOAT16: "write bfloat16, which computes the forward in autocast; the parameters stay as the task makes them",
    _FLOAT16: "write float16, which computes the forward in autocast and scales the loss",
    _FLOAT32: "write float32",
    _TFLOAT32: "write float32, and call torch.set_float32_matmul_precision in the task's constructor",
    _FLOAT64: "write float32, which leaves the forward as it is, and return model.double() from build_model",
}
_WIRE_DTYPES = {_BFLOAT16: "write bfloat16", _FLOAT16: "write float16", _FLOAT32: "write float32"}

_CLASS = string(r"[^:\s][^:\n]*:[^:\s]+", "module:Class or path/to/file.py:Class", "examples/digits.py:Digits")
_FUNCTION = string(r"[^:\s][^:\n]*:[^:\s]+", "module:function or path/to/file.py:function", "simulate.py:simulate")
_SINKS = Rule(
    "list",
    pattern=r"csv|[^:\s][^:\n]*:[^:\s]+",
    form="a list of csv, module:Class and path/to/file.py:Class",
    example="[csv, sinks.py:Wandb]",
)
_BOOLEAN, _MAPPING, _POSITIVE = Rule("bool"), Rule("mapping"), Rule("float", above=0)
# Seconds that a wait may take. RPC and sockets count them in milliseconds of 32 bits, and limits are added up.
_TIME_LIMIT = Rule("float", above=0, maximum=1_000_000)
_HOST = string(r"[^\s.]{1,63}(\.[^\s.]{1,63})*\.?", "a host name or address", "127.0.0.1")
_INTERFACE = string(r"\S+", "the name of a network interface", "eth0")
_FOLDER = string(r"(?!\.{1,2}$)[^/\0\n]+", "the plain name of a folder, without /", "digits-1")

# The kinds of a family, as the config names them, which may not import their classes: those need torch or numpy. A test
# compares each with the registry that builds the objects. With the keys of the section that not all kinds have: of a
# buffer ``Buffer.options``.
CONSISTENCIES: dict[str, tuple[str, ...]] = {
    "sync": ("backup_trainers",),
    "bounded": ("staleness_bound",),
    "async": ("arrivals",),
}
OUTER_OPTIMIZERS: dict[str, tuple[str, ...]] = {
    "sgd": (),
    "nesterov": (),
    "adam": ("beta2", "eps"),
    "delayed_nesterov": ("delay",),
}
CLIPPINGS = ("clip_grad_norm", "clip_grad_value")
"""Keys of the section training of which one may be given: the kinds of clipping."""
BUFFERS: dict[str, tuple[str, ...]] = {
    "fifo": ("pseudo_epochs",),
    "firo": ("pseudo_epochs",),
    "reservoir": ("min_new_per_batch",),
}


@dataclass(frozen=True)
class TransportChoice:
    """What a value of ``server.transport`` lets a process use: shared memory, messages, and TCP for most of these."""

    shares_memory: bool
    sends: bool
    connects: bool


TRANSPORTS = {
    "auto": TransportChoice(shares_memory=True, sends=True, connects=True),
    "rpc": TransportChoice(shares_memory=False, sends=True, connects=False),
    "shared_memory": TransportChoice(shares_memory=True, sends=False, connects=False),
    "tcp": TransportChoice(shares_memory=False, sends=True, connects=True),
}


def sends(transport: str) -> bool:
    """Return whether parameters and gradients were sent by a transport, by its name in records."""
    return transport not in TRANSPORTS or TRANSPORTS[transport].sends


HEARTBEAT_S = 1.0
"""Seconds between two heartbeats of a process, unless ``server.lost_after_s`` is below five times as much."""


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Section ``cluster``: the processes of a run and how they find each other."""

    num_servers: int | None = key(
        None, integer(1), "parameter servers; null = 1, or with colocate one per trainer; rpc only"
    )
    num_trainers: int = key(2, integer(1), "trainers, where the world size is not given otherwise")
    colocate: bool = key(False, _BOOLEAN, "rpc: a server on the host of each trainer; --rank then counts hosts")
    master_addr: str = key("127.0.0.1", _HOST, "host of rank 0")
    master_port: int = key(0, integer(0, 65535), "port of rank 0; 0 = a free one, or 29500 with --rank")
    interface: str | None = key(
        None, _INTERFACE, "interface that ranks use; null = loopback on one machine, else the one towards rank 0"
    )
    backend: str = key(
        "auto",
        one_of("auto", "gloo", "nccl"),
        "backend of torch.distributed in ddp; auto = nccl on GPUs, gloo otherwise",
    )
    timeout_s: float = key(60.0, _TIME_LIMIT, "limit of every wait that no other key limits, in seconds")
    stop_within_s: float = key(
        15.0, _TIME_LIMIT, "after a signal, limit of the step or hook that is in progress, in seconds"
    )
    max_restarts: int = key(3, integer(0), "how often a rank that died starts again, if a supervisor started it")
    spares: int = key(0, integer(0), "processes that wait, torch imported, to take the role of a rank that died")
    elastic: bool = key(False, _BOOLEAN, "rpc: trainers beyond the first world may join a running job")
    token_file: str | None = key(None, string(), "file (mode 600) with the token that ranks prove to rank 0")


@dataclass(frozen=True, kw_only=True)
class DeviceConfig:
    """Section ``device``: where tensors live."""

    kind: str = key(
        "auto", one_of("auto", "cpu", "cuda"), "device of the trainers; auto = a GPU each where there are enough"
    )
    server: str = key("auto", one_of("auto", "cpu", "cuda"), "device where the parameters live")
    num_gpus: int | None = key(None, integer(0), "GPUs of one process")
    share_gpus: bool = key(False, _BOOLEAN, "trainers of a host share its GPUs where there are not enough")


@dataclass(frozen=True, kw_only=True)
class OuterConfig:
    """Section ``training.outer``: the optimizer that is stepped with what the trainers changed in a round.

    Values that are null are chosen by ``optim/outer.py``.
    """

    optimizer: str | None = key(
        None, one_of(*OUTER_OPTIMIZERS), "null = nesterov for local_steps of 64 and more, otherwise sgd"
    )
    lr: float | None = key(
        None,
        _POSITIVE,
        "null = 1 for sgd, 0.7 for both nesterov, 0.01 for adam; with async and bounded divided by the trainers",
    )
    momentum: float | None = key(
        None, Rule("float", minimum=0, maximum=1), "of adam its first beta; null = 0 for sgd, 0.9 for the others"
    )
    beta2: float = key(0.99, Rule("float", minimum=0, maximum=1), "adam: decay of the mean of squares")
    eps: float = key(1e-3, _POSITIVE, "adam: added to the root of the mean of squares")
    delay: int | None = key(
        None, integer(1), "delayed_nesterov: updates for each change of the momentum; null = one of each trainer"
    )
    weighting: str = key(
        "trainers", one_of("trainers", "samples"), "what the mean over the trainers of a round is weighted by"
    )


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Section ``training``: limits, batches and validation. The first limit that is reached ends the run."""

    max_epochs: int | None = key(None, integer(1), "limit: passes over a map-style source")
    max_steps: int | None = key(None, integer(1), "limit: global steps, exact")
    max_samples: int | None = key(None, integer(1), "limit: samples applied, over all trainers")
    max_seconds: float | None = key(None, _POSITIVE, "limit: seconds of training")
    patience: int | None = key(None, integer(1), "limit: validations without improvement of checkpoint.best")
    min_delta: float = key(
        0.0, Rule("float", minimum=0), "patience: a change of the metric of at most this much is no improvement"
    )
    batch_size: int = key(32, integer(1), "samples per trainer and batch")
    validation_batch_size: int | None = key(
        None, integer(1), "samples per trainer and batch of a validation; null = batch_size"
    )
    accumulate_batches: int = key(1, integer(1), "batches of each trainer per gradient")
    local_steps: int = key(
        1, integer(1), "optimizer steps of each trainer per global step, which is then a round; see outer"
    )
    outer: OuterConfig | None = section(
        OuterConfig, "rounds of local steps: the optimizer of what they change", nullable=True
    )
    clip_grad_norm: float | None = key(None, _POSITIVE, "upper bound of the gradient norm of a step")
    clip_grad_value: float | None = key(
        None, _POSITIVE, "upper bound of the absolute value of each element of the gradient"
    )
    nonfinite: str = key(
        "fail",
        one_of("fail", "skip"),
        "a loss that is NaN or infinite ends the run; skip = no update with that loss, or with such a gradient",
    )
    ema_decay: float | None = key(
        None,
        Rule("float", minimum=0, maximum=1),
        "validate an exponential average of the parameters; this is its decay per step",
    )
    precision: str = key(
        "float32",
        one_of("float32", "bfloat16", "float16", cures=_PRECISIONS),
        "precision of the forward; bfloat16 = autocast; float16 = autocast, with a loss that is scaled",
    )
    validate_every: int = key(100, integer(0), "global steps between two validations; 0 = at the end only")
    uneven_inputs: str = key(
        "stop", one_of("stop", "join"), "stop = all trainers stop when one has no data; join = the others continue"
    )
    loader_workers: int = key(
        0, integer(0), "worker processes per trainer that read a map-style data set or an IterableDataset; 0 = none"
    )

    @cached_property
    def has_rounds(self) -> bool:
        """Whether a global step is a round: each trainer steps an optimizer of its own, and pushes what it changed."""
        return self.local_steps > 1 or self.outer is not None

    @cached_property
    def may_skip(self) -> bool:
        """Whether a step may be skipped, as what it computed is NaN or infinite, so that each is checked.

        With rounds that is a local step, and never the round.
        """
        return (self.nonfinite == "skip" or self.scales_loss) and not self.has_rounds

    @cached_property
    def scales_loss(self) -> bool:
        """Whether losses are scaled for the backward; a step whose gradients overflow is skipped."""
        return self.precision == "float16"

    @property
    def clips(self) -> bool:
        return any(getattr(self, name) is not None for name in CLIPPINGS)

    @property
    def weights_samples(self) -> bool:
        """Whether the mean over trainers is weighted by the samples of each."""
        return self.outer is not None and self.outer.weighting == "samples"

    @cached_property
    def batches_per_step(self) -> int:
        """Batches of each trainer per global step."""
        return self.accumulate_batches * self.local_steps


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Section ``server``: the parameter servers. Only mode rpc uses it."""

    consistency: str = key("sync", one_of(*CONSISTENCIES), "when an update is applied and which trainers wait")
    staleness_bound: int = key(4, integer(0), "bounded: steps that a trainer may be ahead of the slowest one")
    backup_trainers: int = key(0, integer(0), "sync: number of slowest trainers that an update does not wait for")
    arrivals: int = key(1, integer(1), "async: gradients of any trainers whose mean is an update")
    dynamic_local_steps: bool = key(
        False, _BOOLEAN, "rounds: fewer local steps for a trainer that is slower than the others"
    )
    stale_scaling: str = key("none", one_of("none", "inverse"), "inverse = gradient / (1 + staleness)")
    compute: str = key("trainer", one_of("trainer", "server"), "where the forward runs")
    transport: str = key("auto", one_of(*TRANSPORTS), "how tensors are exchanged")
    wire_dtype: str | None = key(
        None,
        one_of("float32", "bfloat16", "float16", cures=_WIRE_DTYPES),
        "type that parameters and gradients are rounded to in messages, if theirs is larger; null = their own",
    )
    compression: str = key(
        "none",
        one_of("none", "bfloat16", "int8", "int4"),
        "how gradients are sent over rpc; what that loses is added to the trainer's next gradient",
    )
    compression_block: int = key(256, integer(1), "int8, int4: elements that have one scale")
    bucket_mb: float | None = key(
        None,
        _POSITIVE,
        "over rpc, size in MB of the buckets that are sent during backward; "
        "null = chosen from the size of the model where each is updated as it arrives, 4 elsewhere",
    )
    lost_after_s: float = key(5.0, _TIME_LIMIT, "seconds without a heartbeat after which a trainer is lost")
    on_loss: str = key("continue", one_of("continue", "rollback", "fail"), "rpc: reaction to the loss of a trainer")

    @property
    def heartbeat_s(self) -> float:
        """Seconds between two heartbeats of a process: several of them before it counts as lost."""
        return min(HEARTBEAT_S, self.lost_after_s / 5)

    @property
    def computes(self) -> bool:
        """Whether the forward of the model runs on the server, where there is one."""
        return self.compute == "server"

    @property
    def bucket_bytes(self) -> float:
        return (4.0 if self.bucket_mb is None else self.bucket_mb) * 2**20

    @property
    def must_share_memory(self) -> bool:
        """Whether a process that cannot share the memory of server 0 ends the run, instead of sending messages."""
        return not TRANSPORTS[self.transport].sends

    @property
    def connects(self) -> bool:
        """Whether trainers make TCP connections to the servers, for most of what they send."""
        return TRANSPORTS[self.transport].connects and not self.computes

    @property
    def shares_memory(self) -> bool:
        """Whether a trainer on the server's host may use shared memory instead of messages."""
        return SHARES_MEMORY and TRANSPORTS[self.transport].shares_memory and not self.computes


@dataclass(frozen=True, kw_only=True)
class DdpConfig:
    """Section ``ddp``: arguments of DistributedDataParallel. Other modes ignore it."""

    shared_memory: str = key(
        "auto",
        one_of("auto", "off"),
        "auto: trainers on the CPUs of one host reduce gradients in memory that they share; off: over gloo",
    )
    comm_hook: str = key("none", one_of("none", "fp16", "bf16", "powersgd"), "compression of the gradients")
    extra: dict[str, Any] = key({}, _MAPPING, "arguments of DistributedDataParallel")


@dataclass(frozen=True, kw_only=True)
class BufferConfig:
    """Section ``buffer``: the samples that each trainer holds."""

    kind: str = key("fifo", one_of(*BUFFERS), "order in which samples are served")
    capacity: int = key(4096, integer(1), "samples per trainer")
    watermark: int = key(0, integer(0), "samples held before the first get")
    pseudo_epochs: int = key(1, integer(1), "fifo, firo: times that each sample is served")
    max_bytes: int | None = key(None, integer(1), "a second capacity, in bytes")
    min_new_per_batch: int = key(0, integer(0), "reservoir: unseen samples per batch while data still arrives")
    max_staleness: int | None = key(
        None, integer(0), "updates since the version of the model that a sample was made with, at most; null = no limit"
    )


@dataclass(frozen=True, kw_only=True)
class SimulationsConfig:
    """Section ``simulations``: online training. It is null where samples come from a data set or an iterable."""

    command: str | None = key(
        None, string(), "starts one simulation; {simulation} and parameter names are replaced by values"
    )
    function: str | None = key(None, _FUNCTION, "instead of command: a Python function of (parameters, client)")
    count: int | None = key(None, integer(1), "simulations in total; null = until a client calls finish")
    at_once: int = key(1, integer(1), "simulations that run at the same time")
    steps: int | None = key(None, integer(1), "samples of each simulation; null = unknown")
    fields: dict[str, Any] = key({}, _MAPPING, "fields of a sample: {name: [sizes]} or {name: {shape, dtype, finite}}")
    parameters: dict[str, Any] = key({}, _MAPPING, "input parameters of a simulation: {name: [low, high]}")
    sampler: str = key("uniform", string(), "uniform, lhs, halton, importance, or module:Class of a custom sampler")
    sampler_args: dict[str, Any] = key({}, _MAPPING, "keyword arguments of the sampler's class")
    group_size: int = key(1, integer(1, 65535), "processes of one simulation; each sends a part of each sample")
    deal: str = key("round_robin", one_of("round_robin", "simulation"), "how samples are assigned to trainers")
    address: str = key(
        "127.0.0.1", _HOST, "host where clients connect to rank 0; trainers listen on the interface towards it"
    )
    port: int = key(0, integer(0, 65535), "port of rank 0 for clients; 0 = a free port")
    keys: str | None = key(None, string(), "folder made by paramserver keys; required beyond loopback")
    window: int | None = key(
        None, integer(1), "unacknowledged samples from one process to one trainer; null = 64, or fewer that are large"
    )
    timeout_s: float = key(60.0, _TIME_LIMIT, "seconds without a message after which a simulation is restarted")
    max_restarts: int = key(2, integer(0), "restarts of one simulation before another one replaces it")
    launcher: str = key("auto", one_of("auto", "local", "srun"), "auto = srun inside a SLURM allocation")


@dataclass(frozen=True, kw_only=True)
class PublishConfig:
    """Section ``publish``: versions of the model for other programs. It is null where none are published."""

    address: str = key("127.0.0.1", _HOST, "host where subscribers connect to rank 0")
    port: int = key(0, integer(0, 65535), "port of rank 0 for subscribers; 0 = a free port")
    keys: str | None = key(None, string(), "folder made by paramserver keys; required beyond loopback")
    every: int = key(1, integer(1), "updates between two versions that are copied for subscribers, at least")
    every_s: float | None = key(None, _POSITIVE, "seconds between them, at least; null = no limit")
    averages: bool = key(False, _BOOLEAN, "publish what is validated in the place of parameters")


@dataclass(frozen=True, kw_only=True)
class BestConfig:
    """Section ``checkpoint.best``: the validation metric that decides which checkpoint is the best."""

    metric: str = key(REQUIRED, string(), "the name of a value that validation_step returns")
    mode: str = key("max", one_of("min", "max"), "whether the smallest or the largest value is the best")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Section ``checkpoint``: what is saved, and when."""

    every: int | None = key(None, integer(0), "global steps between two; null = validate_every; 0 = at the end only")
    keep: int = key(3, integer(1), "number of newest checkpoints that are kept")
    best: BestConfig | None = section(BestConfig, "also keep the best checkpoint", nullable=True)
    background: bool = key(True, _BOOLEAN, "write while training continues")
    memory_every: int | None = key(
        None, integer(1), "global steps between two in memory, for restarts on this machine; null = none"
    )
    memory_folder: str = key("/dev/shm", string(), "folder of rank 0 for those in memory; one is kept")


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Section ``logging``: what is recorded, and where."""

    run_dir: str = key("runs", string(), "folder of the runs")
    name: str | None = key(None, _FOLDER, "folder of the run in run_dir; null = task, mode and time")
    log_every: int = key(10, integer(1), "global steps between two records")
    tensorboard: bool = key(True, _BOOLEAN, "write TensorBoard events")
    sinks: tuple[str, ...] = key((), _SINKS, "also write records to: csv (metrics.csv), or a class of your own")
    prometheus_port: int | None = key(
        None, integer(0, 65535), "port of rank 0 that Prometheus scrapes; 0 = a free one; null = none"
    )
    progress: str = key("auto", one_of("auto", "on", "off"), "progress bar; auto = on a terminal")


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Section ``profile``: the steps of which each rank writes a trace. It is null where there is none."""

    start_step: int = key(10, integer(0), "version of the parameters with which the first traced step begins")
    steps: int = key(10, integer(1), "global steps that are traced")


@dataclass(frozen=True, kw_only=True)
class Config:
    """The effective configuration of a run. Equal configs describe the same run."""

    task: str | None = key(None, _CLASS, "required: the class of the task")
    task_args: dict[str, Any] = key({}, _MAPPING, "keyword arguments of the task's class")
    trainer: str | None = key(None, _CLASS, "a custom trainer; null = the trainer of the mode")
    mode: str = key("rpc", one_of(*MODES), "how the ranks share the work")
    seed: int = key(0, integer(0, 2**63 - 1), "seed of every random number")
    init_from: str | None = key(None, string(), "weights to start from: a model.pt or a run")
    cluster: ClusterConfig = section(ClusterConfig, "processes and how they find each other")
    device: DeviceConfig = section(DeviceConfig, "where tensors live")
    training: TrainingConfig = section(TrainingConfig, "limits and batches; the first limit reached ends the run")
    server: ServerConfig = section(ServerConfig, "parameter servers; rpc only")
    ddp: DdpConfig = section(DdpConfig, "DistributedDataParallel; ddp only")
    buffer: BufferConfig = section(BufferConfig, "samples held per trainer")
    simulations: SimulationsConfig | None = section(
        SimulationsConfig, "online training: the producers of samples", nullable=True
    )
    publish: PublishConfig | None = section(PublishConfig, "versions of the model for other programs", nullable=True)
    checkpoint: CheckpointConfig = section(CheckpointConfig, "what is saved, and when")
    logging: LoggingConfig = section(LoggingConfig, "what is recorded, and where")
    profile: ProfileConfig | None = section(ProfileConfig, "traces of some steps", nullable=True)
    # Not a key: the names of those that were given; None = unknown, then those that have not their default.
    given: frozenset[str] | None = dataclasses.field(default=None, compare=False, repr=False)

    def to_mapping(self) -> dict[str, Any]:
        """Return a nested dict of plain values, as a copy; ``config_from_mapping`` turns it into an equal config."""
        mapping: dict[str, Any] = dataclasses.asdict(
            self, dict_factory=lambda items: {k: list(v) if isinstance(v, tuple) else v for k, v in items}
        )
        del mapping["given"]
        return mapping

    def given_mapping(self) -> dict[str, Any]:
        """Return ``to_mapping()`` without the keys of ``LOADER_KEYS`` that were not given, for another process."""
        mapping = self.to_mapping()
        for name in LOADER_KEYS:
            if not self.has_given(name):
                del mapping["training"][name]
        return mapping

    def has_given(self, name: str) -> bool:
        """Return whether a key of the section ``training`` was given, and not left to its default."""
        if self.given is None:
            return bool(getattr(self.training, name) != getattr(TrainingConfig, name))
        return f"training.{name}" in self.given
