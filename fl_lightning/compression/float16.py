"""Half precision."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from fl_lightning.compression.base import Compressor, Form
from fl_lightning.core.flat_tensors import Tensors


class Float16(Compressor):
    """Send each entry as a float16 number, rounded to the nearest: half the bytes of float32.

    Entries are rounded by at most 2^-11 of their magnitude, and those below 2^-14 by at most 2^-25. An entry above
    65,504 makes its client fail, as an infinite one does.
    """

    suits_weights: ClassVar[bool] = True

    def form(self, size: int, dtype: torch.dtype) -> Form:
        """Return the form of one value for each entry."""
        return {"values": (torch.float16, size)}

    def encode(self, vector: Tensor, dtype: torch.dtype, seed: int) -> Tensors:
        """Return the rounded entries."""
        return {"values": vector.half()}

    def decode(self, sent: Tensors, size: int, seed: int) -> Tensor:
        """Return the entries."""
        return sent["values"].double()
