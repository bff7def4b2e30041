"""Several input tensors of the same samples, for networks whose `forward` takes more than one tensor."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

Batch = tuple[Any, Tensor]
"""A batch `(x, y)`: the inputs, a tensor or `Inputs`, and the labels."""

Shapes = dict[str, tuple[int, ...]] | tuple[tuple[int, ...], ...]
"""The shape of each input of one sample."""

MASK = "attention_mask"
"""Name of the input that is 1 at the tokens of a text and 0 at padding, `(n, length)`."""

TOKEN_INPUTS = ("input_ids", MASK, "token_type_ids", "position_ids")
"""Names of inputs with one number per token, as Hugging Face's models call them."""

MASKED = 1 << 12
"""Rows of a mask from which lengths are computed at a time, which bounds the memory for copies."""


@dataclass(eq=False)  # Lightning converts the tensors in a dataclass
class Inputs:
    """Several input tensors of the same samples, such as the token ids and the mask of texts.

    It is used like one tensor: indices, `to`, `split` and functions such as `torch.cat` apply to each of the tensors.

    Args:
        tensors: The tensors `(n, ...)`: a dict, whose names are parameters of the network's `forward`, or a tuple.

    Example:
        >>> batch = Inputs({"ids": torch.arange(6).view(3, 2), "mask": torch.ones(3, 2)})[:2]
        >>> len(batch), batch.tensors["ids"].tolist()
        (2, [[0, 1], [2, 3]])
    """

    tensors: dict[str, Tensor] | tuple[Tensor, ...]

    def items(self) -> ItemsView[Any, Tensor]:
        """Return the tensors in pairs `(name, tensor)`; without names, the position takes the place of the name."""
        tensors = self.tensors if isinstance(self.tensors, dict) else dict(enumerate(self.tensors))
        return tensors.items()

    def like(self, values: Iterable[Any]) -> Any:
        """Return one value for each tensor, in the form of `tensors`: a dict with the same names, or a tuple."""
        return dict(zip(self.tensors, values, strict=True)) if isinstance(self.tensors, dict) else tuple(values)

    def map(self, function: Callable[[Tensor], Tensor]) -> Inputs:
        """Apply a function to each tensor, and return the results as `Inputs`."""
        return Inputs(self.like(function(value) for _, value in self.items()))

    @property
    def shapes(self) -> Shapes:
        """The shape of each input of one sample."""
        return self.like(tuple(value.shape[1:]) for _, value in self.items())

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return next(value.device for _, value in self.items())

    @property
    def nbytes(self) -> int:
        """Number of bytes of all tensors."""
        return sum(value.nbytes for _, value in self.items())

    @cached_property
    def lengths(self) -> Tensor | None:
        """Length of each text up to its last token, at least 1, `(n,)` on the CPU; None if the inputs are no texts.

        Inputs are texts if they have the names `input_ids` and `attention_mask`.
        """
        named = self.tensors if isinstance(self.tensors, dict) else {}
        if not {"input_ids", MASK} <= named.keys() or named[MASK].ndim != 2:
            return None
        place = torch.arange(1, named[MASK].shape[1] + 1, device=self.device)
        ends = [((part != 0) * place).amax(dim=1) for part in named[MASK].split(MASKED)]
        return torch.cat(ends).clamp(min=1).cpu()

    def trimmed(self, length: int) -> Inputs:
        """Return the inputs with only the first `length` tokens of each text. Other inputs do not change."""
        assert isinstance(self.tensors, dict)
        return Inputs(
            {
                name: value[:, :length].contiguous() if name in TOKEN_INPUTS and value.ndim == 2 else value
                for name, value in self.tensors.items()
            }
        )

    def __len__(self) -> int:
        """Return the number of samples."""
        return min(len(value) for _, value in self.items())

    def __getitem__(self, index: Any) -> Inputs:
        """Return the samples at an index: a slice, or a tensor of indices."""
        return self.map(lambda value: value[index])

    def index_select(self, dim: int, index: Tensor) -> Inputs:
        """Return the samples at these indices, as `Tensor.index_select` does."""
        return self.map(lambda value: value.index_select(dim, index))

    def to(self, *args: Any, **options: Any) -> Inputs:
        """Return the inputs on another device or with another dtype, as `Tensor.to` does."""
        return self.map(lambda value: value.to(*args, **options))

    def pin_memory(self) -> Inputs:
        """Return the inputs in page-locked memory, as `Tensor.pin_memory` does."""
        return self.map(Tensor.pin_memory)

    def split(self, size: int) -> list[Inputs]:
        """Split the samples into parts of `size` samples each. The last part may be smaller."""
        return [self[start : start + size] for start in range(0, len(self), size)]

    def tensor_split(self, parts: int) -> list[Inputs]:
        """Split the samples into `parts` parts whose sizes differ by at most one sample."""
        return [self[rows] for rows in torch.arange(len(self)).tensor_split(parts)]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Inputs:
        """Call a torch function, such as `torch.cat` or `torch.zeros_like`, on each of the tensors."""
        first = args[0] if isinstance(args[0], cls) else args[0][0]
        return cls(
            first.like(
                function(*apply_to_collection(args, cls, lambda one, key=key: one.tensors[key]), **(kwargs or {}))
                for key, _ in first.items()
            )
        )


def map_inputs(function: Callable[[Tensor], Tensor], x: Tensor | Inputs) -> Any:
    """Apply a function to a tensor, or to each tensor of an `Inputs` object, and return the result."""
    return x.map(function) if isinstance(x, Inputs) else function(x)


def describe_inputs(x: Tensor | Inputs, batch: bool = False) -> str:
    """Describe the type and shape of a sample's inputs, as in `ids int64 (64,), age float32 ()`."""

    def described(tensor: Tensor) -> str:
        shape = ("batch", *tensor.shape[1:]) if batch else tuple(tensor.shape[1:])
        return f"{str(tensor.dtype).removeprefix('torch.')} {shape}".replace("'", "")

    if not isinstance(x, Inputs):
        return described(x)
    return ", ".join(f"{key} {described(tensor)}" for key, tensor in x.items())
