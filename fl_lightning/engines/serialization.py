"""Serialization of tasks and results that are sent between processes and machines.

The elements of tensors are kept out of the pickle, so that the receiving process can use them without copying.
Tensors that several tasks of a round share are in a `SharedTensorStore`, and serialized tasks only refer to them. Only
the processes of one run read these bytes; they are never stored.
"""

from __future__ import annotations

import io
import math
import pickle
import warnings
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple, Protocol
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core.flat_tensors import owners
from fl_lightning.core.task import Task
from fl_lightning.engines.persistent_pickle import KeyUnpickler

Block = Callable[[int], list[Tensor]]
"""A function that returns the tensors of one block of a `SharedTensorStore`, given the block's number."""


class SerializedValue:
    """A value, such as a task, serialized to a pickle and separate byte arrays with the elements of its tensors.

    Args:
        value: Anything that can be pickled. Strides of CPU tensors, and tensors that occur several times, are kept.
        store: The store that may contain some of the value's tensors or other objects.

    Attributes:
        parts: The pickle, then the elements of each tensor and array, all `uint8`.
        blocks: The blocks of the store that are needed to read the value.

    Raises:
        Exception: Part of the value cannot be pickled. Pickle raises many types of errors.
    """

    def __init__(self, value: Any, store: SharedPositions | None = None) -> None:
        file, tensors = io.BytesIO(), []
        pickler = _Pickler(file, protocol=5, buffer_callback=lambda part: tensors.append(np.frombuffer(part, np.uint8)))
        pickler.store, self.blocks = store, pickler.blocks
        pickler.dump(value)
        self.parts = [np.frombuffer(file.getbuffer(), np.uint8), *tensors]


def deserialize(parts: Sequence[np.ndarray], block: Block | None = None, copy: bool = False) -> Any:
    """Return the value, such as a task, from the `parts` of its `SerializedValue`.

    Args:
        parts: The parts of the `SerializedValue`. Tensors are views of them, unless they are copied.
        block: Reads the blocks of the store that the value was serialized with.
        copy: Copy the tensors, so that the value does not use the memory of the parts.
    """
    pickled, *tensors = parts

    def buffer(part: np.ndarray) -> np.ndarray:
        is_empty = not len(part)  # `as_tensor` needs elements
        return part if is_empty or not copy else as_tensor(part, torch.uint8).clone().numpy()

    blocks: dict[int, list[Tensor]] = {}

    def shared_tensor(position: SharedPosition) -> Tensor:
        assert block
        if position.block not in blocks:
            blocks[position.block] = block(position.block)
        return blocks[position.block][position.item]

    return KeyUnpickler(io.BytesIO(pickled.tobytes()), shared_tensor, buffers=map(buffer, tensors)).load()


class _Pickler(pickle.Pickler):
    """A pickler that keeps the elements of CPU tensors outside of the pickle, to avoid the copies that torch makes."""

    store: SharedPositions | None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.blocks: set[int] = set()

    def persistent_id(self, value: Any) -> SharedPosition | None:
        position = self.store.positions.get(id(value)) if self.store else None
        if position:
            self.blocks.add(position.block)
        return position

    def reducer_override(self, value: Any) -> Any:
        if not is_plain(value):
            return NotImplemented
        tensor = value if is_dense(value) else value.contiguous()
        elements = torch.as_strided(tensor, (tensor.numel(),), (1,)).view(torch.uint8).numpy()
        return rebuild_tensor, (pickle.PickleBuffer(elements.data), tensor.dtype, tuple(tensor.shape), tensor.stride())


def rebuild_tensor(elements: Any, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    """Return a tensor of this shape and stride whose elements are in a buffer, without copying."""
    if not math.prod(shape):
        return torch.empty_strided(shape, stride, dtype=dtype)
    return as_tensor(elements, dtype).as_strided(shape, stride)


def as_tensor(elements: Any, dtype: torch.dtype) -> Tensor:
    """Return a one-dimensional tensor whose elements are in a buffer, without copying."""
    with warnings.catch_warnings():  # Ray's bytes are read-only, and nothing writes to them
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(elements, dtype=dtype)


class SharedPosition(NamedTuple):
    """The position of a tensor in a `SharedTensorStore`: the number of its block, and its index in the block."""

    block: int
    item: int


class SharedPositions(Protocol):
    """Objects that are stored apart from the values that contain them."""

    positions: dict[int, SharedPosition]
    """The position of each object in the store, by the object's `id`."""


class SharedTensorStore:
    """The tensors that several tasks of a round share, such as the global model. Each is stored once.

    Tensors are stored in blocks: those that become shared with the same task form a block. Tensors are the same if they
    are one object. A tensor of only one task is not kept alive.

    Args:
        put: Stores a serialized block where the workers can read it, and returns its handle.

    Attributes:
        handles: The handle of each block.
        positions: The position of each tensor in the store, by the tensor's `id`.
    """

    def __init__(self, put: Callable[[SerializedValue], Any]) -> None:
        self.handles: list[Any] = []
        self.positions: dict[int, SharedPosition] = {}
        self._put = put
        self._seen: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
        self._held: list[list[Tensor]] = []

    def add(self, task: Task) -> None:
        """Store the tensors of a task that an earlier task also contains, except those that are already stored."""
        sections = [*task.download.sections.values(), *task.memory.values()]
        found = {id(t): t for t in chain.from_iterable(map(owners, sections)) if is_plain(t)}
        new = [t for key, t in found.items() if key not in self.positions and self._seen.get(key) is t]
        self._seen.update(found)
        if new:
            self.handles.append(self._put(SerializedValue(new)))
            self.positions |= {id(tensor): SharedPosition(len(self._held), i) for i, tensor in enumerate(new)}
            self._held.append(new)


def is_plain(value: Any) -> bool:
    """Return whether a value is a CPU tensor of the class `torch.Tensor` itself that requires no gradient."""
    return (
        type(value) is Tensor
        and value.layout == torch.strided
        and value.device.type == "cpu"
        and not (value.requires_grad or value.is_quantized or value.is_conj() or value.is_neg())
    )


def is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor's elements are contiguous in memory, in any order of dimensions."""
    order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    return tensor.permute(order).is_contiguous()
