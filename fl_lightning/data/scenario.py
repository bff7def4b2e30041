"""`Scenario`: who holds what."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Literal, overload

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core.errors import ConfigError
from fl_lightning.core.objectives import Classification, Objective, objective_of
from fl_lightning.core.seeding import Stream, generator
from fl_lightning.data.datasets import Dataset, LoadedData, own_code
from fl_lightning.data.partitions import Partition, Shares, by_class, check_shares, deal

HASHED = 1 << 24
"""Bytes of a tensor that are hashed at a time: as much, and no more, may have to be copied."""

HELD_OUT = 0.25
"""Share of its samples that a client is tested on where neither the config nor the data say."""


@dataclass(frozen=True)
class Shard:
    """One client's share, as indices into the training set.

    Args:
        train: Samples the client trains on.
        test: Samples it is tested on, disjoint from `train`; may be empty.
    """

    train: Tensor
    test: Tensor


class PackedShards(Sequence[Shard]):
    """Shards by client id, for very many clients: two tensors hold the indices of all, and a client's are their views.

    Args:
        train: Each client's training samples.
        test: Each client's test samples.
    """

    def __init__(self, train: Sequence[np.ndarray | Tensor], test: Sequence[np.ndarray | Tensor]) -> None:
        self._parts = {
            part: (torch.from_numpy(np.concatenate(own)), [0, *accumulate(map(len, own))])  # and where each begins
            for part, own in (("train", train), ("test", test))
        }

    @classmethod
    def of(cls, shards: Sequence[Shard]) -> PackedShards:
        """These shards, packed."""
        return shards if isinstance(shards, cls) else cls([own.train for own in shards], [own.test for own in shards])

    def together(self, part: str) -> tuple[Tensor, Tensor]:
        """What `FederatedData.together` gives."""
        indices, starts = self._parts[part]
        return indices, torch.tensor(starts).diff()

    def __len__(self) -> int:
        return len(self._parts["train"][1]) - 1

    @overload
    def __getitem__(self, client: int) -> Shard: ...
    @overload
    def __getitem__(self, client: slice) -> list[Shard]: ...
    def __getitem__(self, client: int | slice) -> Shard | list[Shard]:
        chosen = range(len(self))[client]
        return self._shard(chosen) if isinstance(chosen, int) else [self._shard(k) for k in chosen]

    def _shard(self, k: int) -> Shard:
        return Shard(*(indices[starts[k] : starts[k + 1]] for indices, starts in self._parts.values()))


@dataclass
class FederatedData:
    """A loaded dataset and each client's share of it.

    Args:
        data: The whole dataset; its test split is the global test set. Where clients are tested on samples of that,
            these also follow the training samples in `x_train` and `y_train`. Of whose they are the shards are left.
        shards: One a client, by client id.
        client_ids: What each client is called in the data, by client id, where it has a name there.
        objective: What the labels are for.
    """

    data: LoadedData
    shards: Sequence[Shard]
    client_ids: Sequence[int | str] | None = None
    objective: Objective = field(default_factory=Classification)

    def class_counts(self, part: str = "train") -> np.ndarray:
        """Samples a client and class, `(clients, C)`, of `train` or `test` shares; without classes `(clients, 1)`."""
        classes = self.objective.stratum_count(self.data.num_classes)
        y = self.objective.strata(self.data.y_train)
        held, sizes = self.together(part)
        cell = (torch.arange(len(sizes)) * classes).repeat_interleave(sizes).add_(y[held])
        return torch.bincount(cell, minlength=len(sizes) * classes).reshape(len(sizes), classes).numpy()

    def together(self, part: str = "train") -> tuple[Tensor, Tensor]:
        """All clients' indices of `train` or `test`, one client's after another's, and how many each has, `(K,)`."""
        return PackedShards.of(self.shards).together(part)

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
        large = rows.nbytes > HASHED
        pieces = rows.split(max(1, HASHED // rows[:1].nbytes)) if large else (rows,)
        for piece in pieces:  # one that is laid out otherwise, or on a GPU, is copied
            flat = piece.detach().cpu().contiguous().as_strided((piece.numel(),), (1,))  # one value may have any stride
            digest.update(flat.view(torch.uint8).numpy().data)
    return f"sha256:{digest.hexdigest()}"


@dataclass
class Scenario:
    """Dataset, partition and local split: the same for every method run with one seed.

    Args:
        dataset: What is learnt.
        partition: How its training samples are dealt out to clients.
        clients: Number of clients, `K`, no more than there are training samples. By default as many as the data know
            (`ByClient`, `PredefinedSplit`), and 10 where they know none.
        local_test: What a client's own test split is. A number in [0, 1): that share of the samples the client was
            dealt, stratified by class as far as whole samples allow (0.25 in cwFedAvg, 0.2 in UA-PDFL's code).
            `official`: of each class of the official test set the share that the client has of the class's training
            samples, so that it trains on all it was dealt. By default the test samples that are the client's own
            where the partition knows them, on top of all it was dealt, and 0.25 where it does not.
        long_tail: Imbalance ρ of Cao et al. 2019, 1 or more: the training samples are thinned out by class before
            the partition (FedSKC's CIFAR-10-LT and CIFAR-100-LT, with 10, 50 and 100); none by default.
        train_samples: Use only so many of the training samples, or such a share of them; a share lies between 0 and 1
            and is rounded up, and which ones is drawn by the seed in the proportions of the classes; all by default.
            The test set stays whole.
        objective: What the labels are for: `Classification`, `MultiLabel`, `Regression`, or a class of your own; found
            from the labels by default.

    Raises:
        ConfigError: `clients` is below 1, `train_samples` neither a whole number from 1 on nor a share, `local_test`
            outside [0, 1) or `long_tail` below 1; or one of these two is set beside a partition that knows samples
            by their place.
    """

    dataset: Dataset
    partition: Partition
    clients: int | None = None
    local_test: float | Literal["official"] | None = None
    long_tail: float | None = None
    train_samples: int | float | None = None
    objective: Objective | None = None

    def __post_init__(self) -> None:
        if self.clients is not None and self.clients < 1:
            raise ConfigError(f"scenario.clients: {self.clients} is below 1")
        share, rho, n = self.local_test, self.long_tail, self.train_samples
        if share is not None and share != "official" and not (_is_number(share) and 0 <= share < 1):
            raise ConfigError(f"scenario.local_test: {share} is outside [0, 1); or use official")
        if rho is not None and not (_is_number(rho) and 1 <= rho < math.inf):
            raise ConfigError(f"scenario.long_tail: {rho} is no number from 1 on; the papers use 10, 50 and 100")
        if n is not None and not (_is_number(n) and (0 < n < 1 if isinstance(n, float) else n >= 1)):
            raise ConfigError(
                f"scenario.train_samples: {n} is neither a whole number from 1 on nor a share between 0 and 1"
            )
        for key in ("long_tail", "train_samples"):
            if self.partition.by_place and getattr(self, key) is not None:
                name = type(self.partition).__name__
                raise ConfigError(
                    f"scenario.{key}: {name} knows samples by their place in the whole dataset; leave {key} out"
                )

    def build(self, seed: int) -> FederatedData:
        """Load the data and deal it out.

        Raises:
            ConfigError: The data cannot be read or are not what they should be, the partition cannot be met, or a
                client ends up with no training sample.
        """
        data = self.dataset.checked(self.objective)
        objective = self.objective or self.dataset.objective or objective_of(data.y_train)
        if not objective.classes:
            self._refuse_what_needs_classes(objective)
        # Keys of their own beside the partition's: the same samples for every way to deal them out.
        if self.train_samples is not None:
            data = keep_some(data, self.train_samples, generator(seed, Stream.PARTITION, 1), objective)
        if self.long_tail is not None:
            data = thin_out(data, self.long_tail, generator(seed, Stream.PARTITION, 0))
        labels = objective.strata(data.y_train).numpy()
        shares = self._deal(data, labels, generator(seed, Stream.PARTITION))
        data = replace(data, client_train=None, client_test=None)
        if self.local_test == "official":
            test = share_official_test(data, shares.train, generator(seed, Stream.LOCAL_SPLIT), objective)
            shares = replace(shares, test=test)
        elif self.local_test is not None or shares.test is None:
            split = [self._split_locally(labels, part, seed, client) for client, part in enumerate(shares.train)]
            return FederatedData(data, PackedShards(*zip(*split, strict=True)), shares.ids, objective)
        return in_one_table(data, shares, objective)

    def _refuse_what_needs_classes(self, objective: Objective) -> None:
        if self.partition.needs_classes:
            mend = "take IID, QuantitySkew, ByClient or PredefinedSplit"
            raise ConfigError(f"{self.partition.blamed} deals classes out, and {objective.no_classes}; {mend}")
        if self.long_tail is not None:
            raise ConfigError(f"scenario.long_tail: it thins classes out, and {objective.no_classes}; leave it out")

    def _deal(self, data: LoadedData, labels: np.ndarray, rng: np.random.Generator) -> Shares:
        who = self.partition.blamed
        with own_code(who):
            shares = self.partition.share_out(data, labels, self.clients, rng)
        for client, part in enumerate(shares.train):
            if not len(part):
                raise ConfigError(
                    f"scenario.partition: client {client} holds no data; use fewer scenario.clients, or a partition "
                    "with min_samples"
                )
        clients = len(shares.train) if self.clients is None else self.clients
        try:
            check_shares(shares.train, clients, len(data.y_train))
            for own in shares.test or ():  # one test sample may be several clients'
                check_shares([own], 1, len(data.y_test), "test sample")
        except ValueError as error:
            raise ConfigError(f"{who}: {error}") from error
        return shares

    def _split_locally(
        self, labels: np.ndarray, part: np.ndarray, seed: int, client: int
    ) -> tuple[np.ndarray, np.ndarray]:
        assert self.local_test != "official"
        share = HELD_OUT if self.local_test is None else self.local_test
        if not share:  # nothing to draw
            return part, part[:0]
        test = stratified_sample(labels[part], share, generator(seed, Stream.LOCAL_SPLIT, client))
        return part[~test], part[test]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def keep_some(
    data: LoadedData, n: int | float, rng: np.random.Generator, objective: Objective = Classification()
) -> LoadedData:
    """The dataset with n of its training samples, or that share of them, in the proportions of the classes.

    Raises:
        ConfigError: It has fewer.
    """
    labels = objective.strata(data.y_train).numpy()
    if isinstance(n, float):
        n = max(math.ceil(round(n * len(labels), 9)), 1)  # 0.07 of 100 is a little above 7 in floating point
    if n > len(labels):
        raise ConfigError(f"scenario.train_samples: {n}, and the dataset has {len(labels)} training samples")
    sizes = apportion(n, np.unique(labels, return_counts=True)[1], rng)
    return with_only(data, deal(labels, sizes[None], rng)[0])


def with_only(data: LoadedData, kept: np.ndarray) -> LoadedData:
    """The dataset with the training samples at these places, and whose they are."""
    owners = None if data.client_train is None else data.client_train[kept]
    index = torch.from_numpy(kept)
    return replace(data, x_train=data.x_train[index], y_train=data.y_train[index], client_train=owners)


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
    return with_only(data, deal(labels, sizes[held > 0][None], rng)[0])


# --- Local test data -------------------------------------------------------------------------------------------------


def share_official_test(
    data: LoadedData, parts: list[np.ndarray], rng: np.random.Generator, objective: Objective = Classification()
) -> list[np.ndarray]:
    """Deal the official test set out in the proportions of the training data, class by class.

    Args:
        data: The loaded dataset.
        parts: Each client's training samples.
        rng: The only source of chance.
        objective: What the labels are for.

    Returns:
        Each client's test samples, ascending indices into the test set.
    """
    y_train, y_test = (objective.strata(y).numpy() for y in (data.y_train, data.y_test))
    classes = objective.stratum_count(data.num_classes)
    held = np.stack([np.bincount(y_train[part], minlength=classes) for part in parts])
    present, sizes = np.unique(y_test, return_counts=True)
    counts = np.stack([apportion(size, held[:, j], rng) for j, size in zip(present, sizes, strict=True)], axis=1)
    return deal(y_test, counts, rng)


def in_one_table(data: LoadedData, shares: Shares, objective: Objective = Classification()) -> FederatedData:
    """Clients that train on all they were dealt, and are tested on test samples.

    Args:
        data: The loaded dataset.
        shares: Each client's training samples, and its test samples.
        objective: What the labels are for.

    Returns:
        Shards that index one table, in which the test samples follow the training samples.
    """
    assert shares.test is not None
    x, y = torch.cat([data.x_train, data.x_test]), torch.cat([data.y_train, data.y_test])
    n = len(data.y_train)
    table = replace(data, x_train=x, y_train=y, x_test=x[n:], y_test=y[n:])
    return FederatedData(table, PackedShards(shares.train, [own + n for own in shares.test]), shares.ids, objective)


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
