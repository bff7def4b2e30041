"""Random numbers for private training: from a seed in simulations, from the system's entropy on a client's machine."""

from __future__ import annotations

import os

import numpy as np
import torch
from torch import Tensor

MANTISSA = 53
"""Bits of the fraction of a float64."""


class PrivateRandom:
    """A source of uniform and normal random numbers.

    A seed makes simulations reproducible, but it gives no privacy, because the noise can be computed from it.

    Args:
        device: Where the numbers are used.
        seed: The seed. By default, each number comes from the system's entropy (`os.urandom`).
    """

    def __init__(self, device: torch.device, seed: int | None = None) -> None:
        self.device = device
        self._generator = None if seed is None else torch.Generator(device).manual_seed(seed)

    def uniform(self, count: int) -> Tensor:
        """Return `count` numbers from [0, 1) in float64, `(count,)`."""
        if self._generator:
            return torch.rand(count, generator=self._generator, dtype=torch.float64, device=self.device)
        return entropy(count).mul_(2.0**-MANTISSA).to(self.device)

    def normal(self, like: Tensor) -> Tensor:
        """Return a tensor of standard normal numbers, with the shape, the dtype and the device of another tensor."""
        if self._generator:
            return torch.empty_like(like).normal_(generator=self._generator)
        uniform = entropy(like.numel()).add_(0.5).mul_(2.0**-MANTISSA)  # inside (0, 1), where the inverse is finite
        return torch.special.ndtri(uniform).to(like).view(like.shape)


def entropy(count: int) -> Tensor:
    """Return uniformly distributed whole numbers from 0 to 2^53 - 1 in float64, `(count,)`, from `os.urandom`."""
    words = np.frombuffer(os.urandom(8 * count), np.uint64) >> np.uint64(64 - MANTISSA)
    return torch.from_numpy(words.astype(np.float64))
