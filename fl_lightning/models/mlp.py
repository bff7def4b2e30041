"""Fully connected networks."""

from __future__ import annotations

from math import prod
from typing import Literal

from torch import nn

from fl_lightning.models.base import Backbone
from fl_lightning.models.heads import Head


class MLP(Backbone):
    """Fully connected ReLU layers on the flattened input, then a linear head.

    Args:
        in_shape: Shape of one input, any number of dimensions.
        num_classes: Number of classes, `C`.
        hidden: Widths of the hidden layers; the last is the feature size.
        head: What comes after the features.
        norm: `batch` adds BatchNorm before each ReLU.

    Raises:
        ValueError: `hidden` is empty or contains a width below 1.
    """

    def __init__(
        self,
        in_shape: tuple[int, ...],
        num_classes: int,
        hidden: tuple[int, ...] = (128, 64),
        head: Head = Head(),
        norm: Literal["none", "batch"] = "none",
    ) -> None:
        if not hidden or min(hidden) < 1:
            raise ValueError(f"model.hidden needs at least one width, each 1 or more; got {list(hidden)}")
        layers: list[nn.Module] = [nn.Flatten()]
        width = prod(in_shape)
        for size in hidden:
            layers += [nn.Linear(width, size), *([nn.BatchNorm1d(size)] if norm == "batch" else []), nn.ReLU()]
            width = size
        super().__init__(*head.attach(nn.Sequential(*layers), width, num_classes))
