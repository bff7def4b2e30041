"""Partitions: rules that split a dataset among clients. Each maps labels to one array of sample indices per client."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from fl_lightning.core.arguments import PartMixin, number
from fl_lightning.core.errors import ConfigError
from fl_lightning.data.assignment import (
    assign_samples,
    draw_classes,
    equal_sizes,
    indices_by_class,
    split_classes,
    top_up_clients,
)

if TYPE_CHECKING:
    from fl_lightning.data.loaded_data import LoadedData

CLIENTS = 10
"""Default number of clients, if neither `scenario.clients` nor the data give one."""


@dataclass
class ClientSplits:
    """Result of a partition: the indices of each client's training and test samples.

    Args:
        train: Each client's training samples, ascending indices. No sample belongs to two clients.
        test: Each client's own test samples, ascending indices into the test set; None if there are none.
        ids: Each client's id in the data; None if they have none.
        global_test: The samples of the global test set, as indices into the training samples followed by the test
            samples; None for all test samples. No client trains on one of them.
    """

    train: list[np.ndarray]
    test: list[np.ndarray] | None = None
    ids: Sequence[int | str] | None = None
    global_test: np.ndarray | None = None


class Partition(PartMixin, ABC):
    """Base class of rules that split samples among clients: the `scenario.partition` of a config.

    Attributes:
        needs_classes: Whether it splits by class. Labels that are not classes are then refused.
        needs_whole_dataset: Whether it refers to samples by index. Options that reduce the dataset are then refused,
            and datasets that draw test samples at random.
    """

    section = "scenario.partition"
    needs_classes: ClassVar[bool] = False
    needs_whole_dataset: ClassVar[bool] = False

    @property
    def error_prefix(self) -> str:
        """Return the beginning of error messages about the partition: the config key and the class."""
        return f"scenario.partition: {type(self).__name__}"

    def split_dataset(
        self, data: LoadedData, labels: np.ndarray, clients: int | None, rng: np.random.Generator
    ) -> ClientSplits:
        """Split a dataset among clients. By default, this calls `split` with the labels.

        Override this method if the split depends on more than the labels.

        Args:
            data: The dataset.
            labels: Class of each training sample, `(n,)`; zeros if labels are not classes.
            clients: Number of clients; None if `scenario.clients` is not set.
            rng: Random generator.

        Raises:
            ConfigError: The split is not possible.
        """
        clients = CLIENTS if clients is None else clients
        if clients > len(labels):
            raise ConfigError(
                f"scenario.clients: {clients} is above the {len(labels)} training samples. Each client needs one"
            )
        return ClientSplits(self.split(labels, clients, rng))

    def test_rows(self, data: LoadedData) -> np.ndarray:
        """Return the indices of the training samples that the partition makes test samples; by default none.

        Statistics of the data, such as the mean of the images, are computed without them.
        """
        return np.arange(0)

    @abstractmethod
    def split(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        """Split samples among clients, given the class of each sample.

        Args:
            labels: Class of each sample, `(n,)`.
            clients: Number of clients.
            rng: Random generator.

        Returns:
            One ascending array of sample indices per client. No index is in two of them.

        Raises:
            ConfigError: The split is not possible.
        """


class IID(Partition):
    """Random split, regardless of class. The sizes of clients differ by at most one sample."""

    def split(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        """Shuffle the samples and cut them into equal parts, one per client. Every sample is used."""
        return [np.sort(part) for part in np.array_split(rng.permutation(len(labels)), clients)]


class Dirichlet(Partition):
    """Label skew: class proportions drawn from Dirichlet(alpha). A small alpha gives the strongest skew.

    The papers and their code use four forms. Every sample is used in each:

    - `class` (FedDW's published code): each class is split among the clients in drawn proportions, so that client sizes
      differ too. The draw is repeated until every client has `min_samples`. After 1,000 draws, or one that leaves more
      than 100 clients with too few samples, the last draw is corrected: the largest clients give samples to clients
      with too few, in proportion to their own classes.
    - `capped` (the published code of Yurochkin et al. 2019, MOON, PFLlib, cwFedAVG and UA-PDFL): as `class`, but the
      classes are split one after another, and a client that holds an equal share of all samples gets no samples of the
      next classes. Clients are closer in size and have fewer classes.
    - `balanced` (Hsu et al. 2019): all clients have equally many samples; each client draws its class proportions.
    - `groups` (FedSKC's published code): the samples are split among groups of ten clients, within a group as in
      `capped`, and the result is cut again into equal sizes.

    Args:
        alpha: Concentration, above 0; in `balanced`, the concentration of a class of average size.
        min_samples: Minimum number of samples per client.
        form: `class`, `capped`, `balanced` or `groups`.

    Raises:
        ConfigError: `alpha` is not above 0 and at most 1e6, or `min_samples` below 1.
    """

    alpha: float = number(0.5, "(0, 1e6]")
    min_samples: int = number(10, "[1, inf)")
    form: Literal["class", "capped", "balanced", "groups"] = "class"

    needs_classes = True
    max_draws, max_short = 1000, 100

    def split(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        """Split samples among clients with class proportions drawn from Dirichlet(alpha). Every sample is used."""
        if clients * self.min_samples > len(labels):
            raise self._error(clients, f"{len(labels)} samples are too few")
        forms = {
            "class": self._by_class,
            "capped": self._by_class,
            "balanced": self._balanced,
            "groups": self._in_groups,
        }
        return forms[self.form](labels, clients, rng)

    def _by_class(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        sizes = np.unique(labels, return_counts=True)[1]
        draw = self._draw_capped if self.form == "capped" else self._draw
        for _ in range(self.max_draws):
            counts = draw(sizes, clients, rng).T
            short = (counts.sum(axis=1) < self.min_samples).sum()
            if not 0 < short <= self.max_short:  # their number hardly varies between draws
                break
        return assign_samples(labels, top_up_clients(counts, self.min_samples), rng)

    def _balanced(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        left = np.unique(labels, return_counts=True)[1]
        concentration = self.alpha * len(left) * left / len(labels)
        counts = np.zeros((clients, len(left)), dtype=np.int64)
        # The last clients get the classes that are left, so the order is random.
        for client, size in zip(rng.permutation(clients), equal_sizes(len(labels), clients), strict=True):
            counts[client] = draw_classes(rng.dirichlet(concentration), left, size, rng)
            left = left - counts[client]
        return assign_samples(labels, counts, rng)

    def _in_groups(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        sizes = [10] * (clients // 10) + [clients % 10] * (clients % 10 > 0)
        borders = np.cumsum(sizes)[:-1] * len(labels) // clients
        pieces = []
        for group, members in zip(np.split(rng.permutation(len(labels)), borders), sizes, strict=True):
            parts = assign_samples(labels[group], self._group_counts(labels[group], members, clients, rng).T, rng)
            pieces += [group[part[np.argsort(labels[group][part], kind="stable")]] for part in parts]
        return [np.sort(part) for part in np.array_split(np.concatenate(pieces), clients)]

    def _group_counts(self, labels: np.ndarray, members: int, clients: int, rng: np.random.Generator) -> np.ndarray:
        """Draw the number of samples of each class for each client of a group, `(C, members)`.

        `members` is the number of clients in the group, and `clients` that of all clients, for error messages.
        Draws are repeated until each client has at least half of an equal share of the samples.
        """
        sizes = np.unique(labels, return_counts=True)[1]
        for _ in range(self.max_draws):
            counts = self._draw_capped(sizes, members, rng)
            if counts.sum(axis=0).min() >= int(len(labels) / members / 2):
                return counts
        raise self._error(clients, f"{self.max_draws} draws with alpha {self.alpha} left one below half an equal share")

    def _draw(self, sizes: np.ndarray, clients: int, rng: np.random.Generator) -> np.ndarray:
        """Draw the number of samples of each class for each client, `(C, clients)`, given the sizes of the classes."""
        return split_classes(rng.dirichlet(np.full(clients, self.alpha), size=len(sizes)), sizes)

    def _draw_capped(self, sizes: np.ndarray, clients: int, rng: np.random.Generator) -> np.ndarray:
        """Draw as `_draw`, class by class. A client with an equal share of all samples gets no further samples."""
        counts = np.zeros((len(sizes), clients), dtype=np.int64)
        for j, size in enumerate(sizes):
            below_share = np.flatnonzero(counts.sum(axis=0) * clients < sizes.sum())
            shares = np.zeros(len(below_share))
            while not shares.sum():  # with a tiny alpha, a draw can give the whole class to clients at the cap
                shares = rng.dirichlet(np.full(clients, self.alpha))[below_share]
            counts[j, below_share] = split_classes(shares[None] / shares.sum(), size[None])[0]
        return counts

    def _error(self, clients: int, why: str) -> ConfigError:
        return ConfigError(
            f"scenario.partition.min_samples: cannot give each of {clients} clients {self.min_samples} samples: {why}. "
            "Lower min_samples or scenario.clients, or raise alpha"
        )


class Shards(Partition):
    """Samples sorted by class and cut into equal shards, a few per client (McMahan et al. 2017).

    Args:
        per_client: Shards per client; 2 in the paper, so that most clients have two classes.

    Raises:
        ConfigError: `per_client` is below 1.
    """

    per_client: int = number(2, "[1, inf)")

    needs_classes = True

    def split(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        """Sort samples by class, cut them into shards and assign shards to clients at random. Every sample is used."""
        count = clients * self.per_client
        if count > len(labels):
            raise ConfigError(
                f"scenario.partition.per_client: {count} shards of {len(labels)} samples leave some empty. "
                "Lower per_client or scenario.clients"
            )
        shards = np.array_split(np.concatenate(indices_by_class(labels)), count)
        assigned = rng.permutation(count).reshape(clients, self.per_client)
        return [np.sort(np.concatenate([shards[i] for i in row])) for row in assigned]


class QuantitySkew(Partition):
    """Quantity skew: client sizes drawn from Dirichlet(alpha), samples drawn regardless of class.

    See Li et al. 2022 (NIID-Bench). Draws are repeated and corrected for `min_samples` as in `Dirichlet`.

    Args:
        alpha: Concentration, above 0; a small value gives few clients most of the data.
        min_samples: Minimum number of samples per client.

    Raises:
        ConfigError: As for `Dirichlet`.
    """

    def __init__(self, alpha: float = 0.5, min_samples: int = 10) -> None:
        self.sizes = Dirichlet(alpha, min_samples)

    def split(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        """Draw client sizes from Dirichlet(alpha), and split samples at random by these sizes. Every sample is used."""
        return self.sizes.split(np.zeros_like(labels), clients, rng)


class _FewClasses(Partition):
    """Base class of partitions with a few classes per client."""

    classes_per_client: int = number(2, "[1, inf)")

    needs_classes = True


class DisjointClasses(_FewClasses):
    """Groups of clients with a few classes each. No class occurs in two groups.

    This is the extreme split of the UA-PDFL paper (Fig. 8). The classes, in random order, are cut into blocks. Each
    block is split equally among one group of clients. With fewer clients than blocks, the classes of the remaining
    blocks are unused.

    Args:
        classes_per_client: Most classes per client; blocks differ by at most one class.

    Raises:
        ConfigError: `classes_per_client` is below 1.
    """

    def split(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        """Assign blocks of classes to groups of clients, and split each class equally among its group's clients."""
        sizes = np.unique(labels, return_counts=True)[1]
        blocks = np.array_split(rng.permutation(len(sizes)), -(-len(sizes) // self.classes_per_client))
        groups = np.array_split(rng.permutation(clients), len(blocks))
        counts = np.zeros((clients, len(sizes)), dtype=np.int64)
        for block, group in zip(blocks, groups, strict=True):
            for j in block if len(group) else ():
                counts[group, j] = np.roll(equal_sizes(sizes[j], len(group)), rng.integers(len(group)))
        if counts.sum(axis=1).min() < 1:
            raise ConfigError(
                f"scenario.partition: {len(labels)} samples are too few for {clients} clients. Lower scenario.clients"
            )
        return assign_samples(labels, counts, rng)


class Pathological(_FewClasses):
    """k classes per client: each class is cut into equal shards, and each client gets shards of k different classes.

    Classes are assigned round-robin in random order, so that each belongs to equally many clients (up to one).

    Args:
        classes_per_client: Number of classes per client, `k`.
        sizes: `equal`: the shards of a class have the same size, up to one sample. `drawn` (the code of PFLlib, which
            cwFedAVG uses): the size of each shard is drawn between a tenth of this size and this size, and the last
            client of the class gets the rest.

    Raises:
        ConfigError: `classes_per_client` is below 1.
    """

    sizes: Literal["equal", "drawn"] = "equal"

    def split(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        """Assign classes to clients, then split each class among its clients. Unassigned classes are unused."""
        classes, k = np.unique(labels), self.classes_per_client
        if k > len(classes):
            raise ConfigError(f"scenario.partition.classes_per_client: {k}, but the dataset has {len(classes)} classes")
        order, seats = rng.permutation(classes), rng.permutation(clients)
        holders: dict[int, list[int]] = {int(label): [] for label in classes}
        for turn in range(clients * k):
            holders[int(order[turn % len(classes)])].append(int(seats[turn // k]))
        parts: list[list[np.ndarray]] = [[] for _ in range(clients)]
        for label, owners in holders.items():
            members = rng.permutation(np.flatnonzero(labels == label))
            if len(members) < len(owners):
                raise ConfigError(
                    f"scenario.partition.classes_per_client: class {label} has {len(members)} samples for "
                    f"{len(owners)} clients. Lower classes_per_client or scenario.clients"
                )
            sizes = self._shard_sizes(len(members), max(len(owners), 1), rng)
            for owner, shard in zip(owners, np.split(members, np.cumsum(sizes)), strict=False):
                parts[owner].append(shard)
        return [np.sort(np.concatenate(part)) for part in parts]

    def _shard_sizes(self, total: int, parts: int, rng: np.random.Generator) -> np.ndarray:
        if self.sizes == "equal":
            return equal_sizes(total, parts)
        least = max(total // parts // 10, 1)
        drawn = rng.integers(least, max(total // parts, least + 1), size=parts - 1)
        return np.append(drawn, total - drawn.sum())
