"""Measure the evaluation of received models: compare a round of cwFedAVG with a round of FedAvg.

    python benchmarks/received.py

There are 1,000 clients, and 50 of them train per round. The model is an MLP on random images of Fashion-MNIST's shape.
After each round, the model that each client would receive is evaluated on the client's own test split
(`evaluation.client_model: received`). Short runs of the two methods alternate in one process with one thread. The
script prints the median seconds of a round and their ratio.
"""

import argparse
import statistics
import tempfile
from pathlib import Path

import numpy as np
import torch

from fl_lightning import FederatedOrchestrator, LocalTraining
from fl_lightning.algorithms import CwFedAvg, FedAvg
from fl_lightning.callbacks import Checkpointing, RoundProgress
from fl_lightning.data import IID, Arrays, Scenario
from fl_lightning.evaluation.evaluation import Evaluation
from fl_lightning.models import MLP

CLIENTS, PER_ROUND, SAMPLES = 1000, 50, 60
METHODS = {"FedAvg": FedAvg, "cwFedAVG": CwFedAvg}


class Silent(RoundProgress):
    """Show no progress."""

    def on_fit_start(self, run):
        """Show nothing."""

    def on_round_end(self, run, metrics):
        """Show nothing."""

    def on_fit_end(self, run):
        """Show nothing."""


def write_data(path: Path) -> None:
    """Write random images and labels, 60 samples per client."""
    rng, n = np.random.default_rng(0), CLIENTS * SAMPLES
    x, y = rng.integers(0, 256, (n, 28, 28), dtype=np.uint8), np.arange(n) % 10
    np.savez(path, x_train=x, y_train=y, x_test=x[:1000], y_test=y[:1000])


def rounds(method: str, data: Path, run_dir: Path, count: int) -> list[dict[str, float]]:
    """Return the metrics of a short run, without the first round, which fills caches."""
    run = FederatedOrchestrator(
        Scenario(Arrays(str(data)), IID(), CLIENTS, local_test=0.25),
        MLP,
        METHODS[method](),
        rounds=1 + count,
        clients_per_round=PER_ROUND,
        evaluation=Evaluation(client_model="received"),
        log_clients=False,
        callbacks=[Silent(), Checkpointing(every=1 + count)],
        training=LocalTraining(batch_size=10, trainer={"accelerator": "cpu"}),
        run_dir=str(run_dir),
    )
    run.fit()
    return run.csv.rows[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5, help="runs of each method (default 5)")
    parser.add_argument("--rounds", type=int, default=2, help="timed rounds a run (default 2)")
    args = parser.parse_args()
    torch.set_num_threads(1)  # on shared cores, several threads mostly wait for each other
    seen: dict[str, list[dict[str, float]]] = {name: [] for name in METHODS}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data.npz"
        write_data(data)
        for i in range(args.repeats):
            for name in METHODS:
                seen[name] += rounds(name, data, Path(folder) / f"{name}-{i}", args.rounds)
    medians = {name: statistics.median(row["time/round_s"] for row in rows) for name, rows in seen.items()}
    for name, rows in seen.items():
        fit = statistics.median(row["time/fit_s"] for row in rows)
        print(f"{name:9} {medians[name]:6.2f} s a round, {fit:.2f} s of it training ({len(rows)} rounds)")
    print(f"ratio {medians['cwFedAVG'] / medians['FedAvg']:.2f}")


if __name__ == "__main__":
    main()
