"""Load a client's own data on the client's machine. All other clients have no samples there."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core.errors import ConfigError
from fl_lightning.core.inputs import Inputs
from fl_lightning.data.datasets import Dataset
from fl_lightning.data.federated_data import FederatedData, PackedShards, Shard
from fl_lightning.data.loaded_data import LoadedData
from fl_lightning.data.partitions import ClientSplits, Partition
from fl_lightning.data.scenario import Scenario


class OwnData(Partition):
    """Partition with a single client, which has all training and test samples of the dataset."""

    def split_dataset(
        self, data: LoadedData, labels: np.ndarray, clients: int | None, rng: np.random.Generator
    ) -> ClientSplits:
        """Return the indices of all training and test samples, assigned to a single client."""
        return ClientSplits([np.arange(len(data.y_train))], [np.arange(len(data.y_test))])

    def split(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        """Return the indices of all samples, assigned to a single client."""
        return [np.arange(len(labels))]


def load_own(dataset: Dataset, client: int, local_test: float | None) -> FederatedData:
    """Load the dataset of one client on the client's own machine.

    In the result, clients with smaller ids have no samples.

    Args:
        dataset: The client's dataset.
        client: The client's id.
        local_test: Share of the training samples to test on; by default the dataset's test samples.

    Raises:
        ConfigError: The data cannot be loaded, or a sample has several inputs.
    """
    data = Scenario(dataset, OwnData(), 1, local_test).build(seed=0)
    if not isinstance(data.data.x_train, Tensor):
        what = "several inputs per sample" if isinstance(data.data.x_train, Inputs) else "lazy"
        raise ConfigError(f"{dataset.error_prefix}: {what} is not supported on remote clients")
    none = Shard(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))
    data.shards = PackedShards.from_shards([none] * client + [data.shards[0]])
    return data
