"""`Scenario`: who holds what."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fl_lightning.data.datasets import Dataset, LoadedData
from fl_lightning.data.partitions import Partition
from fl_lightning.errors import ConfigError
from fl_lightning.seeding import Stream, generator


@dataclass
class Shard:
    """One client's share, as indices into the training set.

    Args:
        train: Samples the client trains on.
        test: Samples it is tested on, disjoint from `train`; may be empty.
    """

    train: Tensor
    test: Tensor


@dataclass
class FederatedData:
    """A loaded dataset and each client's share of it.

    Args:
        data: The whole dataset; its test split is the global test set.
        shards: One a client, by client id.
    """

    data: LoadedData
    shards: list[Shard]

    def class_counts(self, part: str = "train") -> np.ndarray:
        """Samples a client and class, `(clients, C)`, of the local `train` or `test` shares."""
        y, classes = self.data.y_train, self.data.num_classes
        return np.stack([torch.bincount(y[getattr(s, part)], minlength=classes).numpy() for s in self.shards])


@dataclass
class Scenario:
    """Dataset, partition and local split: the same for every method run with one seed.

    Args:
        dataset: What is learnt.
        partition: How its training samples are dealt out to clients.
        clients: Number of clients, `K`.
        local_test: Share of each client's samples kept for its own test split, in [0, 1); stratified by class as far
            as whole samples allow.

    Raises:
        ConfigError: `clients` is below 1 or `local_test` outside [0, 1).
    """

    dataset: Dataset
    partition: Partition
    clients: int = 10
    local_test: float = 0.25

    def __post_init__(self) -> None:
        if self.clients < 1:
            raise ConfigError(f"scenario.clients: {self.clients} is below 1")
        if not 0 <= self.local_test < 1:
            raise ConfigError(f"scenario.local_test: {self.local_test} is outside [0, 1)")

    def build(self, seed: int) -> FederatedData:
        """Load the data and deal it out.

        Raises:
            ConfigError: The data cannot be read, the partition cannot be met, or a client ends up with no
                training sample.
        """
        data = self.dataset.load()
        labels = data.y_train.numpy()
        parts = self.partition.split(labels, self.clients, generator(seed, Stream.PARTITION))
        shards = [self._split_locally(labels, part, seed, client) for client, part in enumerate(parts)]
        return FederatedData(data, shards)

    def _split_locally(self, labels: np.ndarray, part: np.ndarray, seed: int, client: int) -> Shard:
        if not len(part):
            raise ConfigError(
                f"scenario.partition: client {client} holds no data; use fewer scenario.clients, or a partition "
                "with min_samples"
            )
        rng = generator(seed, Stream.LOCAL_SPLIT, client)
        test = stratified_sample(labels[part], self.local_test, rng)
        return Shard(torch.from_numpy(part[~test]), torch.from_numpy(part[test]))


def stratified_sample(labels: np.ndarray, share: float, rng: np.random.Generator) -> np.ndarray:
    """Choose `round(share · n)` samples, each class in proportion by largest remainder.

    At least one sample is always left out, so that there is something to train on.

    Args:
        labels: Class of each sample, `(n,)`.
        share: Share to choose, in [0, 1).
        rng: The only source of chance.

    Returns:
        Boolean mask `(n,)` of the chosen samples.
    """
    classes, counts = np.unique(labels, return_counts=True)
    wanted = min(round(share * len(labels)), len(labels) - 1)
    exact = wanted * counts / len(labels)
    quota = np.floor(exact).astype(np.int64)
    # Ties are settled by chance: a fixed order would always favour the low classes.
    order = np.lexsort((rng.random(len(classes)), -(exact - quota)))
    quota[order[: wanted - quota.sum()]] += 1
    chosen = np.zeros(len(labels), dtype=bool)
    for label, size in zip(classes, quota, strict=True):
        chosen[rng.permutation(np.flatnonzero(labels == label))[:size]] = True
    return chosen
