"""The cases of a benchmark: parsed from its command line, named, and interleaved."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from paramserver.config import (
    KEYS,
    MODES,
    SECTIONS,
    Config,
    Mode,
    load_config,
    mode_of,
    num_servers_of,
    with_world_size,
    world_size_of,
)
from paramserver.config.layers import free_key, unknown_key_message
from paramserver.config.parsing import read_text
from paramserver.config.schema import closest_match
from paramserver.errors import TrainingError, UnsupportedConfiguration
from paramserver.tools.bench.slowdown import SlowdownSpec
from paramserver.tools.report.results import LOCAL, NO_COMMUNICATION, Numbers, Target, first_reached, parse_target

T = TypeVar("T")

_LOCAL_MODE = next(mode for mode in MODES.values() if mode.single_process)
# Keys that have a flag are not set or swept by their name; keys that the benchmark sets cannot be given at all.
_FLAGS = {"mode": "--modes", "cluster.num_trainers": "--trainers", "training.max_seconds": "--seconds"}
_SET_BY_BENCHMARK = (
    *("task", "checkpoint.every", "checkpoint.best", "logging.run_dir", "logging.name", "logging.tensorboard"),
    *("training.max_epochs", "training.max_steps", "training.max_samples", "training.patience"),
)


def add_case_flags(parser: argparse.ArgumentParser, trainers: str) -> None:
    """Add the flags that name cases; ``trainers`` is the default of their number."""
    parser.add_argument("--modes", metavar="M,...", help="default: ddp,rpc")
    parser.add_argument("--trainers", metavar="T,...", help=f"numbers of trainers (default: {trainers})")
    parser.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="KEY=V1,V2",
        help="a case for each value of a config key, such as cluster.num_servers=1,2,4",
    )
    parser.add_argument(
        "--slow",
        metavar="trainer=I,factor=F[,probability=P]",
        help="each case once more, with batches of trainer I that take F times as long (each one with probability P)",
    )


@dataclass(frozen=True)
class RequestedCases:
    """The cases of a command line, unparsed: every combination of the ``sweeps``, each with all ``overrides``."""

    file: Path
    modes: str | None = None
    trainers: str | None = None
    overrides: Sequence[str] = ()
    sweeps: Sequence[str] = ()
    slow: SlowdownSpec | None = None


@dataclass(frozen=True)
class Case:
    """A configuration that is measured in every repeat.

    ``config`` is effective, before the benchmark sets its own limits and folders. ``overrides`` are those of this
    case's sweeps. ``NO_COMMUNICATION`` is a run of one trainer for each trainer, at the same time.
    """

    name: str
    config: Config
    trainers: int
    overrides: Mapping[str, Any] = field(default_factory=dict)
    slow: SlowdownSpec | None = None
    baseline: str | None = None

    @property
    def mode(self) -> Mode:
        return mode_of(self.config)

    @property
    def servers(self) -> int:
        return num_servers_of(self.config)

    @property
    def runs(self) -> int:
        return self.trainers if self.mode.single_process else 1


def _mode(word: str, text: str) -> Mode:
    if word not in MODES:
        near = closest_match(word, list(MODES))
        cure = f"did you mean {near}?" if near else "choose among them"
        raise UnsupportedConfiguration(f"--modes {text}: {word} must be one of {', '.join(MODES)}; {cure}")
    return MODES[word]


def parse_positive(word: str, flag: str, text: str | None = None) -> int:
    """Parse a whole number from 1 on.

    Raises:
        UnsupportedConfiguration: it is another text; the message names the flag.
    """
    if not (word.isascii() and word.isdecimal() and int(word) > 0):
        raise UnsupportedConfiguration(
            f"{flag} {word if text is None else text}: {word} must be a whole number from 1 on; correct it"
        )
    return int(word)


def _words(text: str, flag: str, example: str) -> list[str]:
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise UnsupportedConfiguration(f"{flag} {text}: must be words with commas between; write for example {example}")
    return list(dict.fromkeys(words))


def parse_sweep(text: str) -> tuple[str, list[str]]:
    """Parse ``key=v1,v2``; each value is YAML, in which commas inside brackets or quotes do not separate.

    Raises:
        UnsupportedConfiguration: the key is unknown (the message names the closest one) or has its own flag, or a value
            is empty.
    """
    key, equals, rest = (part.strip() for part in text.partition("="))
    values = _split(rest)
    if not equals or not key or not all(values):
        raise UnsupportedConfiguration(
            f"--sweep {text}: must be key=value,value; write for example --sweep training.batch_size=32,64"
        )
    is_section = key in SECTIONS and SECTIONS[key].nullable  # which is one value, such as training.outer
    if key not in KEYS and not is_section and free_key(tuple(key.split("."))) is None:
        raise UnsupportedConfiguration(f"--sweep {text}: {unknown_key_message(key)}")
    _check_may_be_set(key, f"--sweep {text}")
    return key, list(dict.fromkeys(values))


def _split(text: str) -> list[str]:
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        depth += not quote and (character in "[{") - (character in "]}")
        if character == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def _check_may_be_set(key: str, flag: str) -> None:
    if key in _FLAGS:
        raise UnsupportedConfiguration(f"{flag}: {key} is what {_FLAGS[key]} is for; use that")
    if any(key == own or key.startswith(f"{own}.") for own in _SET_BY_BENCHMARK):
        raise UnsupportedConfiguration(f"{flag}: {key} is decided by the benchmark; leave it out")


def make_cases(requested: RequestedCases) -> list[Case]:
    """All cases, the baselines first: ``local``, and for each number of trainers the loops without communication.

    With a straggler every case but ``local`` is made twice, without and with it. With one trainer ``local`` is also the
    loop without communication. Values of a swept key that a mode does not use make one case of that mode.

    Raises:
        UnsupportedConfiguration: the command line or a resulting config is invalid.
    """
    for override in requested.overrides:
        _check_may_be_set(override.partition("=")[0].strip(), f"--set {override}")
    named = requested.modes or "ddp,rpc"
    modes = [_mode(word, named) for word in _words(named, "--modes", "ddp,rpc")]
    swept = [parse_sweep(text) for text in requested.sweeps]
    keys = [key for key, _ in swept]
    if len(set(keys)) < len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise UnsupportedConfiguration(f"--sweep {twice} is given twice; give all of its values at once")
    base = load_config(requested.file, overrides=requested.overrides)
    counts = [base.cluster.num_trainers]
    if (text := requested.trainers) is not None:
        counts = [parse_positive(word, "--trainers", text) for word in _words(text, "--trainers", "1,2,4")]
    if requested.slow is not None and requested.slow.trainer >= min(counts):
        raise UnsupportedConfiguration(
            f"--slow: trainer ({requested.slow.trainer}) must be below the number of trainers of every case "
            f"({min(counts)}); indices count from 0"
        )
    points = [dict(zip(keys, values, strict=True)) for values in itertools.product(*(values for _, values in swept))]
    return list(_cases(requested, modes, counts, points))


def _cases(
    requested: RequestedCases, modes: Sequence[Mode], counts: Sequence[int], points: Sequence[dict[str, str]]
) -> Iterator[Case]:
    several = [count for count in counts if count > 1]
    slows = [None] if requested.slow is None else [None, requested.slow]
    of_local = _relevant(points, _LOCAL_MODE)
    for point in of_local:
        yield _case(requested, _LOCAL_MODE, 1, point, None, LOCAL)
    for count, point, slow in itertools.product(several, of_local, slows):
        yield _case(requested, _LOCAL_MODE, count, point, slow, NO_COMMUNICATION)
    for mode in (mode for mode in modes if not mode.single_process):
        for count, point, slow in itertools.product(counts, _relevant(points, mode), slows):
            yield _case(requested, mode, count, point, slow, None)


def _relevant(points: Sequence[Mapping[str, str]], mode: Mode) -> list[dict[str, str]]:
    """The distinct combinations of the keys that the mode uses."""
    found: list[dict[str, str]] = []
    for point in points:
        used = {key: value for key, value in point.items() if not key.startswith(mode.unused_prefixes)}
        if used not in found:
            found.append(used)
    return found


def _case(
    requested: RequestedCases,
    mode: Mode,
    trainers: int,
    point: Mapping[str, str],
    slow: SlowdownSpec | None,
    baseline: str | None,
) -> Case:
    swept = [f"{key}={text}" for key, text in point.items()]
    try:
        config = load_config(
            requested.file,
            overrides=[*requested.overrides, *swept],
            flags={"mode": mode.name, "cluster.num_trainers": trainers},
        )
        with_world_size(config, world_size_of(config))  # refuses numbers that no run can have
    except UnsupportedConfiguration as error:
        # Sweeps are loaded as overrides; the message must name the flag that the user wrote.
        message = str(error)
        for text in swept:
            message = message.replace(f"--set {text}", f"--sweep {text}")
        raise UnsupportedConfiguration(message) from None
    values = {key: read_text(text, key, numbered=False).value for key, text in point.items()}
    return Case(_name(mode, trainers, point, slow, baseline), config, trainers, values, slow, baseline)


def _name(mode: Mode, trainers: int, point: Mapping[str, str], slow: SlowdownSpec | None, baseline: str | None) -> str:
    of = f"{trainers} trainer" + ("s" if trainers > 1 else "")
    first = LOCAL if baseline == LOCAL else f"{baseline or mode.name} {of}"
    leaves = [key.rpartition(".")[2] for key in point]
    words = [
        f"{leaf if leaves.count(leaf) == 1 else key}={text}"
        for (key, text), leaf in zip(point.items(), leaves, strict=True)
    ]
    return ", ".join([first, *words, *([] if slow is None else [str(slow)])])


def interleaved(cases: Sequence[T], repeats: int) -> Iterator[tuple[int, T]]:
    """Each repeat with each case, in alternating order."""
    for repeat in range(repeats):
        for case in cases if repeat % 2 == 0 else cases[::-1]:
            yield repeat, case


def target_for(text: str, config: Config) -> Target:
    """Parse ``accuracy=0.95``; ``checkpoint.best`` decides whether less is better if it is of the same metric.

    Raises:
        UnsupportedConfiguration: ``text`` is not name=number, or ``config`` has no periodic validation.
    """
    target = parse_target(text)
    if not config.training.validate_every:
        raise UnsupportedConfiguration(
            f"--target {text}: training.validate_every (0) must be above 0, so that the target can be seen; set it"
        )
    best = config.checkpoint.best
    if best is None or best.metric != target.name:
        return target
    return replace(target, at_most=best.mode == "min")


def require_first_reached(
    validation: Sequence[tuple[float, float, Numbers]], goal: Target
) -> tuple[float, float] | None:
    """Samples and seconds of the first validation that meets ``goal``; None where none does.

    Raises:
        TrainingError: the validations have no such metric.
    """
    known = sorted({name for _, _, values in validation for name in values})
    if goal.name not in known:
        raise TrainingError(
            f"--target {goal.name}: validation_step gives {', '.join(known) or 'nothing'}; name one of them"
        )
    return first_reached(validation, goal)
