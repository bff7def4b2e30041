"""Every random number of a run comes from `(seed, stream, round, client)`, so that nothing depends on order.

Two clients, two rounds or two purposes never share a stream, and neither the engine, the order of clients nor a
restart can move one.
"""

import random
from enum import IntEnum

import numpy as np
import torch


class Stream(IntEnum):
    """What a random number is for. The values are part of every run's identity: never renumber them."""

    PARTITION = 0
    LOCAL_SPLIT = 1
    INITIAL_WEIGHTS = 2
    PARTICIPANTS = 3
    BATCHES = 4
    TRAINING = 5
    RUN = 6
    DOWNLOAD = 7


def generator(seed: int, stream: Stream, *key: int) -> np.random.Generator:
    """NumPy generator of one stream; `key` is usually `(round, client)`."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(int(stream), *key)))


def derive(seed: int, stream: Stream, *key: int) -> int:
    """A 63-bit seed for `torch.Generator.manual_seed`, from the same sequence as `generator`."""
    sequence = np.random.SeedSequence(seed, spawn_key=(int(stream), *key))
    return int(sequence.generate_state(1, np.uint64)[0] >> 1)


def seed_everything(seed: int, stream: Stream, *key: int) -> None:
    """Seed Python's, NumPy's and torch's global generators (dropout and a user's own code draw from them)."""
    value = derive(seed, stream, *key)
    random.seed(value)
    np.random.seed(value % 2**32)
    if torch.accelerator.is_available():
        torch.manual_seed(value)
    else:  # the same for the CPU, which alone is there, less the stack trace noted for devices yet to be woken
        torch.default_generator.manual_seed(value)
