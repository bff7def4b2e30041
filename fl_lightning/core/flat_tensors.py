"""State dicts with all floating-point entries in one flat tensor, to copy, add and check them at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from operator import is_
from typing import Any

import torch
from torch import Tensor

Tensors = dict[str, Tensor]

ALIGNMENT = 64
"""Alignment of each entry in bytes, as of a separate tensor. The last bits of matrix products may depend on it."""


@dataclass(frozen=True)
class Layout:
    """Layout of a flat tensor: the names, shapes and order of a state dict's entries, and the padding between them.

    Args:
        shapes: The name and shape of each entry.
        sizes: For each entry its number of elements, then the unused elements up to the next entry.
    """

    shapes: tuple[tuple[str, torch.Size], ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, entries: Tensors) -> Layout:
        """Return the layout for a state dict's entries, each aligned to `ALIGNMENT` bytes."""
        aligned = ((value.numel(), ALIGNMENT // value.element_size()) for value in entries.values())
        sizes = tuple(size for elements, step in aligned for size in (elements, -elements % step))
        return cls(tuple((name, value.shape) for name, value in entries.items()), sizes)

    def empty(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a new flat tensor of this layout: padding is zero, the entries are uninitialised."""
        flat = torch.empty(sum(self.sizes), dtype=dtype, device=device)
        if flat.device not in self._unused:
            self._unused[flat.device] = self._unused[torch.device("cpu")].to(flat.device)
        return flat.index_fill_(0, self._unused[flat.device], 0.0)

    def __reduce__(self) -> Any:
        """Pickle only the shapes and sizes, without the cached indices of the padding."""
        return Layout, (self.shapes, self.sizes)

    @cached_property
    def _unused(self) -> dict[torch.device, Tensor]:
        """Indices of the padding elements in a flat tensor, cached for each device."""
        used = torch.zeros(sum(self.sizes), dtype=torch.bool)
        for part in used.split_with_sizes(self.sizes)[::2]:
            part.fill_(True)
        return {used.device: (~used).nonzero().flatten()}

    def views(self, flat: Tensor) -> Tensors:
        """Split a flat tensor of this layout into the entries of a state dict, which are views of the flat tensor."""
        parts = flat.split_with_sizes(self.sizes)[::2]
        return {name: torch.reshape(part, shape) for (name, shape), part in zip(self.shapes, parts, strict=True)}


class FlatTensors(Tensors):
    """A state dict whose floating-point entries are views of one flat tensor, `flat`.

    It is used like any other dict. Functions that handle many state dicts ask `as_flat` and then handle one tensor
    instead of one per entry. Once an entry is replaced, it is an ordinary dict for them, too.

    Args:
        flat: The flat tensor.
        layout: The entries in it.
        others: Entries that are not in it, such as integers.
        order: Names of all entries in the order of the dict.

    Example:
        >>> layout = Layout.of({"w": torch.zeros(2), "b": torch.zeros(1)})
        >>> state = FlatTensors(torch.zeros(32), layout, {}, ("b", "w"))
        >>> _ = state["w"].fill_(1.0)
        >>> state, float(state.flat.sum())
        ({'b': tensor([0.]), 'w': tensor([1., 1.])}, 2.0)
    """

    def __init__(self, flat: Tensor, layout: Layout, others: Tensors, order: tuple[str, ...]) -> None:
        entries = layout.views(flat) | others
        super().__init__((name, entries[name]) for name in order)
        self.flat, self.layout, self.others, self.order = flat, layout, others, order
        self._entries = list(self.values())

    def __reduce__(self) -> Any:
        """Pickle the flat tensor instead of its views. If entries were replaced, pickle an ordinary dict instead."""
        if self.is_intact:
            return FlatTensors, (self.flat, self.layout, self.others, self.order)
        return dict, (dict(self),)

    @property
    def is_intact(self) -> bool:
        """Whether the entries are still the views of `flat`: none was replaced, added or removed."""
        return len(self) == len(self._entries) and all(map(is_, self.values(), self._entries))


def as_flat(tensors: Tensors) -> FlatTensors | None:
    """Return the state dict as `FlatTensors` if its entries are still views of one tensor, else None."""
    return tensors if isinstance(tensors, FlatTensors) and tensors.is_intact else None


def unflatten(value: Any) -> Any:
    """Replace each `FlatTensors` in nested dicts by an ordinary state dict. Tensors are not copied.

    A background thread calls this. It computes nothing, because torch's threads would then slow down the training.
    """
    if isinstance(value, FlatTensors):
        return dict(value)
    return {key: unflatten(content) for key, content in value.items()} if isinstance(value, dict) else value


def owners(tensors: Tensors) -> list[Tensor]:
    """Return a list of a state dict's tensors, in which a flat tensor takes the place of its views."""
    state = as_flat(tensors)
    return [*tensors.values()] if state is None else [state.flat, *state.others.values()]


def map_tensors(change: Callable[..., Tensor], tensors: Tensors, *arguments: Mapping[str, Any]) -> Tensors:
    """Apply `change` to each tensor of a state dict, and return the results as a state dict.

    If the entries are views of one flat tensor, `change` is applied once to the flat tensor.

    Args:
        change: Computes each element from that element alone.
        tensors: The state dict.
        *arguments: Further arguments of `change` by entry. All entries of a flat tensor have the same.
    """
    state = as_flat(tensors)
    if state is None:
        return {name: change(value, *(each[name] for each in arguments)) for name, value in tensors.items()}
    others = {name: change(value, *(each[name] for each in arguments)) for name, value in state.others.items()}
    first = state.layout.shapes[0][0]
    flat = change(state.flat, *(each[first] for each in arguments))
    unchanged = flat is state.flat and all(map(is_, others.values(), state.others.values()))
    return state if unchanged else FlatTensors(flat, state.layout, others, state.order)


def matching_parts(ours: Tensors, theirs: Tensors) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of matching tensors of two state dicts: flat tensors if the layouts are equal, else entries."""
    one, other = as_flat(ours), as_flat(theirs)
    if one is None or other is None or one.layout != other.layout:
        return [(ours[name], value) for name, value in theirs.items()]
    return [(one.flat, other.flat), *((one.others[name], value) for name, value in other.others.items())]
