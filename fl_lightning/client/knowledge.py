"""`SharedKnowledge`: what some methods exchange besides weights, such as class prototypes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_lightning.core.message import Tensors, Upload
from fl_lightning.core.state_dicts import at_least_float32

if TYPE_CHECKING:
    from fl_lightning.client.module import ClientModule, Step


Seen = Literal["after", "last_epoch", "round"]


class SharedKnowledge(nn.Module):
    """Knowledge that clients share besides weights, such as class prototypes or soft labels.

    Clients compute it, the server merges and broadcasts it. A loss term or an aggregator that needs it lists it in its
    property `knowledge`. On a client, an instance holds the downloaded tensors as buffers, so they move to the GPU with
    the module. Subclasses set `name` (the section of the message), set `needs_classes` if it needs classes, and
    override the methods below.
    """

    name: str
    needs_classes: bool = False

    @property
    def observes(self) -> bool:
        """Whether `observe` is to be called: where a subclass has one of its own, unless that says otherwise."""
        return type(self).observe is not SharedKnowledge.observe

    def initial(self, num_classes: int) -> Tensors:
        """Return the knowledge that the server broadcasts in round 1."""
        raise NotImplementedError

    def load(self, shared: Tensors) -> None:
        """Store the downloaded tensors as buffers, on the client."""
        for name, value in shared.items():
            held = getattr(self, name, None)
            device = held.device if isinstance(held, Tensor) else value.device
            self.register_buffer(name, value.to(device), persistent=False)

    def observe(self, step: Step, epoch: int) -> None:
        """Client, after each training step: see the batch's outputs. Most knowledge does not need to."""

    def summarize(self, module: ClientModule, batches: Iterable[tuple[Tensor, Tensor]], num_classes: int) -> Tensors:
        """Return the client's upload, after training, in eval mode without gradients."""
        raise NotImplementedError

    def merge(self, previous: Tensors, uploads: Sequence[Upload]) -> Tensors:
        """Return the knowledge to broadcast next, on the server.

        Args:
            previous: What was broadcast this round.
            uploads: The uploads without weights, in ascending client id. `upload.message.section(self.name)` is what a
                client's `summarize` returned.
        """
        raise NotImplementedError


def class_sums(values: Tensor, targets: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Sum of `(B, d)` values by class, `(C, d)` in float32 or more, and samples a class, `(C,)`."""
    values = at_least_float32(values)
    members = F.one_hot(targets, num_classes).to(values.dtype)  # a product, not index_add: deterministic on CUDA
    with torch.autocast(values.device.type, enabled=False):
        return members.T @ values, members.sum(dim=0)


def class_sums_over(
    batches: Iterable[tuple[Tensor, Tensor]], values: Callable[[Tensor], Tensor], num_classes: int
) -> tuple[Tensor, Tensor]:
    """`class_sums` of `values(x)` over all batches `(x, y)`."""
    parts = [class_sums(values(x), y, num_classes) for x, y in batches]
    sums, counts = (torch.stack(part).sum(dim=0) for part in zip(*parts, strict=True))
    return sums, counts


def mean_over_holders(local: Tensor, held: Tensor) -> tuple[Tensor, Tensor]:
    """Average each class over the clients that hold it, in float64, rounded once.

    Args:
        local: The clients' values, `(K, C, d)`.
        held: Which client holds which class, `(K, C)` bool.

    Returns:
        The means `(C, d)`, zero for a class that no client holds, and which classes any client holds, `(C,)`.
    """
    holders = held.sum(dim=0)
    sums = torch.where(held[:, :, None], local.double(), 0.0).sum(dim=0)
    return (sums / holders.clamp(min=1)[:, None]).to(local.dtype), holders > 0


class ClassMeans(SharedKnowledge):
    """The mean output of the clients' networks for each class, averaged over clients.

    All clients that hold a class have the same weight. A class that no client uploads keeps its last mean. Before round
    1, no class has a mean, and nothing is sent. Subclasses return in `outputs` what is averaged.

    Args:
        seen: When a client averages: in a pass over its data `after` training, in eval mode, or during training, over
            the `last_epoch` or the whole `round`.

    Attributes:
        values: The means, `(C, d)`, zero for classes without one; None before the first.
        known: Which classes have a mean, `(C,)` bool.
        tracked: Sums per class, `(C, d)`, and samples per class, `(C,)`, during training.
    """

    needs_classes = True

    def __init__(self, seen: Seen = "after") -> None:
        super().__init__()
        self.seen: Seen = seen
        self.values: Tensor | None
        self.known: Tensor | None
        self.register_buffer("values", None, persistent=False)
        self.register_buffer("known", None, persistent=False)
        self.tracked: tuple[Tensor, Tensor] | None = None
        self._epoch = 0

    def outputs(self, step: Step) -> Tensor:
        """Return the outputs to average, `(B, d)`."""
        raise NotImplementedError

    def initial(self, num_classes: int) -> Tensors:
        """Nothing."""
        return {}

    @property
    def observes(self) -> bool:
        """Whether it looks on in training."""
        return self.seen != "after"

    def observe(self, step: Step, epoch: int) -> None:
        """Add the outputs of a batch. With `last_epoch`, start again in each epoch."""
        sums, counts = class_sums(self.outputs(step).detach(), step.targets, step.logits.shape[1])
        if self.tracked and (self.seen == "round" or self._epoch == epoch):
            sums, counts = sums + self.tracked[0].to(sums.device), counts + self.tracked[1].to(sums.device)
        self.tracked, self._epoch = (sums, counts), epoch

    def summarize(self, module: ClientModule, batches: Iterable[tuple[Tensor, Tensor]], num_classes: int) -> Tensors:
        """The client's means, `(C, d)`, and which classes they are of, `(C,)`."""
        sums, counts = self.tracked or self._passed(module, batches, num_classes)
        return {"values": sums / counts.clamp(min=1)[:, None], "known": counts > 0}

    def _passed(
        self, module: ClientModule, batches: Iterable[tuple[Tensor, Tensor]], num_classes: int
    ) -> tuple[Tensor, Tensor]:
        parts = [class_sums(self.outputs(module.step(batch)), batch[1], num_classes) for batch in batches]
        sums, counts = (torch.stack(part).sum(dim=0) for part in zip(*parts, strict=True))
        return sums, counts

    def merge(self, previous: Tensors, uploads: Sequence[Upload]) -> Tensors:
        """The means over the clients that hold a class."""
        sections = [upload.message.section(self.name) for upload in uploads]
        local, held = (torch.stack([section[name] for section in sections]) for name in ("values", "known"))
        values, known = mean_over_holders(local, held)
        if previous:
            values = torch.where(known[:, None], values, previous["values"])
            known = known | previous["known"]
        return {"values": values, "known": known}


def unique_knowledge(pieces: Iterable[SharedKnowledge]) -> list[SharedKnowledge]:
    """Each piece of shared knowledge once, by name, in the order first met."""
    by_name: dict[str, SharedKnowledge] = {}
    for piece in pieces:
        by_name.setdefault(piece.name, piece)
    return list(by_name.values())
