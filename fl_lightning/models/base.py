"""What every backbone offers: an encoder, a head, and the feature size between them."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, cast

from torch import Tensor, nn

from fl_lightning.core.errors import ConfigError
from fl_lightning.core.message import Tensors


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
        return self.features_and_logits(x)[1]

    def features_and_logits(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features `(B, d)` and the logits `(B, C)` of a batch, from one pass."""
        features = self.encoder(x)
        return cast(Tensor, features), cast(Tensor, self.head(features))


@contextmanager
def tapped(backbone: nn.Module, names: Iterable[str]) -> Iterator[Tensors]:
    """Note what goes into layers of a network, while inside; of a layer that is called several times, the last.

    Args:
        backbone: The network.
        names: The layers, by their dotted names.

    Yields:
        The layers' inputs by name, as they come. They are copies: a layer may write into its input.

    Raises:
        ConfigError: The network is compiled, which hides what is inside.

    Example:
        >>> import torch
        >>> net = nn.Sequential(nn.Linear(1, 1, bias=False), nn.ReLU(inplace=True))
        >>> _ = net[0].weight.data.fill_(-1.0)
        >>> with tapped(net, ["1"]) as taps:
        ...     _ = net(torch.ones(1, 1))
        >>> taps["1"].tolist()
        [[-1.0]]
    """
    taps: Tensors = {}
    names = list(dict.fromkeys(names))
    if names and any(part._compiled_call_impl for part in backbone.modules()):
        raise ConfigError(f"compile: a loss term looks at {names[0]!r}, inside the compiled network; set compile false")

    def tap(name: str, inputs: tuple[Any, ...]) -> None:
        taps[name] = inputs[0].clone()

    handles = [
        backbone.get_submodule(name).register_forward_pre_hook(lambda _, inputs, name=name: tap(name, inputs))
        for name in names
    ]
    try:
        yield taps
    finally:
        for handle in handles:
            handle.remove()


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


def with_features(module: nn.Module | None) -> Backbone:
    """Return the module if it is a backbone, which gives features.

    Raises:
        ConfigError: It is not a backbone.
    """
    if not isinstance(module, Backbone):
        raise ConfigError("model: this method looks at features, so the model must be a Backbone; FromModule makes one")
    return module


def with_encoder(module: nn.Module | None) -> Backbone:
    """Return the module if it is a backbone with an encoder and a head that can be called apart.

    Raises:
        ConfigError: It is not a backbone, or its encoder and head cannot be taken apart.
    """
    backbone = with_features(module)
    _ = backbone.encoder  # `FromModule` refuses where it cannot be taken apart
    return backbone


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
