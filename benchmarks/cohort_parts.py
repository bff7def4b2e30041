"""The parts of `benchmarks/cohort.py` that fl-lightning's config names by class path."""

from __future__ import annotations

from pathlib import Path

import cohort
from torch import nn

from fl_lightning.callbacks import RoundCallback
from fl_lightning.callbacks.base import FederatedRun
from fl_lightning.data import LoadedData
from fl_lightning.evaluation.summary import Row


class RoundEnds(RoundCallback):
    """Notes the end of each round, after its checkpoint was begun."""

    def on_round_end(self, run: FederatedRun, metrics: Row) -> None:
        """Note the time."""
        cohort.end_round()


class Texts:
    """Token ids, from the file that all contestants read."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def load(self) -> LoadedData:
        """Return the training and test set."""
        return LoadedData(*cohort.read(self.path), *cohort.read(self.path, "test"), cohort.CLASSES, lambda x: x)


def pfl_network() -> nn.Module:
    """Build the network of `w1`."""
    return cohort.network_of(cohort.WORKLOADS["w1"])
