"""Real children: their arguments, their exit codes, and that nothing of them is left."""

import errno
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from process_states import is_alive, wait_until_ended

from paramserver.config import SimulationsConfig
from paramserver.errors import StorageError, TrainingError, UnsupportedConfiguration
from paramserver.online.process_runner import LaunchCommand, ProcessRunner
from paramserver.online.spec import IngestSpec
from paramserver.online.tracker import StartProcess
from paramserver.platform import PORTABLE

ROOT = Path(__file__).parents[3]
PARAMETERS = {"left": [0, 1], "right": [0, 1]}
DEADLINE_S = 20.0
ENDED = -signal.SIGKILL  # a guard that ends its group ends with it


def spec_of(**options):
    defaults = {"count": 4, "fields": {"t": [2]}, "parameters": PARAMETERS, "launcher": "local"}
    return IngestSpec.from_config(SimulationsConfig(**{**defaults, **options}))


@pytest.fixture
def runner_of(tmp_path):
    """Runners that leave nothing."""
    made = []

    def make(environ=None, folders=(), **options):
        own = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **(environ or {})}
        made.append(ProcessRunner(spec_of(**options), tmp_path / "logs", folders, own))
        return made[-1]

    yield make
    for runner in made:
        runner.kill_all()
        wait_for(runner)
        assert runner.exit_pipes == []


def wait_for(runner):
    """All exits, in order; woken by the pipes and not by the clock."""
    found, deadline = [], time.monotonic() + DEADLINE_S
    while runner.running:
        assert time.monotonic() < deadline
        select.select(runner.exit_pipes, [], [], 0.2)
        found += runner.poll_exited()
    return found


def script(tmp_path, text, name="program.py"):
    file = tmp_path / name
    file.write_text(text)
    return f"{sys.executable} {file}"


def log(tmp_path, simulation=0):
    return (tmp_path / "logs" / f"simulation-{simulation}.log").read_text()


def start(runner, simulation=0, attempt=0, parameters=(0.25, 1 / 3)):
    runner.start(StartProcess(simulation, attempt, parameters), "tcp://127.0.0.1:5", "a secret")


def pids_in(tmp_path, count, simulation=0):
    """What the program printed of itself and its children, as soon as it is all there."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        words = log(tmp_path, simulation).partition("\n")[2].split()
        if len(words) >= count:
            return [int(word) for word in words]
        select.select([], [], [], 0.02)
    raise AssertionError(log(tmp_path, simulation))


# Arguments and environment.


def test_a_command_gets_its_placeholders_and_runs_by_no_shell(runner_of, tmp_path):
    program = script(tmp_path, "import sys, json; print(json.dumps(sys.argv[1:]))")
    runner = runner_of(
        command=f"{program} --id={{simulation}} {{attempt}} '{{right}} {{left}}' {{{{left}}}} '{{}}' $HOME"
    )
    start(runner, simulation=3, attempt=1)
    assert wait_for(runner) == [(3, 1, 0)]
    head, printed = log(tmp_path, 3).splitlines()
    assert json.loads(printed) == ["--id=3", "1", f"{1 / 3!r} 0.25", "{left}", "{}", "$HOME"]
    assert head.startswith("--- simulation 3, attempt 1, ")
    assert "--id=3" in head


@pytest.mark.claim("simulation-folder")
@pytest.mark.parametrize(
    ("command", "found"),
    [
        ("./solver --t0 1", ["{config}/solver", "--t0", "1"]),
        ("bin/solve-{simulation} cases/{simulation}.txt", ["{config}/bin/solve-3", "{config}/cases/3.txt"]),
        ("python solver.py", ["python", "{config}/solver.py"]),
        ("python -u elsewhere.py 1.5", ["python", "-u", "{here}/elsewhere.py", "1.5"]),  # of the current folder only
        ("python data", ["python", "data"]),  # perhaps a word and no file
        ("python new.txt", ["python", "new.txt"]),
        ("python " + 5000 * "x.", ["python", 5000 * "x."]),
        ("{config}/solver", ["{config}/solver"]),
    ],
)
def test_files_of_a_command_are_those_of_the_folder_of_the_config(tmp_path, monkeypatch, command, found):
    config, here, programs = tmp_path / "config", tmp_path / "here", tmp_path / "programs"
    files = ["solver", "solver.py", "data", "python", "bin/solve-3", "cases/3.txt"]
    for file in [*(config / name for name in files), here / "elsewhere.py", here / "solver.py", programs / "python"]:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(0o755)
    monkeypatch.chdir(here)
    names = {"config": config, "here": here, "simulation": "{simulation}"}
    launch = LaunchCommand(spec_of(command=command.format(**names)), [config, here], {"PATH": str(programs)})
    assert launch.arguments(StartProcess(3, 0, (0.0, 1.0))) == [word.format(**names) for word in found]


@pytest.mark.claim("simulation-folder")
def test_a_program_of_the_folder_of_the_config_runs(runner_of, tmp_path):
    file = tmp_path / "config" / "solver"
    file.parent.mkdir()
    file.write_text("#!/bin/sh\necho $1\n")
    file.chmod(0o755)
    runner = runner_of(command="./solver {simulation}", folders=[file.parent])
    start(runner, simulation=3)
    assert wait_for(runner) == [(3, 0, 0)]
    assert log(tmp_path, 3).splitlines()[1] == "3"


@pytest.mark.claim("wrong-shape")
@pytest.mark.parametrize(
    ("printed", "line"),
    [
        (r"one\ntwo: 3\t4\n\n  \n", "two: 3 4"),
        ("", ""),
        (10_000 * "x", 400 * "x"),
        (r"\xff\n", "\N{REPLACEMENT CHARACTER}"),
    ],
)
def test_the_last_line_of_an_attempt_is_one_printable_line(runner_of, tmp_path, printed, line):
    runner = runner_of(
        command=script(tmp_path, f"import os, sys; os.write(1, b'{printed}' * (sys.argv[1] == '1'))") + " {attempt}"
    )
    for attempt, expected in ((1, line), (2, "")):
        start(runner, attempt=attempt)
        wait_for(runner)
        assert runner.last_line(0) == expected
    (tmp_path / "logs" / "simulation-0.log").unlink()
    assert runner.last_line(0) == ""


def test_a_program_finds_the_run_by_its_environment(runner_of, tmp_path):
    # print writes a line and its end one after the other, and the other member could write between them.
    shown = (
        "import os, json\n"
        "own = json.dumps({k: v for k, v in os.environ.items() if k[:3] in ('PAR', 'OMP')})\n"
        "os.write(1, own.encode() + b'\\n')\n"
    )
    runner = runner_of(command=script(tmp_path, shown), keys=str(tmp_path), group_size=2)
    start(runner, attempt=2)
    assert wait_for(runner) == [(0, 2, 0)]
    found = sorted(
        (json.loads(line) for line in log(tmp_path).splitlines()[1:]), key=lambda one: one["PARAMSERVER_MEMBER"]
    )
    assert found == [
        {
            "PARAMSERVER_ADDRESS": "tcp://127.0.0.1:5",
            "PARAMSERVER_SIMULATION": "0",
            "PARAMSERVER_PARAMETERS": json.dumps([0.25, 1 / 3]),
            "PARAMSERVER_ATTEMPT": "2",
            "PARAMSERVER_MEMBER": str(member),
            "PARAMSERVER_MEMBERS": "2",
            "PARAMSERVER_KEYS": str(tmp_path),
            "PARAMSERVER_SECRET": "a secret",
            "OMP_NUM_THREADS": "1",
        }
        for member in range(2)
    ]


def test_output_of_all_attempts_is_in_one_log(runner_of, tmp_path):
    program = script(tmp_path, "import sys; print('out'); print('err', file=sys.stderr); sys.exit(int(sys.argv[1]))")
    runner = runner_of(command=f"{program} {{attempt}}")
    for attempt in range(2):
        start(runner, attempt=attempt)
        assert wait_for(runner) == [(0, attempt, attempt)]
    text = log(tmp_path)
    assert text.count("--- simulation 0, attempt") == text.count("out\n") == text.count("err\n") == 2
    assert text.index("attempt 0") < text.index("out") < text.index("attempt 1")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"command": "echo {lefft}"}, r"has \{lefft\}, but only \{simulation\}, \{attempt\}, \{left\}, \{right\} are"),
        ({"command": "echo 'open"}, r"cannot be split \(No closing quotation\)"),
        ({"command": "''"}, "begins with , which is no program"),
        ({"command": "no-such-program {left}"}, "begins with no-such-program, which is no program on the PATH"),
        ({"command": "echo", "parameters": {"attempt": [0, 1]}}, r"attempt must have another name than \{attempt\}"),
        ({"command": "echo", "parameters": {"T 0": [0, 1]}}, r"\('T 0'\) must have letters, digits, _, \. and - only"),
        ({"command": None, "function": "__main__:main"}, r"each process can import; write path/to/file.py:main$"),
        ({"command": "echo", "launcher": "srun"}, r"launcher \(srun\) needs srun, which is not on the PATH"),
    ],
)
def test_a_command_that_cannot_work_is_refused_at_once(runner_of, tmp_path, options, sentence):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "echo").symlink_to(shutil.which("echo"))
    with pytest.raises(UnsupportedConfiguration, match=sentence):
        runner_of(environ={"PATH": str(tmp_path / "bin")}, **options)


# Exits.


def test_what_the_system_refuses_at_a_start_is_one_sentence(runner_of, tmp_path, monkeypatch):
    runner = runner_of(command="true")
    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "Popen", Mock(side_effect=OSError(errno.E2BIG, "Argument list too long")))
        with pytest.raises(TrainingError, match=r"^simulation 0 cannot be started \(.*Argument list too long"):
            start(runner)
    wait_for(runner)
    (tmp_path / "logs" / "simulation-1.log").mkdir()
    with pytest.raises(StorageError, match=r"^log .*simulation-1.log could not be written \(.*Is a directory"):
        start(runner, simulation=1)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no full disk")
def test_a_full_disk_is_named(runner_of, tmp_path):
    runner = runner_of(command="true")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "simulation-0.log").symlink_to("/dev/full")
    with pytest.raises(StorageError, match=r"^log .*simulation-0.log could not be written \(.*No space left.*; free"):
        start(runner)


@pytest.mark.parametrize(("code", "seen"), [("exit(0)", 0), ("exit(5)", 5), ("os.kill(os.getpid(), 9)", 137)])
def test_an_end_is_seen_with_its_exit_code(runner_of, tmp_path, code, seen):
    runner = runner_of(command=script(tmp_path, f"import os; {code}"))
    start(runner, simulation=2)
    assert runner.exit_pipes
    assert wait_for(runner) == [(2, 0, seen)]
    assert runner.poll_exited() == []


def test_a_program_that_vanished_is_reported_in_the_log(runner_of, tmp_path):
    file = tmp_path / "vanishing"
    file.write_text("#!/bin/sh\n")
    file.chmod(0o755)
    runner = runner_of(command=str(file))
    file.unlink()
    start(runner)
    assert wait_for(runner) == [(0, 0, 127)]
    assert f"{file} cannot be started: No such file or directory" in log(tmp_path)


FAMILY = r"""
import os, signal, sys, time
child = os.fork()
if child == 0:
    if "deaf" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.write(1, b"%d\n" % os.getpid())
else:
    if "deaf" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.write(1, b"%d\n" % os.getpid())
    if "leaves" in sys.argv:
        while len(open(sys.argv[1]).read().split(chr(10), 1)[1].split()) < 2:
            pass
        sys.exit(0)
signal.pause()
"""


def test_one_that_hangs_is_ended_with_its_children(runner_of, tmp_path):
    runner = runner_of(command=script(tmp_path, FAMILY), group_size=2)
    start(runner)
    start(runner, simulation=1)
    pids, others = pids_in(tmp_path, 4), pids_in(tmp_path, 4, simulation=1)
    began = time.monotonic()
    runner.kill(0)
    runner.kill(0)
    while not (ended := runner.poll_exited()):
        select.select(runner.exit_pipes, [], [], 0.2)
    assert ended == [(0, 0, ENDED)]
    assert time.monotonic() - began < 1.5  # it listened
    wait_until_ended(pids)
    assert all(map(is_alive, others))
    runner.kill_all()
    assert wait_for(runner) == [(1, 0, ENDED)]
    wait_until_ended(others)


def test_one_that_ignores_sigterm_is_killed_after_two_seconds(runner_of, tmp_path):
    runner = runner_of(command=script(tmp_path, FAMILY) + " deaf")
    start(runner)
    pids = pids_in(tmp_path, 2)
    began = time.monotonic()
    runner.kill(0)
    assert wait_for(runner) == [(0, 0, ENDED)]
    assert 1.9 < time.monotonic() - began < 5.0
    wait_until_ended(pids)


def test_what_a_program_leaves_behind_is_ended_with_it(runner_of, tmp_path):
    runner = runner_of(command=script(tmp_path, FAMILY) + f" {tmp_path}/logs/simulation-0.log leaves")
    start(runner)
    assert wait_for(runner) == [(0, 0, 0)]
    wait_until_ended(pids_in(tmp_path, 2))


LEAVES_THE_GROUP = """
import os, signal, sys
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        if "deaf" in sys.argv:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.write(1, b"%d\\n" % os.getpid())
        signal.pause()
    os._exit(0)
os.wait()
if "waits" in sys.argv:
    signal.pause()
"""


@pytest.mark.skipif(PORTABLE, reason="only Linux lists the descendants of a process")
@pytest.mark.parametrize("how", ["", " waits", " waits deaf"])
def test_no_process_outlives_its_attempt_in_a_group_of_its_own(runner_of, tmp_path, how):
    runner = runner_of(command=script(tmp_path, LEAVES_THE_GROUP) + how)
    start(runner)
    if how:
        pids_in(tmp_path, 1)
        runner.kill(0)
    assert wait_for(runner) == [(0, 0, ENDED if how else 0)]
    wait_until_ended(pids_in(tmp_path, 1) if how else [int(word) for word in log(tmp_path).partition("\n")[2].split()])


def test_a_program_starts_with_the_signals_of_a_shell(runner_of, tmp_path):
    runner = runner_of(command="sh -c 'yes | head -1; grep SigIgn /proc/self/status'")
    start(runner)
    assert wait_for(runner) == [(0, 0, 0)]
    *_, printed, _, ignored = log(tmp_path).split()
    assert printed == "y"
    # Those that Python ignores; what started the tests, as nohup or a background job, may ignore others.
    assert int(ignored, 16) & (1 << signal.SIGPIPE - 1 | 1 << signal.SIGXFSZ - 1) == 0


def test_a_frozen_guard_is_ended_with_its_program(runner_of, tmp_path, monkeypatch):
    monkeypatch.setattr("paramserver.online.process_runner._GUARD_GRACE_S", 0.3)
    runner = runner_of(command=script(tmp_path, FAMILY))
    start(runner)
    pids = pids_in(tmp_path, 2)
    os.kill(runner._running[0].guards[0].process.pid, signal.SIGSTOP)
    runner.kill(0)
    assert wait_for(runner) == [(0, 0, ENDED)]
    wait_until_ended(pids)


def test_a_group_ends_with_its_first_failure(runner_of, tmp_path):
    text = "import os, signal\nos.write(1, b'%d\\n' % os.getpid())\n"
    text += "if os.environ['PARAMSERVER_MEMBER'] == '1': os._exit(9)\n"
    runner = runner_of(command=script(tmp_path, text + "signal.pause()"), group_size=3)
    start(runner)
    assert wait_for(runner) == [(0, 0, 9)]
    wait_until_ended(pids_in(tmp_path, 1))


RUN = """
import os, signal, sys
from pathlib import Path
from paramserver.config import SimulationsConfig
from paramserver.online.spec import IngestSpec
from paramserver.online.process_runner import LaunchCommand, ProcessRunner
from paramserver.online.tracker import StartProcess
from paramserver.platform import PORTABLE
config = SimulationsConfig(command=sys.argv[1], count=1, fields={"t": [2]}, launcher="local")
runner = ProcessRunner(IngestSpec.from_config(config), Path(sys.argv[2]))
runner.start(StartProcess(0, 0, ()), "tcp://127.0.0.1:5", "a secret")
signal.pause()
"""


@pytest.mark.parametrize("how", ["", " deaf"])
def test_nothing_outlives_a_run_that_was_killed(tmp_path, how):
    command = [sys.executable, "-c", RUN, script(tmp_path, FAMILY) + how, str(tmp_path / "logs")]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}) as run:
        while not (tmp_path / "logs" / "simulation-0.log").exists():
            select.select([], [], [], 0.02)
        pids = pids_in(tmp_path, 2)
        run.kill()
    wait_until_ended(pids)


# srun.


FAKE_SRUN = """#!/bin/sh
echo "srun $*"
shift 4
SLURM_PROCID=0 "$@" & SLURM_PROCID=1 "$@" & wait
"""


@pytest.mark.parametrize(
    ("launcher", "job", "used"), [("auto", "7", 1), ("auto", "", 0), ("srun", "", 1), ("local", "7", 0)]
)
def test_in_an_allocation_one_srun_starts_the_whole_group(runner_of, tmp_path, launcher, job, used):
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text(FAKE_SRUN)
    srun.chmod(0o755)
    environ = {"PATH": f"{srun.parent}:{os.environ['PATH']}", "SLURM_JOB_ID": job}
    shown = (
        "import os\n"
        'own = f\'member {os.environ.get("SLURM_PROCID")} {os.environ.get("PARAMSERVER_MEMBER")}\'\n'
        "os.write(1, own.encode() + b'\\n')\n"
    )
    runner = runner_of(environ, command=script(tmp_path, shown), group_size=2, launcher=launcher)
    start(runner)
    assert wait_for(runner) == [(0, 0, 0)]
    lines = log(tmp_path).splitlines()[1:]
    assert sum(line.startswith("srun --ntasks=2 --exact --kill-on-bad-exit=1 --input=none ") for line in lines) == used
    members = sorted(line for line in lines if line.startswith("member"))
    assert members == (["member 0 None", "member 1 None"] if used else ["member None 0", "member None 1"])


def test_a_group_of_srun_is_ended_as_one(runner_of, tmp_path):
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text(FAKE_SRUN.replace("echo", "true"))
    srun.chmod(0o755)
    environ = {"PATH": f"{srun.parent}:{os.environ['PATH']}"}
    runner = runner_of(environ, command=script(tmp_path, FAMILY), group_size=2, launcher="srun")
    start(runner)
    pids = pids_in(tmp_path, 4)
    runner.kill(0)
    assert wait_for(runner) == [(0, 0, ENDED)]
    wait_until_ended(pids)
