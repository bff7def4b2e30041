"""`Codec`: compress and restore the messages of a run, in both directions.

The floating-point parameters in the section `model` are compressed together, as one vector in which they are sorted by
name. Buffers, integers and all other sections are sent as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable
from functools import reduce

import torch
from torch import Tensor

from fl_lightning.compression.base import Compressor
from fl_lightning.compression.bits import packed_bytes
from fl_lightning.core.errors import ConfigError, NonFiniteError
from fl_lightning.core.flat_tensors import Tensors
from fl_lightning.core.message import Message
from fl_lightning.core.precision import widened_type
from fl_lightning.core.seeding import Stream, derive
from fl_lightning.core.state_dicts import State, first_non_finite, pack_mask, parameter_names, unpack_mask

COMPRESSED = "compressed"
"""The section of a message with the compressed parameters."""

RESIDUAL = "residual"
"""The section of the client state with the part of the updates that was not sent: float64 tensors by name."""

ENTRIES = "entries"
"""A tensor of a compressed update that has only some of the received parameters: one bit for each of them."""


class Codec:
    """Compresses and restores the messages of a run. The server and all clients have equal ones.

    An update is the difference between the uploaded and the received weights of a parameter, in float64. With feedback,
    the client adds its residual before it compresses, and keeps what the server does not restore as its new residual.

    Args:
        seed: The run's seed.
        upload: Compresses the clients' updates. By default, uploads are not changed.
        download: Compresses the weights that clients receive. By default, downloads are not changed.
        layout: Returns the entries of a client's network that clients and server exchange, for their shapes and types.
        buffers: Names of the network's buffers.
    """

    def __init__(
        self,
        seed: int = 0,
        upload: Compressor | None = None,
        download: Compressor | None = None,
        layout: Callable[[int], Tensors] = lambda client: {},
        buffers: Collection[str] = (),
    ) -> None:
        self.seed, self.upload, self.download = seed, upload, download
        self.layout, self.buffers = layout, buffers
        self._packed, self._restored = LastState(), LastState()

    def parameters(self, model: Tensors) -> list[str]:
        """Return the sorted names of a state dict's entries that are compressed: floating point, and no buffers."""
        return sorted(parameter_names(model, self.buffers))

    # --- Downloads ---

    def compress_download(self, message: Message, round: int) -> Message:
        """Server: return the message to a client with compressed weights.

        The random numbers are the same for all clients of a round, so clients with equal models get equal bytes.
        """
        compressor, model = self.download, message.section("model")
        if not compressor:
            return message

        def packed() -> State:
            names, seed = self.parameters(model), derive(self.seed, Stream.COMPRESSION, round)
            weights = {name: model[name] for name in names}
            sent = compressor.encode(to_vector(weights), value_type(weights), seed)
            return {"model": without(model, names), COMPRESSED: sent}

        return with_sections(message, self._packed.of(model, round, packed))

    def restore_download(self, message: Message, client: int) -> Message:
        """Client and server: return the message to a client with the weights that the client uses.

        Raises:
            ValueError: The compressed weights are not those of the client's network.
        """
        compressor, sent = self.download, message.section(COMPRESSED)
        if not compressor or not sent:
            return message

        def restored() -> State:
            layout = self.layout(client)
            zeros = {name: torch.zeros_like(layout[name], device="cpu") for name in self.parameters(layout)}
            model = add_vector(zeros, decode(compressor, sent, zeros, seed=0))
            return {"model": in_order(layout, model | message.section("model")), COMPRESSED: {}}

        return with_sections(message, self._restored.of(sent, None, restored))

    # --- Uploads ---

    def compress_upload(
        self, message: Message, received: Tensors, memory: State, round: int, client: int
    ) -> tuple[Message, State]:
        """Client: compress the update in an upload.

        Args:
            message: The upload.
            received: The weights that the client received, on the CPU.
            memory: The state that the client kept from its last round, with the residual.
            round: The round.
            client: The client's id.

        Returns:
            The message to send, which shares no memory with the upload, and the residual as a section of the client's
            next state; without feedback no section.

        Raises:
            ConfigError: The upload has none of the received weights.
            NonFiniteError: The update contains NaN or Inf.
        """
        compressor, model = self.upload, message.section("model")
        if not compressor:
            return message, {}
        known, residual = self.parameters(received), memory.get(RESIDUAL, {}) if compressor.feedback else {}
        names = [name for name in known if name in model and model[name].shape == received[name].shape]
        if not names:
            raise ConfigError("compression: a client uploads none of the weights that it received. Remove compression.")
        update = {name: model[name].cpu().double() - received[name].double() for name in names}
        if bad := first_non_finite(update):
            raise NonFiniteError(f"the upload's {f'model/{bad}'!r} is NaN or Inf: lower the learning rate")
        vector = to_vector({name: value + residual.get(name, 0.0) for name, value in update.items()})
        seed = derive(self.seed, Stream.COMPRESSION, round, client)
        sent = compressor.encode(vector, value_type({name: received[name] for name in names}), seed)
        state: State = {}
        if compressor.feedback:
            left = vector - compressor.decode(sent, len(vector), seed)
            state = {RESIDUAL: residual | {name: part.clone() for name, part in split_vector(left, update).items()}}
        if names != known:
            sent |= {ENTRIES: pack_mask(torch.tensor([name in names for name in known]))}
        dense = {name: value.cpu().clone() for name, value in without(model, names).items()}
        return with_sections(message, {"model": dense, COMPRESSED: sent}), state

    def restore_upload(self, message: Message, received: Tensors | None, round: int, client: int) -> Message:
        """Server: return an upload with dense weights: the received ones plus the update, rounded once.

        Args:
            message: The message from the client.
            received: The weights that the client received.
            round: The round.
            client: The client's id.

        Raises:
            ValueError: The message is not one of `compress_upload` for these weights.
        """
        compressor, sent = self.upload, message.section(COMPRESSED)
        if not compressor:
            return message
        known = self.parameters(received or {})
        start = {name: (received or {})[name] for name in sent_names(sent, known)}
        seed = derive(self.seed, Stream.COMPRESSION, round, client)
        model = add_vector(start, decode(compressor, without(sent, [ENTRIES]), start, seed))
        restored = in_order(received or {}, model | message.section("model"))
        return with_sections(message, {"model": restored, COMPRESSED: {}})


class LastState:
    """Keeps the sections that were last computed from some tensors, for the next message with the same tensors."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []  # kept, so that no other tensor gets the same id
        self._key: Hashable = None
        self._state: State = {}

    def of(self, tensors: Tensors, key: Hashable, compute: Callable[[], State]) -> State:
        """Return the last state if tensors and key are the same objects as in the last call, else compute it."""
        full_key = (key, *map(id, tensors.values()))
        if full_key != self._key:
            self._state = compute()
            self._key, self._tensors = full_key, [*tensors.values()]
        return self._state


def with_sections(message: Message, sections: State) -> Message:
    """Return a message with some sections replaced. Empty sections are left out."""
    return Message.pack({**message.sections, **sections}, **message.numbers)


def without(tensors: Tensors, names: Iterable[str]) -> Tensors:
    """Return a state dict without the entries with these names."""
    left_out = {*names}
    return {name: value for name, value in tensors.items() if name not in left_out}


def in_order(like: Tensors, tensors: Tensors) -> Tensors:
    """Return a state dict with its entries in the order of another one, and further entries at the end."""
    return {name: tensors[name] for name in (*(name for name in like if name in tensors), *without(tensors, like))}


def to_vector(tensors: Tensors) -> Tensor:
    """Return the elements of all tensors of a state dict as one float64 vector, `(P,)`, on the CPU."""
    return torch.cat([value.cpu().double().flatten() for value in tensors.values()])


def split_vector(vector: Tensor, like: Tensors) -> Tensors:
    """Split a vector into entries with the names and shapes of a state dict. They are views of the vector."""
    parts = vector.split([value.numel() for value in like.values()])
    return {name: part.view(value.shape) for part, (name, value) in zip(parts, like.items(), strict=True)}


def add_vector(start: Tensors, vector: Tensor) -> Tensors:
    """Return a state dict plus a float64 vector of all its elements. Half precision is widened to float32."""
    return {
        name: (start[name].double() + part).to(widened_type(start[name].dtype))
        for name, part in split_vector(vector, start).items()
    }


def value_type(tensors: Tensors) -> torch.dtype:
    """Return the type in which values for entries of a state dict are sent: float32, or float64 if one has it."""
    return reduce(torch.promote_types, (value.dtype for value in tensors.values()), torch.float32)


def decode(compressor: Compressor, sent: Tensors, start: Tensors, seed: int) -> Tensor:
    """Return the restored vector of an update, after a check of the names, types and sizes of the sent tensors.

    Args:
        compressor: The compressor.
        sent: The tensors that were sent.
        start: The weights to which the vector is added, for their sizes and types.
        seed: The seed that was given to `encode`.

    Raises:
        ValueError: The tensors are not those that `encode` returns for a vector of this size.
    """
    size = sum(value.numel() for value in start.values())
    form = {name: (kind, (count,)) for name, (kind, count) in compressor.form(size, value_type(start)).items()}
    found = {name: (value.dtype, tuple(value.shape)) for name, value in sent.items()}
    if form != found:
        name = min(name for name in {**form, **found} if form.get(name) != found.get(name))
        raise ValueError(f"the compressed update has {name!r} of form {found.get(name)}, not {form.get(name)}")
    return compressor.decode(sent, size, seed)


def sent_names(sent: Tensors, known: list[str]) -> list[str]:
    """Return the names of the received parameters whose differences are in a compressed update.

    Args:
        sent: The section `compressed` of an upload.
        known: Names of the received parameters, sorted.

    Raises:
        ValueError: The tensor that tells which parameters are sent is not valid.
    """
    if ENTRIES not in sent:
        return known
    mask = sent[ENTRIES]
    if mask.dtype != torch.uint8 or tuple(mask.shape) != (packed_bytes(len(known), 1),):
        raise ValueError(f"the compressed update has an invalid mask of {len(known)} entries")
    return [name for name, is_sent in zip(known, unpack_mask(mask, torch.Size([len(known)])), strict=True) if is_sent]
