"""Fast copies of a module, by pickling its structure once instead of calling `copy.deepcopy` for each copy."""

from __future__ import annotations

import copy
import io
import pickle
import types
import weakref
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from fl_lightning.core.fixed_tensors import alias, copy_network, is_shared
from fl_lightning.engines.persistent_pickle import KeyPickler, KeyUnpickler

M = TypeVar("M", bound=nn.Module)

# Types that a deep copy shares with the original, and that pickle would refuse or look up by name.
AS_IS = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, property, weakref.ref, Enum)


class ModuleCopier(Generic[M]):
    """Builds copies of a module as `copy_network` does, which share its fixed tensors, but faster.

    The other tensors are copied one by one. The objects that hold them are unpickled from memory, which is faster than
    copying them in Python. A module that cannot be pickled, or that defines `__deepcopy__`, is deep-copied.

    Args:
        module: The module, which must not change afterwards.

    Example:
        >>> copier = ModuleCopier(nn.Linear(2, 1))
        >>> one, other = copier.build(), copier.build()
        >>> bool((one.weight == other.weight).all()), one.weight is other.weight
        (True, False)
    """

    def __init__(self, module: M) -> None:
        self._module = module
        self._parts: list[Any] = []
        self._entries: Mapping[str, Tensor] = module.state_dict(keep_vars=True)
        self._structure: bytes | None
        try:
            self._structure = self._pickle_structure()
            self.build()
        except Exception:  # whatever an object's own pickling raises
            self._structure = None

    def build(self, blank: Iterable[str] = ()) -> M:
        """Build a new copy of the module, optionally without copying the values of some tensors.

        Args:
            blank: Names of state dict entries that the caller overwrites. Their values are uninitialised.
        """
        if self._structure is None:
            return copy_network(self._module)
        empty = {id(self._entries[name]) for name in blank if name in self._entries}
        built: dict[int, Any] = {}

        def part(number: int) -> Any:
            if number not in built:
                original = self._parts[number]
                if isinstance(original, Tensor):
                    original = empty_copy(original) if id(original) in empty else copy_tensor(original)
                built[number] = original
            return built[number]

        return KeyUnpickler(io.BytesIO(self._structure), part).load()

    def _pickle_structure(self) -> bytes:
        """Pickle the module with a number in place of each tensor and shared value, which go to `_parts`."""
        numbers: dict[int, int] = {}

        def number_of(value: Any) -> int | None:
            if not isinstance(value, (Tensor, *AS_IS)):
                if hasattr(value, "__deepcopy__") and not isinstance(value, np.ndarray):
                    raise TypeError(f"{type(value).__name__} copies itself its own way")
                return None
            if id(value) not in numbers:
                numbers[id(value)] = len(self._parts)
                self._parts.append(value)
            return numbers[id(value)]

        KeyPickler(stream := io.BytesIO(), number_of, protocol=pickle.HIGHEST_PROTOCOL).dump(self._module)
        return stream.getvalue()


def copy_tensor(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor or parameter. A fixed tensor's copy has the same memory."""
    return alias(tensor) if is_shared(tensor) else copy.deepcopy(tensor)


def empty_copy(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor or parameter without its values. Tensors of other classes keep their values."""
    if type(tensor) is nn.Parameter:
        return nn.Parameter(torch.empty_like(tensor), tensor.requires_grad)
    return torch.empty_like(tensor) if type(tensor) is Tensor else copy.deepcopy(tensor)
