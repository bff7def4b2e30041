"""`SharedKnowledge`: the small thing some papers exchange beside the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_lightning.message import Tensors, Upload

if TYPE_CHECKING:
    from fl_lightning.client import ClientModule, Step


class SharedKnowledge(nn.Module):
    """Class-wise prototypes, soft labels and the like: made by clients, merged by the server, broadcast.

    A loss term or an aggregator that needs some names it in its `knowledge`; whoever binds them makes it travel. On
    a client an instance holds the tensors last downloaded, as buffers, so it moves to the GPU with its module.
    Subclasses set `name` (the section of the message) and override the methods below.
    """

    name: str

    @property
    def observes(self) -> bool:
        """Whether `observe` is to be called: where a subclass has one of its own, unless that says otherwise."""
        return type(self).observe is not SharedKnowledge.observe

    def initial(self, num_classes: int) -> Tensors:
        """What the server broadcasts in round 1, before any client has spoken."""
        raise NotImplementedError

    def load(self, shared: Tensors) -> None:
        """Client, after a download: hold what the server sent."""
        for name, value in shared.items():
            held = getattr(self, name, None)
            device = held.device if isinstance(held, Tensor) else value.device
            self.register_buffer(name, value.to(device), persistent=False)

    def observe(self, step: Step, epoch: int) -> None:
        """Client, after each training step: see the batch's outputs. Most knowledge does not need to."""

    def summarize(self, module: ClientModule, batches: Iterable[tuple[Tensor, Tensor]], num_classes: int) -> Tensors:
        """Client, after training, in eval mode without gradients: what to upload."""
        raise NotImplementedError

    def merge(self, previous: Tensors, uploads: Sequence[Upload]) -> Tensors:
        """Server: the next knowledge to broadcast, from this round's uploads in ascending client id.

        Args:
            previous: What was broadcast this round.
            uploads: The messages less their weights; `upload.message.section(self.name)` is a client's `summarize`.
        """
        raise NotImplementedError


def class_sums(values: Tensor, targets: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Sum of `(B, d)` values by class, `(C, d)` in float32, and samples a class, `(C,)`."""
    members = F.one_hot(targets, num_classes).float()  # a product, not index_add: deterministic on CUDA
    with torch.autocast(values.device.type, enabled=False):
        return members.T @ values.float(), members.sum(dim=0)


def class_sums_over(
    batches: Iterable[tuple[Tensor, Tensor]], values: Callable[[Tensor], Tensor], num_classes: int
) -> tuple[Tensor, Tensor]:
    """`class_sums` of `values(x)` over all batches `(x, y)`."""
    parts = [class_sums(values(x), y, num_classes) for x, y in batches]
    sums, counts = (torch.stack(part).sum(dim=0) for part in zip(*parts, strict=True))
    return sums, counts
