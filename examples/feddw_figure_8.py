"""Redraw FedDW's Fig. 8: do the outputs and the classification weights of a model agree about the classes?

There are three runs: FedAvg on IID data, FedAvg on non-IID data, and FedDW on the same non-IID data. The figure shows
the soft-label (SL) matrix and the class-relation (CR) matrix of each final model. In the paper, the two matrices agree
on IID data, differ on non-IID data, and agree again with FedDW.

    python examples/feddw_figure_8.py [--data FOLDER_OF_FASHION_MNIST] [--out feddw_figure_8.png]
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import torch

from fl_lightning import Evaluation, FederatedOrchestrator, LocalTraining
from fl_lightning.algorithms import Algorithm, FedAvg, FedDW
from fl_lightning.callbacks import Checkpointing, ClassRelations
from fl_lightning.callbacks.plots import heat_maps, write_png
from fl_lightning.data import IID, Digits, Dirichlet, FashionMNIST, Partition, Scenario
from fl_lightning.models import MLP, Head, LeNet


def final_matrices(
    algorithm: Algorithm, partition: Partition, data: str | None, rounds: int
) -> tuple[dict[str, np.ndarray], float]:
    """Return the SL and CR matrices and the test accuracy of a run."""
    scenario = Scenario(
        FashionMNIST(data_dir=data) if data else Digits(), partition, clients=10, train_samples=6000 if data else None
    )
    mapping = Head(mapping=(128,), classifier="bias_free")
    with tempfile.TemporaryDirectory() as folder:
        run = FederatedOrchestrator(
            scenario,
            LeNet if data else partial(MLP, head=mapping),
            algorithm,
            rounds=rounds,
            training=LocalTraining(
                batch_size=32,
                optimizer=partial(torch.optim.Adam, lr=1e-3),
                trainer={"accelerator": "cpu", "max_epochs": 5},
            ),
            evaluation=Evaluation(every=rounds),
            callbacks=[Checkpointing(every=rounds)],
            run_dir=f"{folder}/run",
        )
        result = run.fit()
        return ClassRelations().measure(run), result.summary["global/acc_last"]


def main(data: str | None = None, out: str | None = None, rounds: int = 10, mu: float = 10.0) -> dict[str, float]:
    """Train, print and draw the three runs. Return the distance between SL and CR of each run."""
    non_iid = Dirichlet(0.1, min_samples=20)
    runs = {
        "FedAvg, IID": (FedAvg(), IID()),
        "FedAvg, non-IID": (FedAvg(), non_iid),
        "FedDW, non-IID": (FedDW(mu=mu), non_iid),
    }
    images, distances = {}, {}
    for name, (algorithm, partition) in runs.items():
        matrices, accuracy = final_matrices(algorithm, partition, data, rounds)
        distances[name] = float(matrices["distance"])
        print(f"{name}: distance of SL and CR {distances[name]:.5f}, test accuracy {accuracy:.3f}")
        images |= {f"{name}: SL": matrices["sl"], f"{name}: CR": matrices["cr"]}
    if out:
        write_png(heat_maps(images, rows="class"), Path(out))
    return distances


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="Folder of Fashion-MNIST. By default the 8x8 digits are used.")
    parser.add_argument("--out", default="feddw_figure_8.png")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--mu", type=float, default=10.0)
    main(**vars(parser.parse_args()))
