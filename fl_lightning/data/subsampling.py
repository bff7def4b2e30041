"""Random subsets of samples: shares stratified by class, fewer training samples, and long tails of classes."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch

from fl_lightning.core.errors import ConfigError
from fl_lightning.core.objectives import Objective
from fl_lightning.data.assignment import assign_samples, indices_by_class
from fl_lightning.data.loaded_data import LoadedData


def stratified_sample(labels: np.ndarray, share: float, rng: np.random.Generator) -> np.ndarray:
    """Draw the same share of the samples of each class at random. Return a boolean mask of the samples, `(n,)`.

    The number of drawn samples is `round(share · n)`, but at least one is left to train on. The numbers by class are
    rounded by largest remainders.
    """
    chosen = np.zeros(len(labels), dtype=bool)
    total = min(round(share * len(labels)), len(labels) - 1)
    if total:
        members = indices_by_class(labels)
        quota = apportion(total, np.array([len(rows) for rows in members]), rng)
        for rows, size in zip(members, quota, strict=True):
            chosen[rng.permutation(rows)[:size]] = True
    return chosen


def apportion(total: int, weights: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Split `total` into integers in proportion to integer weights, by largest remainder with random ties.

    All are zero if all weights are. Ties are broken at random: a fixed order would always favour the first.
    """
    exact = total * weights / max(weights.sum(), 1)
    quota = np.floor(exact).astype(np.int64)
    order = np.lexsort((rng.random(len(weights)), -(exact - quota)))
    quota[order[: round(exact.sum()) - quota.sum()]] += 1
    return quota


def subsample(data: LoadedData, n: int | float, rng: np.random.Generator, objective: Objective) -> LoadedData:
    """Return a dataset with fewer training samples, drawn at random and stratified by class.

    `n` is the number of samples to keep or, if it is a float, the share.
    """
    labels = objective.strata(data.y_train).numpy()
    if isinstance(n, float):
        n = max(math.ceil(round(n * len(labels), 9)), 1)  # 0.07 of 100 is a little above 7 in floating point
    if n > len(labels):
        raise ConfigError(f"scenario.train_samples: {n} is above the {len(labels)} training samples. Lower it")
    sizes = apportion(n, np.unique(labels, return_counts=True)[1], rng)
    return select_training_samples(data, assign_samples(labels, sizes[None], rng)[0])


def select_training_samples(data: LoadedData, kept: np.ndarray) -> LoadedData:
    """Return a dataset with only the training samples at the indices `kept`; the test set stays unchanged."""
    owners = None if data.client_train is None else data.client_train[kept]
    index = torch.from_numpy(kept)
    return replace(data, x_train=data.x_train[index], y_train=data.y_train[index], client_train=owners)


def long_tail_sizes(largest: int, classes: int, rho: float) -> np.ndarray:
    """Return the class sizes of a long-tailed training set: `floor(largest · ρ^(-j / (C - 1)))` for class j.

    The exponential form of Cao et al. 2019. `largest` is the size of the largest class before.
    """
    exact = largest * rho ** (-np.arange(classes) / max(classes - 1, 1))
    return np.floor(exact + 1e-9).astype(np.int64)  # 500 · 100^-1 is a little below 5 in floating point


def make_long_tailed(data: LoadedData, rho: float, rng: np.random.Generator) -> LoadedData:
    """Subsample the training set at random to long-tailed class sizes, and return the new dataset."""
    labels = data.y_train.numpy()
    held = np.bincount(labels, minlength=data.num_classes)
    sizes = np.minimum(long_tail_sizes(held.max(), data.num_classes, rho), held)
    if (held > 0)[sizes == 0].any():
        raise ConfigError(f"scenario.long_tail: {rho:g} leaves the last classes empty. Lower it")
    return select_training_samples(data, assign_samples(labels, sizes[held > 0][None], rng)[0])
