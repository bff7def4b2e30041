"""`SharedKnowledge`: tensors that some methods exchange besides weights, such as class prototypes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_lightning.core.arguments import ArgumentsMixin
from fl_lightning.core.message import Tensors, Upload
from fl_lightning.core.precision import at_least_float32, without_autocast
from fl_lightning.core.round import Round

if TYPE_CHECKING:
    from fl_lightning.client.loss_term import Step
    from fl_lightning.client.module import ClientModule


Seen = Literal["after", "last_epoch", "round"]


class SharedKnowledge(ArgumentsMixin, nn.Module):
    """Tensors that clients and server exchange besides weights, such as class prototypes or soft labels.

    Clients compute them, the server merges and broadcasts them. A loss term or an aggregator that needs them lists the
    object in its property `knowledge`. On a client, the object holds the downloaded tensors as buffers, so they move to
    the GPU with the module. Subclasses set `name` (the section of the message), set `needs_classes` if they require
    class labels, and override the methods below.

    Attributes:
        name: The section of the message, and of the server's state.
        needs_classes: Whether labels must be classes.
        server_only: Names of the tensors of `merge` that the server keeps for the next `merge` and does not send.
    """

    name: str
    needs_classes: bool = False
    server_only: tuple[str, ...] = ()

    @property
    def observes(self) -> bool:
        """Whether `observe` is called after each training step; by default True if a subclass overrides `observe`."""
        return type(self).observe is not SharedKnowledge.observe

    def initial(self, num_classes: int) -> Tensors:
        """Return the knowledge tensors that the server broadcasts in round 1."""
        raise NotImplementedError

    def sent(self, kept: Tensors) -> Tensors:
        """On the server, return those of its knowledge tensors that clients receive."""
        return (
            {name: value for name, value in kept.items() if name not in self.server_only} if self.server_only else kept
        )

    def load(self, shared: Tensors) -> None:
        """On the client, store the knowledge tensors received from the server as buffers."""
        for name, value in shared.items():
            held = getattr(self, name, None)
            device = held.device if isinstance(held, Tensor) else value.device
            self.register_buffer(name, value.to(device), persistent=False)

    def observe(self, step: Step, epoch: int) -> None:
        """On the client, update running values, such as sums per class, in a training step. Does nothing by default."""

    def summarize(self, module: ClientModule, batches: Iterable[tuple[Tensor, Tensor]], num_classes: int) -> Tensors:
        """On the client after training, return the tensors to upload. Called in eval mode without gradients."""
        raise NotImplementedError

    def merge(self, previous: Tensors, uploads: Sequence[Upload], round: Round) -> Tensors:
        """On the server, merge the clients' knowledge tensors, and return those to broadcast in the next round.

        Args:
            previous: The knowledge tensors at the start of this round.
            uploads: The uploads without weights, in ascending client id. `upload.message.section(self.name)` are the
                tensors that a client's `summarize` returned.
            round: The round, with the state at its start and random numbers.
        """
        raise NotImplementedError


def class_sums(values: Tensor, targets: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Return the sums of values `(B, d)` over the samples of each class, `(C, d)`, and the sample counts, `(C,)`."""
    values = at_least_float32(values)
    members = F.one_hot(targets, num_classes).to(values.dtype)  # index_add is not deterministic on CUDA
    with without_autocast(values.device):
        return members.T @ values, members.sum(dim=0)


def class_sums_over(
    batches: Iterable[tuple[Tensor, Tensor]], values: Callable[[Tensor], Tensor], num_classes: int
) -> tuple[Tensor, Tensor]:
    """Return the sums of `values(x)` over the samples of each class in all batches `(x, y)`, and the sample counts."""
    parts = [class_sums(values(x), y, num_classes) for x, y in batches]
    sums, counts = (torch.stack(part).sum(dim=0) for part in zip(*parts, strict=True))
    return sums, counts


def class_values(uploads: Sequence[Upload], section: str) -> tuple[Tensor, Tensor]:
    """Return the values of each class in a section of K uploads, `(K, C, d)`, and which clients have them, `(K, C)`."""
    sections = [upload.message.section(section) for upload in uploads]
    return torch.stack([each["values"] for each in sections]), torch.stack([each["known"] for each in sections])


def with_previous(values: Tensor, known: Tensor, previous: Tensors) -> Tensors:
    """Complete new values of classes with the previous values of other classes. Return `values` and `known` classes.

    Args:
        values: New values, `(C, d)`.
        known: Whether a class has a new value, `(C,)` bool.
        previous: The result of the round before; empty if there is none.
    """
    if not previous:
        return {"values": values, "known": known}
    return {"values": torch.where(known[:, None], values, previous["values"]), "known": known | previous["known"]}


def mean_over_holders(local: Tensor, held: Tensor) -> tuple[Tensor, Tensor]:
    """Average the clients' values of each class over the clients that have samples of the class, in float64.

    Args:
        local: The clients' values, `(K, C, d)`.
        held: Whether a client has samples of a class, `(K, C)` bool.

    Returns:
        The means `(C, d)`, zero for a class that no client has, and a mask of the classes that a client has, `(C,)`.
    """
    holders = held.sum(dim=0)
    sums = torch.where(held[:, :, None], local.double(), 0.0).sum(dim=0)
    return (sums / holders.clamp(min=1)[:, None]).to(local.dtype), holders > 0


class ClassMeans(SharedKnowledge):
    """Mean network output of each class. Each client averages over its samples, and the server over the clients.

    All clients that have samples of a class count equally. A class that no client uploads keeps its last mean. Before
    round 1, no class has a mean, and nothing is sent. Subclasses return the outputs to average in `outputs`.

    Args:
        seen: The outputs that a client averages: those of a pass over its data `after` training, in eval mode, or those
            of the training steps, in the `last_epoch` or the whole `round`.

    Attributes:
        values: The means, `(C, d)`, zero for classes without a mean; None before the first download of means.
        known: Whether a class has a mean, `(C,)` bool.
        tracked: Sums of outputs per class, `(C, d)`, and samples per class, `(C,)`, of the training steps so far.
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
        """Return the network outputs to average for each class, such as the features of a batch, `(B, d)`."""
        raise NotImplementedError

    def initial(self, num_classes: int) -> Tensors:
        """Return no tensors to broadcast, because no class has a mean before round 1."""
        return {}

    @property
    def observes(self) -> bool:
        """Whether the means are computed during training. If not, a pass over the data after training computes them."""
        return self.seen != "after"

    def observe(self, step: Step, epoch: int) -> None:
        """Add the network outputs of a training step to the sum of each class, from which the means are computed.

        With `seen="last_epoch"`, the sums restart in each epoch.
        """
        sums, counts = class_sums(self.outputs(step).detach(), step.targets, step.logits.shape[1])
        if self.tracked and (self.seen == "round" or self._epoch == epoch):
            sums, counts = sums + self.tracked[0].to(sums.device), counts + self.tracked[1].to(sums.device)
        self.tracked, self._epoch = (sums, counts), epoch

    def summarize(self, module: ClientModule, batches: Iterable[tuple[Tensor, Tensor]], num_classes: int) -> Tensors:
        """Return the client's mean output of each class, `(C, d)`, and a mask of the classes in its data, `(C,)`."""
        sums, counts = self.tracked or self.output_sums(module, batches, num_classes)
        return {"values": sums / counts.clamp(min=1)[:, None], "known": counts > 0}

    def output_sums(
        self, module: ClientModule, batches: Iterable[tuple[Tensor, Tensor]], num_classes: int
    ) -> tuple[Tensor, Tensor]:
        """Return the sums of the outputs over the samples of each class, `(C, d)`, and the sample counts, `(C,)`."""
        outputs = ((self.outputs(module.step(batch)), batch[1]) for batch in batches)
        return class_sums_over(outputs, at_least_float32, num_classes)

    def merge(self, previous: Tensors, uploads: Sequence[Upload], round: Round) -> Tensors:
        """Average the means that the clients uploaded for each class.

        A class for which no client uploaded a mean keeps its previous mean.
        """
        return with_previous(*mean_over_holders(*class_values(uploads, self.name)), previous)


def unique_knowledge(pieces: Iterable[SharedKnowledge]) -> list[SharedKnowledge]:
    """Keep the first `SharedKnowledge` object of each name, in the given order, and remove the others."""
    by_name: dict[str, SharedKnowledge] = {}
    for piece in pieces:
        by_name.setdefault(piece.name, piece)
    return list(by_name.values())
