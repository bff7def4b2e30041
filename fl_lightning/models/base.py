"""Base class of backbones: an encoder, a head, and the feature size between them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol, cast

from torch import Tensor, nn

from fl_lightning.core.arguments import ArgumentsMixin
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.fixed_tensors import copy_network
from fl_lightning.core.inputs import Inputs
from fl_lightning.core.message import Tensors


class Backbone(ArgumentsMixin, nn.Module):
    """A network in two parts: `logits = head(encoder(x))`.

    The encoder contains all convolutional (or recurrent) layers and what maps their output to features. The head is
    the rest. Methods that share one part and keep the other (FedPer, FedRep, FedBABU, UA-PDFL) cut here.

    Args:
        encoder: Maps a batch of inputs to features `(B, feature_dim)`.
        head: Maps features to logits `(B, C)`.
        feature_dim: Size `d` of a feature.
        predictor: Maps features to predictions of the same size, for siamese losses. The logits do not depend on it.

    Attributes:
        several_inputs: Whether the class takes samples with several inputs (`Inputs`), and unpacks them itself.
        new_layers: Names of the layers that are trained whole if the rest is pretrained and frozen, as in `Adapted`.
    """

    several_inputs: ClassVar[bool] = False
    new_layers: Sequence[str] = ("head",)

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
        """The classification layer: the last layer of an `nn.Sequential` head, otherwise the head itself.

        It has a `weight` of shape `(C, ...)`.
        """
        return self.head[-1] if isinstance(self.head, nn.Sequential) else self.head

    def forward(self, x: Tensor | Inputs) -> Tensor:
        """Return the logits `(B, C)` of a batch of inputs."""
        return self.features_and_logits(x)[1]

    def features_and_logits(self, x: Tensor | Inputs) -> tuple[Tensor, Tensor]:
        """Return the features `(B, d)` and the logits `(B, C)` of a batch, from one pass."""
        features = self.encoder(x)
        return cast(Tensor, features), cast(Tensor, self.head(features))


@contextmanager
def tapped(backbone: nn.Module, names: Iterable[str]) -> Iterator[Tensors]:
    """Context that records the inputs of named layers while the network runs.

    If a layer is called several times, the input of its last call is kept.

    Args:
        backbone: The network.
        names: Dotted names of the layers.

    Yields:
        A dict that is filled with copies of the layers' inputs by name.

    Raises:
        ConfigError: The network is compiled, so its layers are not accessible.

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
    """Return the classification layer: a backbone's `classifier`, or the last linear layer of any other module.

    Raises:
        ConfigError: The module has no linear layer.
    """
    layers = [module.classifier] if isinstance(module, Backbone) else list(module.modules())
    linear = [layer for layer in layers if isinstance(layer, nn.Linear)]
    if not linear:
        raise ConfigError("model: this method needs a linear classification layer. Use a model with one.")
    return linear[-1]


def options_with_head(module: nn.Module | None) -> str:
    """Return command-line options as text, for a model of a network's class with its last linear layer as the head."""
    linear = [name for name, layer in module.named_modules() if isinstance(layer, nn.Linear)] if module else []
    head = linear[-1] if linear else "NAME_OF_ITS_LAST_LAYER"
    return (
        f"--model FromModule --model.module {type(module).__module__}.{type(module).__qualname__} --model.head {head}"
    )


def with_features(module: nn.Module | None) -> Backbone:
    """Check that a model is a `Backbone`, which can return features as well as logits, and return it.

    Raises:
        ConfigError: It is not a backbone. The message has the options that name its head.
    """
    if not isinstance(module, Backbone):
        what = f"this method reads features, and {type(module).__name__} does not name its head"
        raise ConfigError(f"model: {what}. Did you mean {options_with_head(module)}?")
    return module


def with_encoder(module: nn.Module | None) -> Backbone:
    """Check that a model is a `Backbone` whose encoder and head can be called separately, and return it.

    Raises:
        ConfigError: It is not a backbone, or its encoder and head cannot be called separately.
    """
    backbone = with_features(module)
    _ = backbone.encoder  # raises for a `FromModule` that cannot be split
    return backbone


def frozen_encoder(module: nn.Module, weights: Tensors | None = None) -> nn.Module:
    """Return a copy of a model's encoder in eval mode, without gradients, for contrastive losses to compare with.

    Args:
        module: The model, a `Backbone`. It is not changed.
        weights: State dict for the copy; the model's own by default.

    Raises:
        ConfigError: The model is not a `Backbone`.
    """
    return frozen_copy(with_encoder(module).encoder, weights)


def frozen_copy(module: nn.Module, weights: Tensors | None = None) -> nn.Module:
    """Return a copy of a module, with other weights if they are given, in eval mode and without gradients."""
    copied = copy_network(module)
    if weights:
        copied.load_state_dict(weights)
    return copied.eval().requires_grad_(False)


class NetworkFactory(Protocol):
    """A callable that builds a network, not necessarily a `Backbone`, for an input shape and a number of classes."""

    def __call__(self, *, in_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        """Build the network for inputs of `in_shape` (without the batch) and `num_classes` classes."""
        ...


class ModelFactory(Protocol):
    """A callable, such as a config's `model`, that builds a backbone for an input shape and a number of classes."""

    def __call__(self, *, in_shape: tuple[int, ...], num_classes: int) -> Backbone:
        """Build the backbone for inputs of `in_shape` (without the batch) and `num_classes` classes."""
        ...
