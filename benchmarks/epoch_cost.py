"""Measure the time of a local epoch of each method relative to FedAvg.

    python benchmarks/epoch_cost.py [--repeats 5] [--steps 20]

Each method first runs one round, so that its shared knowledge and client state exist. Then the fits of one client are
timed, with the methods in alternation. The second epoch of a fit counts, because FedSiam-DA's history term is active
from then on.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import lightning as L
import numpy as np
import torch

from fl_lightning import FederatedOrchestrator, LocalTraining
from fl_lightning.algorithms import UAPDFL, Algorithm, CwFedAvg, FedAvg, FedDW, FedProx, FedSiamDA, FedSKC
from fl_lightning.callbacks import RoundCallback
from fl_lightning.data import IID, Arrays, Scenario
from fl_lightning.data.loaders import Batches, ClientDataModule
from fl_lightning.engines.trainer import quiet_lightning
from fl_lightning.models import CNN4, Head

METHODS = {
    "FedAvg": FedAvg,
    "FedProx": FedProx,
    "FedSKC": partial(FedSKC, gpr=False),
    "FedDW": FedDW,
    "FedSiam-DA": FedSiamDA,
    "cwFedAVG + WDR": partial(CwFedAvg, lam=1.0),
    "UA-PDFL": partial(UAPDFL, mu=1e-4, n_com=1),
}
BATCH = 64


class Clock(L.Callback):
    """Record the time of each epoch."""

    def __init__(self) -> None:
        self.epochs: list[float] = []

    def on_train_epoch_start(self, *args: Any) -> None:
        """Record the start."""
        self.started = time.perf_counter()

    def on_train_epoch_end(self, *args: Any) -> None:
        """Record the time since the start of the epoch."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.epochs.append(time.perf_counter() - self.started)


class OneRound(RoundCallback):
    """Stop a run after its first round, so that round 2 can be measured."""

    stops = False

    def on_round_end(self, *args: Any) -> None:
        """Stop the run."""
        self.stops = True


def prepared(algorithm: Algorithm, data: Path, run_dir: Path) -> FederatedOrchestrator:
    """Return a run after its first round. All methods have the siamese heads, so the networks are equal."""
    run = FederatedOrchestrator(
        Scenario(Arrays(str(data)), IID(), clients=2, local_test=0),
        partial(CNN4, head=Head(projection=256, prediction=256)),
        algorithm,
        rounds=2,
        callbacks=[OneRound()],
        training=LocalTraining(
            batch_size=BATCH,
            optimizer=partial(torch.optim.SGD, lr=0.01),
            trainer={"accelerator": "auto", "max_steps": 2},
        ),
        run_dir=str(run_dir),
    )
    run.fit()
    return run


def epoch(run: FederatedOrchestrator) -> float:
    """Return the seconds of a client's second local epoch."""
    module, data = run.starting_module(0).train(), run.data.data
    batches = Batches(data.x_train, data.y_train, run.data.shards[0].train, BATCH, seed=0)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    clock = Clock()
    with quiet_lightning():
        trainer = L.Trainer(max_epochs=2, devices=1, limit_val_batches=0, callbacks=[clock], **quiet)
        trainer.fit(module, datamodule=ClientDataModule(batches, run.worker.client_data.ready_to_train))
    return clock.epochs[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    rng = np.random.default_rng(0)
    n = 2 * BATCH * given.steps
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "images.npz"
        images = rng.random((n + 64, 1, 28, 28), dtype=np.float32)
        labels = rng.integers(0, 10, n + 64)
        np.savez(path, x_train=images[:n], y_train=labels[:n], x_test=images[n:], y_test=labels[n:])
        runs = {name: prepared(make(), path, Path(folder) / name) for name, make in METHODS.items()}
        for run in runs.values():
            epoch(run)
        times: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(given.repeats):
            for name, run in runs.items():
                times[name].append(epoch(run))
    print(f"{torch.get_num_threads()} threads, {given.steps} steps of {BATCH}, CNN4 with projection and predictor")
    for name, seconds in times.items():
        ratios = [mine / base for mine, base in zip(seconds, times["FedAvg"], strict=True)]
        spread = f"{min(ratios):.2f} - {max(ratios):.2f}"
        print(f"{name:15s} {1000 * median(seconds):7.0f} ms an epoch, {median(ratios):.3f} of FedAvg's ({spread})")


if __name__ == "__main__":
    main()
