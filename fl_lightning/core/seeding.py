"""Random generators derived from `(seed, purpose, round, client)`, independent of the order of execution.

Two clients, two rounds or two purposes never share a random stream. Streams do not depend on the engine, the order of
clients or a restart.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from functools import cache
from typing import Any

import numpy as np
import torch


class Stream(IntEnum):
    """Purposes for which random numbers are drawn. Each purpose has its own stream of random numbers.

    Never renumber them: results depend on the values.
    """

    PARTITION = 0
    LOCAL_SPLIT = 1
    INITIAL_WEIGHTS = 2
    PARTICIPANTS = 3
    BATCHES = 4
    TRAINING = 5
    RUN = 6
    DOWNLOAD = 7
    EVALUATED = 8
    PREPARATION = 9
    VALIDATION = 10
    AVAILABILITY = 11
    CALIBRATION = 12
    HELD_OUT_CLIENTS = 13
    VALIDATION_SHARE = 14
    AGGREGATION = 15
    NETWORKS = 16
    ATTACKS = 17
    COMPRESSION = 18
    PRIVACY = 19
    DEVICES = 20
    REPLACEMENTS = 21


def generator(seed: int, stream: Stream, *key: int) -> np.random.Generator:
    """Return the NumPy generator for a seed, a purpose (`stream`) and integers `key`, usually `(round, client)`."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(int(stream), *key)))


def derive(seed: int, stream: Stream, *key: int) -> int:
    """Return a 63-bit seed for a torch generator, derived from a seed, a purpose, and usually a round and a client."""
    sequence = np.random.SeedSequence(seed, spawn_key=(int(stream), *key))
    return int(sequence.generate_state(1, np.uint64)[0]) >> 1


def sample_seed(seed: int, epoch: int, place: int) -> int:
    """Return the 63-bit seed of one sample's random numbers in a client's fit.

    Args:
        seed: The seed of the client's batches in the round, from `derive`.
        epoch: The epoch of the fit, from 0.
        place: The sample's place in the order of the epoch.
    """
    sequence = np.random.SeedSequence(seed, spawn_key=(epoch, place))
    return int(sequence.generate_state(1, np.uint64)[0]) >> 1


def seed_everything(seed: int, stream: Stream, *key: int) -> None:
    """Seed the global generators of Python, NumPy and torch from a seed, a purpose, and usually a round and client."""
    value = derive(seed, stream, *key)
    random.seed(value)
    np.random.seed(value % 2**32)
    if _accelerated():
        torch.manual_seed(value)
    else:  # does the same if there is only a CPU, and is faster
        torch.default_generator.manual_seed(value)


@cache
def _accelerated() -> bool:
    """Return whether torch has an accelerator, such as a GPU. The answer is cached."""
    return torch.accelerator.is_available()


class RandomStates:
    """Saved states of the global random generators (Python, NumPy, torch), to switch between several clients.

    Clients that train in turns have one object each, and draw from their own states.

    Args:
        device: The training device. The generator of a GPU is saved as well as the CPU's.
    """

    def __init__(self, device: torch.device) -> None:
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            self._generators.append(torch.cuda.default_generators[device.index or 0])
        self.keep()

    def keep(self) -> None:
        """Save the current states of the global generators."""
        self._others = _others()
        self._keep_torch()

    def unmoved(self) -> bool:
        """Return whether the global generators are still in the saved states, because no random number was drawn."""
        states = zip(self._generators, self._torch, strict=True)
        return all(torch.equal(one.get_state(), state) for one, state in states) and _others() == self._others

    def restore(self) -> None:
        """Set the global generators to the saved states."""
        python, (kind, words, *rest) = self._others
        random.setstate(python)
        np.random.set_state((kind, np.frombuffer(words, np.uint32), *rest))
        self._restore_torch()

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Context that sets the global generators to the saved states, and saves their new states at its end."""
        self.restore()
        try:
            yield
        finally:
            self.keep()

    @contextmanager
    def drawing_torch(self) -> Iterator[None]:
        """Context that sets torch's generators to the saved states, and saves their new states at its end.

        This is faster than `drawing`, which also switches the generators of Python and NumPy.
        """
        self._restore_torch()
        try:
            yield
        finally:
            self._keep_torch()

    def _restore_torch(self) -> None:
        for generator, state in zip(self._generators, self._torch, strict=True):
            generator.set_state(state)

    def _keep_torch(self) -> None:
        self._torch = [generator.get_state() for generator in self._generators]


def _others() -> tuple[Any, tuple[Any, ...]]:
    """Return the states of the global random generators other than torch's: Python's and NumPy's.

    The states can be compared with `==`.
    """
    kind, words, *rest = np.random.get_state(legacy=True)
    return random.getstate(), (kind, np.asarray(words).tobytes(), *rest)
