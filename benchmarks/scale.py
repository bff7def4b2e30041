"""Whether a round's time and the run's memory depend on how many clients there are, or only on how many take part.

    python benchmarks/scale.py

FedAvg, an MLP on noise of the digits' shape: 10 to 100,000 clients of 20 samples each, of whom 50 (or all 10) take
part in a round with two steps each. The data are the same 2,000,000 samples for every number of clients, most of them
nobody's but for the largest. Each size runs in a process of its own, on one thread, all sizes in turn and all over
again for each repeat. A round lasts from its start to the next one's, evaluation, logs and checkpoint and all. Prints
medians, and ratios to 100 clients; single times vary by machine.
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
from fl_lightning.callbacks import RoundProgress

from fl_lightning import FederatedOrchestrator, LocalTraining
from fl_lightning.algorithms import FedAvg
from fl_lightning.data import IID, Arrays, Scenario
from fl_lightning.models import MLP

EACH = 20
SIZES = (10, 100, 1_000, 10_000, 100_000)
BASE, COHORT, SAMPLES = 100, 50, 2_000_000


class Few(IID):
    """As many samples for each client, however many there are."""

    def split(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        """Deal some of the samples out."""
        return super().split(labels[: EACH * clients], clients, rng)


class Clock(RoundProgress):
    """Notes when rounds begin, and shows nothing."""

    def __init__(self) -> None:
        self.starts: list[float] = []

    def on_fit_start(self, run):
        """Nothing to set up."""

    def on_round_start(self, run, participants):
        """A round begins."""
        self.starts.append(time.perf_counter())

    def on_client_end(self, run, result):
        """Nothing to show."""

    def on_round_end(self, run, metrics):
        """Nothing to show."""

    def on_fit_end(self, run):
        """Nothing to take down."""


def write_data(path: Path) -> None:
    """Noise and labels."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (SAMPLES, 8, 8), dtype=np.uint8), np.arange(SAMPLES) % 10
    np.savez(path, x_train=x, y_train=y, x_test=x[:1000], y_test=y[:1000])


def measure(clients: int, data: Path, rounds: int) -> None:
    """Run one size; the last line says what it took."""
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
    per_client = statistics.median(np.diff(clock.starts)[1:]) / cohort  # in the first, much is made for the first time
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"start": clock.starts[0] - started, "fit": per_client, "peak": peak, "checkpoint": checkpoint}))


def measured(clients: int, data: Path, rounds: int) -> dict[str, float]:
    """One size's figures, from a process of its own."""
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
