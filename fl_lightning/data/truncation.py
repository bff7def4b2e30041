"""Truncation of a federated dataset to a few samples per client, for dry runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fl_lightning.data.federated_data import FederatedData, Shard
from fl_lightning.data.loaded_data import LoadedData

TEST_SAMPLES = 256
"""Samples that are kept of each test set."""


def truncate_dataset(data: FederatedData, train_samples: int) -> FederatedData:
    """Return federated data with fewer samples: evenly spaced samples of each client and of the global test set.

    Each client keeps at most `train_samples` training samples. The partition and the shapes do not change. A dataset
    with custom batches (such as episodes) keeps all samples of the clients, and one with custom scoring its test set.
    """
    loaded, shards, held_out = data.data, data.shards, data.held_out
    if loaded.cut is LoadedData.cut:
        shards, held_out = ([_truncate(one, train_samples) for one in some] for some in (shards, held_out))
    if loaded.evaluate is LoadedData.evaluate:
        x, y = _subset(loaded.x_test, TEST_SAMPLES), _subset(loaded.y_test, TEST_SAMPLES)
        loaded = replace(loaded, x_test=x, y_test=y)
    return replace(data, data=loaded, shards=shards, held_out=held_out)


def _truncate(shard: Shard, train_samples: int) -> Shard:
    return Shard(_subset(shard.train, train_samples), _subset(shard.test, TEST_SAMPLES))


def _subset(values: Any, most: int) -> Any:
    """Return at most `most` rows of a tensor or `Inputs`, evenly spaced because a test set may be sorted by class."""
    return values if len(values) <= most else values[torch.linspace(0, len(values) - 1, most).long()]
