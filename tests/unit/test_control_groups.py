"""The cores that a control group allows, in a tree of files as the kernel shows it."""

import pytest

from paramserver.platform import cpu_limit


def mounted(root, line, files):
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("0::/job/step\n" if "cgroup2" in line else "3:cpu,cpuacct:/job/step\n")
    (root / "proc/self/mountinfo").write_text(line)
    for name, text in files.items():
        (root / "sys" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "sys" / name).write_text(text)


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({"job/step/cpu.max": "150000 100000\n", "job/cpu.max": "400000 100000\n"}, 1.5),
        ({"job/step/cpu.max": "max 100000\n", "job/cpu.max": "400000 100000\n"}, 4.0),
        ({"job/step/cpu.max": "max 100000\n"}, None),
        ({}, None),
    ],
)
def test_the_smallest_limit_of_version_2_counts(tmp_path, files, limit):
    mounted(tmp_path, "1 0 0:1 / /sys rw - cgroup2 cgroup2 rw\n", files)
    assert cpu_limit(tmp_path) == limit


@pytest.mark.parametrize(("quota", "limit"), [("250000", 2.5), ("-1", None)])
def test_version_1_has_a_quota_and_a_period(tmp_path, quota, limit):
    files = {"job/step/cpu.cfs_quota_us": f"{quota}\n", "job/step/cpu.cfs_period_us": "100000\n"}
    mounted(tmp_path, "1 0 0:1 / /sys rw - cgroup cgroup rw,cpu,cpuacct\n", files)
    assert cpu_limit(tmp_path) == limit
