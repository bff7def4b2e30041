"""Serialization of tasks and results that travel between processes and machines.

A serialized value is a pickle followed by the elements of its tensors, so that whoever maps or receives the bytes can
use the tensors without copying. Tensors that several tasks of a round share are in a `SharedTensorStore`, and
serialized tasks only refer to them. Only the processes of one run read these bytes; they are never stored.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core.task import Task

ALIGNMENT = 64  # torch's own: where a matrix starts can decide how a product rounds
HEADER = 8  # bytes that hold the pickle's length


class OwnPosition(NamedTuple):
    """The position of a tensor's elements in its own serialized value, counted from the first tensor."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class SharedPosition(NamedTuple):
    """The position of a tensor in the round's shared store."""

    block: int
    item: int


class SerializedValue:
    """A serialized value, ready to be written.

    Args:
        value: Anything that can be pickled. Strides of its CPU tensors, and which of them are the same, are kept.
        store: The store that may hold some of its tensors.

    Attributes:
        nbytes: How many bytes `write` needs.
        blocks: The blocks of the store that are needed to read it.

    Raises:
        Exception: The value holds something that cannot be pickled; pickle raises all kinds.
    """

    def __init__(self, value: Any, store: SharedTensorStore | None = None) -> None:
        file = io.BytesIO()
        pickler = _Pickler(file, store)
        pickler.dump(value)
        self.blocks: set[int] = pickler.blocks
        self._pickle, self._tensors = file.getbuffer(), pickler.tensors
        self._start = aligned(HEADER + len(self._pickle))
        self.nbytes = self._start + pickler.end

    def write(self, target: Tensor) -> None:
        """Write the bytes into a `uint8` tensor of the same size."""
        head = len(self._pickle).to_bytes(HEADER, "little") + self._pickle
        target[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        for place, tensor in self._tensors:
            elements = torch.as_strided(tensor, (tensor.numel(),), (1,)).view(torch.uint8)
            start = self._start + place.offset
            target[start : start + len(elements)] = elements


def unpack(source: np.ndarray, block: Callable[[int], list[Tensor]] | None = None, copy: bool = False) -> Any:
    """Return a serialized value.

    Args:
        source: The bytes, `uint8`. Tensors are views of them, unless they are copied.
        block: Returns the tensors of a block of the store that the value was serialized with.
        copy: Whether every tensor gets memory of its own.
    """
    return _Unpickler(source, block, copy).load()


class _Pickler(pickle.Pickler):
    """A pickler that stores plain CPU tensors outside of the pickle, because torch copies them several times."""

    def __init__(self, file: io.BytesIO, store: SharedTensorStore | None) -> None:
        super().__init__(file, protocol=5)
        self.store = store
        self.places: dict[int, OwnPosition] = {}
        self.tensors: list[tuple[OwnPosition, Tensor]] = []
        self.blocks: set[int] = set()
        self.end = 0

    def persistent_id(self, value: Any) -> OwnPosition | SharedPosition | None:
        if not is_plain(value):
            return None
        if self.store and (shared := self.store.position(value)):
            self.blocks.add(shared.block)
            return shared
        if id(value) not in self.places:
            self.places[id(value)] = self._beside(value)
        return self.places[id(value)]

    def _beside(self, value: Tensor) -> OwnPosition:
        tensor = value if is_dense(value) else value.contiguous()
        place = OwnPosition(self.end, tensor.dtype, tuple(tensor.shape), tensor.stride())
        self.tensors.append((place, tensor))  # held: an id is only good for as long as its owner lives
        self.end = aligned(self.end + tensor.numel() * tensor.element_size())
        return place


class _Unpickler(pickle.Unpickler):
    def __init__(self, source: np.ndarray, block: Callable[[int], list[Tensor]] | None, copy: bool) -> None:
        length = int.from_bytes(source[:HEADER].tobytes(), "little")
        super().__init__(io.BytesIO(source[HEADER : HEADER + length].tobytes()))
        self.elements, self.block, self.copy = source[aligned(HEADER + length) :], block, copy
        self.read: dict[int | SharedPosition, Tensor] = {}
        self.blocks: dict[int, list[Tensor]] = {}

    def persistent_load(self, place: OwnPosition | SharedPosition) -> Tensor:
        if isinstance(place, SharedPosition):
            assert self.block
            if place.block not in self.blocks:
                self.blocks[place.block] = self.block(place.block)
            return self.blocks[place.block][place.item]
        if place.offset not in self.read or not self.read[place.offset].numel():  # empty ones share an offset
            self.read[place.offset] = self._tensor(place)
        return self.read[place.offset]

    def _tensor(self, place: OwnPosition) -> Tensor:
        numel = int(np.prod(place.shape, dtype=np.int64))
        if not numel:
            return torch.empty_strided(place.shape, place.stride, dtype=place.dtype)
        with warnings.catch_warnings():  # Ray's bytes are read-only, and nobody writes to what lies in them
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            flat = torch.frombuffer(self.elements, dtype=place.dtype, count=numel, offset=place.offset)
        return (flat.clone() if self.copy else flat).as_strided(place.shape, place.stride)


class SharedTensorStore:
    """The tensors that several tasks of a round share. Each is stored once, block by block.

    Tensors are the same if they are one object. A tensor of only one task is not kept alive.

    Args:
        put: Stores a serialized block where the workers can read it, and returns its handle.

    Attributes:
        handles: The handle of each block.
    """

    def __init__(self, put: Callable[[SerializedValue], Any]) -> None:
        self.handles: list[Any] = []
        self._put = put
        self._seen: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
        self._places: dict[int, SharedPosition] = {}
        self._held: list[list[Tensor]] = []

    def add(self, task: Task) -> None:
        """Store the tensors that a task shares with earlier tasks."""
        found = {id(tensor): tensor for tensor in tensors_of(task) if is_plain(tensor)}
        new = [t for key, t in found.items() if key not in self._places and self._seen.get(key) is t]
        self._seen.update(found)
        if new:
            self._places |= {id(tensor): SharedPosition(len(self._held), i) for i, tensor in enumerate(new)}
            self._held.append(new)
            self.handles.append(self._put(SerializedValue(new)))

    def position(self, tensor: Tensor) -> SharedPosition | None:
        """Return the position of a tensor in the store, or None."""
        return self._places.get(id(tensor))


def tensors_of(task: Task) -> Iterator[Tensor]:
    """Yield the large tensors of a task."""
    yield from task.download.tensors.values()
    for section in task.memory.values():
        yield from section.values()


def is_plain(value: Any) -> bool:
    """Return whether a value is a plain tensor in this machine's memory."""
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


def aligned(offset: int) -> int:
    """Return the next offset at which a tensor may start."""
    return -(-offset // ALIGNMENT) * ALIGNMENT
