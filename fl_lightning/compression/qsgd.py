"""QSGD: stochastic quantisation.

Alistarh et al., "QSGD: Communication-efficient SGD via gradient quantization and encoding", NeurIPS 2017
(arXiv:1610.02132), Section 3.1. Values have a fixed number of bits here, in place of the paper's Elias coding.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fl_lightning.compression.base import Compressor, Form
from fl_lightning.compression.bits import index_width, pack_bits, packed_bytes, unpack_bits
from fl_lightning.compression.buckets import bucket_count, into_buckets
from fl_lightning.core.arguments import number
from fl_lightning.core.errors import MOST
from fl_lightning.core.flat_tensors import Tensors
from fl_lightning.core.precision import widened_type


def norms_rounded_up(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the Euclidean norm of each row, rounded up to a type, so that no entry is above the norm of its row.

    Args:
        rows: float64 `(n, d)`.
        dtype: The type.
    """
    exact = rows.norm(dim=1)
    rounded = exact.to(dtype)
    return torch.where(rounded.double() < exact, torch.nextafter(rounded, torch.full_like(rounded, torch.inf)), rounded)


def quantized_levels(ratios: Tensor, draws: Tensor) -> Tensor:
    """Round numbers up or down at random, so that they are unchanged on average (Eq. 3.1: `ξ_i` times `s`).

    Args:
        ratios: `s |v_i| / ‖v‖₂`, non-negative.
        draws: Random numbers in [0, 1), of the same shape.
    """
    below = ratios.floor()
    return below + (draws < ratios - below)


class QSGD(Compressor):
    """Round each entry at random to one of `2 s + 1` values between plus and minus the norm of its bucket.

    The restored vector is unbiased. Its variance is at most `min(d / s², √d / s) ‖v‖²` in a bucket `v` of `d` entries
    (Lemma 3.1), so smaller buckets and more levels are more precise. As `download_compression`, weights are rounded.

    Args:
        levels: Number of levels above zero, `s`. An entry takes `⌈log2(2 s + 1)⌉` bits: 2 for 1 level, 8 for 127.
        bucket: Number of entries with a norm of their own, `d`. null: one norm for the whole vector.

    Raises:
        ConfigError: `levels` is not in [1, 2^24], or `bucket` is below 1.
    """

    levels: int = number(127, "[1, 16777216]")
    bucket: int | None = number(512, f"[1, {MOST}]")

    suits_weights: ClassVar[bool] = True

    @property
    def width(self) -> int:
        """Number of bits of an entry, `⌈log2(2 s + 1)⌉`."""
        return index_width(2 * self.levels + 1)

    def form(self, size: int, dtype: torch.dtype) -> Form:
        """Return the form of the norms of all buckets and the packed levels of all entries."""
        levels = (torch.uint8, packed_bytes(size, self.width))
        return {"norms": (widened_type(dtype), bucket_count(size, self.bucket)), "levels": levels}

    def encode(self, vector: Tensor, dtype: torch.dtype, seed: int) -> Tensors:
        """Return the norms, and for each entry its level in [-s, s] plus `s`."""
        rows = into_buckets(vector, self.bucket)
        norms = norms_rounded_up(rows, widened_type(dtype))
        scales = norms.double().where(norms > 0, 1.0)[:, None]  # a bucket of zeros has level 0
        ratios = (rows.abs() / scales * self.levels).flatten()[: len(vector)]
        draws = torch.from_numpy(np.random.default_rng(seed).random(len(vector)))
        signed = vector.sign() * quantized_levels(ratios, draws)
        return {"norms": norms, "levels": pack_bits(signed.long() + self.levels, self.width)}

    def decode(self, sent: Tensors, size: int, seed: int) -> Tensor:
        """Return the levels times the norm of their bucket, divided by `s`."""
        signed = unpack_bits(sent["levels"], size, self.width) - self.levels
        if bool((signed > self.levels).any()):
            raise ValueError(f"a level is above {self.levels}")
        rows = into_buckets(signed.double() / self.levels, self.bucket)
        return (rows * sent["norms"].double()[:, None]).flatten()[:size]
