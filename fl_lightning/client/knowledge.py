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
        """Whether `observe` is called in training: by default, if a subclass overrides it."""
        return type(self).observe is not SharedKnowledge.observe

    def initial(self, num_classes: int) -> Tensors:
        """Return the knowledge tensors that the server broadcasts in round 1."""
        raise NotImplementedError

    def load(self, shared: Tensors) -> None:
        """Client: store the knowledge tensors received from the server as buffers."""
        for name, value in shared.items():
            held = getattr(self, name, None)
            device = held.device if isinstance(held, Tensor) else value.device
            self.register_buffer(name, value.to(device), persistent=False)

    def observe(self, step: Step, epoch: int) -> None:
        """Client: read a training step's outputs, after each step. Most kinds of knowledge do not need it."""

    def summarize(self, module: ClientModule, batches: Iterable[tuple[Tensor, Tensor]], num_classes: int) -> Tensors:
        """Client: return its part of the knowledge to upload, after training, in eval mode without gradients."""
        raise NotImplementedError

    def merge(self, previous: Tensors, uploads: Sequence[Upload]) -> Tensors:
        """Server: return the knowledge to broadcast in the next round, from the clients' uploads.

        Args:
            previous: What was broadcast this round.
            uploads: The uploads without weights, in ascending client id. `upload.message.section(self.name)` is what a
                client's `summarize` returned.
        """
        raise NotImplementedError


def class_sums(values: Tensor, targets: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Return the sum of values `(B, d)` over the samples of each class, `(C, d)`, and the number of samples, `(C,)`."""
    values = at_least_float32(values)
    members = F.one_hot(targets, num_classes).to(values.dtype)  # a product, not index_add: deterministic on CUDA
    with torch.autocast(values.device.type, enabled=False):
        return members.T @ values, members.sum(dim=0)


def class_sums_over(
    batches: Iterable[tuple[Tensor, Tensor]], values: Callable[[Tensor], Tensor], num_classes: int
) -> tuple[Tensor, Tensor]:
    """Return the sums of `values(x)` over the samples of each class in all batches `(x, y)`, and their number."""
    parts = [class_sums(values(x), y, num_classes) for x, y in batches]
    sums, counts = (torch.stack(part).sum(dim=0) for part in zip(*parts, strict=True))
    return sums, counts


def mean_over_holders(local: Tensor, held: Tensor) -> tuple[Tensor, Tensor]:
    """Average each class's values over the clients that hold the class, in float64.

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
        """Return the network's outputs on a batch that are averaged by class, `(B, d)`."""
        raise NotImplementedError

    def initial(self, num_classes: int) -> Tensors:
        """Return no tensors, because no class has a mean before round 1."""
        return {}

    @property
    def observes(self) -> bool:
        """Whether means are computed during training instead of in a pass after it."""
        return self.seen != "after"

    def observe(self, step: Step, epoch: int) -> None:
        """Add a training batch's outputs to the sums by class; `last_epoch` resets them in each epoch."""
        sums, counts = class_sums(self.outputs(step).detach(), step.targets, step.logits.shape[1])
        if self.tracked and (self.seen == "round" or self._epoch == epoch):
            sums, counts = sums + self.tracked[0].to(sums.device), counts + self.tracked[1].to(sums.device)
        self.tracked, self._epoch = (sums, counts), epoch

    def summarize(self, module: ClientModule, batches: Iterable[tuple[Tensor, Tensor]], num_classes: int) -> Tensors:
        """Return the client's mean output of each class, `(C, d)`, and the mask of the classes it has, `(C,)`."""
        sums, counts = self.tracked or self._passed(module, batches, num_classes)
        return {"values": sums / counts.clamp(min=1)[:, None], "known": counts > 0}

    def _passed(
        self, module: ClientModule, batches: Iterable[tuple[Tensor, Tensor]], num_classes: int
    ) -> tuple[Tensor, Tensor]:
        parts = [class_sums(self.outputs(module.step(batch)), batch[1], num_classes) for batch in batches]
        sums, counts = (torch.stack(part).sum(dim=0) for part in zip(*parts, strict=True))
        return sums, counts

    def merge(self, previous: Tensors, uploads: Sequence[Upload]) -> Tensors:
        """Return the mean of each class over the clients that hold it; a class without clients keeps its last mean."""
        sections = [upload.message.section(self.name) for upload in uploads]
        local, held = (torch.stack([section[name] for section in sections]) for name in ("values", "known"))
        values, known = mean_over_holders(local, held)
        if previous:
            values = torch.where(known[:, None], values, previous["values"])
            known = known | previous["known"]
        return {"values": values, "known": known}


def unique_knowledge(pieces: Iterable[SharedKnowledge]) -> list[SharedKnowledge]:
    """Return the shared knowledge objects without those of a repeated name, in order of first occurrence."""
    by_name: dict[str, SharedKnowledge] = {}
    for piece in pieces:
        by_name.setdefault(piece.name, piece)
    return list(by_name.values())
