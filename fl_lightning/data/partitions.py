"""Who holds which training samples: each partition maps labels to one index array a client."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from fl_lightning.core.errors import ConfigError

if TYPE_CHECKING:
    from fl_lightning.data.datasets import LoadedData

CLIENTS = 10
"""How many clients there are where neither `scenario.clients` nor the data say."""


@dataclass
class Shares:
    """What a partition makes of a dataset.

    Args:
        train: Each client's training samples, ascending indices; none in two of them.
        test: Each client's own test samples, ascending indices into the test set, where the partition knows them.
        ids: What each client is called in the data, where it has a name there.
    """

    train: list[np.ndarray]
    test: list[np.ndarray] | None = None
    ids: Sequence[int | str] | None = None


class Partition(ABC):
    """A rule that deals samples out to clients: the `scenario.partition` of a config.

    Attributes:
        needs_classes: Whether it deals by class, and so makes no sense where labels are no classes.
        by_place: Whether it knows samples by their place in the dataset, which must then be left whole.
    """

    needs_classes: ClassVar[bool] = False
    by_place: ClassVar[bool] = False

    @property
    def blamed(self) -> str:
        """How a line begins that says what is wrong with what it has dealt."""
        return f"scenario.partition: {type(self).__name__}"

    def share_out(self, data: LoadedData, labels: np.ndarray, clients: int | None, rng: np.random.Generator) -> Shares:
        """Deal a dataset out: what a scenario asks for. Override it where classes do not tell enough; else `split`.

        Args:
            data: The dataset.
            labels: Class of each training sample, `(n,)`; zeros where labels are no classes.
            clients: Number of clients, or None where `scenario.clients` does not say: then it is the data's to say.
            rng: The only source of chance.

        Raises:
            ConfigError: The rule cannot be met.
        """
        clients = CLIENTS if clients is None else clients
        if clients > len(labels):
            raise ConfigError(
                f"scenario.clients: {clients} is above the {len(labels)} training samples; each client needs one"
            )
        return Shares(self.split(labels, clients, rng))

    @abstractmethod
    def split(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        """Deal the samples out.

        Args:
            labels: Class of each sample, `(n,)`.
            clients: Number of clients.
            rng: The only source of chance.

        Returns:
            One ascending array of sample indices a client; no index is in two of them.

        Raises:
            ConfigError: The rule cannot be met.
        """


class IID(Partition):
    """Samples dealt out at random, equally many each (up to one)."""

    def split(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        """Shuffle and cut; every sample is used."""
        return [np.sort(part) for part in np.array_split(rng.permutation(len(labels)), clients)]


class Dirichlet(Partition):
    """Label skew: classes dealt out in proportions drawn from Dirichlet(alpha); small alpha skews most.

    Three forms are met in the papers and their code, and every sample is used in each:

    - `class` (Yurochkin et al. 2019; FedDW, cwFedAvg, UA-PDFL, FedSiam-DA): each class is cut among the clients in
      drawn proportions, so that sizes differ too. Drawn again until every client has `min_samples`; where that cannot
      be hoped for (1,000 draws, or one that leaves more than 100 clients short), the last draw is mended: the clients
      with the most samples give some up, of each of their classes in proportion, to those that are short, who get
      them a class at a time.
    - `balanced` (Hsu et al. 2019): all clients hold equally many samples, whose classes are drawn in proportions of
      the client's own.
    - `groups` (FedSKC's published code): the samples are shared out among groups of ten clients, cut within a group
      as in `class`, and the result is cut again into equal sizes.

    Args:
        alpha: Concentration, above 0; in `balanced`, that of a class of average size.
        min_samples: Fewest samples a client may hold.
        form: `class`, `balanced` or `groups`.

    Raises:
        ConfigError: `alpha` is not above 0 and at most 1e6, or `min_samples` below 1.
    """

    needs_classes = True
    draws, hopeless = 1000, 100

    def __init__(
        self, alpha: float = 0.5, min_samples: int = 10, form: Literal["class", "balanced", "groups"] = "class"
    ) -> None:
        if not 0 < alpha <= 1e6:
            raise ConfigError(
                f"scenario.partition.alpha: {alpha} is not above 0 and at most 1e6; small values such as 0.1 skew most"
            )
        if min_samples < 1:
            raise ConfigError(f"scenario.partition.min_samples: {min_samples} is below 1; a client needs data")
        self.alpha, self.min_samples, self.form = alpha, min_samples, form

    def split(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        """Draw proportions until every client has enough, or mend the last draw; every sample is used."""
        if clients * self.min_samples > len(labels):
            raise self._error(clients, f"{len(labels)} samples are too few")
        forms = {"class": self._by_class, "balanced": self._balanced, "groups": self._in_groups}
        return forms[self.form](labels, clients, rng)

    def _by_class(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        sizes = np.unique(labels, return_counts=True)[1]
        for _ in range(self.draws):
            counts = cut_by_shares(rng.dirichlet(np.full(clients, self.alpha), size=len(sizes)), sizes).T
            short = (counts.sum(axis=1) < self.min_samples).sum()
            if not 0 < short <= self.hopeless:  # how many are short hardly varies: none of 1,000 draws would have none
                break
        return deal(labels, mended(counts, self.min_samples), rng)

    def _balanced(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        left = np.unique(labels, return_counts=True)[1]
        concentration = self.alpha * len(left) * left / len(labels)
        counts = np.zeros((clients, len(left)), dtype=np.int64)
        # Late clients get what is left: a random order keeps that from being always the same ones.
        for client, size in zip(rng.permutation(clients), equal_sizes(len(labels), clients), strict=True):
            counts[client] = draw_classes(rng.dirichlet(concentration), left, size, rng)
            left = left - counts[client]
        return deal(labels, counts, rng)

    def _in_groups(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        members = [10] * (clients // 10) + [clients % 10] * (clients % 10 > 0)
        borders = np.cumsum(members)[:-1] * len(labels) // clients
        pieces = []
        for group, own in zip(np.split(rng.permutation(len(labels)), borders), members, strict=True):
            parts = deal(labels[group], self._group_counts(labels[group], own, clients, rng).T, rng)
            pieces += [group[part[np.argsort(labels[group][part], kind="stable")]] for part in parts]
        return [np.sort(part) for part in np.array_split(np.concatenate(pieces), clients)]

    def _group_counts(self, labels: np.ndarray, members: int, clients: int, rng: np.random.Generator) -> np.ndarray:
        """Samples a class and client of one group, `(C, members)`; each client has half an equal share or more."""
        sizes = np.unique(labels, return_counts=True)[1]
        share = len(labels) / members
        for _ in range(self.draws):
            counts = np.zeros((len(sizes), members), dtype=np.int64)
            for j, shares in enumerate(rng.dirichlet(np.full(members, self.alpha), size=len(sizes))):
                open_shares = shares * (counts.sum(axis=0) < share)  # who has an equal share gets no more
                if open_shares.sum() > 0:
                    counts[j] = cut_by_shares(open_shares[None] / open_shares.sum(), sizes[j : j + 1])[0]
            if counts.sum(axis=0).min() >= int(share / 2) and counts.sum() == len(labels):
                return counts
        raise self._error(clients, f"{self.draws} draws with alpha {self.alpha} left one below half an equal share")

    def _error(self, clients: int, why: str) -> ConfigError:
        return ConfigError(
            f"scenario.partition.min_samples: cannot give each of {clients} clients {self.min_samples} samples: {why}; "
            "lower min_samples or scenario.clients, or raise alpha"
        )


class Shards(Partition):
    """Samples sorted by class and cut into equal shards, of which each client gets a few (McMahan et al. 2017).

    Args:
        per_client: Shards a client; 2 in the paper, so that most clients hold two classes.

    Raises:
        ConfigError: `per_client` is below 1.
    """

    needs_classes = True

    def __init__(self, per_client: int = 2) -> None:
        if per_client < 1:
            raise ConfigError(f"scenario.partition.per_client: {per_client} is below 1")
        self.per_client = per_client

    def split(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        """Sort, cut and deal; every sample is used."""
        count = clients * self.per_client
        if count > len(labels):
            raise ConfigError(
                f"scenario.partition.per_client: {count} shards of {len(labels)} samples leave some empty; "
                "lower per_client or scenario.clients"
            )
        shards = np.array_split(np.concatenate(by_class(labels)), count)
        dealt = rng.permutation(count).reshape(clients, self.per_client)
        return [np.sort(np.concatenate([shards[i] for i in own])) for own in dealt]


class QuantitySkew(Partition):
    """Sizes drawn from Dirichlet(alpha) over the clients, classes in the same proportions everywhere.

    The quantity skew of Li et al. 2022 (NIID-Bench). Drawn again, and mended, as `Dirichlet` is for `min_samples`.

    Args:
        alpha: Concentration, above 0; small values give few clients most of the data.
        min_samples: Fewest samples a client may hold.

    Raises:
        ConfigError: As for `Dirichlet`.
    """

    def __init__(self, alpha: float = 0.5, min_samples: int = 10) -> None:
        self.sizes = Dirichlet(alpha, min_samples)

    def split(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        """A Dirichlet split that sees one class only; every sample is used."""
        return self.sizes.split(np.zeros_like(labels), clients, rng)


class _FewClasses(Partition):
    needs_classes = True

    def __init__(self, classes_per_client: int = 2) -> None:
        if classes_per_client < 1:
            raise ConfigError(f"scenario.partition.classes_per_client: {classes_per_client} is below 1")
        self.classes_per_client = classes_per_client


class DisjointClasses(_FewClasses):
    """A few classes a client, and no class in common between groups of clients: UA-PDFL's extreme split (Fig. 8).

    The classes, in random order, are cut into blocks; each block belongs to one group of clients, who share it
    equally. With fewer clients than blocks, the classes of the blocks left over stay unused.

    Args:
        classes_per_client: Most classes a client holds; blocks differ by at most one class.

    Raises:
        ConfigError: `classes_per_client` is below 1.
    """

    def split(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        """Deal each class out equally among the clients of its block."""
        sizes = np.unique(labels, return_counts=True)[1]
        blocks = np.array_split(rng.permutation(len(sizes)), -(-len(sizes) // self.classes_per_client))
        groups = np.array_split(rng.permutation(clients), len(blocks))
        counts = np.zeros((clients, len(sizes)), dtype=np.int64)
        for block, group in zip(blocks, groups, strict=True):
            for j in block if len(group) else ():
                counts[group, j] = np.roll(equal_sizes(sizes[j], len(group)), rng.integers(len(group)))
        if counts.sum(axis=1).min() < 1:
            raise ConfigError(
                f"scenario.partition: {len(labels)} samples are too few for {clients} clients; lower scenario.clients"
            )
        return deal(labels, counts, rng)


class Pathological(_FewClasses):
    """k classes a client: each class is cut into equal shards and each client gets shards of k different classes.

    Classes are dealt round-robin over a random order, so each is held by equally many clients (up to one).

    Args:
        classes_per_client: How many classes a client holds, `k`.

    Raises:
        ConfigError: `classes_per_client` is below 1.
    """

    def split(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        """Deal classes, then cut each among its holders; a class that nobody was dealt stays unused."""
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
                    f"{len(owners)} clients; lower classes_per_client or scenario.clients"
                )
            for owner, shard in zip(owners, np.array_split(members, max(len(owners), 1)), strict=False):
                parts[owner].append(shard)
        return [np.sort(np.concatenate(own)) for own in parts]


def check_shares(parts: list[np.ndarray], clients: int, samples: int, what: str = "sample") -> None:
    """See that a partition has kept to what `Partition.split` says.

    Args:
        parts: What it made.
        clients: How many clients there are.
        samples: How many samples there are.
        what: What to call one.

    Raises:
        ValueError: Says what it did instead.
    """
    if len(parts) != clients:
        raise ValueError(f"made {len(parts)} shares for {clients} clients")
    held = np.concatenate(parts)
    if held.ndim != 1 or not np.issubdtype(held.dtype, np.integer):
        raise ValueError(f"made shares of {held.dtype}; they are to be indices of samples")
    if not len(held):
        return
    if held.min() < 0 or held.max() >= samples:
        odd = held.min() if held.min() < 0 else held.max()
        raise ValueError(f"dealt {what} {odd}, of {samples} that count from 0")
    if (twice := np.bincount(held) > 1).any():
        raise ValueError(f"dealt {what} {twice.argmax()} twice; each goes to one client, once")


# --- What the partitions are made of ---------------------------------------------------------------------------------


def by_class(labels: np.ndarray) -> list[np.ndarray]:
    """Indices of each class's samples, ascending; one array a class that occurs, in the order of `np.unique`."""
    order = np.argsort(labels, kind="stable")
    ordered = labels[order]
    ends = [*(np.flatnonzero(ordered[1:] != ordered[:-1]) + 1).tolist(), len(order)]
    return [order[start:end] for start, end in zip([0, *ends], ends, strict=False)]  # np.split takes much longer


def deal(labels: np.ndarray, counts: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """Deal samples out at random so that each client gets given numbers of each class.

    Args:
        labels: Class of each sample, `(n,)`.
        counts: `(clients, C)` whole numbers, a column a class that occurs; what a column falls short of its class
            stays unused.
        rng: The only source of chance.

    Returns:
        One ascending array of sample indices a client.
    """
    clients = len(counts)
    owner = np.full(len(labels), clients)
    for members, sizes in zip(by_class(labels), counts.T, strict=True):
        owner[rng.permutation(members)[: sizes.sum()]] = np.repeat(np.arange(clients), sizes)
    return np.split(np.argsort(owner, kind="stable"), np.cumsum(np.bincount(owner, minlength=clients)))[:clients]


def cut_by_shares(shares: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Cut each class where the running sum of its clients' shares says.

    Args:
        shares: `(C, clients)`, rows sum to 1.
        sizes: Samples a class, `(C,)`.

    Returns:
        `(C, clients)` whole numbers, rows sum to `sizes`.
    """
    cuts = (np.cumsum(shares, axis=1)[:, :-1] * sizes[:, None]).astype(np.int64)
    return np.diff(cuts, axis=1, prepend=0, append=sizes[:, None])


def mended(counts: np.ndarray, least: int) -> np.ndarray:
    """Counts in which every client has so many samples, as they are where that is so already.

    The largest clients give up what is missing, so that none of them ends below another who gave; each its classes in
    proportion, by largest remainder. Who is short gets it class by class, and the classes go to those who hold most
    of them as far as the order of classes allows.

    Args:
        counts: `(clients, C)` whole numbers.
        least: Fewest samples a client is to have; no more than there are for each.

    Returns:
        `(clients, C)` with the sums of each class unchanged.
    """
    sizes = counts.sum(axis=1)
    missing = np.maximum(least - sizes, 0)
    given = shared_out(counts, above_level(sizes, missing.sum()))
    short = np.flatnonzero(missing)
    short = short[np.argsort(counts[short].argmax(axis=1), kind="stable")]
    takers = np.repeat(short, missing[short])
    taken = np.zeros_like(counts)
    np.add.at(taken, (takers, np.repeat(np.arange(counts.shape[1]), given.sum(axis=0))), 1)
    return counts - given + taken


def above_level(sizes: np.ndarray, total: int) -> np.ndarray:
    """What each of the largest is above a level at which that makes `total`, the last of them one less if need be."""
    low, high = 0, int(sizes.max())  # at the one there is enough above, at the other perhaps not
    while high - low > 1:
        level = (low + high) // 2
        low, high = (level, high) if np.maximum(sizes - level, 0).sum() >= total else (low, level)
    above = np.maximum(sizes - low, 0)
    givers = np.flatnonzero(above)
    above[givers[len(givers) - (above.sum() - total) :]] -= 1
    return above


def shared_out(counts: np.ndarray, totals: np.ndarray) -> np.ndarray:
    """Whole numbers in proportion to each row of counts that sum to its total, by largest remainder, first come first.

    Args:
        counts: `(n, C)` whole numbers.
        totals: `(n,)`, none above the row's sum.
    """
    quota, rest = np.divmod(totals[:, None] * counts, np.maximum(counts.sum(axis=1, keepdims=True), 1))
    rank = np.argsort(np.argsort(-rest, axis=1, kind="stable"), axis=1, kind="stable")
    return quota + (rank < (totals - quota.sum(axis=1))[:, None])


def draw_classes(shares: np.ndarray, left: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
    """Draw the classes of `size` samples in given shares; where a class runs out, go on with the others.

    Args:
        shares: `(C,)` probabilities.
        left: `(C,)` samples still there, `size` or more in all.
        size: How many to draw.
        rng: The only source of chance.

    Returns:
        `(C,)` whole numbers that sum to `size`, none above `left`.
    """
    drawn = np.zeros_like(left)
    while missing := size - drawn.sum():
        weights = np.where(drawn < left, shares, 0)
        if weights.sum() < np.finfo(float).tiny:  # every class it has a share in is used up
            weights = left - drawn
        drawn = np.minimum(drawn + rng.multinomial(missing, weights / weights.sum()), left)
    return drawn


def equal_sizes(total: int, parts: int) -> np.ndarray:
    """`total` cut into `parts` whole numbers that differ by at most one, the larger first."""
    return np.arange(total + parts - 1, total - 1, -1) // parts
