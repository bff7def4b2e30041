"""`Message`: the only type of data that a client and a server, or two peers, exchange."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

Tensors = dict[str, Tensor]

NUMBER_BYTES = 8  # a float64 or an int64


@dataclass(frozen=True)
class Message:
    """Named tensors and plain numbers.

    Tensor names are `section/name`. The weights are in the section `model`, and each piece of shared knowledge has a
    section of its own.

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

    tensors: Tensors = field(default_factory=dict)
    numbers: dict[str, int | float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, tensor in self.tensors.items():
            if not isinstance(tensor, Tensor):
                raise TypeError(f"Message.tensors[{name!r}] is a {type(tensor).__name__}, not a tensor")
        for name, number in self.numbers.items():
            if type(number) not in (int, float):
                raise TypeError(f"Message.numbers[{name!r}] is a {type(number).__name__}, not a plain int or float")

    @classmethod
    def pack(cls, sections: Mapping[str, Tensors], **numbers: int | float) -> Message:
        """Build a message from sections of tensors and plain numbers."""
        tensors = {f"{section}/{name}": t for section, content in sections.items() for name, t in content.items()}
        return cls(tensors, numbers)

    def section(self, name: str) -> Tensors:
        """Return the tensors of one section by their short names; empty if the message has no such section."""
        prefix = f"{name}/"
        return {key[len(prefix) :]: tensor for key, tensor in self.tensors.items() if key.startswith(prefix)}

    def without(self, name: str) -> Message:
        """Return the message without one section."""
        return Message({k: t for k, t in self.tensors.items() if not k.startswith(f"{name}/")}, self.numbers)

    def on_cpu(self) -> Message:
        """Return the message with its tensors on the CPU."""
        return Message({name: tensor.cpu() for name, tensor in self.tensors.items()}, self.numbers)

    def plus(self, sections: Mapping[str, Tensors]) -> Message:
        """Return the message with more sections."""
        return Message(self.tensors | Message.pack(sections).tensors, self.numbers)

    @property
    def nbytes(self) -> int:
        """Size of the payload in bytes: every tensor's elements, and 8 for each number."""
        tensors = sum(t.numel() * t.element_size() for t in self.tensors.values())
        return tensors + NUMBER_BYTES * len(self.numbers)


class Upload(NamedTuple):
    """A message and the client it came from."""

    client: int
    message: Message

    @property
    def n_samples(self) -> int:
        """Number of training samples of the client, `N_k`."""
        return int(self.message.numbers["n_samples"])
