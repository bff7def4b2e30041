"""The trainer of a module, and the samples that PyTorch's `DistributedSampler` repeats on several devices."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DistributedSampler


def trainer_of(module: L.LightningModule) -> L.Trainer | None:
    """Return the `Trainer` that a module is attached to, or None if there is none."""
    try:
        return module.trainer
    except RuntimeError:
        return None


def count_unrepeated(loaders: Any, batch_idx: int, size: int, dataloader_idx: int = 0) -> int:
    """Return how many samples of a batch are no repetitions. These are the first samples of the batch.

    A `DistributedSampler` gives every device the same number of samples. For this it repeats some at the end.

    Args:
        loaders: The data loader on this device, or a collection that contains it.
        batch_idx: Number of the batch on this device, from 0.
        size: Number of samples in the batch.
        dataloader_idx: Number of the data loader in the collection, from 0.
    """
    loader: Any = CombinedLoader(loaders, "sequential").flattened[dataloader_idx]
    sampler, batch_size = getattr(loader, "sampler", None), getattr(loader, "batch_size", None)
    if not isinstance(sampler, DistributedSampler) or batch_size is None:
        return size
    own = len(range(sampler.rank, len(sampler.dataset), sampler.num_replicas))  # type: ignore[arg-type]
    return max(0, min(size, own - batch_idx * batch_size))
