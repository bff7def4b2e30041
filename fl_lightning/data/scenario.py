"""The scenario of an experiment: the dataset, and which client trains and is tested on which samples."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core.errors import ConfigError, check_instance, check_number, one_line
from fl_lightning.core.names import Names, shown_names
from fl_lightning.core.objectives import Objective, objective_of
from fl_lightning.core.seeding import Stream, generator
from fl_lightning.data.assignment import assign_samples, check_split
from fl_lightning.data.datasets import Dataset, naming_class
from fl_lightning.data.federated_data import FederatedData, PackedShards, Shard
from fl_lightning.data.loaded_data import LoadedData
from fl_lightning.data.natural_partitions import ByClient
from fl_lightning.data.partitions import ClientSplits, Partition
from fl_lightning.data.remote import RemoteClients
from fl_lightning.data.subsampling import apportion, make_long_tailed, stratified_sample, subsample

TEST_SHARE = 0.25
"""Default share of a client's samples that are held out for testing."""


@dataclass
class Scenario:
    """Dataset, partition and local test split of an experiment. They depend on the seed, not on the algorithm.

    Args:
        dataset: The dataset.
        partition: How its training samples are split among clients.
        clients: Number of clients, `K`, at most the number of training samples. By default the number of clients in
            the data or file (`ByClient`, `PredefinedSplit`), and 10 for other partitions.
        local_test: Each client's own test set. A number in [0, 1) holds out that share of the client's samples,
            stratified by class (0.25 in cwFedAvg, 0.2 in UA-PDFL's code). `official` takes samples of the official
            test set: of each class, the share that the client has of the class's training samples. By default the
            client's own test samples if the partition provides them, else 0.25.
        long_tail: Imbalance ρ of Cao et al. 2019, at least 1. Classes are subsampled to a long tail before the
            partition (FedSKC's CIFAR-10-LT and CIFAR-100-LT, with 10, 50 and 100). By default they are not.
        train_samples: Number of training samples to use, or a share of them in (0, 1), rounded up. They are drawn by
            the seed, stratified by class. By default all. The test set stays whole.
        objective: The learning task: `Classification`, `MultiLabel`, `Regression` or a class of your own; by default
            inferred from the labels.
        validation_share: For tuning: this share of each client's training samples, in (0, 1), stratified by class,
            takes the place of the client's test samples, and all clients' shares together that of the global test
            set. No test sample is used then. By default, models are tested on the test sets.
        held_out_clients: Number of clients, or share of them in (0, 1), that never train, drawn by the seed. Models
            are also evaluated on their data, as what the method gives to a new client. By default none.

    Raises:
        ConfigError: A number is out of range; or `long_tail` or `train_samples` is set with a partition that needs
            the whole dataset.
    """

    dataset: Dataset
    partition: Partition
    clients: int | None = None
    local_test: float | Literal["official"] | None = None
    long_tail: float | None = None
    train_samples: int | float | None = None
    objective: Objective | None = None
    validation_share: float | None = None
    held_out_clients: int | float | None = None

    def __post_init__(self) -> None:
        fix = "Use TorchDataset(train, test) for torch datasets, Arrays for arrays, and Table for data frames"
        check_instance("scenario.dataset", self.dataset, Dataset, fix)
        check_instance("scenario.partition", self.partition, Partition, "Give a partition, such as IID()")
        if isinstance(self.dataset, RemoteClients):
            self._refuse_splitting(self.dataset.clients)
        check_number("scenario.clients", self.clients, "[1, inf)")
        share, rho = self.local_test, self.long_tail
        if share is not None and share != "official" and not (_is_number(share) and 0 <= share < 1):
            raise ConfigError(f"scenario.local_test: {share} is outside [0, 1). Give a share, or official")
        if rho is not None and not (_is_number(rho) and 1 <= rho < math.inf):
            raise ConfigError(f"scenario.long_tail: {rho} is not a number of at least 1. The papers use 10, 50 and 100")
        for key in ("train_samples", "held_out_clients"):
            n = getattr(self, key)
            if n is not None and not (_is_number(n) and (0 < n < 1 if isinstance(n, float) else n >= 1)):
                what = "is neither an integer of at least 1 nor a share between 0 and 1"
                raise ConfigError(f"scenario.{key}: {n} {what}")
        if self.clients is not None:
            self.training_clients(self.clients)
        check_number("scenario.validation_share", self.validation_share, "(0, 1)")
        for key in ("long_tail", "train_samples"):
            if self.partition.needs_whole_dataset and getattr(self, key) is not None:
                what = f"{type(self.partition).__name__} refers to samples of the whole dataset by index"
                raise ConfigError(f"scenario.{key}: {what}. Leave {key} out")

    def build(self, seed: int, test_set: bool = False) -> FederatedData:
        """Load the data and split them among the clients.

        Args:
            seed: Seed of the partition and of all other splits.
            test_set: Test on the test samples even if `validation_share` is set. The training samples stay the same.

        Raises:
            ConfigError: The data cannot be read or are invalid, the partition is not possible, or a client would have
                no training sample.
        """
        if isinstance(self.dataset, RemoteClients):
            return self.dataset.federated(self.objective)
        data = self.dataset.checked(self.objective)
        if self.validation_share and data.evaluate is not None:
            what = f"{type(self.dataset).__name__} has its own evaluation, which needs its own test set"
            fix = " and set scenario.dataset.evaluate_on to val" if hasattr(self.dataset, "evaluate_on") else ""
            raise ConfigError(f"scenario.validation_share: {what}. Leave it out{fix}")
        if self.partition.needs_whole_dataset and self.dataset.draws_test_set:
            what = f"it refers to samples by index, but {type(self.dataset).__name__} draws test samples at random"
            fix = "Name the test samples, such as with test_path or split of a table"
            raise ConfigError(f"{self.partition.error_prefix}: {what}. {fix}")
        self._warn_of_unused_clients()
        federated = self._split_clients(data, seed)
        held_out = self._draw_held_out_clients(len(federated.shards), seed)
        hidden = self._hidden_rows(held_out, federated, data, seed)
        if self.dataset.has_statistics and len(hidden):
            federated = self._split_clients(self._load_without(hidden, len(data.y_train)), seed)
        if held_out:
            federated = hold_out_clients(federated, held_out)
        if self.validation_share:
            validated = hold_out_validation(federated, self.validation_share, seed)
            federated = with_tests_of(federated, validated) if test_set else validated
        if federated.held_out and not any(len(shard.test) for shard in federated.held_out):
            what, fix = "the held-out clients have no test samples", "Set scenario.local_test, such as 0.25"
            raise ConfigError(f"scenario.held_out_clients: {what}. {fix}")
        return federated

    def _refuse_splitting(self, clients: int) -> None:
        """Raise an error if an option would split or reduce data that are on the clients' machines."""
        keys = ("local_test", "long_tail", "train_samples", "validation_share", "held_out_clients")
        given = [key for key in keys if getattr(self, key) is not None]
        given += ["partition"] * (not isinstance(self.partition, ByClient)) + ["clients"] * (self.clients != clients)
        if given:
            fix = {"partition": "Set it to ByClient", "clients": f"Set it to {clients}"}.get(given[0], "Leave it out")
            raise ConfigError(f"scenario.{given[0]}: the data are on the clients' machines, already split. {fix}")

    def training_clients(self, clients: int) -> int:
        """Return the number of clients that train. `clients` is the number of all clients; the others are held out.

        Raises:
            ConfigError: All clients are held out.
        """
        n = self.held_out_clients or 0
        held_out = max(1, round(n * clients)) if isinstance(n, float) else n
        if held_out >= clients:
            raise ConfigError(f"scenario.held_out_clients: {n} of {clients} clients leaves none to train. Lower it")
        return clients - held_out

    def _draw_held_out_clients(self, clients: int, seed: int) -> list[int]:
        """Draw the clients that never train, ascending. `clients` is the number of all clients."""
        count = clients - self.training_clients(clients)
        return sorted(generator(seed, Stream.HELD_OUT_CLIENTS).choice(clients, count, replace=False).tolist())

    def _hidden_rows(
        self, held_out: Sequence[int], federated: FederatedData, data: LoadedData, seed: int
    ) -> np.ndarray:
        """Return the indices of the training samples that only test: of held-out clients, and of the partition."""
        of_partition = self.partition.test_rows(data)
        if not held_out:
            return of_partition
        everything = torch.arange(len(data.y_train))
        rows = self._reduce(replace(data, x_train=everything), seed, self._objective(data)).x_train
        assert isinstance(rows, Tensor)
        shards = [federated.shards[client] for client in held_out]
        own = torch.cat([part for shard in shards for part in (shard.train, shard.test)])
        left_out = rows[own[own < len(rows)]].numpy()  # others are test samples
        if isinstance(self.partition, ByClient):  # also the samples that `_reduce` has dropped
            assert federated.client_ids
            assert data.client_train is not None
            left_out = np.flatnonzero(np.isin(data.client_train, [federated.client_ids[client] for client in held_out]))
        return np.union1d(left_out, of_partition)

    def _load_without(self, hidden: np.ndarray, train: int) -> LoadedData:
        """Load the data again, and compute statistics such as the mean without some of the `train` samples."""
        dataset = copy.copy(self.dataset)
        dataset.fitted = np.setdiff1d(np.arange(train), hidden)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they were shown the first time
            return dataset.checked(self.objective)

    def _split_clients(self, data: LoadedData, seed: int) -> FederatedData:
        objective = self._objective(data)
        if not objective.classes:
            self._refuse_classless(objective)
        data = self._reduce(data, seed, objective)
        labels = objective.strata(data.y_train).numpy()
        splits = self._split(data, labels, generator(seed, Stream.PARTITION))
        if self.local_test is not None and splits.test is not None and self.partition.needs_whole_dataset:
            what = f"{self.local_test} takes the place of the test samples that {type(self.partition).__name__} lists"
            warnings.warn(f"scenario.local_test: {what}. Set it to null to use them", stacklevel=2)
        data = replace(data, client_train=None, client_test=None)
        if self.local_test == "official":
            if splits.global_test is not None:
                what = f"official takes test samples of all data, and {type(self.partition).__name__} leaves some out"
                raise ConfigError(f"scenario.local_test: {what}. Leave it out, or give a share")
            test = split_official_test(data, splits.train, generator(seed, Stream.LOCAL_SPLIT), objective)
            splits = replace(splits, test=test)
        elif self.local_test is not None or splits.test is None:
            split = [self._split_locally(labels, part, seed, client) for client, part in enumerate(splits.train)]
            federated = FederatedData(data, PackedShards(*zip(*split, strict=True)), splits.ids, objective)
            return with_global_test(federated, data, splits.global_test)
        return with_global_test(append_test_set(data, splits, objective), data, splits.global_test)

    def _objective(self, data: LoadedData) -> Objective:
        return self.objective or self.dataset.objective or objective_of(data.y_train)

    def _reduce(self, data: LoadedData, seed: int, objective: Objective) -> LoadedData:
        """Return the data with a training set reduced by the options `train_samples` and `long_tail`."""
        # These random streams differ from the partition's, so that every partition splits the same samples.
        if self.train_samples is not None:
            data = subsample(data, self.train_samples, generator(seed, Stream.PARTITION, 1), objective)
        if self.long_tail is not None:
            data = make_long_tailed(data, self.long_tail, generator(seed, Stream.PARTITION, 0))
        return data

    def _refuse_classless(self, objective: Objective) -> None:
        if self.partition.needs_classes:
            fix = "Use IID, QuantitySkew, ByClient or PredefinedSplit"
            raise ConfigError(f"{self.partition.error_prefix} splits by class, but {objective.no_classes}. {fix}")
        if self.long_tail is not None:
            raise ConfigError(f"scenario.long_tail: subsamples classes, but {objective.no_classes}. Leave it out")

    def _warn_of_unused_clients(self) -> None:
        """Warn if the config names a column of client ids that the partition does not use."""
        column = getattr(self.dataset, "client", None)
        if column and type(self.partition).split_dataset is Partition.split_dataset:
            what = f"{type(self.partition).__name__} does not use the column {one_line(column)}"
            fix = "To make each of its values a client, set scenario.partition ByClient and scenario.clients null"
            warnings.warn(f"scenario.dataset.client: {what}. {fix}", stacklevel=2)

    def _split(self, data: LoadedData, labels: np.ndarray, rng: np.random.Generator) -> ClientSplits:
        """Split the data by the partition, which may be a user's own, and check what it returns."""
        who = self.partition.error_prefix
        with naming_class(who):
            splits = self.partition.split_dataset(data, labels, self.clients, rng)
        for client, part in enumerate(splits.train):
            if not len(part):
                whose = Names(shown_names(splits.ids)).client(client)
                fix = "Use fewer clients, or a partition with min_samples"
                raise ConfigError(f"scenario.partition: {whose} has no data. {fix}")
        clients = len(splits.train) if self.clients is None else self.clients
        try:
            check_split(splits.train, clients, len(data.y_train))
            for part in splits.test or ():  # clients may share test samples
                check_split([part], 1, len(data.y_test), "test sample")
        except ValueError as error:
            raise ConfigError(f"{who}: {error}") from error
        return splits

    def _split_locally(
        self, labels: np.ndarray, part: np.ndarray, seed: int, client: int
    ) -> tuple[np.ndarray, np.ndarray]:
        assert self.local_test != "official"
        share = TEST_SHARE if self.local_test is None else self.local_test
        if not share:
            return part, part[:0]
        test = stratified_sample(labels[part], share, generator(seed, Stream.LOCAL_SPLIT, client))
        return part[~test], part[test]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def split_official_test(
    data: LoadedData, parts: list[np.ndarray], rng: np.random.Generator, objective: Objective
) -> list[np.ndarray]:
    """Split each class of the official test set among clients, in proportion to their training samples of the class.

    Returns each client's test samples as ascending indices into the test set.
    """
    y_train, y_test = (objective.strata(y).numpy() for y in (data.y_train, data.y_test))
    classes = objective.stratum_count(data.num_classes)
    held = np.stack([np.bincount(y_train[part], minlength=classes) for part in parts])
    present, sizes = np.unique(y_test, return_counts=True)
    counts = np.stack([apportion(size, held[:, j], rng) for j, size in zip(present, sizes, strict=True)], axis=1)
    return assign_samples(y_test, counts, rng)


def append_test_set(data: LoadedData, splits: ClientSplits, objective: Objective) -> FederatedData:
    """Return federated data whose clients train on parts of the training set and are tested on parts of the test set.

    Both sets are stored as one: `x_train` and `y_train` of the result hold the training samples followed by the test
    samples.
    """
    assert splits.test is not None
    inputs: list[Any] = [data.x_train, data.x_test]
    x, y = torch.cat(inputs), torch.cat([data.y_train, data.y_test])
    n = len(data.y_train)
    table = replace(data, x_train=x, y_train=y, x_test=x[n:], y_test=y[n:])
    return FederatedData(table, PackedShards(splits.train, [part + n for part in splits.test]), splits.ids, objective)


def with_global_test(federated: FederatedData, data: LoadedData, rows: np.ndarray | None) -> FederatedData:
    """Return federated data with another global test set: `rows` of a dataset's training and test samples.

    Args:
        federated: The data.
        data: The dataset that was split.
        rows: Indices into its training samples followed by its test samples; None to change nothing.
    """
    if rows is None:
        return federated
    train, n = rows < len(data.y_train), len(data.y_train)
    sets: list[list[Any]] = [[data.x_train, data.x_test], [data.y_train, data.y_test]]
    x, y = (torch.cat([first[rows[train]], second[rows[~train] - n]]) for first, second in sets)
    return replace(federated, data=replace(federated.data, x_test=x, y_test=y))


def hold_out_clients(federated: FederatedData, held_out: Sequence[int]) -> FederatedData:
    """Return federated data in which some clients do not train and come last. The other clients keep their order.

    The ids of all clients stay the same. If the data have no ids, the clients' previous indices become their ids.

    Args:
        federated: The data of all clients.
        held_out: The indices of the clients to hold out, ascending.
    """
    shards, ids = federated.shards, federated.client_ids or range(len(federated.shards))
    train = [client for client in range(len(shards)) if client not in set(held_out)]
    kept, rest = ([shards[client] for client in clients] for clients in (train, held_out))
    names = [ids[client] for client in (*train, *held_out)]
    return replace(federated, shards=PackedShards.from_shards(kept), client_ids=names, held_out=rest)


def with_tests_of(federated: FederatedData, validated: FederatedData) -> FederatedData:
    """Combine two splits of the same data: test samples from `federated`, training samples from `validated`."""

    def shards(train: Sequence[Shard], test: Sequence[Shard]) -> PackedShards:
        return PackedShards.from_shards([Shard(one.train, other.test) for one, other in zip(train, test, strict=True)])

    held_out = shards(validated.held_out, federated.held_out) if federated.held_out else ()
    return replace(federated, shards=shards(validated.shards, federated.shards), held_out=held_out)


def hold_out_validation(federated: FederatedData, share: float, seed: int) -> FederatedData:
    """Replace all test samples by a validation set: a random share of each client's training samples.

    Returns the new federated data, and leaves `federated` unchanged.

    Raises:
        ConfigError: No client has enough training samples.
    """
    labels, parts = federated.objective.strata(federated.data.y_train).numpy(), []
    for client, shard in enumerate((*federated.shards, *federated.held_out)):
        train = shard.train.numpy()
        held = stratified_sample(labels[train], share, generator(seed, Stream.VALIDATION_SHARE, client))
        parts.append((train[~held], train[held]))
    clients = len(federated.shards)
    shards = PackedShards(*zip(*parts[:clients], strict=True))
    held_out = PackedShards(*zip(*parts[clients:], strict=True)) if federated.held_out else ()
    everything, _ = shards.concatenate("test")
    if not len(everything):
        raise ConfigError(f"scenario.validation_share: {share} holds out no sample of any client. Raise it")
    data = federated.data
    data = replace(data, x_test=data.x_train[everything], y_test=data.y_train[everything])
    return replace(federated, data=data, shards=shards, held_out=held_out)
