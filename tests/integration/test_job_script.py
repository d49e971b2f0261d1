"""What examples/slurm/job.sh does once its step has ended. SLURM's commands are replaced."""

import json
import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

SCRIPT = Path(__file__).parents[2] / "examples" / "slurm" / "job.sh"


@pytest.mark.parametrize(
    ("code", "earlier", "status", "expected"),
    [
        (3, None, "interrupted", 3),
        (137, None, "interrupted", 3),  # a trainer was killed before, and the run continued without it
        (137, "interrupted", "interrupted", 3),
        (137, None, "completed", 0),
        (0, "interrupted", "completed", 0),
        (1, None, "failed", 1),
        (137, None, None, 137),  # rank 0 was killed
        (2, "interrupted", "", 2),  # it ended before the run began: the summary is that of the turn before
        (3, None, None, 3),
    ],
)
def test_a_job_is_requeued_if_its_run_was_interrupted(tmp_path, code, earlier, status, expected):
    folder = tmp_path / "runs" / "job-7"
    folder.mkdir(parents=True)
    if earlier is not None:
        (folder / "summary.json").write_text(json.dumps({"status": earlier, "time_s": 1}, indent=2))
    after = "" if status == "" else "rm -f runs/job-7/summary.json"
    if status:
        (tmp_path / "written").write_text(json.dumps({"status": status, "time_s": 2}, indent=2))
        after = "cp written runs/job-7/summary.json"
    for name, text in {"srun": f"{after}\nexit {code}", "scontrol": 'echo "$@" > requeued'}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash", SCRIPT], cwd=tmp_path, env=environ, timeout=30, check=False)
    assert done.returncode == expected
    assert (tmp_path / "requeued").exists() == (expected == 3)
