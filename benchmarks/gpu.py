"""FedAvg rounds on a GPU: fl-lightning's engines and options beside a hand-written loop and the arithmetic limit.

    python benchmarks/gpu.py           # about ten minutes
    python benchmarks/gpu.py --tiny    # a small case that also runs on a CPU, to check the script

The setting is CIFAR-10's shape and size (synthetic): 100 clients of 500 images, all in every round, one local epoch in
batches of 64, SGD with momentum, ResNet-8 and ResNet-18. The precision is bf16-mixed on a GPU that has it, and 32-true
elsewhere. All data are on the device. The hand-written loop keeps one local model. Its variant with CUDA graphs is
`torch.compile(mode="reduce-overhead")`: what fl-lightning could gain from capturing its steps.

The limit is the time that the multiplications of the training steps would take at the speed of a large matrix product,
with the same precision and device.

The script prints, for each contestant, the median round, its ratio to the loop's and to the limit, the peak memory of
the main process on the GPU, and the training loss of the last round. The first round selects and compiles kernels, and
is not measured. A contestant that fails, such as for lack of memory, gets a line with the reason. The script stops if
losses are not close.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from fl_lightning import Evaluation, FederatedOrchestrator, LocalTraining
from fl_lightning.algorithms import FedAvg
from fl_lightning.callbacks import Checkpointing, RoundProgress
from fl_lightning.data import IID, Arrays, Scenario
from fl_lightning.engines import ProcessesEngine, SequentialEngine, StackedEngine
from fl_lightning.models import ModelFactory, ResNet8, ResNet18

CLASSES = 10
SGD = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
NETWORKS: dict[str, ModelFactory] = {"resnet8": ResNet8, "resnet18": ResNet18}


@dataclass(frozen=True)
class Workload:
    """The experiment that all contestants run.

    Args:
        network: Builds the network.
        device: Where clients train.
        precision: `bf16-mixed` or `32-true`.
        clients: Number of clients. All of them are in every round.
        samples: Training images of each client.
        batch: Batch size.
        size: Height and width of an image.
        rounds: Timed rounds.
    """

    network: ModelFactory
    device: torch.device
    precision: str
    clients: int = 100
    samples: int = 500
    batch: int = 64
    size: int = 32
    rounds: int = 3

    @property
    def steps(self) -> int:
        """Optimizer steps of a round."""
        return self.clients * -(-self.samples // self.batch)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of an image."""
        return 3, self.size, self.size

    @property
    def half(self) -> bool:
        """Whether products are computed in bfloat16."""
        return self.precision == "bf16-mixed"


class Outcome(NamedTuple):
    """Seconds of each timed round, and the mean training loss of the last."""

    seconds: list[float]
    loss: float


def write_data(path: Path, work: Workload) -> None:
    """Write a pattern for each class under noise."""
    rng = np.random.default_rng(0)
    patterns = rng.normal(size=(CLASSES, *work.shape), scale=0.2).astype(np.float32)
    y = np.arange(work.clients * work.samples) % CLASSES
    x = rng.standard_normal((len(y), *work.shape), dtype=np.float32)
    x += patterns[y]
    np.savez(path, x_train=x, y_train=y, x_test=x[:100], y_test=y[:100])


# --- The contestants --------------------------------------------------------------------------------------------------


def loop(work: Workload, data: Path, folder: Path, channels_last: bool = False, mode: str | None = None) -> Outcome:
    """FedAvg as one would write it by hand."""
    torch.manual_seed(0)
    model, local = (work.network(in_shape=work.shape, num_classes=CLASSES).to(work.device) for _ in range(2))
    with np.load(data) as arrays:
        x, y = (torch.from_numpy(arrays[name]).to(work.device) for name in ("x_train", "y_train"))
    if channels_last:
        x, local = (each.to(memory_format=torch.channels_last) for each in (x, local))
    if mode:
        torch._dynamo.reset()
        local.compile(mode=mode)
    shards = torch.randperm(len(y)).split(work.samples)
    ends, losses = [time.perf_counter()], []
    for _ in range(1 + work.rounds):
        sums = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
        total = torch.zeros((), device=work.device)
        for shard in shards:
            local.load_state_dict(model.state_dict())
            optimizer = SGD(local.parameters())
            for batch in shard[torch.randperm(work.samples)].to(work.device, non_blocking=True).split(work.batch):
                optimizer.zero_grad()
                with torch.autocast(work.device.type, torch.bfloat16, enabled=work.half):
                    loss = F.cross_entropy(local(x[batch]), y[batch])
                loss.backward()
                optimizer.step()
                total += loss.detach()
            for name, value in local.state_dict().items():
                sums[name] += value / work.clients if value.is_floating_point() else 0
        model.load_state_dict(sums)
        losses.append(total.item() / work.steps)  # waits for the device
        ends.append(time.perf_counter())
    return Outcome(np.diff(ends)[1:].tolist(), losses[-1])


def ours(work: Workload, data: Path, folder: Path, **options: Any) -> Outcome:
    """fl-lightning, evaluated and with a checkpoint after the last round only."""
    rounds, engine = 1 + work.rounds, options.pop("engine", SequentialEngine)
    torch._dynamo.reset()
    run = FederatedOrchestrator(
        Scenario(Arrays(str(data)), IID(), work.clients, local_test=0.0),
        work.network,
        FedAvg(),
        rounds=rounds,
        engine=engine(),
        training=LocalTraining(
            batch_size=work.batch,
            optimizer=SGD,
            trainer={"accelerator": "gpu" if work.device.type == "cuda" else "cpu", "precision": work.precision},
            **options,
        ),
        evaluation=Evaluation(every=rounds),
        callbacks=[RoundProgress(Console(quiet=True)), Checkpointing(every=rounds)],
        run_dir=str(folder / "run"),
    )
    run.fit()
    return Outcome([row["time/fit_s"] for row in run.csv.rows[1:]], run.csv.rows[-1]["client/train_loss"])


Contestant = Callable[[Workload, Path, Path], Outcome]
CONTESTANTS: dict[str, Contestant] = {
    "loop": loop,
    "loop, channels last": partial(loop, channels_last=True),
    "loop, compiled": partial(loop, mode="default"),
    "loop, CUDA graphs": partial(loop, mode="reduce-overhead"),
    "eager": ours,
    "channels last": partial(ours, channels_last=True),
    "compiled": partial(ours, compile=True),
    "stacked, 8": partial(ours, engine=partial(StackedEngine, 8)),
    "stacked, 32": partial(ours, engine=partial(StackedEngine, 32)),
    "processes, 2": partial(ours, engine=partial(ProcessesEngine, 2)),
    "processes, 4": partial(ours, engine=partial(ProcessesEngine, 4)),
}


# --- The limit --------------------------------------------------------------------------------------------------------


def limit(work: Workload, rate: float) -> float:
    """Return the seconds that the multiplications of a round's steps take at a rate of operations per second."""
    network: nn.Module = work.network(in_shape=work.shape, num_classes=CLASSES)
    with FlopCounterMode(display=False) as counter:
        outputs = network(torch.zeros(work.batch, *work.shape))
        F.cross_entropy(outputs, torch.zeros(work.batch, dtype=torch.int64)).backward()
    return work.clients * work.samples * counter.get_total_flops() / work.batch / rate


def product_rate(device: torch.device, half: bool) -> float:
    """Return the floating-point operations per second of a large matrix product."""
    n = 8192 if device.type == "cuda" else 1024
    a, b = torch.randn(2, n, n, device=device, dtype=torch.bfloat16 if half else torch.float32)
    times = []
    for _ in range(10):
        started = time.perf_counter()
        (a @ b)[0, 0].item()  # reading a value waits for the device
        times.append(time.perf_counter() - started)
    return 2 * n**3 / min(times)


# --- All of them ------------------------------------------------------------------------------------------------------


def compare(name: str, work: Workload, rate: float, chosen: list[str]) -> None:
    """Print the table of one network."""
    fastest = limit(work, rate)
    print(f"\n{name}: {work.clients} clients, {work.steps} steps a round, {work.rounds} timed rounds, {work.precision}")
    print(f"{'':22}{'s a round':>10}{'ms a step':>11}{'to the loop':>13}{'to the limit':>14}{'GiB':>7}{'loss':>8}")
    print(f"{'limit':22}{fastest:10.3f}{1e3 * fastest / work.steps:11.3f}")
    beside: Outcome | None = None
    with tempfile.TemporaryDirectory() as folder:
        write_data(data := Path(folder) / "images.npz", work)
        for number, contestant in enumerate(chosen):
            place = Path(folder) / str(number)
            place.mkdir()
            peak = Peak(work.device)
            try:
                outcome = CONTESTANTS[contestant](work, data, place)
            except Exception as error:
                print(f"{contestant:22}failed: {str(error).splitlines()[0] if str(error) else type(error).__name__}")
                continue
            beside = beside or outcome
            assert abs(outcome.loss - beside.loss) < max(0.25 * beside.loss, 0.05), f"{contestant}: {outcome.loss}"
            seconds = median(outcome.seconds)
            ratios = f"{seconds / median(beside.seconds):13.2f}{seconds / fastest:14.1f}"
            times = f"{seconds:10.3f}{1e3 * seconds / work.steps:11.3f}"
            print(f"{contestant:22}{times}{ratios}{peak.gibibytes():7.2f}{outcome.loss:8.3f}", flush=True)


class Peak:
    """Peak memory on a GPU since the object was created; 0 on other devices."""

    def __init__(self, device: torch.device) -> None:
        self.counts = device.type == "cuda"
        if self.counts:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def gibibytes(self) -> float:
        """Return the peak in GiB."""
        return torch.cuda.max_memory_allocated() / 2**30 if self.counts else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds (default 3)")
    parser.add_argument("--tiny", action="store_true", help="ResNet-8, 8x8 images, four clients of two steps")
    args = parser.parse_args()
    started = time.time()
    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    half = gpu and torch.cuda.is_bf16_supported(including_emulation=False)
    warnings.filterwarnings("error", "StackedEngine")  # it goes on with one client at a time
    rate = product_rate(device, half)
    where = torch.cuda.get_device_name() if gpu else f"CPU, {torch.get_num_threads()} threads"
    print(f"{where}, torch {torch.__version__}: {rate / 1e12:.2f} TFLOP/s in a matrix product")
    for name in args.networks[: 1 if args.tiny else None]:
        work = Workload(NETWORKS[name], device, "bf16-mixed" if half else "32-true", rounds=args.rounds)
        compare(name, replace(work, clients=4, samples=12, batch=8, size=8) if args.tiny else work, rate, args.only)
    print(f"\n{time.time() - started:.0f} s")


if __name__ == "__main__":
    main()
