"""examples/mnist: reading IDX, finding and downloading the files, the tutorial's network, and runs of all of it."""

import gzip
import hashlib
import json
import os
import re
import shlex
import struct
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from example_modules import load_example
from filelock import FileLock
from http_mirror import HttpMirror, closed_address
from launching import FinishedRun, command, environment, fork_server
from torch.nn import functional as F

import paramserver
from paramserver import Partition
from paramserver.config import load_config
from paramserver.errors import TaskError
from paramserver.launch import make_parser

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "mnist"
TRAIN, TEST = 96, 40
NAMES = ["train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"]


@pytest.fixture(scope="module")
def example():
    return load_example("mnist", "Mnist")


def idx(array, code=0x08):
    return struct.pack(f">HBB{array.ndim}I", 0, code, array.ndim, *array.shape) + array.tobytes()


def contents(train=TRAIN, test=TEST):
    """The four files, by name: noise with a bright row whose place is the label."""
    draw, files = np.random.default_rng(0), []
    for count in (train, test):
        labels = np.arange(count, dtype=np.uint8) % 10
        images = draw.integers(0, 50, (count, 28, 28), dtype=np.uint8)
        images[np.arange(count), labels * 2 + 4] = 255
        files += [idx(images), idx(labels)]
    return dict(zip(NAMES, files, strict=True))


def write(folder, files, compressed=False):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / f"{name}{'.gz' if compressed else ''}").write_bytes(gzip.compress(content) if compressed else content)
    return folder


# IDX.


@pytest.mark.parametrize("compressed", [False, True], ids=["plain", "gz"])
def test_an_idx_file_gives_its_values(example, tmp_path, compressed):
    values = np.random.default_rng(1).integers(0, 256, (5, 3, 2), dtype=np.uint8)
    write(tmp_path, {"a": idx(values)}, compressed)
    read = example.idx.read_idx(tmp_path / ("a.gz" if compressed else "a"), 3)
    assert read.dtype == np.uint8
    assert np.array_equal(read, values)
    assert isinstance(read, np.memmap) != compressed


GOOD = idx(np.arange(12, dtype=np.uint8).reshape(3, 2, 2))
FAULTS = {
    "cut": (GOOD[:-1], r"must hold 12 values \(3 x 2 x 2\), as its header states, and holds 11;"),
    "longer": (GOOD + b"\0", "as its header states, and holds 13;"),
    "empty": (b"", "must begin like an IDX file .*, and begins with nothing;"),
    "header cut": (GOOD[:10], "must have a header of 16 bytes, and ends after 10;"),
    "another magic": (b"\1" + GOOD[1:], r"must begin like an IDX file \(0000 0803\), and begins with 0100 0803;"),
    "no such type": (b"\0\0\7\3" + GOOD[4:], "begins with 0000 0703;"),
    "another type": (idx(np.zeros((3, 2, 2), ">f4"), 0x0D), "must hold values of type uint8, and holds float32;"),
    "labels": (idx(np.zeros(20, np.uint8)), r"must have 3 dimension\(s\), and has 1;"),
}


@pytest.mark.parametrize("compressed", [False, True], ids=["plain", "gz"])
@pytest.mark.parametrize(("content", "message"), FAULTS.values(), ids=FAULTS)
def test_an_idx_file_with_a_fault_is_refused_by_name(example, tmp_path, content, message, compressed):
    write(tmp_path, {"a": content}, compressed)
    path = tmp_path / ("a.gz" if compressed else "a")
    with pytest.raises(TaskError, match=f"^{path} .*{message}") as caught:
        example.idx.read_idx(path, 3)
    assert "\n" not in str(caught.value)


def test_a_damaged_gz_is_refused_by_name(example, tmp_path):
    file, whole = tmp_path / "a.gz", gzip.compress(GOOD)
    for content in (whole[:-9], GOOD, whole[:12] + b"\xff\xff" + whole[14:], whole[:-8] + b"\0" * 8):
        file.write_bytes(content)
        with pytest.raises(TaskError, match=f"^{file} must be a whole gzip file "):
            example.idx.read_idx(file, 3)


# The data set and the network.


def task_of(example, folder, **arguments):
    task = example.task.Mnist(folder=str(folder), download=False, **arguments)
    task.config = load_config(EXAMPLE / "config.yaml")
    return task


def test_samples_are_images_normalised_as_in_the_tutorial(example, tmp_path):
    files = contents()
    task = task_of(example, write(tmp_path, files))
    train, test = task.train_source(Partition(0, 2)), task.validation_source(Partition(1, 2))
    assert (len(train), len(test)) == (TRAIN, TEST)
    image, label = train[13]
    raw = np.frombuffer(files[NAMES[0]], np.uint8, offset=16).reshape(-1, 28, 28)[13]
    assert image.dtype == torch.float32
    assert image.shape == (1, 28, 28)
    torch.testing.assert_close(image[0], torch.from_numpy((raw / 255 - 0.1307) / 0.3081).float())
    assert label == 3
    together = train.__getitems__([2, 13, 2])
    assert [label for _, label in together] == [2, 3, 2]
    assert all(torch.equal(one, train[i][0]) for (one, _), i in zip(together, (2, 13, 2), strict=True))


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        (NAMES[0], np.zeros((TRAIN, 28, 27), np.uint8), f"{NAMES[0]} must hold images of 28 x 28, not 28 x 27"),
        (NAMES[1], np.zeros(TRAIN - 1, np.uint8), r"\(96 images\) must hold as many as .*-labels.* \(95 labels\)"),
        (NAMES[1], np.full(TRAIN, 10, np.uint8), "must hold labels from 0 to 9, and holds 10"),
    ],
)
def test_files_that_do_not_fit_are_refused(example, tmp_path, name, array, message):
    task = task_of(example, write(tmp_path, {**contents(), name: idx(array)}))
    with pytest.raises(TaskError, match=message):
        task.train_source(Partition(0, 1))


def test_the_network_is_the_tutorials(example):
    net = example.task.Net([torch.device("cpu")])
    shapes = {name: tuple(parameter.shape) for name, parameter in net.named_parameters() if "weight" in name}
    assert shapes == {
        "conv1.weight": (32, 1, 3, 3),
        "conv2.weight": (64, 32, 3, 3),
        "fc1.weight": (128, 9216),
        "fc2.weight": (10, 128),
    }
    split = example.task.Net([torch.device("cpu"), torch.device("meta")])
    assert {n for n, p in split.named_parameters() if p.is_meta} == {
        f"fc{i}.{w}" for i in "12" for w in ("weight", "bias")
    }
    images = torch.randn(4, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(3)
    output = net(images)
    torch.manual_seed(3)
    x = F.max_pool2d(net.conv2(F.relu(net.conv1(images))), 2)
    x = F.relu(net.fc1(torch.flatten(F.dropout2d(x, 0.25), 1)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = F.dropout2d(x, 0.5)  # the tutorial's, which warns of rows of numbers
    assert torch.equal(output, F.log_softmax(net.fc2(x), 1))


def test_the_hyper_parameters_are_the_tutorials(example):
    config = load_config(EXAMPLE / "config.yaml")
    assert (config.mode, config.training.batch_size, config.cluster.num_trainers) == ("rpc", 32, 2)
    for arguments in ({}, config.task_args):
        task = example.task.Mnist(**arguments)
        (group,) = task.build_optimizer(torch.nn.Linear(1, 1)).param_groups
        assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.03, 0, 0)


def test_commands_of_the_readme_parse():
    lines = re.findall(r"^python -m paramserver\.launch (.*)$", (EXAMPLE / "README.md").read_text(), re.MULTILINE)
    parsed = [make_parser().parse_args(shlex.split(line, comments=True)) for line in lines]
    assert [(a.rank, a.world_size) for a in parsed] == [(None, None), (0, 3), (1, 3), (2, 3)]
    assert {ROOT / a.config for a in parsed} == {EXAMPLE / "config.yaml"}


# Finding and downloading.


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")


@pytest.fixture(scope="module")
def archives():
    """What a mirror serves, and the checksums."""
    served = {f"{name}.gz": gzip.compress(content, mtime=0) for name, content in contents().items()}
    return served, {name: hashlib.sha256(served[f"{name}.gz"]).hexdigest() for name in NAMES}


def visible(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def test_missing_files_are_downloaded_once_and_only_these(example, tmp_path, archives):
    served, checksums = archives
    write(tmp_path / "deep" / "folder", {NAMES[1]: contents()[NAMES[1]]})
    with HttpMirror(served) as mirror:
        for _ in range(2):
            paths = example.download.provide(tmp_path / "deep" / "folder", mirrors=[mirror.url], checksums=checksums)
            assert sorted(paths) == sorted(NAMES)
    assert mirror.asked == [f"/mnist/{name}.gz" for name in NAMES if name != NAMES[1]]
    assert visible(tmp_path / "deep" / "folder") == sorted([NAMES[1], *(f"{n}.gz" for n in NAMES if n != NAMES[1])])
    assert paths[NAMES[0]].read_bytes() == served[f"{NAMES[0]}.gz"]


def test_a_plain_file_comes_before_its_gz(example, tmp_path):
    write(write(tmp_path, contents(), compressed=True), {NAMES[2]: b""})
    found = example.download.provide(tmp_path, download=False)
    assert {path.name for path in found.values()} == {NAMES[2], *(f"{n}.gz" for n in NAMES if n != NAMES[2])}


def test_the_next_mirror_is_tried(example, tmp_path, archives):
    served, checksums = archives
    wrong = {name: content[:-1] for name, content in served.items()}
    address, kept = closed_address()
    with kept, HttpMirror(wrong) as cut, HttpMirror({}) as empty, HttpMirror(served) as right:
        mirrors = [address, empty.url, cut.url, right.url]
        found = example.download.provide(tmp_path, mirrors=mirrors, checksums=checksums)
    assert len(empty.asked) == len(cut.asked) == len(right.asked) == 4
    assert {n: hashlib.sha256(path.read_bytes()).hexdigest() for n, path in found.items()} == checksums


def refused(example, folder, **arguments):
    """The refusal; nothing may stay in the folder."""
    with pytest.raises(TaskError) as caught:
        example.download.provide(folder, **arguments)
    message = str(caught.value)
    assert message.startswith(f"task_args.folder ({folder}) must hold {', '.join(NAMES)}, plain or as .gz, and ")
    assert message.endswith(
        "; copy them there from https://ossci-datasets.s3.amazonaws.com/mnist/ or "
        "https://storage.googleapis.com/cvdf-datasets/mnist/, or name the folder where they are"
    )
    assert "\n" not in message
    assert not folder.exists() or visible(folder) == []
    return message


@pytest.mark.parametrize("change", [lambda c: c[:-1], lambda c: c + b"\0", lambda c: b"\0" + c[1:]])
def test_what_has_another_checksum_does_not_stay(example, tmp_path, archives, change):
    served, checksums = archives
    with HttpMirror({name: change(content) for name, content in served.items()}) as mirror:
        message = refused(example, tmp_path, mirrors=[mirror.url], checksums=checksums)
    assert f"{mirror.url}{NAMES[0]}.gz: the SHA-256 must be {checksums[NAMES[0]]}, and is " in message
    assert len(mirror.asked) == 1  # the run cannot go on without the first; the others are not asked for


def test_a_download_has_a_deadline(example, tmp_path, archives):
    with HttpMirror(dict.fromkeys(archives[0])) as endless:
        message = refused(example, tmp_path, mirrors=[endless.url], timeout_s=0.2)
    assert "the time for the download is over" in message
    with HttpMirror(archives[0], patience_s=5.0) as silent:
        message = refused(example, tmp_path, mirrors=[silent.url], timeout_s=0.2)
        silent.second.set()
    assert f"{NAMES[0]}.gz: timed out)" in message


def test_without_files_and_network_one_sentence_says_what_to_do(example, tmp_path):
    address, kept = closed_address()
    with kept:
        assert "Connection refused" in refused(example, tmp_path / "none", mirrors=[address])
    assert "no mirror gave" in refused(example, tmp_path / "none", mirrors=[])
    assert "unknown url type" in refused(example, tmp_path / "none", mirrors=["a folder"])
    assert "task_args.download is false" in refused(example, tmp_path / "other", download=False)
    assert not (tmp_path / "other").exists()
    (tmp_path / "file").touch()
    with pytest.raises(TaskError, match="nothing can be written there"):
        example.download.provide(tmp_path / "file" / "below")


def test_another_process_is_waited_for_until_a_deadline(example, tmp_path):
    with FileLock(tmp_path / ".lock"):
        message = refused(example, tmp_path, mirrors=[], timeout_s=0.1)
        task = example.task.Mnist(folder=str(tmp_path))
        task.config = load_config(EXAMPLE / "config.yaml", overrides=["cluster.timeout_s=0.2"])
        with pytest.raises(TaskError, match=r"for 0\.15 s"):  # less than the others wait for this rank
            task.train_source(Partition(0, 1))
    assert f"another process held {tmp_path / '.lock'} for 0.1 s" in message


ASK = """
import json, sys
from pathlib import Path
from download import provide
folder, mirror, checksums = sys.argv[1:]
print("ready", flush=True)
sys.stdin.readline()
print(len(provide(Path(folder), mirrors=[mirror], checksums=json.loads(checksums))))
"""


def test_of_several_processes_one_downloads(tmp_path, archives):
    served, checksums = archives
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(EXAMPLE), str(ROOT)])}
    with HttpMirror(served, patience_s=0.5) as mirror:
        asking = [sys.executable, "-c", ASK, str(tmp_path), mirror.url, json.dumps(checksums)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        processes = [subprocess.Popen(asking, env=environ, **pipes) for _ in range(3)]
        assert [process.stdout.readline() for process in processes] == ["ready\n"] * 3
        for process in processes:
            process.stdin.write("\n")
            process.stdin.flush()
        assert [process.communicate(timeout=90)[0] for process in processes] == ["4\n"] * 3
    assert mirror.asked == [f"/mnist/{name}.gz" for name in NAMES]


# Runs.


def settings(folder, **values):
    values = {"logging.run_dir": folder / "runs", "logging.name": "run", "logging.tensorboard": False, **values}
    return [f"{key}={value}" for key, value in values.items()]


def launch(folder, *flags, **values):
    """The example's command, with keys set, from a folder, in new interpreters."""
    flags += tuple(word for setting in settings(folder, **values) for word in ("--set", setting))
    done = subprocess.run(
        command("--config", EXAMPLE / "config.yaml", *flags),
        capture_output=True,
        text=True,
        timeout=150,
        env=environment(),
        cwd=folder,
        check=False,
    )
    return FinishedRun(done.returncode, done.stdout + done.stderr, folder / "runs" / "run")


@pytest.mark.processes
@pytest.mark.parametrize("mode", ["rpc", "ddp"])
def test_the_example_runs(tmp_path, mode):
    write(tmp_path / "data" / "mnist", contents())
    finished = launch(tmp_path, "--mode", mode, **{"training.validate_every": 1, "task_args.download": False})
    assert finished.code == 0, finished.output
    summary = finished.summary
    assert (summary["num_trainers"], summary["steps"], summary["samples"]) == (2, 2, TRAIN)
    right = summary["validation"]["accuracy"] * TEST
    assert right == pytest.approx(round(right), abs=1e-4)
    assert "arning" not in finished.output + "".join(map(finished.log, range(3 if mode == "rpc" else 2)))
    assert sum(tensor.numel() for tensor in finished.load("model").values()) == 1199882


def test_the_example_learns_in_local(example, tmp_path):
    data = write(tmp_path / "files", contents(), compressed=True)
    values = {"mode": "local", "training.max_epochs": 3, "task_args.folder": data, "task_args.download": False}
    result = paramserver.run(example.task.Mnist, EXAMPLE / "config.yaml", overrides=settings(tmp_path, **values))
    assert result.summary["samples"] == 3 * TRAIN
    assert result.validation["accuracy"] > 0.9  # a bright row says which digit it is


@pytest.mark.processes
def test_a_run_without_files_ends_with_one_sentence(tmp_path):
    address, kept = closed_address()
    flags = [word for setting in settings(tmp_path, **{"task_args.mirrors": [address]}) for word in ("--set", setting)]
    with kept:
        arguments = ["--config", EXAMPLE / "config.yaml", "--mode", "ddp", *flags]
        code, output = fork_server().run(arguments, tmp_path, environ=environment())
    finished = FinishedRun(code, output, tmp_path / "runs" / "run")
    assert finished.code == 2, finished.output
    last = finished.output.splitlines()[-1]
    assert re.match(r"error: rank [01] \(trainer [01]\): task_args\.folder \(data/mnist\) must hold .* refused", last)
    assert finished.output.count("error: ") == 1
    assert "Traceback" not in finished.output
