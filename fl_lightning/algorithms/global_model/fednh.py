"""FedNH: the classification layer consists of class prototypes on the unit sphere. Only the server updates them.

Dai, Chen, Li, Heinecke, Sun, Xu: "Tackling Data Heterogeneity in Federated Learning with Class Prototypes", AAAI 2023,
Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_lightning.algorithms.aggregators import Aggregator
from fl_lightning.algorithms.base import Algorithm, Batches
from fl_lightning.client.knowledge import class_sums_over
from fl_lightning.client.module import ClientModule
from fl_lightning.client.weights import to_cpu
from fl_lightning.core.arguments import number
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.message import Message, Upload
from fl_lightning.core.precision import at_least_float32
from fl_lightning.core.round import Round
from fl_lightning.core.state_dicts import RunningMean, State
from fl_lightning.models.base import Backbone, with_encoder
from fl_lightning.models.heads import CosineLinear

PROTOTYPES = "prototypes"
"""The section of an upload with a client's prototypes and its samples per class."""


def uniform_prototypes(classes: int, width: int) -> Tensor:
    """Return the initial prototypes `W^0`, `(C, d)`: random unit rows, orthogonal to each other if `C <= d`."""
    return F.normalize(nn.init.orthogonal_(torch.empty(classes, width)), dim=1)


def class_prototypes(sums: Tensor, counts: Tensor) -> Tensor:
    """Return a client's prototypes `μ_c`, `(C, d)`: the mean normalised feature of each class, normalised again.

    A class without samples has a row of zeros.

    Args:
        sums: Sums of the features per class, `(C, d)`.
        counts: Samples per class, `(C,)`.
    """
    return F.normalize(sums / counts.clamp(min=1)[:, None], dim=1)


def update_prototypes(prototypes: Tensor, sums: Tensor, counts: Tensor, rho: float) -> Tensor:
    """Return the next class prototypes: a mix of the old ones and the clients' mean prototypes, normalised to length 1.

    They are `norm(ρ W_c + (1 - ρ) norm(Σ_k n_kc μ_kc / Σ_k n_kc))`. A class without samples keeps its prototype.

    Args:
        prototypes: `W`, `(C, d)`, unit rows.
        sums: `Σ_k n_kc μ_kc`, `(C, d)`.
        counts: `Σ_k n_kc`, `(C,)`.
        rho: ρ; with 1 the prototypes do not change.
    """
    target = F.normalize(sums / counts.clamp(min=1)[:, None], dim=1)
    moved = F.normalize(rho * prototypes.double() + (1 - rho) * target, dim=1).to(prototypes.dtype)
    is_moved = (counts > 0) & (rho < 1)
    return torch.where(is_moved[:, None], moved, prototypes)


@dataclass
class RoundSums:
    """Running sums over a round's uploads: weights, class prototypes and class counts.

    Attributes:
        mean: The unweighted mean of the clients' weights.
        sums: `Σ_k n_kc μ_kc`, `(C, d)`, float64.
        counts: `Σ_k n_kc`, `(C,)`, float64.
    """

    mean: RunningMean
    sums: Tensor
    counts: Tensor


class PrototypeAveraging(Aggregator):
    """Average the trained weights uniformly, and move the server's class prototypes towards the clients' prototypes.

    The prototypes are the only entry of the shared model that clients do not send. Instead they send `values` `(C, d)`
    and `counts` `(C,)` in the section `prototypes`.

    Args:
        rho: ρ, the share of the old prototypes that is kept in a round, in [0, 1].
    """

    rho: float = number(0.9, "[0, 1]", "the paper uses 0.9")

    needs_classes = True
    only_in = "FedNH"

    def begin(self, round: Round) -> RoundSums:
        """Return empty sums."""
        zero = torch.zeros((), dtype=torch.float64)
        return RoundSums(RunningMean(), zero, zero)

    def fold(self, folded: RoundSums, upload: Upload) -> None:
        """Add an upload's weights, class prototypes and class counts to the sums."""
        folded.mean.add(upload.message.section("model"), 1)
        own = upload.message.section(PROTOTYPES)
        folded.sums = folded.sums + own["counts"].double()[:, None] * own["values"].double()
        folded.counts = folded.counts + own["counts"].double()

    def finish(self, folded: RoundSums, round: Round, knowledge: State) -> State:
        """Return the next model: the mean of the clients' weights, with the updated class prototypes."""
        model = folded.mean.value()
        (name,) = round.before["model"].keys() - model.keys()
        model[name] = update_prototypes(round.before["model"][name], folded.sums, folded.counts, self.rho)
        return {"model": model}


class FedNH(Algorithm):
    """FedAvg with class prototypes as the classification layer. Only the server updates the prototypes.

    The model's classification layer is replaced by one of scaled cosines. With `rho` 1 this is FedAvg with
    `weighting: uniform` and a fixed random layer, bit for bit.

    Bytes a round, each participant: down `model`, up `model + 4 * C + 8`.

    Kept by the server: the class prototypes.

    Args:
        rho: ρ, the share of the old prototypes that is kept in a round.
        scale: Initial factor on the cosines. The authors' code uses 1 for a CNN and 20 for a ResNet.
        learn_scale: Train the factor and average it with the weights. Otherwise it stays at `scale`.
    """

    rho: float = 0.9
    scale: float = number(1.0, "(0, inf)", "the authors' code uses 1 to 30")
    learn_scale: bool = True
    aggregator: Aggregator = field(init=False)

    search_space: ClassVar = {  # around the values of Dai et al.
        "rho": {"distribution": "uniform", "min": 0.1, "max": 0.99},
        "scale": {"distribution": "log_uniform_values", "min": 1.0, "max": 30.0},
    }

    def own_aggregator(self) -> Aggregator:
        """Return the aggregator that moves the class prototypes."""
        return PrototypeAveraging(self.rho)

    def prepare_network(self, backbone: nn.Module) -> None:
        """Replace the classification layer by the prototypes, which are frozen."""
        name, layer = prototype_layer(backbone)
        classes, width = layer.weight.shape
        head = CosineLinear(width, classes, self.scale)
        head.weight = nn.Parameter(uniform_prototypes(classes, width), requires_grad=False)
        head.scale.requires_grad_(self.learn_scale)
        backbone.set_submodule(name, head)

    def upload(self, module: ClientModule, batches: Batches, n_samples: int, num_classes: int) -> Message:
        """Return the trained weights without the prototype layer, and the client's own prototypes and class counts."""
        backbone = with_encoder(module.backbone)
        name, _ = prototype_layer(backbone)
        sums, counts = class_sums_over(batches, lambda x: directions(backbone, x), num_classes)
        own = to_cpu({PROTOTYPES: {"values": class_prototypes(sums, counts), "counts": counts}})
        message = super().upload(module, batches, n_samples, num_classes)
        sent = {key: value for key, value in message.tensors.items() if key != f"model/{name}.weight"}
        return Message(sent, message.numbers).plus(own)


def prototype_layer(backbone: nn.Module) -> tuple[str, nn.Linear | CosineLinear]:
    """Return the layer of a backbone that holds the class prototypes, and its name.

    Raises:
        ConfigError: The model does not end with a linear layer.
    """
    whole = with_encoder(backbone)
    layer = whole.classifier
    if not isinstance(layer, nn.Linear | CosineLinear):
        kind = type(layer).__name__
        raise ConfigError(
            f"model: FedNH needs a linear classification layer, not {kind}. Use a model that ends with nn.Linear."
        )
    return next((name, layer) for name, module in whole.named_modules() if module is layer)


def directions(backbone: Backbone, x: Tensor) -> Tensor:
    """Return the normalised features `z / |z|` of a batch, `(B, d)`: the inputs of the classification layer."""
    before = backbone.head[:-1] if isinstance(backbone.head, nn.Sequential) else nn.Identity()
    return F.normalize(at_least_float32(before(backbone.encoder(x))), dim=1)
