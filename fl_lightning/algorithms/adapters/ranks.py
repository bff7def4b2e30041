"""Adapters of a smaller rank for some clients, in a model whose adapters have the largest rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fl_lightning.algorithms.adapters.low_rank import belongs_to_a, belongs_to_b
from fl_lightning.client.module import ClientModule
from fl_lightning.core.message import Message, Tensors

RANK = "rank"
"""The key of `ClientModule.notes` with the rank of the client's adapters."""


def rank_of(ranks: Sequence[int], client: int) -> int | None:
    """Return the rank of a client's adapters, or None if all clients have that of the model. `ranks` repeats."""
    return ranks[client % len(ranks)] if ranks else None


def cut_ranks(model: Tensors, rank: int | None) -> Tensors:
    """Return a model whose adapters have at most the given rank: the first rows of `A`, the first columns of `B`.

    Args:
        model: Entries of a state dict.
        rank: The rank; None leaves the model as it is.
    """

    def cut(name: str, value: Tensor) -> Tensor:
        if value.ndim > 1 and belongs_to_a(name):
            return value[:rank].clone()
        return value[:, :rank].clone() if value.ndim > 1 and belongs_to_b(name) else value

    return model if rank is None else {name: cut(name, value) for name, value in model.items()}


def pad_ranks(model: Tensors, backbone: nn.Module) -> Tensors:
    """Return a model whose adapters are extended by zeros to the ranks of a network's adapters.

    If the additional rows of `A` and columns of `B` are zero, their gradients are exactly zero. So they stay zero, and
    the adapter trains as one of the smaller rank.
    """
    entries = backbone.state_dict()

    def padded(value: Tensor, like: Tensor) -> Tensor:
        whole = torch.zeros_like(like, dtype=value.dtype, device=value.device)
        whole[tuple(slice(size) for size in value.shape)] = value
        return whole

    return {
        name: padded(value, entries[name]) if value.shape != entries[name].shape else value
        for name, value in model.items()
    }


def receive_rank(module: ClientModule, download: Message) -> Message:
    """Return a download with adapters of the model's rank, and keep the received rank in the module's notes."""
    model = download.section("model")
    rank = max(len(value) for name, value in model.items() if belongs_to_a(name))
    module.notes[RANK] = {RANK: torch.tensor(rank)}
    return Message.pack({**download.sections, "model": pad_ranks(model, module.backbone)}, **download.numbers)


def upload_rank(module: ClientModule, upload: Message) -> Message:
    """Return an upload with adapters of the rank that the client received."""
    model = cut_ranks(upload.section("model"), int(module.notes[RANK][RANK]))
    return Message.pack({**upload.sections, "model": model}, **upload.numbers)
