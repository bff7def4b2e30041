"""The last layers of every model: projections, fully connected layers and classification layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_lightning.core.errors import ConfigError


class Parts(NamedTuple):
    """The arguments of `Backbone`: encoder, head, feature size and predictor."""

    encoder: nn.Module
    head: nn.Module
    feature_dim: int
    predictor: nn.Module | None


@dataclass(frozen=True)
class Head:
    """Options of a model's last layers, such as projection and classification layer. The default is one linear layer.

    Args:
        projection: Size of a projection MLP (linear, ReLU, linear) that ends the encoder, so that its output is the
            feature; 256 in MOON and FedSiam-DA.
        prediction: Hidden width of a prediction MLP on the features (linear, BatchNorm, ReLU, linear back to the
            feature size), FedSiam-DA's `h`. It becomes the backbone's `predictor`.
        hidden: Widths of fully connected layers before the classification layer, each followed by ReLU.
        mapping: Widths of fully connected layers after those of `hidden`, with ReLU between them and none after the
            last: FedDW's two mapping layers are `[256, 128]`.
        classifier: The classification layer: `linear`, `bias_free` (FedDW) or `cosine` (`CosineLinear`).

    Raises:
        ConfigError: A width is below 1.

    Example:
        >>> Head(mapping=(256, 128), classifier="bias_free").attach(nn.Flatten(), 320, num_classes=10).head
        Sequential(
          (0): Linear(in_features=320, out_features=256, bias=True)
          (1): ReLU()
          (2): Linear(in_features=256, out_features=128, bias=True)
          (3): Linear(in_features=128, out_features=10, bias=False)
        )
    """

    projection: int | None = None
    prediction: int | None = None
    hidden: tuple[int, ...] = ()
    mapping: tuple[int, ...] = ()
    classifier: Literal["linear", "bias_free", "cosine"] = "linear"

    def __post_init__(self) -> None:
        widths = {
            "projection": (self.projection,),
            "prediction": (self.prediction,),
            "hidden": self.hidden,
            "mapping": self.mapping,
        }
        for name, values in widths.items():
            if any(width is not None and width < 1 for width in values):
                raise ConfigError(f"model.head.{name}: {getattr(self, name)} has a width below 1")

    def attach(self, encoder: nn.Module, width: int, num_classes: int) -> Parts:
        """Build the layers after an encoder, and return them with the encoder as the arguments of `Backbone`.

        Args:
            encoder: Maps inputs to `(B, width)`.
            width: Size of the encoder's output.
            num_classes: Number of classes, `C`.

        Returns:
            The arguments of `Backbone`.
        """
        if self.projection:
            projector = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, self.projection))
            encoder, width = nn.Sequential(encoder, projector), self.projection
        predictor = prediction_mlp(width, self.prediction) if self.prediction else None
        return Parts(encoder, self._build_head(width, num_classes), width, predictor)

    def _build_head(self, width: int, num_classes: int) -> nn.Module:
        layers: list[nn.Module] = []
        for size in (*self.hidden, *self.mapping):
            layers += [nn.Linear(width, size), nn.ReLU()]
            width = size
        if self.mapping:
            layers.pop()
        if self.classifier == "cosine":
            last: nn.Module = CosineLinear(width, num_classes)
        else:
            last = nn.Linear(width, num_classes, bias=self.classifier == "linear")
        return nn.Sequential(*layers, last) if layers else last


class CosineLinear(nn.Module):
    """Linear layer whose logits are scaled cosines between features and class weights (Gidaris, Komodakis 2018).

    Args:
        in_features: Size `d` of a feature.
        out_features: Number of classes, `C`.
        scale: Initial value of the learnt factor on the cosines.
    """

    def __init__(self, in_features: int, out_features: int, scale: float = 10.0) -> None:
        super().__init__()
        self.in_features = in_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.scale = nn.Parameter(torch.tensor(scale))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new weights from the distribution that `nn.Linear` uses."""
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits `(B, C)` of features `(B, d)`. A zero feature vector gives zero logits."""
        return self.scale * F.linear(F.normalize(x, dim=1), F.normalize(self.weight, dim=1))


def prediction_mlp(width: int, hidden: int) -> nn.Sequential:
    """Return FedSiam-DA's predictor `h`, an MLP with BatchNorm and ReLU on its hidden layer only."""
    return nn.Sequential(
        nn.Linear(width, hidden, bias=False), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, width)
    )
