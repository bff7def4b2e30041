"""FedBN: normalization layers stay on their client, everything else is averaged.

Li, Jiang, Zhang, Kamp, Dou: "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021,
Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from fnmatch import fnmatchcase

from torch import nn

from fl_lightning.algorithms.aggregators import Weighting
from fl_lightning.algorithms.base import Algorithm, Buffers
from fl_lightning.client.weights import beginnings
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.names import join_names
from fl_lightning.models.layers import BATCH_NORMS


def normalization_layers(network: nn.Module, patterns: Sequence[str] = ()) -> list[str]:
    """Return the names of a network's normalization layers that match a pattern.

    A normalization layer has no sublayers, has an entry in the state dict, and the name of its class contains `Norm`.

    Args:
        network: The network.
        patterns: Patterns with `*`, `?` and `[...]`. One of them must match the layer's dotted name or the name of its
            class. Without patterns, the BatchNorm layers are returned.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.BatchNorm1d(4))
        >>> normalization_layers(net), normalization_layers(net, ["LayerNorm"]), normalization_layers(net, ["*"])
        (['2'], ['1'], ['1', '2'])
    """

    def chosen(name: str, layer: nn.Module) -> bool:
        kind = type(layer).__name__
        if not patterns:
            return isinstance(layer, BATCH_NORMS)
        is_norm = "norm" in kind.lower() and not list(layer.children()) and bool(layer.state_dict())
        return is_norm and any(fnmatchcase(text, pattern) for text in (name, kind) for pattern in patterns)

    return [name for name, layer in network.named_modules() if chosen(name, layer)]


class FedBN(Algorithm):
    """FedAvg of all layers except BatchNorm layers, which stay on their client with their running statistics.

    `layers` names other normalization layers to keep, such as LayerNorm. `buffers: local` of other methods keeps only
    BatchNorm's statistics on the client.

    Bytes a round, each participant: down `model - norm`, up `model - norm + 8`.

    Kept by a client: its BatchNorm layers.

    Args:
        layers: Patterns of the normalization layers that stay on their client, such as `["GroupNorm"]` or
            `["encoder.*norm*"]`: names of layers or of their classes, with `*` for any text. By default all BatchNorm
            layers.
        weighting: Weight clients by their number of `samples`, or equally (`uniform`).

    Raises:
        ConfigError: The model has no BatchNorm layer or, with `layers`, a pattern matches no normalization layer.
    """

    layers: Sequence[str] = ()
    weighting: Weighting = "samples"
    buffers: Buffers = field(default="average", init=False)

    one_model = False

    def prepare_network(self, backbone: nn.Module) -> None:
        """Make the normalization layers in `layers` personal."""
        for pattern in self.layers:
            if not normalization_layers(backbone, [pattern]):
                raise ConfigError(f"algorithm.layers: {pattern!r} matches no normalization layer. {_hint(backbone)}")
        self.personal = beginnings(normalization_layers(backbone, self.layers))
        if not self.personal:
            what = f"FedBN keeps BatchNorm layers on their client, and {type(backbone).__name__} has none"
            fix = "Use a model with BatchNorm, such as ResNet18, or name other normalization layers in algorithm.layers"
            raise ConfigError(f"model: {what}. {fix}")


def _hint(backbone: nn.Module) -> str:
    """Return a sentence with the normalization layers of a network and their classes."""
    layers = dict(backbone.named_modules())
    found = [f"{name} ({type(layers[name]).__name__})" for name in normalization_layers(backbone, ["*"])]
    return f"{type(backbone).__name__} has {join_names(found) or 'none'}"
