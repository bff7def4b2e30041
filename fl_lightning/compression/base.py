"""`Compressor`: the base class of update compressors."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from fl_lightning.core.arguments import FieldsMixin
from fl_lightning.core.flat_tensors import Tensors

Form = dict[str, tuple[torch.dtype, int]]
"""The type and the number of elements of each tensor in a compressed vector, by name."""


class Compressor(FieldsMixin):
    """Base class of compressors: a vector of P numbers becomes a few small tensors, and these a vector again.

    The config keys are `compression`, for the clients' updates, and `download_compression`. Subclasses declare their
    options as annotated class attributes, and override `form`, `encode` and `decode`. A compressor keeps no state.

    Attributes:
        feedback: Whether a client adds what it has not sent, its residual, to its next update. An option of some
            compressors.
        suits_weights: Whether it can compress weights that the server sends, for which there are no residuals: each
            entry of the restored vector is near its value, or equal to it on average.
    """

    section = "compression"
    feedback = False
    suits_weights: ClassVar[bool] = False

    def form(self, size: int, dtype: torch.dtype) -> Form:
        """Return the types and sizes of the tensors that `encode` returns. They do not depend on the vector's values.

        Args:
            size: Number of entries of the vector, `P`.
            dtype: Type in which values are sent.
        """
        raise NotImplementedError

    def encode(self, vector: Tensor, dtype: torch.dtype, seed: int) -> Tensors:
        """Return the tensors to send for a vector, of the types and sizes of `form`.

        Args:
            vector: The vector, float64 `(P,)`, on the CPU. It is not changed.
            dtype: Type in which values are sent: float32, or float64 if the vector has entries of a float64 model.
            seed: Seed of the random numbers, the same as in `decode`.
        """
        raise NotImplementedError

    def decode(self, sent: Tensors, size: int, seed: int) -> Tensor:
        """Return the vector that the receiver restores, float64 `(P,)`.

        Args:
            sent: The result of `encode`. Its types and sizes are those of `form`.
            size: Number of entries of the vector, `P`.
            seed: The seed given to `encode`.

        Raises:
            ValueError: The tensors contain a value that `encode` never sends.
        """
        raise NotImplementedError

    def nbytes(self, size: int, dtype: torch.dtype = torch.float32) -> int:
        """Return the number of bytes that are sent for a vector of `size` entries."""
        return sum(count * kind.itemsize for kind, count in self.form(size, dtype).values())
