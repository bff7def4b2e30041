"""Sparsification: only a share of the entries is sent.

- Stich et al., "Sparsified SGD with memory", NeurIPS 2018 (arXiv:1809.07599): top-k and random-k with error feedback.
- Konečný et al., "Federated learning: strategies for improving communication efficiency", 2016 (arXiv:1610.05492):
  random masks from a seed that client and server share.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fl_lightning.compression.base import Compressor, Form
from fl_lightning.compression.bits import pack_positions, position_bytes, unpack_positions
from fl_lightning.core.arguments import number
from fl_lightning.core.flat_tensors import Tensors


def kept_count(keep: float, size: int) -> int:
    """Return the number of entries that are sent: `keep · size` to the nearest whole number, at least 1."""
    return max(1, round(keep * size))


def largest_entries(vector: Tensor, count: int) -> Tensor:
    """Return the ascending indices of the entries with the largest magnitudes. Of equal ones, the first are chosen.

    Args:
        vector: The vector, `(P,)`.
        count: Number of indices, in [1, P].
    """
    magnitude = vector.abs()
    threshold = magnitude.kthvalue(len(vector) - count + 1).values
    chosen = magnitude > threshold
    ties = (magnitude == threshold).nonzero().flatten()
    chosen[ties[: count - int(chosen.sum())]] = True
    return chosen.nonzero().flatten()


def random_entries(count: int, size: int, seed: int) -> Tensor:
    """Return ascending indices of `count` of `size` entries, drawn from a seed. All subsets are equally likely."""
    drawn = np.random.default_rng(seed).choice(size, count, replace=False, shuffle=False)
    return torch.from_numpy(np.sort(drawn))


def scatter(values: Tensor, indices: Tensor, size: int) -> Tensor:
    """Return a float64 vector `(size,)` with values at the given indices, and zeros elsewhere."""
    return torch.zeros(size, dtype=torch.float64).index_copy_(0, indices, values.double())


class TopK(Compressor):
    """Send the entries of the update with the largest magnitudes, and their positions.

    The entries are chosen among those of the whole update, so some layers may send more of theirs than others.

    Args:
        keep: Share of the entries that are sent, in (0, 1].
        feedback: Add what was not sent to the client's next update. Without it, small entries are never sent.

    Raises:
        ConfigError: `keep` is not in (0, 1].
    """

    keep: float = number(0.01, "(0, 1]")
    feedback: bool = True

    def form(self, size: int, dtype: torch.dtype) -> Form:
        """Return the form of `k = keep · P` values and their positions."""
        count = kept_count(self.keep, size)
        return {"values": (dtype, count), "positions": (torch.uint8, position_bytes(count, size))}

    def encode(self, vector: Tensor, dtype: torch.dtype, seed: int) -> Tensors:
        """Return the values with the largest magnitudes, in the order of the vector, and their positions."""
        indices = largest_entries(vector, kept_count(self.keep, len(vector)))
        return {"values": vector[indices].to(dtype), "positions": pack_positions(indices, len(vector))}

    def decode(self, sent: Tensors, size: int, seed: int) -> Tensor:
        """Return the vector with the sent values at their positions, and zeros elsewhere."""
        indices = unpack_positions(sent["positions"], kept_count(self.keep, size), size)
        return scatter(sent["values"], indices, size)


class RandomK(Compressor):
    """Send randomly chosen entries of the update. Client and server draw the same positions, which are not sent.

    Without feedback, the server multiplies the values by `P / k`, so that the restored update is unbiased. With
    feedback it does not, because the rest is sent later.

    Args:
        keep: Share of the entries that are sent, in (0, 1].
        feedback: Add what was not sent to the client's next update.

    Raises:
        ConfigError: `keep` is not in (0, 1].
    """

    keep: float = number(0.01, "(0, 1]")
    feedback: bool = True

    def form(self, size: int, dtype: torch.dtype) -> Form:
        """Return the form of `k = keep · P` values."""
        return {"values": (dtype, kept_count(self.keep, size))}

    def encode(self, vector: Tensor, dtype: torch.dtype, seed: int) -> Tensors:
        """Return the values at the positions that the seed determines, in the order of the vector."""
        return {"values": vector[random_entries(kept_count(self.keep, len(vector)), len(vector), seed)].to(dtype)}

    def decode(self, sent: Tensors, size: int, seed: int) -> Tensor:
        """Return the vector with the sent values, times `P / k` without feedback, and zeros elsewhere."""
        count = kept_count(self.keep, size)
        scale = 1.0 if self.feedback else size / count
        return scatter(scale * sent["values"].double(), random_entries(count, size, seed), size)
