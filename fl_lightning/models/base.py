"""What every backbone offers: an encoder, a head, and the feature size between them."""

from __future__ import annotations

import copy
from typing import Protocol, cast

from torch import Tensor, nn

from fl_lightning.errors import ConfigError
from fl_lightning.message import Tensors


class Backbone(nn.Module):
    """A network in two parts, logits = head(encoder(x)).

    The encoder is all convolutional (or recurrent) layers and whatever maps their output to features; the head is the
    rest. Methods that share one part and keep the other (FedPer, FedRep, FedBABU, UA-PDFL) cut here.

    Args:
        encoder: Maps a batch of inputs to features `(B, feature_dim)`.
        head: Maps features to logits `(B, C)`.
        feature_dim: Size `d` of a feature.
        predictor: Maps features to predictions of the same size, for siamese losses; it takes no part in the logits.
    """

    def __init__(
        self, encoder: nn.Module, head: nn.Module, feature_dim: int, predictor: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head
        self.feature_dim = feature_dim
        self.predictor = predictor

    @property
    def classifier(self) -> nn.Module:
        """The classification layer: the head, or the last layer of one that has several; `weight` is `(C, ...)`."""
        return self.head[-1] if isinstance(self.head, nn.Sequential) else self.head

    def forward(self, x: Tensor) -> Tensor:
        """Logits `(B, C)` of a batch of inputs."""
        return cast(Tensor, self.head(self.encoder(x)))


def classification_layer(module: nn.Module) -> nn.Linear:
    """The layer with one row of weights a class: a backbone's classifier, or any other module's last linear layer.

    Raises:
        ConfigError: There is none.
    """
    layers = [module.classifier] if isinstance(module, Backbone) else list(module.modules())
    linear = [layer for layer in layers if isinstance(layer, nn.Linear)]
    if not linear:
        raise ConfigError("model: this method needs a linear classification layer, and the model ends with none")
    return linear[-1]


def with_encoder(module: nn.Module | None) -> Backbone:
    """The module, if it is a backbone with an encoder and a head.

    Raises:
        ConfigError: It is none.
    """
    if not isinstance(module, Backbone):
        raise ConfigError("model: this method looks at features, so the model must be a Backbone; FromModule makes one")
    return module


def frozen_encoder(module: nn.Module, weights: Tensors | None = None) -> nn.Module:
    """A copy of a model's encoder to compare with: in eval mode, without gradients.

    Args:
        module: The model, a `Backbone`; it is left as it is.
        weights: The copy's state dict; the model's if there is none.

    Raises:
        ConfigError: The model is no `Backbone`.
    """
    encoder = copy.deepcopy(with_encoder(module).encoder)
    if weights:
        encoder.load_state_dict(weights)
    return encoder.eval().requires_grad_(False)


class ModelFactory(Protocol):
    """Builds a backbone for a dataset; a config's `model` key is one, with the dataset's shape left open."""

    def __call__(self, *, in_shape: tuple[int, ...], num_classes: int) -> Backbone:
        """Build the backbone for inputs of `in_shape` (without the batch) and `num_classes` classes."""
        ...
