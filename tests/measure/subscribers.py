"""Subscribers of a run: what they cost it, how late a version arrives, how few bytes a difference takes.

    python -m tests.measure.subscribers [--cases throughput latency difference whole] [--subscribers 64] [--steps 100]
                                        [--repeats 5] [--reads 10000]

- ``throughput``: an MLP of 1.9 million parameters, two trainers whose batches sleep for 100 ms, ``rpc`` and ``ddp``. As
  many processes as ``--subscribers`` take every 10th version and read all of its bytes. The ratio is of steps per
  second with them to those without, in turns. Also of each: the longest step, and by how much the steps in which a
  version is published take longer than the usual one, as a median.
- ``latency``: from the end of an update to the array in another process, 7.6 MB, and the time of the copy in between.
- ``difference``: bytes of one version in bfloat16 after 500 steps of Adam, whole and as a difference, by learning rate.
- ``whole``: versions of a model whose numbers are all its step, by processes that are killed at random with the run's,
  until there were as many reads as ``--reads``; none may be torn, or older than the one before.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from paramserver.config import PublishConfig
from paramserver.online.publisher import ModelPublisher, ModelVersion
from paramserver.online.weights import Version, encode_difference
from paramserver.subscriber import Subscriber
from tests.measure.common import (
    Measured,
    loss_of,
    measured_config,
    measuring_environment,
    mlp,
    optimizer_of,
    origin,
    parser_of,
    random_images,
    read_stamps,
    run_fresh,
    spread,
)

HELPERS = Path(__file__).parents[1] / "helpers"
WARM = 10
EVERY = 10  # steps from a version that is published to the next one
RATES = (1e-6, 1e-5, 1e-4)


class Sleeping(Measured):
    """A batch takes 100 ms without computing, as that of a trainer with a core of its own."""

    def training_step(self, model: nn.Module, batch: Any, batch_idx: int) -> Tensor:
        time.sleep(0.1)
        return loss_of(model, batch)


def start_follower(address: str, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(HELPERS / "follower.py"), address, *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def free_address() -> tuple[str, int]:
    with tempfile.TemporaryDirectory() as name, ModelPublisher(PublishConfig(), "", 1, 0, Path(name) / "x") as probe:
        return probe.address, int(probe.address.rpartition(":")[2])


def train(mode: str, arguments: argparse.Namespace, subscribers: int) -> list[float]:
    """Seconds of each step of a run, after the first ones."""
    address, port = free_address()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        config = measured_config(mode, folder, arguments.steps, 2, {"model": "mlp", "folder": name})
        config |= {"task": f"{__file__}:Sleeping", "publish": {"port": port, "every": EVERY}}
        file = folder / "config.yaml"
        file.write_text(yaml.safe_dump(config), encoding="utf-8")
        followers = [start_follower(address) for _ in range(subscribers)]
        for follower in followers:
            stack.callback(follower.kill)
        run_fresh([["-m", "paramserver.launch", "--config", str(file)]], measuring_environment(), timeout_s=600.0)
        read = [follower.communicate(timeout=60)[0].splitlines()[-1].split() for follower in followers]
        expected = arguments.steps / EVERY / 2  # those that start last miss some
        assert all(float(versions) > expected for versions, _, _ in read), read
        stamps = [stamp[0] for stamp in read_stamps(folder)[0]][WARM:]
    return [after - before for before, after in pairwise(stamps)]


def throughput(arguments: argparse.Namespace) -> None:
    for mode in ("rpc", "ddp"):
        ratios, longest, pauses = [], ([], []), ([], [])  # type: ignore[var-annotated]
        for _ in range(arguments.repeats):
            without, with_them = train(mode, arguments, 0), train(mode, arguments, arguments.subscribers)
            ratios.append(statistics.mean(without) / statistics.mean(with_them))
            longest[0].append(1e3 * (max(without) - statistics.median(without)))
            longest[1].append(1e3 * (max(with_them) - statistics.median(without)))
            for found, steps in zip(pauses, (without, with_them), strict=True):
                found.append(pause_ms(steps))
        print(f"{mode}: {arguments.subscribers} subscribers, steps per second against none: {spread(ratios, '.3f')}")
        print(f"  longest step less the usual one: {spread(longest[0], '.1f')} and {spread(longest[1], '.1f')} ms")
        print(f"  the pause for a version: {spread(pauses[0], '.1f')} and {spread(pauses[1], '.1f')} ms")


def pause_ms(steps: list[float]) -> float:
    """How much longer the step takes in which a version is published, one of ten; of single steps the medians."""
    usual = statistics.median(steps)
    return 1e3 * max(statistics.median(steps[place::EVERY]) - usual for place in range(EVERY))


def latency(arguments: argparse.Namespace) -> None:
    model, copies, delays, told = mlp(), [], [], {}
    with (
        tempfile.TemporaryDirectory() as name,
        ModelPublisher(PublishConfig(), "run", 1, 0, Path(name) / "publisher.json") as publisher,
        Subscriber(publisher.address) as subscriber,
    ):
        publisher.is_wanted(0)
        publisher.publish(0, model.state_dict())
        version = subscriber.latest(10).version

        def receive() -> None:
            nonlocal version
            for _ in range(50):
                newer = subscriber.newer_than(version, 30)
                assert newer is not None
                delays.append(1e3 * (time.monotonic() - told[newer.step]))
                version = newer.version

        thread = threading.Thread(target=receive)
        thread.start()
        for step in range(1, 10**6):
            if not thread.is_alive():
                break
            time.sleep(0.02)  # an update
            told[step] = began = time.monotonic()
            if publisher.is_wanted(step):
                publisher.publish(step, model.state_dict())
                copies.append(1e3 * (time.monotonic() - began))
        thread.join()
    print(f"latency: update to array of {sum(p.nbytes for p in model.parameters()) / 1e6:.1f} MB {spread(delays)} ms")
    print(f"  of which the copy, for which training waits: {spread(copies)} ms")


def difference(arguments: argparse.Namespace) -> None:
    images = random_images()
    for rate in RATES:
        torch.manual_seed(0)
        model, generator = mlp(), torch.Generator().manual_seed(0)
        optimizer = optimizer_of(model, "adam")
        for group in optimizer.param_groups:
            group["lr"] = rate
        versions = []
        for step in range(501):
            chosen = torch.randint(len(images), (32,), generator=generator).tolist()
            batch = [torch.stack(part) for part in zip(*(images[index] for index in chosen), strict=True)]
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
            if step >= 499:
                versions.append(ModelVersion(Version(1, step), model.state_dict()).rounded[1])
        frames = encode_difference(*versions)
        whole = len(versions[1])
        sent = whole if frames is None else sum(map(len, frames))
        print(f"difference: Adam, lr {rate:g}: {sent:,} of {whole:,} bytes, 1/{whole / sent:.1f}")


def whole(arguments: argparse.Namespace) -> None:
    reads = runs = kills = 0
    drawn = random.Random(arguments.seed)
    while reads < arguments.reads:
        address, port = free_address()
        mode, target = drawn.choice([("rpc", 0), ("rpc", 1), ("rpc", 2), ("ddp", 0), ("ddp", 1)])
        with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
            folder = Path(name)
            config = {
                "task": f"{HELPERS / 'published_tasks.py'}:CountedWithFault",
                "task_args": {"folder": name, "fault": "kill", "target": target, "compute_s": 0.005},
                "mode": mode,
                "cluster": {"num_trainers": 2},
                # Up to 256 a whole number is exact in bfloat16.
                "training": {"max_steps": 250, "batch_size": 4, "validate_every": 0},
                "checkpoint": {"every": drawn.randint(2, 6)},
                "logging": {"run_dir": name, "name": "run", "tensorboard": False},
                "publish": {"port": port},
            }
            file = folder / "config.yaml"
            file.write_text(yaml.safe_dump(config), encoding="utf-8")
            followers = [
                start_follower(address, kind, "counted") for kind in ("exact", "exact", "bfloat16", "bfloat16")
            ]
            for follower in followers:
                stack.callback(follower.kill)
            environ = {**measuring_environment(), "PYTHONPATH": f"{HELPERS}:{HELPERS.parents[1]}"}
            victim = drawn.choice(followers)
            killer = threading.Timer(drawn.uniform(2.0, 6.0), victim.kill)
            killer.start()
            run_fresh([["-m", "paramserver.launch", "--config", str(file)]], environ, timeout_s=300.0)
            killer.cancel()
            kills += (folder / "mark").exists()
            for follower in followers:
                output = follower.communicate(timeout=60)[0]
                if follower.returncode == 0:
                    reads += int(output.splitlines()[-1].split()[0])
                elif follower is not victim or follower.returncode != -9:
                    raise RuntimeError(f"{mode}, rank {target} killed:\n{output}")
        runs += 1
        print(f"  {reads} reads in {runs} runs", file=sys.stderr)
    print(f"whole: {reads:,} reads in {runs} runs with {kills} deaths of ranks: none torn, none older")


CASES = {"throughput": throughput, "latency": latency, "difference": difference, "whole": whole}


def main() -> None:
    parser = parser_of(__doc__, subscribers=64, steps=100, repeats=5, reads=10_000, seed=0)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    arguments = parser.parse_args()
    print(origin())
    for case in arguments.cases:
        CASES[case](arguments)


if __name__ == "__main__":
    main()
