"""What the command line changes: ``--set section.key=value`` and the flags that stand for a key."""

from collections.abc import Mapping, Sequence
from typing import Any

from paramserver.config.reading import read_text
from paramserver.config.settings import Settings, everywhere
from paramserver.errors import UnsupportedConfiguration


def apply_overrides(settings: Settings, overrides: Sequence[str]) -> None:
    """Assign each ``key=value``, in order; the value is YAML: 64, or {metric: accuracy, mode: max}.

    Raises:
        UnsupportedConfiguration: no "=", no key, malformed YAML, or what `Settings.assign` refuses.
    """
    for override in overrides:
        origin = f"--set {override}"
        path, value = _parse(override, origin)
        settings.assign(path, value, everywhere(origin))


def _parse(override: str, origin: str) -> tuple[tuple[str, ...], Any]:
    # The first "=" ends the key; a value may hold more of them.
    name, equals, text = override.partition("=")
    path = tuple(part.strip() for part in name.split("."))
    if not equals or not all(path):
        raise UnsupportedConfiguration(f"{origin}: must be key=value; write for example --set training.batch_size=64")
    return path, read_text(text, origin, numbered=False).value


def apply_flags(settings: Settings, flags: Mapping[str, Any]) -> None:
    """Assign values by dotted key; None means that the flag was not given. The flag of a key has its last name."""
    for name, value in flags.items():
        if value is not None:
            settings.assign(tuple(name.split(".")), value, everywhere(f"--{name.rpartition('.')[2]}"))
