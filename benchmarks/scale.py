"""Measure how the time of a round and the memory depend on the total number of clients.

    python benchmarks/scale.py

FedAvg trains an MLP on random images of the digits' shape. There are 10 to 100,000 clients with 20 samples each. In
each round, 50 clients (all 10 if there are only 10) train for two steps. The dataset has 2,000,000 samples for every
number of clients, so most samples are unused except with 100,000 clients.

Each size runs in its own process with one thread, and the sizes run in alternation. The time of a round is that from
its start to the start of the next one, with evaluation, logs and checkpoint. The script prints medians, and ratios to
100 clients.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch

from fl_lightning import FederatedOrchestrator, LocalTraining
from fl_lightning.algorithms import FedAvg
from fl_lightning.callbacks import RoundProgress
from fl_lightning.data import IID, Arrays, Scenario
from fl_lightning.models import MLP

EACH = 20
SIZES = (10, 100, 1_000, 10_000, 100_000)
BASE, COHORT, SAMPLES = 100, 50, 2_000_000


class Few(IID):
    """An IID partition with a fixed number of samples per client. The other samples are unused."""

    def split(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        """Split the first `EACH * clients` samples."""
        return super().split(labels[: EACH * clients], clients, rng)


class Clock(RoundProgress):
    """Record when rounds begin. Show no progress."""

    def __init__(self) -> None:
        self.starts: list[float] = []

    def on_fit_start(self, run):
        """Show nothing."""

    def on_round_start(self, run, participants):
        """Record the time."""
        self.starts.append(time.perf_counter())

    def on_client_end(self, run, result):
        """Show nothing."""

    def on_round_end(self, run, metrics):
        """Show nothing."""

    def on_fit_end(self, run):
        """Show nothing."""


def write_data(path: Path) -> None:
    """Write random images and labels."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (SAMPLES, 8, 8), dtype=np.uint8), np.arange(SAMPLES) % 10
    np.savez(path, x_train=x, y_train=y, x_test=x[:1000], y_test=y[:1000])


def measure(clients: int, data: Path, rounds: int) -> None:
    """Run one size in this process. Print the measurements as JSON in the last line."""
    torch.set_num_threads(1)
    clock, cohort = Clock(), min(COHORT, clients)
    with tempfile.TemporaryDirectory() as folder:
        run = FederatedOrchestrator(
            Scenario(Arrays(str(data)), Few(), clients, local_test=0.0),
            partial(MLP, hidden=(64,)),
            FedAvg(),
            rounds=2 + rounds,
            clients_per_round=cohort,
            log_clients=clients <= 1000,
            callbacks=[clock],
            training=LocalTraining(batch_size=10, trainer={"accelerator": "cpu", "max_steps": 2}),
            run_dir=str(Path(folder) / "run"),
        )
        started = time.perf_counter()
        run.fit()
        checkpoint = sum(file.stat().st_size for file in run.checkpoints.path.glob(f"*{run.round:06d}/*"))
    per_client = statistics.median(np.diff(clock.starts)[1:]) / cohort  # without the first round, which fills caches
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"start": clock.starts[0] - started, "fit": per_client, "peak": peak, "checkpoint": checkpoint}))


def measured(clients: int, data: Path, rounds: int) -> dict[str, float]:
    """Return the measurements of one size from a new process."""
    command = [sys.executable, __file__, "--clients", str(clients), "--data", str(data), "--rounds", str(rounds)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3, help="runs of each size (default 3)")
    parser.add_argument("--rounds", type=int, default=8, help="timed rounds a run (default 8)")
    parser.add_argument("--clients", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--data", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.clients:
        measure(args.clients, args.data, args.rounds)
        return
    runs: dict[int, list[dict[str, float]]] = {clients: [] for clients in SIZES}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data.npz"
        write_data(data)
        for _ in range(args.repeats):
            for clients in SIZES:
                runs[clients].append(measured(clients, data, args.rounds))
    print("clients  start s  ms a fit  ratio  least   most  peak MiB  ratio  checkpoint kB")
    for clients, own in runs.items():
        middle = {name: statistics.median(run[name] for run in own) for name in own[0]}
        times = [run["fit"] / base["fit"] for run, base in zip(own, runs[BASE], strict=True)]
        peaks = [run["peak"] / base["peak"] for run, base in zip(own, runs[BASE], strict=True)]
        print(
            f"{clients:7}{middle['start']:9.1f}{middle['fit'] * 1e3:10.2f}{statistics.median(times):7.2f}"
            f"{min(times):7.2f}{max(times):7.2f}{middle['peak']:10.0f}{statistics.median(peaks):7.2f}"
            f"{middle['checkpoint'] / 1e3:15.0f}"
        )


if __name__ == "__main__":
    main()
