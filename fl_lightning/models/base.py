"""What every backbone offers: an encoder, a head, and the feature size between them."""

from __future__ import annotations

from typing import Protocol, cast

from torch import Tensor, nn


class Backbone(nn.Module):
    """A network in two parts, logits = head(encoder(x)).

    Args:
        encoder: Maps a batch of inputs to features `(B, feature_dim)`.
        head: Maps features to logits `(B, C)`.
        feature_dim: Size `d` of a feature.
    """

    def __init__(self, encoder: nn.Module, head: nn.Module, feature_dim: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head
        self.feature_dim = feature_dim

    def forward(self, x: Tensor) -> Tensor:
        """Logits `(B, C)` of a batch of inputs."""
        return cast(Tensor, self.head(self.encoder(x)))


class ModelFactory(Protocol):
    """Builds a backbone for a dataset; a config's `model` key is one, with the dataset's shape left open."""

    def __call__(self, *, in_shape: tuple[int, ...], num_classes: int) -> Backbone:
        """Build the backbone for inputs of `in_shape` (without the batch) and `num_classes` classes."""
        ...
