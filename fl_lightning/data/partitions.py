"""Who holds which training samples: each partition maps labels to one index array a client."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from fl_lightning.errors import ConfigError


class Partition(ABC):
    """A rule that deals samples out to clients: the `scenario.partition` of a config."""

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
    """Label skew: each class is dealt out in proportions drawn from Dirichlet(alpha) over the clients.

    The usual form of Hsu et al. 2019 and Yurochkin et al. 2019: small alpha gives few clients most of a class. The
    draw is repeated until every client has `min_samples`.

    Args:
        alpha: Concentration, above 0.
        min_samples: Fewest samples a client may hold.

    Raises:
        ConfigError: `alpha` is not above 0 or `min_samples` below 1.
    """

    draws = 1000

    def __init__(self, alpha: float = 0.5, min_samples: int = 10) -> None:
        if not alpha > 0 or not np.isfinite(alpha):
            raise ConfigError(f"scenario.partition.alpha: {alpha} is not above 0; small values such as 0.1 skew most")
        if min_samples < 1:
            raise ConfigError(f"scenario.partition.min_samples: {min_samples} is below 1; a client needs data")
        self.alpha, self.min_samples = alpha, min_samples

    def split(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        """Draw proportions until every client has enough; every sample is used."""
        by_class = [np.flatnonzero(labels == label) for label in np.unique(labels)]
        sizes = np.array([len(members) for members in by_class])
        if clients * self.min_samples > len(labels):
            raise self._error(clients, f"{len(labels)} samples are too few")
        for _ in range(self.draws):
            shares = rng.dirichlet(np.full(clients, self.alpha), size=len(by_class))
            cuts = (np.cumsum(shares, axis=1)[:, :-1] * sizes[:, None]).astype(np.int64)
            counts = np.diff(cuts, axis=1, prepend=0, append=sizes[:, None])
            if counts.sum(axis=0).min() >= self.min_samples:
                return self._deal(by_class, cuts, rng)
        raise self._error(clients, f"{self.draws} draws with alpha {self.alpha} did not")

    def _error(self, clients: int, why: str) -> ConfigError:
        return ConfigError(
            f"scenario.partition.min_samples: cannot give each of {clients} clients {self.min_samples} samples: {why}; "
            "lower min_samples or scenario.clients, or raise alpha"
        )

    @staticmethod
    def _deal(by_class: list[np.ndarray], cuts: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
        parts = [np.split(rng.permutation(members), cut) for members, cut in zip(by_class, cuts, strict=True)]
        return [np.sort(np.concatenate(own)) for own in zip(*parts, strict=True)]


class Pathological(Partition):
    """k classes a client: each class is cut into equal shards and each client gets shards of k different classes.

    Classes are dealt round-robin over a random order, so each is held by equally many clients (up to one).

    Args:
        classes_per_client: How many classes a client holds, `k`.

    Raises:
        ConfigError: `classes_per_client` is below 1.
    """

    def __init__(self, classes_per_client: int = 2) -> None:
        if classes_per_client < 1:
            raise ConfigError(f"scenario.partition.classes_per_client: {classes_per_client} is below 1")
        self.classes_per_client = classes_per_client

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
