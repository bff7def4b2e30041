"""The loss of the received model on a client's training data, for methods whose server weighs clients by it."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from fl_lightning.client.module import ClientModule
from fl_lightning.core.errors import NonFiniteError
from fl_lightning.core.precision import at_least_float32

LOSSES = "losses"
"""The section of a module's notes with `F_k(w)`, the loss of the received model on the client's training data."""


def mean_loss(module: ClientModule, batches: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Return `F_k(w)`, a model's mean loss over all samples of a client, as a float64 scalar on the model's device.

    If the objective averages over other units than samples, such as tokens, it is the mean over these. Additional loss
    terms are not part of it.

    Args:
        module: The client's module, in eval mode.
        batches: All samples of the client.
    """
    objective = module.objective
    with torch.no_grad():
        sums = [(objective.loss(at_least_float32(module(x)), y, "sum"), objective.units(y)) for x, y in batches]
    losses, units = (torch.stack(part).double().sum() for part in zip(*sums, strict=True))
    return losses / units


def keep_received_loss(module: ClientModule, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
    """In `Algorithm.prepare`, compute the loss of the received model on the training data, and keep it for `upload`."""
    module.notes = {LOSSES: {"received_loss": mean_loss(module, batches)}}


def received_loss(module: ClientModule) -> float:
    """In `Algorithm.upload`, return the loss that `keep_received_loss` has computed before the training.

    Raises:
        NonFiniteError: It is NaN or Inf.
    """
    loss = float(module.notes[LOSSES]["received_loss"])
    if not math.isfinite(loss):
        raise NonFiniteError("the received model's loss on the training data is NaN or Inf: lower the learning rate")
    return loss
