"""All commands: both forms of each, names of flags, words that are no command, completion."""

import argparse
import importlib.util
import runpy
import subprocess
import sys

import pytest

from paramserver import cli
from paramserver._commands import COMMANDS, MEANT
from paramserver.launch import CommandParser

MODULES = [*COMMANDS, "reporting"]


def usage_of(monkeypatch, capsys, run, words):
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", MODULES)
@pytest.mark.filterwarnings("ignore:'paramserver.*' found in sys.modules:RuntimeWarning")
def test_both_forms_of_each_command_are_the_same(command, monkeypatch, capsys):
    module = usage_of(
        monkeypatch,
        capsys,
        lambda: runpy.run_module(f"paramserver.{command}", run_name="__main__", alter_sys=True),
        [command, "--help"],
    )
    name = "report" if command == "reporting" else command
    console = usage_of(monkeypatch, capsys, cli.main, ["paramserver", name, "--help"])
    assert module == console
    assert f"{name} " in module.splitlines()[0].replace(".", " ")


def test_the_package_itself_is_the_console_script():
    done = subprocess.run(
        [sys.executable, "-m", "paramserver", "--help"], capture_output=True, text=True, timeout=60, check=True
    )
    assert [line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ") and line[2] != " "] == [
        *COMMANDS
    ]


def test_a_module_that_is_no_command_is_not_found():
    assert importlib.util.find_spec("paramserver.train") is None
    assert importlib.util.find_spec("paramserver.buffers.__main__") is None


@pytest.mark.parametrize("command", COMMANDS)
def test_each_flag_of_each_command_may_be_written_with_dashes(command):
    """As the flags of two kinds that argparse knows here: with a value and without."""
    parser = COMMANDS[command].make_parser()
    assert type(parser) is CommandParser
    for group in (*parser._actions, *parser._mutually_exclusive_groups):
        group.required = False
    for action in parser._actions:
        if isinstance(action, argparse._StoreAction) and not action.option_strings:
            action.nargs = "?"
    for action in parser._actions:
        flags = [flag for flag in action.option_strings if "_" in flag]
        for flag in flags:
            value = [] if action.nargs == 0 else [str((action.choices or ["7"])[0])]
            underscores, dashes = ([name, *value] for name in (flag, flag.replace("_", "-")))
            assert parser.parse_args(dashes) == parser.parse_args(underscores)
            assert vars(parser.parse_args(dashes)) != vars(parser.parse_args([])), flag


@pytest.mark.parametrize(
    ("word", "meant"), [*MEANT.items(), ("lanch", "launch"), ("docter", "doctor"), ("trian", "launch")]
)
def test_a_word_that_is_no_command_names_the_one_that_is_meant(word, meant, monkeypatch, capsys):
    assert meant in COMMANDS
    assert word not in COMMANDS
    monkeypatch.setattr(sys, "argv", ["paramserver", word])
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    message = f"error: paramserver {word}: there is no such command; did you mean paramserver {meant}?\n"
    assert capsys.readouterr().err == message


def completed(script, *words):
    """What bash offers for the last of these words."""
    program = (
        'source "$0"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); function=$(complete -p "$1"); '
        "function=${function#*-F }; "
        '${function%% *} "$1" "${@: -1}" "${@: -2:1}"; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    command = ["bash", "-c", program, script, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.split()


def test_a_shell_completes_commands_and_flags(tmp_path, capsys):
    pytest.importorskip("shtab")
    assert cli.completion_main(["bash"]) == 0
    script = tmp_path / "paramserver.bash"
    script.write_text(capsys.readouterr().out)
    assert set(COMMANDS) <= set(completed(script, "paramserver", ""))
    assert {"--config", "--dry_run", "--resume"} <= set(completed(script, "paramserver", "launch", "--"))
    assert str(script) in completed(script, "paramserver", "launch", "--config", str(script)[:-3])


def test_completion_without_its_extra_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert cli.completion_main(["bash"]) == 2
    assert capsys.readouterr().err == (
        "error: paramserver completion needs shtab; install the extra completion, or shtab\n"
    )
