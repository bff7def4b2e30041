"""Count how often clients of UA-PDFL take over a whole model, and whether it comes from a client with other classes.

Thirty clients are in groups that share no class, as in the paper's Table 5. In each round a client compares the output
of its model for a constant input with those of five peers. If all divergences are at most th_I, it continues from the
whole model of one of them (client-wise dropout). For each round, the script prints the median divergence within and
between groups, the share of clients that take over a model, and the share of these models that come from another group.

    python examples/ua_pdfl_dropout.py [--data FOLDER_OF_FASHION_MNIST] [--th_i 0.1] [--rounds 15] [--seeds 0 1 2]
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from rich.console import Console

from fl_lightning import FederatedOrchestrator, LocalTraining
from fl_lightning.algorithms import UAPDFL
from fl_lightning.callbacks import RoundProgress
from fl_lightning.core.message import Message
from fl_lightning.core.state_dicts import State
from fl_lightning.data import Digits, DisjointClasses, FashionMNIST, Scenario
from fl_lightning.evaluation.evaluation import Evaluation
from fl_lightning.models import MLP

CLIENTS = 30


class Comparison(NamedTuple):
    """One client's comparison with its peers: the peers, the divergences, and the peer whose model it takes over."""

    client: int
    peers: list[int]
    gaps: list[float]
    taken: int | None


class RecordingUAPDFL(UAPDFL):
    """UA-PDFL that records all comparisons, in the order in which clients download."""

    def __post_init__(self) -> None:
        """Start without comparisons."""
        super().__post_init__()
        self.comparisons: list[Comparison] = []
        self._last = Comparison(-1, [], [], None)

    def download(self, state: State, client: int, rng: np.random.Generator) -> Message:
        """Return what the client downloads, and record the comparison."""
        message = super().download(state, client, rng)
        self.comparisons.append(self._last._replace(client=client))
        return message

    def collect(self, own: Message, peers: Mapping[int, Message], rng: np.random.Generator) -> dict[int, Message]:
        """Return the parts of the peers' messages that the client collects."""
        collected = super().collect(own, peers, rng)
        whole = [peer for peer, message in collected.items() if message.section("model")]
        gaps = self.divergences(own, peers.values())
        self._last = Comparison(-1, list(peers), gaps, whole[0] if self.drops_out(gaps) else None)
        return collected


def run(data: Path | None, th_i: float, rounds: int, seed: int) -> tuple[list[Comparison], list[set[int]], list[float]]:
    """Run UA-PDFL; return all comparisons, the classes of each client, and the accuracies by round before training."""
    algorithm = RecordingUAPDFL(th_i=th_i, mu=0.001, n_com=5)
    dataset = FashionMNIST(data_dir=str(data)) if data else Digits()
    scenario = Scenario(
        dataset, DisjointClasses(3), clients=CLIENTS, local_test=0.2, train_samples=0.1 if data else None
    )
    with tempfile.TemporaryDirectory() as folder:
        orchestrator = FederatedOrchestrator(
            algorithm=algorithm,
            scenario=scenario,
            model=MLP,
            training=LocalTraining(
                batch_size=50,
                optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.5),
                trainer={"max_epochs": 5, "accelerator": "cpu"},
            ),
            round_lr_scheduler=partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.95),
            callbacks=[RoundProgress(Console(quiet=True))],
            logger=False,
            rounds=rounds,
            seed=seed,
            evaluation=Evaluation("received"),
            run_dir=Path(folder) / "run",
        )
        result = orchestrator.fit()
        labels = orchestrator.data.data.y_train
        classes = [set(labels[shard.train].tolist()) for shard in orchestrator.data.shards]
    return algorithm.comparisons, classes, [row["client/acc_mean"] for row in result.rounds]


def dropout_table(
    comparisons: Sequence[Comparison], classes: Sequence[set[int]]
) -> list[tuple[float, float, float, float]]:
    """Return a row for each round: median divergence within and between groups, share of dropouts, and of foreign ones.

    The last number is NaN in a round without a dropout.
    """
    rows = []
    # Clients also compare to be evaluated after each round, exactly as at the start of the next one.
    for start in range(0, len(comparisons), 2 * CLIENTS):
        within, between, taken = [], [], []
        for one in comparisons[start : start + CLIENTS]:
            for peer, gap in zip(one.peers, one.gaps, strict=True):
                (within if classes[peer] & classes[one.client] else between).append(gap)
            if one.taken is not None:
                taken.append(not classes[one.taken] & classes[one.client])
        foreign = float(np.mean(taken)) if taken else np.nan
        rows.append((float(np.median(within)), float(np.median(between)), len(taken) / CLIENTS, foreign))
    return rows


def main(
    data: str | None = None, th_i: float = 0.1, rounds: int = 15, seeds: Sequence[int] = (0,)
) -> list[tuple[float, float, float, float]]:
    """Print the table, each number averaged over the seeds, with the accuracy before training. Return its rows."""
    tables, accuracies = [], []
    for seed in seeds:
        comparisons, classes, accuracy = run(Path(data) if data else None, th_i, rounds, seed)
        tables.append(dropout_table(comparisons, classes))
        accuracies.append(accuracy)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # no dropout in a round of any seed
        rows = np.nanmean(tables, axis=0)
    print("round  Div, same classes  Div, other classes  dropouts  from other classes  accuracy before training")
    before = [np.nan, *np.mean(accuracies, axis=0)[:-1]]  # of the models that clients receive for this round
    for round, (row, accuracy) in enumerate(zip(rows, before, strict=True), start=1):
        within, between, dropouts, foreign = row
        print(f"{round:5d}  {within:17.4f}  {between:18.4f}  {dropouts:7.0%}  {foreign:18.0%}  {accuracy:24.1%}")
    return [tuple(row) for row in rows.tolist()]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="Folder of Fashion-MNIST. By default the 8x8 digits are used.")
    parser.add_argument("--th_i", type=float, default=0.1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    main(**vars(parser.parse_args()))
