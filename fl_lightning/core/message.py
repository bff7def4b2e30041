"""`Message`: the only type of data that a client and a server, or two peers, exchange."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core.flat_tensors import Tensors, map_tensors

NUMBER_BYTES = 8  # a float64 or an int64


class Message:
    """Tensors in named groups (sections) and plain numbers, sent between a client and a server or two peers.

    Tensor names are `section/name`. The weights are in the section `model`, and each kind of shared knowledge has its
    own section. A message and its tensors are not changed once it is built.

    Args:
        tensors: The tensors, by full name.
        numbers: Plain `int` or `float` values, by name.

    Raises:
        TypeError: A value is neither a tensor nor a plain number.

    Example:
        >>> import torch
        >>> message = Message.pack({"model": {"w": torch.zeros(3)}}, n_samples=5)
        >>> message.nbytes, sorted(message.section("model"))
        (20, ['w'])
    """

    def __init__(self, tensors: Tensors | None = None, numbers: Mapping[str, int | float] | None = None) -> None:
        sections: dict[str, Tensors] = {}
        for full_name, tensor in (tensors or {}).items():
            section, _, name = full_name.partition("/")
            sections.setdefault(section, {})[name] = tensor
        self._fill(sections, numbers or {})

    @classmethod
    def pack(cls, sections: Mapping[str, Tensors], **numbers: int | float) -> Message:
        """Build a message from plain numbers and a state dict for each section, such as `model` for the weights."""
        return cls.__new__(cls)._fill(sections, numbers)

    def _fill(self, sections: Mapping[str, Tensors], numbers: Mapping[str, int | float]) -> Message:
        for section, content in sections.items():
            for name, tensor in content.items():
                if not isinstance(tensor, Tensor):
                    raise TypeError(f"Message.tensors['{section}/{name}'] is a {type(tensor).__name__}, not a tensor")
        for name, number in numbers.items():
            if type(number) not in (int, float):
                raise TypeError(f"Message.numbers[{name!r}] is a {type(number).__name__}, not a plain int or float")
        self.sections, self.numbers = {name: content for name, content in sections.items() if content}, dict(numbers)
        return self

    @property
    def tensors(self) -> Tensors:
        """All tensors of the message by full name, such as `model/head.weight`."""
        return {f"{section}/{name}": t for section, content in self.sections.items() for name, t in content.items()}

    def section(self, name: str) -> Tensors:
        """Return one section's tensors as a dict from name to tensor, empty if the message has no such section.

        The section `model`, for example, contains the weights.
        """
        return self.sections.get(name, {})

    def without(self, name: str) -> Message:
        """Return a copy of the message without one section of tensors, such as `model` for the weights."""
        return Message.pack({key: content for key, content in self.sections.items() if key != name}, **self.numbers)

    def on_cpu(self) -> Message:
        """Return the message with all tensors moved to the CPU."""
        sections = {name: map_tensors(Tensor.cpu, content) for name, content in self.sections.items()}
        return Message.pack(sections, **self.numbers)

    def plus(self, sections: Mapping[str, Tensors] | None = None, /, **numbers: int | float) -> Message:
        """Return a copy of the message with numbers and tensors added.

        Args:
            sections: The tensors by section; existing sections are extended.
            numbers: Plain numbers by name.
        """
        both = {name: self.sections.get(name, {}) | content for name, content in (sections or {}).items()}
        return Message.pack({**self.sections, **both}, **self.numbers | numbers)

    @property
    def nbytes(self) -> int:
        """Size of the message in bytes: the elements of all tensors, and 8 bytes for each number."""
        tensors = sum(t.numel() * t.element_size() for content in self.sections.values() for t in content.values())
        return tensors + NUMBER_BYTES * len(self.numbers)


class Upload(NamedTuple):
    """The message that a client sent to the server, with the client's id and the weights that it received before.

    The client's update is the weights in the message minus those in `received`, which is None without a server.
    `staleness` is the number of rounds that ended between the message to the client and this round.
    """

    client: int
    message: Message
    received: Tensors | None = None
    staleness: int = 0

    @property
    def n_samples(self) -> int:
        """Number of training samples of the client that sent the upload, `N_k`."""
        return int(self.message.numbers["n_samples"])


def message_to_tensors(message: Message) -> Tensors:
    """Convert a message to a dict of tensors; each of its numbers becomes a tensor `number/<name>`."""
    return message.tensors | {
        f"number/{name}": torch.as_tensor(np.asarray(value)) for name, value in message.numbers.items()
    }


def tensors_to_message(tensors: Tensors) -> Message:
    """Convert the tensors from `message_to_tensors` back to a message."""
    numbers = {k.removeprefix("number/"): v.item() for k, v in tensors.items() if k.startswith("number/")}
    return Message({k: v for k, v in tensors.items() if not k.startswith("number/")}, numbers)


def peer_section(peer: int) -> str:
    """Return `peer_<id>`, the prefix of one peer's entries in a message that joins several peers' messages."""
    return f"peer_{peer}"


def bundle(messages: Mapping[int, Message]) -> Message:
    """Join several peers' messages into one message, in which their entries have the prefix `peer_<id>/`."""
    tensors = {f"{peer_section(j)}/{name}": value for j, one in messages.items() for name, value in one.tensors.items()}
    numbers = {f"{peer_section(j)}/{name}": value for j, one in messages.items() for name, value in one.numbers.items()}
    return Message(tensors, numbers)


def unbundle(message: Message) -> list[Upload]:
    """Split a message that joins several peers' messages into one upload per peer, in ascending order of ids.

    This is the inverse of `bundle`. Every message must contain at least one number, such as `n_samples`.
    """
    peers = {int(name.split("/")[0].removeprefix("peer_")) for name in message.numbers}
    uploads = []
    for peer in sorted(peers):
        prefix = f"{peer_section(peer)}/"
        numbers = {k.removeprefix(prefix): v for k, v in message.numbers.items() if k.startswith(prefix)}
        uploads.append(Upload(peer, Message(message.section(peer_section(peer)), numbers)))
    return uploads
