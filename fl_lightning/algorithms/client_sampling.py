"""Client samplers: which clients take part in a round.

The participants depend only on the seed, the round and the number of clients asked for. So all methods with one seed
see the same participants, and a resumed run needs no state of the sampler.
"""

from __future__ import annotations

import csv
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np

from fl_lightning.algorithms.base import Algorithm
from fl_lightning.core.errors import ConfigError, check_number
from fl_lightning.core.files import read_file
from fl_lightning.core.seeding import Stream, generator

MOST_ROUNDS = 10**7
"""Largest round number that an availability file may contain."""


class ClientSampler(ABC):
    """Base class of client samplers, which choose the participants of a round. The config key is `client_sampler`.

    Subclasses override `sample`. Its result may depend only on its arguments and the attributes that `start` sets.

    Attributes:
        seed: The run's seed.
        samples: Number of training samples of each client.
        min_clients: Smallest number of participants of a round. With 0, a round can be empty.
    """

    seed: int
    samples: Sequence[int]
    min_clients: int

    def start(self, algorithm: Algorithm, seed: int, min_clients: int) -> None:
        """Set the sampler's attributes before round 1, and check that its options are valid for the run's clients.

        Args:
            algorithm: The method, which knows the number of samples of each client.
            seed: The run's seed.
            min_clients: Smallest number of participants of a round.

        Raises:
            ConfigError: An option is not valid for these clients.
        """
        self.seed, self.samples, self.min_clients = seed, algorithm.samples, min_clients

    @abstractmethod
    def sample(self, round: int, size: int) -> list[int]:
        """Return the ids of the clients that take part in a round, in ascending order.

        Args:
            round: The round, from 1.
            size: The number of clients asked for: `clients_per_round`, or the method's own number.
        """

    @property
    def clients(self) -> int:
        """The number of clients, `K`."""
        return len(self.samples)

    def rng(self, round: int) -> np.random.Generator:
        """Return the random generator for the participants of a round."""
        return generator(self.seed, Stream.PARTICIPANTS, round)


class UniformSampling(ClientSampler):
    """Every set of `clients_per_round` clients is equally likely. This is the default."""

    def sample(self, round: int, size: int) -> list[int]:
        """Return distinct clients, drawn uniformly."""
        return choose(self.rng(round), self.clients, size)


class PoissonSampling(ClientSampler):
    """Each client takes part independently, with probability `clients_per_round / K`, so the number of clients varies.

    A round with fewer than `min_clients` clients is drawn again. With `min_clients: 0`, none is drawn again, as privacy
    accounting assumes, and rounds without participants are possible.
    """

    def sample(self, round: int, size: int) -> list[int]:
        """Draw each client independently with the same probability, and return the clients that were drawn."""
        rng = self.rng(round)
        while True:
            chosen = np.flatnonzero(rng.random(self.clients) < size / self.clients)
            if len(chosen) >= min(self.min_clients, size):
                return chosen.tolist()


class WeightedSampling(ClientSampler):
    """Clients are drawn without replacement, with probabilities proportional to their numbers of samples.

    With an equal weight of all uploads (`algorithm.weighting: uniform`), the mean over participants is then an unbiased
    estimate of FedAvg's mean over all clients, if no client has more than 1 / `clients_per_round` of the samples. A
    larger client takes part in every round.

    Args:
        weights: `samples`, or a list with a number above 0 for each client.

    Raises:
        ConfigError: A weight is not above 0.
    """

    def __init__(self, weights: Literal["samples"] | list[float] = "samples") -> None:
        for weight in () if isinstance(weights, str) else weights:
            check_number("client_sampler.weights", weight, "(0, inf)")
        self.weights = weights

    def start(self, algorithm: Algorithm, seed: int, min_clients: int) -> None:
        """Check that a list of weights fits the clients. Warn if the aggregation also weights by numbers of samples."""
        super().start(algorithm, seed, min_clients)
        if self.weights != "samples":
            check_length("weights", self.weights, self.clients)
        elif any(getattr(one, "weighting", None) == "samples" for one in algorithm.aggregator.chain()):
            what = "large clients are drawn more often and also have a larger weight in the mean"
            fix = "set algorithm.weighting uniform (with an aggregator: algorithm.aggregator.weighting)"
            warnings.warn(f"client_sampler: {what}. For an unbiased mean, {fix}", stacklevel=2)

    def sample(self, round: int, size: int) -> list[int]:
        """Draw distinct clients by systematic sampling (Madow 1949). Clients with larger weights are drawn more often.

        In a random order, the clients take intervals of the line from 0 to `size`, as long as their probabilities. One
        random point in [0, 1) and all points at whole distances from it draw the clients in whose intervals they are.
        """
        rng = self.rng(round)
        order = rng.permutation(self.clients)
        weights = self.samples if self.weights == "samples" else self.weights
        ends = np.cumsum(inclusion_probabilities(np.array(weights, dtype=np.float64), size)[order])
        points = rng.random() + np.arange(size)
        positions = np.searchsorted(ends, points, side="right")
        last = self.clients - 1  # by rounding, the last interval may end below the last point
        return sorted({int(order[min(position, last)]) for position in positions})


class RoundRobin(ClientSampler):
    """Each round takes the next `clients_per_round` clients of a random order, which stays the same for the whole run.

    With a method that changes the number of participants, such as `CriticalFL`, some turns are skipped or repeated.
    """

    def sample(self, round: int, size: int) -> list[int]:
        """Return the next `size` clients of the fixed random order, which repeats after its last client."""
        order = self.rng(0).permutation(self.clients)
        return sorted(order[np.arange((round - 1) * size, round * size) % self.clients].tolist())


class AvailabilityFile(ClientSampler):
    """Participants are drawn uniformly from the clients that a file lists as available in the round.

    If fewer than `clients_per_round` are available, all of them take part.

    Args:
        path: A CSV file with the header `client,first,last`. A row says that a client, from 0, is available from round
            `first` to round `last`, from 1. A client can have several rows. After the largest `last`, the file starts
            again.

    Raises:
        ConfigError: The file cannot be read or is invalid, or fewer than `min_clients` are available in a round.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def start(self, algorithm: Algorithm, seed: int, min_clients: int) -> None:
        """Read the availability file, and check that each of its rounds has at least `min_clients` clients."""
        super().start(algorithm, seed, min_clients)
        try:
            text = read_file(Path(self.path), 2**30, links=True).decode()
            rows = sorted(read_intervals(text, self.clients))
        except (OSError, ValueError) as error:
            raise ConfigError(f"client_sampler.path: {self.path} cannot be read: {error}") from error
        self._owner, self._first, self._last = np.array(rows, dtype=np.int64).reshape(-1, 3).T
        for (client, _, last), (other, first, _) in pairwise(rows):
            if client == other and first <= last:
                raise ConfigError(f"client_sampler.path: {self.path} lists client {client} twice in round {first}.")
        self._period = int(self._last.max(initial=0))
        changes = np.zeros(self._period + 2, dtype=np.int64)
        np.add.at(changes, self._first, 1)
        np.add.at(changes, self._last + 1, -1)
        available = changes.cumsum()[1:-1] if rows else np.zeros(1, dtype=np.int64)
        if (few := available < min_clients).any():
            round = int(few.argmax())
            what = f"{self.path} has {available[round]} clients for round {round + 1}, fewer than min_clients"
            raise ConfigError(f"client_sampler.path: {what} ({min_clients}). List more clients.")

    def sample(self, round: int, size: int) -> list[int]:
        """Draw participants uniformly from the clients that the file lists as available in the round."""
        now = (round - 1) % self._period + 1
        available = self._owner[(self._first <= now) & (now <= self._last)]
        return choose(self.rng(round), available, min(size, len(available)))


class MarkovAvailability(ClientSampler):
    """Participants are drawn uniformly from the available clients. Availability is a two-state Markov chain per client.

    An available client stays available with probability `π + λ (1 - π)`, and an unavailable client becomes available
    with probability `π (1 - λ)` (Rodio et al. 2023). A client is available in a share π of the time. If fewer than
    `clients_per_round` are available, all of them take part. A round only starts when at least `min_clients` are
    available; until then, the chains take further steps.

    Args:
        available: π, the share of the time in which a client is available, in (0, 1]: one number, or a list with a
            number for each client.
        correlation: λ, in [0, 0.999]. With 0, availability is independent in each round. With a larger λ, clients stay
            available or unavailable for longer.

    Raises:
        ConfigError: An option is out of range.
    """

    def __init__(self, available: float | list[float] = 0.5, correlation: float = 0.0) -> None:
        for share in available if isinstance(available, list) else [available]:
            check_number("client_sampler.available", share, "(0, 1]")
        check_number("client_sampler.correlation", correlation, "[0, 0.999]")
        self.available, self.correlation = available, correlation

    def start(self, algorithm: Algorithm, seed: int, min_clients: int) -> None:
        """Check that a list `available` fits the clients, and that enough clients for a round are available on average.

        On average, at least `min_clients` clients must be available.
        """
        super().start(algorithm, seed, min_clients)
        if isinstance(self.available, list):
            check_length("available", self.available, self.clients)
        self._shares = np.broadcast_to(self.available, self.clients)
        if (mean := float(self._shares.sum())) < min_clients:
            what = f"{mean:g} clients are available on average, fewer than min_clients ({min_clients})"
            raise ConfigError(f"client_sampler.available: {what}. Increase it.")
        self._masks, self._round = self._masks_by_round(), 0

    def sample(self, round: int, size: int) -> list[int]:
        """Draw participants uniformly from the clients that are available in the round.

        The chains take one round after another. For an earlier round they start again.
        """
        if round < self._round:
            self._masks, self._round = self._masks_by_round(), 0
        while self._round < round:
            self._mask, self._round = next(self._masks), self._round + 1
        available = np.flatnonzero(self._mask)
        return choose(self.rng(round), available, min(size, len(available)))

    def _masks_by_round(self) -> Iterator[np.ndarray]:
        """Yield a mask of the available clients, `(K,)` bool, for each round from round 1."""
        rng, chance = generator(self.seed, Stream.AVAILABILITY), self._shares
        while True:
            state = rng.random(self.clients) < chance
            chance = self._shares * (1 - self.correlation) + self.correlation * state
            if state.sum() >= self.min_clients:
                yield state


def choose(rng: np.random.Generator, among: int | np.ndarray, size: int) -> list[int]:
    """Draw `size` distinct ids uniformly, and return them in ascending order.

    `among` is an array of ids, or a number n for all ids below n.
    """
    return sorted(rng.choice(among, size, replace=False).tolist())


def inclusion_probabilities(weights: np.ndarray, size: int) -> np.ndarray:
    """Return each client's probability to be drawn, in proportion to its weight but at most 1. Their sum is `size`."""
    certain = np.zeros(len(weights), dtype=bool)
    while True:
        share = (size - certain.sum()) * weights / max(weights[~certain].sum(), np.finfo(float).tiny)
        chances = np.where(certain, 1.0, share)
        if (chances <= 1).all():
            return chances
        certain |= chances >= 1


def check_length(key: str, values: Sequence[float], clients: int) -> None:
    """Raise an error if a list does not have one number for each client."""
    if len(values) != clients:
        raise ConfigError(f"client_sampler.{key}: {len(values)} numbers for {clients} clients. Give one for each.")


def read_intervals(text: str, clients: int) -> Iterator[tuple[int, int, int]]:
    """Yield `(client, first round, last round)` for each row of an availability file.

    Raises:
        ValueError: The header or a row is invalid. The message names the line.
    """
    lines = csv.reader(text.splitlines())
    if [word.strip() for word in next(lines, [])] != ["client", "first", "last"]:
        raise ValueError("the first line must be client,first,last")
    for number, words in enumerate(lines, 2):
        if not words:
            continue
        try:
            client, first, last = map(int, words)
        except ValueError:
            raise ValueError(f"line {number} does not hold three whole numbers") from None
        if not 0 <= client < clients:
            raise ValueError(f"line {number} names client {client}, and clients are 0 to {clients - 1}")
        if not 1 <= first <= last <= MOST_ROUNDS:
            raise ValueError(f"line {number} names rounds {first} to {last}, which must be from 1 in ascending order")
        yield client, first, last
