"""docs/clusters.md: each command parses; the programs that it gives to launchers are tested where these are."""

import configparser
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from paramserver.cluster import resolve_identity
from paramserver.launch import parse, rank_flags, resolve_run

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "clusters.md").read_text()
BLOCKS = re.findall(r"^```bash\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
COMMANDS = [part for block in BLOCKS for line in block.splitlines() for part in re.split(" && | : ", line)]


def launches(words):
    """Parse what follows ``paramserver.launch``, and what torchrun is given before it."""
    place = words.index("paramserver.launch")
    if words[0] == "torchrun":
        assert get_args_parser().parse_args(words[1 : place + 1]).module
    arguments = parse(words[place + 1 :])
    config = resolve_run(arguments)[0]
    return resolve_identity(rank_flags(arguments), {}, config)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_parses(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = shlex.split(command)
    if "paramserver.launch" in words:
        launches(words)
    elif words[0] in ("bash", "sbatch"):
        subprocess.run(["bash", "-n", words[1]], check=True, timeout=10)
    elif words[0] in ("docker", "kubectl"):
        place = words.index("--file" if words[0] == "docker" else "--filename")
        assert Path(words[place + 1]).is_file()
    elif words[:4] == ["python", "-m", "pip", "install"]:
        setup = configparser.ConfigParser()
        setup.read("setup.cfg")
        (extra,) = re.findall(r"\[(\w+)\]", words[-1])
        assert extra in setup["options.extras_require"]
    else:  # its own test runs it
        assert words[:2] in (["torchx", "run"], ["paramserver", "ray"])


def test_the_commands_by_hand_are_the_ranks_of_one_run(monkeypatch):
    monkeypatch.chdir(ROOT)
    section = PAGE.partition("## Several hosts by hand")[2].partition("## SLURM")[0]
    for block in re.findall(r"^```bash\n(.*?)^```$", section, flags=re.MULTILINE | re.DOTALL):
        identities = [launches(shlex.split(line)) for line in block.splitlines()]
        assert [identity.global_rank for identity in identities] == [0, 1, 2]
        assert {identity.world_size for identity in identities} == {3}
