"""FedSiam-DA: clients train siamese networks, and the server weights each client by its similarity to the mean.

Yang, Wang, Wang, Zhang, Wu, Cheng: "FedSiam-DA: Dual-aggregated Federated Learning via Siamese Network under Non-IID
Data", 2022. Sections and equations below are the paper's.

On the client, `SiameseAlignment` pulls the client's and the global model together through a stop-gradient, and
`HistoryContrast` pushes the client's model away from its state one epoch earlier. On the server, `DualAggregation`
weights each client by its similarity to the mean. Each part also works in other methods.
"""

from __future__ import annotations

import warnings
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_lightning.algorithms.aggregators import Aggregator, WeightedMean
from fl_lightning.algorithms.base import Algorithm, Buffers
from fl_lightning.client.loss_term import LossTerm, Step
from fl_lightning.client.module import ClientModule
from fl_lightning.client.optimizers import descend
from fl_lightning.core.arguments import number
from fl_lightning.core.errors import ConfigError, check_number
from fl_lightning.core.fixed_tensors import copy_network
from fl_lightning.core.inputs import Inputs
from fl_lightning.core.message import Tensors, Upload
from fl_lightning.core.round import Round
from fl_lightning.core.state_dicts import State, flatten, weighted_mean
from fl_lightning.models import Backbone, frozen_encoder, with_encoder

Aggregation = Literal["dual", "uniform", "weighted"]

# --- Section III-A: siamese networks ------------------------------------------------------------------------------


def positive_similarity(one: Tensor, other: Tensor) -> Tensor:
    """Return `D+` (Eq. 3), the mean cosine of two representations `(B, d)`; zero where a norm is zero."""
    return F.cosine_similarity(one, other, dim=1).mean()


def negative_similarity(one: Tensor, other: Tensor) -> Tensor:
    """Return `D-` (Eq. 4), the negative mean cosine of two representations."""
    return -positive_similarity(one, other)


def stop_gradient_half(prediction: Tensor, representation: Tensor) -> Tensor:
    """Return one model's half of the siamese loss, `½ D-(p, sg(z))`, with a stop-gradient `sg` on `z` (Eq. 6).

    Eq. 7 is the sum of both halves, for the global model and for the client's model.

    Args:
        prediction: `p` of the model in training, `(B, d)`.
        representation: `z` of the other model, `(B, d)`, which gets no gradient.
    """
    return negative_similarity(prediction, representation.detach()) / 2


class SiameseAlignment(LossTerm):
    """Loss term `μ L_stop`: aligns the client's features with those of a copy of the global model.

    Each of the two models predicts the features of the other. In each step, the copy is first trained on its half of
    Eq. 7 (Eq. 8), by a second optimizer of the client's type. Then the term is the client's half, computed with the
    updated copy (Eq. 9). In each fit, the copy starts from the received weights. Without the stop-gradient this is
    Eq. 5's `μ ½ D-(z_global, z)`, and there is no trained copy.

    Args:
        mu: μ, 0 or more; 0 switches the term off.
        stop_gradient: Whether to use the stop-gradient. Without it, this is the paper's ablation.

    Raises:
        ConfigError: A fit begins with a model without predictor, and `stop_gradient` is true.
    """

    mu: float = number(0.1, "[0, inf)", "the paper uses 0.05 to 1")
    stop_gradient: bool = True

    name = "siamese"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.active = self.mu > 0
        self._copy: list[Backbone] = []  # a list keeps it out of the client's module
        self._optimizer: torch.optim.Optimizer | None = None

    def begin(self, module: ClientModule) -> None:
        """Copy the received global model, which is trained alongside the client's model."""
        if not self.active:
            return
        backbone = copy_network(with_encoder(module.backbone))
        if self.stop_gradient and backbone.predictor is None:
            raise ConfigError(
                "model.head.prediction: the siamese loss needs a predictor. Set its hidden width, such as 256."
            )
        self._copy = [backbone]
        self._optimizer = module.optimizer_for(backbone.parameters(), backbone) if self.stop_gradient else None

    def forward(self, step: Step) -> Tensor:
        """Return `μ` times the siamese loss of the client's model on a batch; zero outside of a client's training."""
        if not self._copy or step.inputs is None or step.features is None:
            return self.outside_fit(step.logits.new_zeros(()))
        received = self._copy[0]
        if self.stop_gradient:
            self._update(received, step.inputs, step.features)
        with torch.no_grad():
            representation = received.encoder(step.inputs)
        if not self.stop_gradient:
            return self.mu * negative_similarity(representation, step.features) / 2
        predictor = with_encoder(step.backbone).predictor
        assert predictor is not None
        return self.mu * stop_gradient_half(predictor(step.features), representation)

    def _update(self, received: Backbone, inputs: Tensor | Inputs, features: Tensor) -> None:
        """Train the copy of the global model for one step on its half of the siamese loss (Eq. 8)."""
        assert received.predictor is not None
        assert self._optimizer is not None
        loss = self.mu * stop_gradient_half(received.predictor(received.encoder(inputs)), features)
        descend(self._optimizer, loss)


class HistoryContrast(LossTerm):
    """Loss term `μ L_hist` (Eq. 10): pushes the client's features away from those of its model one epoch earlier.

    In the first epoch of a round, the earlier model is the client's model at the end of its previous round, which never
    leaves the client. In a client's first round the term is off until the second epoch. The earlier model is in eval
    mode.

    Args:
        mu: μ, 0 or more; 0 switches the term off.
        factor: Factor on `D+` in addition to μ: 1, or ½ in Eq. 5.
    """

    mu: float = number(0.1, "[0, inf)", "the paper uses 0.05 to 1")
    factor: float = 1.0

    name = "history"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("algorithm.loss_terms.factor", self.factor, "[0, inf)", "1, or 0.5 for Eq. 5")
        self.active = self.mu > 0
        self._kept: Tensors = {}
        self._earlier: list[nn.Module] | None = None  # a list keeps it out of the client's module

    def begin(self, module: ClientModule) -> None:
        """Build the earlier encoder to compare with: the client's encoder at the end of its last round."""
        self._earlier = []
        if self.active:
            earlier = frozen_encoder(module.backbone, self._kept)  # raises before round 1 if there is no encoder
            self._earlier = [earlier] if self._kept else []

    def begin_epoch(self, module: ClientModule) -> None:
        """Copy the client's encoder, for comparison during the epoch that starts. The first epoch makes no copy."""
        if self.active and module.current_epoch > 0:
            self._earlier = [frozen_encoder(module.backbone)]

    def remember(self, module: ClientModule) -> Tensors:
        """Return the client's encoder at the end of the fit, for its next round."""
        return with_encoder(module.backbone).encoder.state_dict() if self.active else {}

    def recall(self, kept: Tensors) -> None:
        """Restore the encoder that the client kept from its last round."""
        self._kept = kept

    def forward(self, step: Step) -> Tensor:
        """Return `μ L_hist` (Eq. 10), the scaled cosine of current and earlier features; zero without earlier ones."""
        if self._earlier is None or step.inputs is None or step.features is None:
            return self.outside_fit(step.logits.new_zeros(()))
        if not self._earlier:
            return step.logits.new_zeros(())
        return self.mu * self.factor * positive_similarity(self._earlier[0](step.inputs), step.features)


# --- Section III-B: dual aggregation ------------------------------------------------------------------------------


def dual_weights(models: Tensor) -> Tensor:
    """Return the clients' weights `ξ_k = cos(w_k, w0) / Σ cos`, `(K,)`, with `w0` the mean of their models (Eq. 13-15).

    `w0` is the unweighted mean. If a cosine is not positive, all clients get the same weight, with a warning.

    Args:
        models: `(K, P)`, each client's parameters in one row.
    """
    mean = models.mean(dim=0, keepdim=True)
    cosines = F.cosine_similarity(models, mean, dim=1)
    if bool((cosines > 0).all()):
        return cosines / cosines.sum()
    warnings.warn(
        "dual aggregation: a client's weights point away from the mean. All clients get the same weight.", stacklevel=2
    )
    return torch.full_like(cosines, 1 / len(cosines))


class DualAggregation(Aggregator):
    """Dual aggregation: weight clients by the cosine of their parameters with the unweighted mean.

    The weights are those of Eq. 13-16. BatchNorm's statistics are averaged with the same weights but do not enter the
    cosine. All uploads of a round are in memory at once.
    """

    leaves = ("weights",)

    def finish(self, folded: list[Upload], round: Round, knowledge: State) -> State:
        """Return the weighted mean of the clients' models, `w = Σ ξ_k w_k` (Eq. 16), and the weights `ξ_k`."""
        models = [upload.message.section("model") for upload in folded]
        weights = dual_weights(flatten(models, self.buffers))
        clients = torch.tensor([upload.client for upload in folded])
        return {"model": weighted_mean(models, weights.tolist()), "weights": {"client": clients, "value": weights}}


# --- The method --------------------------------------------------------------------------------------------------


class FedSiamDA(Algorithm):
    """Clients align their features with the global model's. Models close to the mean get larger weights in it.

    With `mu` 0 and `aggregation: uniform` this is FedAvg with `weighting: uniform`, bit for bit. The model needs a
    projection and a predictor: `model.head.projection: 256`, `model.head.prediction: 256`.

    Bytes a round, each participant: down `model`, up `model + 8`.

    Kept by a client: its last model.

    Args:
        mu: μ of Eq. 11; the paper's best is 0.1.
        stop_gradient: With false, use Eq. 5: `μ [½ cos(z_hist, z) - ½ cos(z_global, z)]`, without predictor and trained
            copy.
        aggregation: `dual`, or the ablations `uniform` and `weighted` (by samples).
    """

    search_space: ClassVar = {  # Section IV-A: 0.05, 0.1, 0.2, 1
        "mu": {"distribution": "log_uniform_values", "min": 0.05, "max": 1.0},
    }
    aggregator_options = ("aggregation",)

    def __init__(  # no fields: an option has the name of `Algorithm.aggregation`
        self,
        mu: float = 0.1,
        stop_gradient: bool = True,
        aggregation: Aggregation = "dual",
        loss_terms: list[LossTerm] | None = None,
        aggregator: Aggregator | None = None,
        buffers: Buffers = "average",
    ) -> None:
        factor = 1.0 if stop_gradient else 0.5  # the factor ½ of Eq. 5
        terms = [HistoryContrast(mu, factor), SiameseAlignment(mu, stop_gradient)]
        if aggregator is None:
            mean = WeightedMean("samples" if aggregation == "weighted" else "uniform")
            aggregator = DualAggregation() if aggregation == "dual" else mean
        super().__init__(loss_terms=[*terms, *(loss_terms or [])], aggregator=aggregator, buffers=buffers)
