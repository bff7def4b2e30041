"""A few samples of a federated dataset, for dry runs."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fl_lightning.data.datasets import LoadedData
from fl_lightning.data.scenario import FederatedData, Shard

TEST_SAMPLES = 256
"""Samples that are kept of each test set."""


def truncate_dataset(data: FederatedData, train_samples: int) -> FederatedData:
    """Return a dataset with fewer samples, taken evenly from each client and from the test set.

    The partition and the shapes stay as they are. Datasets that make batches or scores in their own way, such as
    episodes, keep the samples that those need. Each client keeps at most `train_samples`.
    """
    loaded, shards = data.data, data.shards
    if loaded.cut is LoadedData.cut:
        shards = [Shard(_evenly(shard.train, train_samples), _evenly(shard.test, TEST_SAMPLES)) for shard in shards]
    if loaded.evaluate is LoadedData.evaluate:
        test = _evenly(loaded.x_test, TEST_SAMPLES), _evenly(loaded.y_test, TEST_SAMPLES)
        loaded = replace(loaded, x_test=test[0], y_test=test[1])
    return replace(data, data=loaded, shards=shards)


def _evenly(values: Tensor, most: int) -> Tensor:
    """Return at most so many rows, evenly spread: a test set may be sorted by class."""
    return values if len(values) <= most else values[torch.linspace(0, len(values) - 1, most).long()]
