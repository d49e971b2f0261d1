"""From a file, a stored config or a mapping, and the command line, to one checked `Config`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from paramserver.config.checks import check_config
from paramserver.config.overrides import apply_flags, apply_overrides
from paramserver.config.reading import read_file
from paramserver.config.schema import Config
from paramserver.config.settings import Settings, everywhere

_NO_FLAGS: Mapping[str, Any] = MappingProxyType({})


def load_config(
    file: Path | None,
    *,
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] = _NO_FLAGS,
    base: Mapping[str, Any] | None = None,
) -> Config:
    """Build the effective config: flag over ``--set`` over file over default.

    Args:
        file: a YAML file; None = defaults only.
        overrides: ``section.key=value`` texts, as after ``--set``; the later over the earlier.
        flags: values by dotted key; None stands for a flag that was not given.
        base: a stored config (``Config.to_mapping()``) in place of the file, when a run is resumed.

    Raises:
        UnsupportedConfiguration: what the user gave is wrong; the message begins with file and line, or the option.
        ValueError: both ``file`` and ``base``.
    """
    if file is not None and base is not None:
        raise ValueError(f"file ({file}) and base must not be given together; a stored config stands in for the file")
    settings, source = Settings(), ""
    if file is not None:
        source = str(file)
        document = read_file(Path(file))
        settings.assign((), document.value, lambda path: f"{source}:{document.lines.get(path, 1)}")
    elif base is not None:
        source = "the stored config"
        settings.assign((), base, everywhere(source))
    apply_overrides(settings, overrides)
    apply_flags(settings, flags)
    return _checked(settings, source)


def config_from_mapping(mapping: Mapping[str, Any], origin: str | None = None) -> Config:
    """Build a config from nested mappings, as from Python. ``origin`` begins every message.

    Raises:
        UnsupportedConfiguration: a key or value is wrong.
    """
    source = origin or ""
    settings = Settings()
    settings.assign((), mapping, everywhere(source))
    return _checked(settings, source)


def _checked(settings: Settings, source: str) -> Config:
    config = settings.build()
    check_config(config, settings.origins, source)
    return config
