"""`Scenario`: who holds what."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fl_lightning.data.datasets import Dataset, LoadedData, own_code
from fl_lightning.data.partitions import Partition, by_class, check_shares, deal
from fl_lightning.errors import ConfigError
from fl_lightning.seeding import Stream, generator

HASHED = 1 << 24
"""Bytes of a tensor that are hashed at a time: as much, and no more, may have to be copied."""


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
        data: The whole dataset; its test split is the global test set. Where clients are tested on a share of that
            (`local_test: official`), its samples also follow the training samples in `x_train` and `y_train`.
        shards: One a client, by client id.
    """

    data: LoadedData
    shards: list[Shard]

    def class_counts(self, part: str = "train") -> np.ndarray:
        """Samples a client and class, `(clients, C)`, of the local `train` or `test` shares."""
        y, classes = self.data.y_train, self.data.num_classes
        held = [getattr(shard, part) for shard in self.shards]
        owner = torch.arange(len(held)).repeat_interleave(torch.tensor([len(own) for own in held]))
        cells = torch.bincount(owner * classes + y[torch.cat(held)], minlength=len(held) * classes)
        return cells.reshape(len(held), classes).numpy()

    def digest(self) -> dict[str, str]:
        """SHA-256 of all that clients and server compute on, by part, so that two runs can tell whether theirs is one.

        Returns:
            `sha256:...` of `x_train`, `y_train` (with the number of classes), `x_test`, `y_test` and `partition`:
            each client's indices. Values, shapes, dtypes and order all count. The format is part of every run folder.
        """
        data = self.data
        held = (indices for shard in self.shards for indices in (shard.train, shard.test))
        classes = torch.tensor(data.num_classes)
        parts: dict[str, Iterable[Tensor]] = {
            "x_train": [data.x_train],
            "y_train": [classes, data.y_train],
            "x_test": [data.x_test],
            "y_test": [data.y_test],
            "partition": held,
        }
        with ThreadPoolExecutor(len(parts)) as pool:  # hashing leaves Python's lock
            return dict(zip(parts, pool.map(sha256, parts.values()), strict=True))


def sha256(tensors: Iterable[Tensor]) -> str:
    """SHA-256 of tensors one after another, each its dtype, its shape and its values in row-major order."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
        rows = tensor.reshape(1) if tensor.ndim == 0 else tensor
        at_a_time = max(1, HASHED // max(1, rows[:1].nbytes))
        for piece in rows.split(at_a_time):  # a piece that is laid out otherwise, or on a GPU, is copied
            flat = piece.detach().cpu().contiguous().as_strided((piece.numel(),), (1,))  # one value may have any stride
            digest.update(flat.view(torch.uint8).numpy())
    return f"sha256:{digest.hexdigest()}"


@dataclass
class Scenario:
    """Dataset, partition and local split: the same for every method run with one seed.

    Args:
        dataset: What is learnt.
        partition: How its training samples are dealt out to clients.
        clients: Number of clients, `K`, no more than there are training samples.
        local_test: What a client's own test split is. A number in [0, 1): that share of the samples the client was
            dealt, stratified by class as far as whole samples allow (0.25 in cwFedAvg, 0.2 in UA-PDFL's code).
            `official`: of each class of the official test set the share that the client has of the class's training
            samples, so that it trains on all it was dealt.
        long_tail: Imbalance ρ of Cao et al. 2019, 1 or more: the training samples are thinned out by class before
            the partition (FedSKC's CIFAR-10-LT and CIFAR-100-LT, with 10, 50 and 100); none by default.
        train_samples: Use only so many of the training samples, or such a share of them; a share lies between 0 and 1
            and is rounded up, and which ones is drawn by the seed in the proportions of the classes; all by default.
            The test set stays whole.

    Raises:
        ConfigError: `clients` is below 1, `train_samples` neither a whole number from 1 on nor a share, `local_test`
            outside [0, 1) or `long_tail` below 1.
    """

    dataset: Dataset
    partition: Partition
    clients: int = 10
    local_test: float | Literal["official"] = 0.25
    long_tail: float | None = None
    train_samples: int | float | None = None

    def __post_init__(self) -> None:
        if self.clients < 1:
            raise ConfigError(f"scenario.clients: {self.clients} is below 1")
        if self.local_test != "official" and not (_is_number(self.local_test) and 0 <= self.local_test < 1):
            raise ConfigError(f"scenario.local_test: {self.local_test} is outside [0, 1); or use official")
        rho, n = self.long_tail, self.train_samples
        if rho is not None and not (_is_number(rho) and 1 <= rho < math.inf):
            raise ConfigError(f"scenario.long_tail: {rho} is no number from 1 on; the papers use 10, 50 and 100")
        if n is not None and not (_is_number(n) and (0 < n < 1 if isinstance(n, float) else n >= 1)):
            raise ConfigError(
                f"scenario.train_samples: {n} is neither a whole number from 1 on nor a share between 0 and 1"
            )

    def build(self, seed: int) -> FederatedData:
        """Load the data and deal it out.

        Raises:
            ConfigError: The data cannot be read or are not what they should be, the partition cannot be met, or a
                client ends up with no training sample.
        """
        data = self.dataset.checked()
        # Keys of their own beside the partition's: the same samples for every way to deal them out.
        if self.train_samples is not None:
            data = keep_some(data, self.train_samples, generator(seed, Stream.PARTITION, 1))
        if self.long_tail is not None:
            data = thin_out(data, self.long_tail, generator(seed, Stream.PARTITION, 0))
        parts = self._deal(data.y_train.numpy(), generator(seed, Stream.PARTITION))
        if self.local_test == "official":
            return share_official_test(data, parts, generator(seed, Stream.LOCAL_SPLIT))
        labels = data.y_train.numpy()
        shards = [self._split_locally(labels, part, seed, client) for client, part in enumerate(parts)]
        return FederatedData(data, shards)

    def _deal(self, labels: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
        if self.clients > len(labels):
            raise ConfigError(
                f"scenario.clients: {self.clients} is above the {len(labels)} training samples; each client needs one"
            )
        who = f"scenario.partition: {type(self.partition).__name__}"
        with own_code(who):
            parts = self.partition.split(labels, self.clients, rng)
        for client, part in enumerate(parts):
            if not len(part):
                raise ConfigError(
                    f"scenario.partition: client {client} holds no data; use fewer scenario.clients, or a partition "
                    "with min_samples"
                )
        try:
            check_shares(parts, self.clients, len(labels))
        except ValueError as error:
            raise ConfigError(f"{who}: {error}") from error
        return parts

    def _split_locally(self, labels: np.ndarray, part: np.ndarray, seed: int, client: int) -> Shard:
        assert self.local_test != "official"
        rng = generator(seed, Stream.LOCAL_SPLIT, client)
        test = stratified_sample(labels[part], self.local_test, rng)
        return Shard(torch.from_numpy(part[~test]), torch.from_numpy(part[test]))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def keep_some(data: LoadedData, n: int | float, rng: np.random.Generator) -> LoadedData:
    """The dataset with n of its training samples, or that share of them, in the proportions of the classes.

    Raises:
        ConfigError: It has fewer.
    """
    labels = data.y_train.numpy()
    if isinstance(n, float):
        n = max(math.ceil(round(n * len(labels), 9)), 1)  # 0.07 of 100 is a little above 7 in floating point
    if n > len(labels):
        raise ConfigError(f"scenario.train_samples: {n}, and the dataset has {len(labels)} training samples")
    sizes = apportion(n, np.unique(labels, return_counts=True)[1], rng)
    kept = torch.from_numpy(deal(labels, sizes[None], rng)[0])
    return replace(data, x_train=data.x_train[kept], y_train=data.y_train[kept])


# --- The long tail ---------------------------------------------------------------------------------------------------


def long_tail_sizes(largest: int, classes: int, rho: float) -> np.ndarray:
    """Samples a class keeps, `floor(largest · ρ^(-j / (C - 1)))` for class j (Cao et al. 2019, exponential form).

    Args:
        largest: Samples of the largest class, which class 0 keeps.
        classes: Number of classes, `C`.
        rho: Imbalance ρ, the size of the first class over that of the last.

    Returns:
        `(C,)` whole numbers.
    """
    exact = largest * rho ** (-np.arange(classes) / max(classes - 1, 1))
    return np.floor(exact + 1e-9).astype(np.int64)  # 500 · 100^-1 is a little below 5 in floating point


def thin_out(data: LoadedData, rho: float, rng: np.random.Generator) -> LoadedData:
    """The dataset with a long-tailed training set; which samples stay is drawn, the test set stays whole.

    Raises:
        ConfigError: A class would keep no sample.
    """
    labels = data.y_train.numpy()
    held = np.bincount(labels, minlength=data.num_classes)
    sizes = np.minimum(long_tail_sizes(held.max(), data.num_classes, rho), held)
    if (held > 0)[sizes == 0].any():
        raise ConfigError(f"scenario.long_tail: {rho:g} leaves the last classes empty; lower it")
    kept = torch.from_numpy(deal(labels, sizes[held > 0][None], rng)[0])
    return replace(data, x_train=data.x_train[kept], y_train=data.y_train[kept])


# --- Local test data -------------------------------------------------------------------------------------------------


def share_official_test(data: LoadedData, parts: list[np.ndarray], rng: np.random.Generator) -> FederatedData:
    """Deal the official test set out in the proportions of the training data, class by class.

    Args:
        data: The loaded dataset.
        parts: Each client's training samples.
        rng: The only source of chance.

    Returns:
        Shards that train on all of `parts`. They index one table, so the test samples follow the training samples.
    """
    y_train, y_test = data.y_train.numpy(), data.y_test.numpy()
    held = np.stack([np.bincount(y_train[part], minlength=data.num_classes) for part in parts])
    present, sizes = np.unique(y_test, return_counts=True)
    counts = np.stack([apportion(size, held[:, j], rng) for j, size in zip(present, sizes, strict=True)], axis=1)
    tests = deal(y_test, counts, rng)
    x, y = torch.cat([data.x_train, data.x_test]), torch.cat([data.y_train, data.y_test])
    n = len(y_train)
    shards = [Shard(torch.from_numpy(own), torch.from_numpy(test + n)) for own, test in zip(parts, tests, strict=True)]
    return FederatedData(replace(data, x_train=x, y_train=y, x_test=x[n:], y_test=y[n:]), shards)


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
    chosen = np.zeros(len(labels), dtype=bool)
    total = min(round(share * len(labels)), len(labels) - 1)
    if total:
        members = by_class(labels)
        quota = apportion(total, np.array([len(own) for own in members]), rng)
        for own, size in zip(members, quota, strict=True):
            chosen[rng.permutation(own)[:size]] = True
    return chosen


def apportion(total: int, weights: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Whole numbers in proportion to weights, by largest remainder; none where every weight is zero.

    Args:
        total: What they sum to.
        weights: `(n,)` whole numbers.
        rng: Settles ties: a fixed order would always favour the first.
    """
    exact = total * weights / max(weights.sum(), 1)
    quota = np.floor(exact).astype(np.int64)
    order = np.lexsort((rng.random(len(weights)), -(exact - quota)))
    quota[order[: round(exact.sum()) - quota.sum()]] += 1
    return quota
