"""Compares training on GPUs with loops written by hand: samples per second.

    python -m tests.measure.gpu [--trainers 1] [--model cnn] [--batch 256] [--steps 200] [--cases loop ...]

``loop`` is a plain loop over a DataLoader, with DistributedDataParallel where there are several trainers; ``local``,
``ddp`` and ``rpc`` (one server, its parameters on the CPU) are runs of this package without validation; ``rpc-gpu`` has
the parameters on a GPU (``device.server: cuda``). These two share memory with their trainers; in ``rpc-messages`` and
``rpc-gpu-messages`` everything is sent over RPC. Each trainer has its own GPU, or they share those that there are, with
gloo in place of nccl then. ``--device cpu`` measures the same without a GPU.

Every measurement is a fresh process; the cases are interleaved, in alternating order. A step lasts from one batch to
the next; the first ``--warm`` are left out; of several trainers the slowest counts. No case waits for the GPU between
two steps on behalf of the measurement: this package reads each loss, the loop by hand each tenth one.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import paramserver
from tests.measure.common import (
    MODELS,
    Measured,
    loss_of,
    measured_config,
    measured_in_turn,
    measuring_environment,
    measuring_parser,
    origin,
    parsed,
    read_stamps,
    run_fresh,
    samples_of,
    spread,
    write_stamps,
)
from tests.measure.overhead import timing_of, train_by_hand

ON_GPU = {"device": {"server": "cuda"}}
MESSAGES = {"server": {"transport": "rpc"}}
OURS: dict[str, tuple[str, dict[str, Any]]] = {
    "local": ("local", {}),
    "ddp": ("ddp", {}),
    "rpc": ("rpc", {}),
    "rpc-messages": ("rpc", MESSAGES),
    "rpc-gpu": ("rpc", ON_GPU),
    "rpc-gpu-messages": ("rpc", {**ON_GPU, **MESSAGES}),
}
CASES = ("loop", *OURS)


def cases_of(wanted: list[str], device: str, trainers: int) -> list[str]:
    """The cases that exist for a device and a number of trainers."""
    without = {"local"} if trainers > 1 else {"ddp"}
    without |= {case for case, (_, config) in OURS.items() if device == "cpu" and "device" in config}
    return [case for case in wanted if case not in without]


def run_loop(arguments: argparse.Namespace) -> None:
    """One process of the loop that a user would write."""
    rank, trainers, device = arguments.rank, arguments.trainers, torch.device(arguments.device)
    gpus = torch.cuda.device_count()
    if device.type == "cuda":
        device = torch.device("cuda", rank % gpus)
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    model: Any = MODELS[arguments.model]().to(device)
    data: Any = samples_of(arguments.model)
    sampler: DistributedSampler[object] | None = None
    if trainers > 1:
        backend = "nccl" if device.type == "cuda" and gpus >= trainers else "gloo"
        rendezvous = f"file://{arguments.folder}/rendezvous"
        dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=trainers)
        model = DistributedDataParallel(model, device_ids=None if device.type == "cpu" else [device])
        sampler = DistributedSampler(data)
    loader = DataLoader(data, arguments.batch, sampler is None, sampler, pin_memory=device.type == "cuda")

    def loss_on_device(model: nn.Module, batch: Any) -> Tensor:
        return loss_of(model, [tensor.to(device, non_blocking=True) for tensor in batch])

    write_stamps(arguments.folder, rank, train_by_hand(model, loader, arguments.steps, sampler, [], loss_on_device))
    if trainers > 1:
        dist.destroy_process_group()


def be_child(arguments: argparse.Namespace) -> None:
    """One process of a measurement."""
    if arguments.child == "loop":
        run_loop(arguments)
        return
    mode, sections = OURS[arguments.child]
    task_args = {"model": arguments.model, "folder": str(arguments.folder)}
    config = measured_config(mode, arguments.folder, arguments.steps, arguments.trainers, task_args)
    config["training"]["batch_size"] = arguments.batch
    config["buffer"] = {"capacity": 8 * arguments.batch}
    device = {"kind": arguments.device, "share_gpus": True, **sections.get("device", {})}
    paramserver.run(Measured, {**config, **sections, "device": device})


def measure(case: str, arguments: argparse.Namespace) -> float:
    """One fresh run of a case, in samples per second of all trainers."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["-m", "tests.measure.gpu", "--child", case, "--folder", folder, "--device", arguments.device]
        for name in ("model", "batch", "steps", "trainers"):
            words += [f"--{name}", str(getattr(arguments, name))]
        processes = arguments.trainers if case == "loop" else 1
        run_fresh([[*words, "--rank", str(rank)] for rank in range(processes)], measuring_environment())
        slowest_ms = max(timing_of(stamps, arguments.warm).mean_ms for stamps in read_stamps(Path(folder)))
    return 1e3 * arguments.trainers * arguments.batch / slowest_ms


def report(rates: dict[str, list[float]]) -> str:
    """A line per case: samples per second, and the ratio to the loop, repeat by repeat."""
    lines = []
    for case, taken in rates.items():
        line = f"  {case:18s}{spread(taken, '.0f'):28s}"
        if case != "loop" and "loop" in rates:
            ratios = [own / by_hand for own, by_hand in zip(taken, rates["loop"], strict=True)]
            line += f"{spread(ratios)} of loop"
        lines.append(line.rstrip())
    return "\n".join(lines)


def make_parser() -> argparse.ArgumentParser:
    parser = measuring_parser(__doc__, list(CASES))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--trainers", type=int, default=1)
    parser.add_argument("--model", choices=MODELS, default="cnn")
    parser.add_argument("--batch", type=int, default=256)
    return parser


def main() -> None:
    parser = make_parser()
    arguments = parsed(parser)
    if arguments.child is not None:
        be_child(arguments)
        return
    if arguments.device == "cuda" and not torch.cuda.device_count():
        parser.error("--device (cuda) must find a GPU, and torch finds none; use --device cpu")
    cases = cases_of(arguments.cases, arguments.device, arguments.trainers)
    rates = measured_in_turn(cases, arguments.repeats, lambda case: measure(case, arguments), ".0f")
    print(origin())
    if arguments.device == "cuda":
        print(f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}")
    about = f"{arguments.model}, {arguments.trainers} trainer(s), batch {arguments.batch}"
    print(f"{about}: samples/s, median (least to greatest)")
    print(report(rates))


if __name__ == "__main__":
    main()
