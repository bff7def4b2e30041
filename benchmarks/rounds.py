"""Compare the time of a FedSKC round with the arithmetic limit of the device.

    python benchmarks/rounds.py [--samples 50000] [--rounds 3]

The setting is that of the FedSKC paper: images of CIFAR-100's shape (synthetic, augmented), ResNet-8, 8 of 20 clients
per round, 10 epochs, batches of 64. The precision is bf16-mixed on a GPU and 32-true elsewhere.

The limit is the time that the multiplications of the training steps would take at the speed of a large matrix product,
with the same precision and device. The variants run in alternation. The first round of a run is not measured, because
it selects and compiles kernels.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from fl_lightning import Evaluation, FederatedOrchestrator, LocalTraining
from fl_lightning.algorithms import FedSKC
from fl_lightning.client.module import ClientModule
from fl_lightning.data import Dirichlet, LoadedData, Scenario
from fl_lightning.data.arrays import Arrays
from fl_lightning.data.transforms import CropFlip
from fl_lightning.models import ResNet8

CLIENTS, PER_ROUND, EPOCHS, BATCH, CLASSES = 20, 8, 10, 64, 100
WAYS = {
    "plain": {},
    "channels last": {"channels_last": True},
    "compiled": {"compile": True},
    "both": {"channels_last": True, "compile": True},
}


class Images(Arrays):
    """A dataset from arrays with random crops and flips, like CIFAR-100."""

    def load(self) -> LoadedData:
        """Load the arrays and add the augmentation."""
        data = super().load()
        data.augment = CropFlip()
        return data


def write_data(path: Path, samples: int) -> None:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (samples + 1000, 3, 32, 32), dtype=np.uint8)
    labels = np.arange(samples + 1000) % CLASSES
    np.savez(path, x_train=images[:samples], y_train=labels[:samples], x_test=images[samples:], y_test=labels[samples:])


def prepared(data: Path, run_dir: Path, rounds: int, precision: str, options: dict[str, bool]) -> FederatedOrchestrator:
    """Build a run that is evaluated only after its last round."""
    return FederatedOrchestrator(
        Scenario(Images(str(data)), Dirichlet(0.2), CLIENTS, local_test=0.0),
        ResNet8,
        FedSKC(),
        rounds=rounds,
        clients_per_round=PER_ROUND,
        training=LocalTraining(
            batch_size=BATCH,
            optimizer=partial(torch.optim.SGD, lr=0.01),
            trainer={"accelerator": "auto", "precision": precision, "max_epochs": EPOCHS},
        ),
        run_dir=str(run_dir),
        evaluation=Evaluation(every=rounds),
        **options,
    )


def round_time(run: FederatedOrchestrator) -> tuple[float, float]:
    """Return the median seconds and the mean training steps of a round, without the first."""
    run.fit()
    steps = [
        sum(-(-len(run.data.shards[client].train) // BATCH) for client in run.server.participants(round)) * EPOCHS
        for round in range(2, run.rounds + 1)
    ]
    seconds = [row["time/fit_s"] for row in run.csv.rows[1:]]
    return median(seconds), sum(steps) / len(steps)


def step_flops() -> float:
    """Return the floating-point operations of a training step: forward and backward pass."""
    module = ClientModule(ResNet8(in_shape=(3, 32, 32), num_classes=CLASSES))
    with FlopCounterMode(display=False) as counter:
        module.training_step((torch.zeros(BATCH, 3, 32, 32), torch.zeros(BATCH, dtype=torch.int64)), 0).backward()
    return float(counter.get_total_flops())


def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Return the floating-point operations per second of a large matrix product."""
    n = 8192 if device.type == "cuda" else 2048
    a, b = torch.randn(2, n, n, device=device, dtype=dtype)
    times = []
    for _ in range(10):
        started = time.perf_counter()
        (a @ b)[0, 0].item()  # reading a value waits for the device
        times.append(time.perf_counter() - started)
    return 2 * n**3 / min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=50_000, help="training images")
    parser.add_argument("--rounds", type=int, default=3, help="rounds a run, the first of which does not count")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    given = parser.parse_args()
    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    rate = product_rate(device, torch.bfloat16 if gpu else torch.float32)
    print(f"{torch.cuda.get_device_name() if gpu else f'CPU, {torch.get_num_threads()} threads'}: ", end="")
    print(f"{rate / 1e12:.2f} TFLOP/s in a matrix product, {step_flops() / 1e9:.2f} GFLOP a step of {BATCH}")
    seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in given.ways}
    with tempfile.TemporaryDirectory() as folder:
        write_data(data := Path(folder) / "images.npz", given.samples)
        for repeat in range(given.repeats):
            for way in given.ways:
                run_dir = Path(folder) / f"{way}-{repeat}"
                run = prepared(data, run_dir, given.rounds, "bf16-mixed" if gpu else "32-true", WAYS[way])
                seconds[way].append(round_time(run))
    for way, measured in seconds.items():
        over = [spent * rate / (steps * step_flops()) for spent, steps in measured]
        print(
            f"{way:14} {median(spent for spent, _ in measured):8.2f} s a round, "
            f"{1e3 * median(spent / steps for spent, steps in measured):7.2f} ms a step, "
            f"{median(over):6.1f} x the limit ({min(over):.1f} - {max(over):.1f})"
        )


if __name__ == "__main__":
    main()
