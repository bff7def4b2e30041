"""FedDG-GA: clients whose data the global model fits worse than their own model get larger weights in the mean.

Zhang, Xu, Yao, Zhang, Tian, Wang: "Federated Domain Generalization with Generalization Adjustment", CVPR 2023. The
options of the authors' code are in `reference`.
"""

from __future__ import annotations

from dataclasses import field
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from fl_lightning.algorithms.aggregators import Aggregator, Weighting
from fl_lightning.algorithms.base import Algorithm, Batches
from fl_lightning.client.module import ClientModule
from fl_lightning.client.received_loss import keep_received_loss, mean_loss, received_loss
from fl_lightning.core.arguments import number
from fl_lightning.core.message import Message, Upload
from fl_lightning.core.round import Round
from fl_lightning.core.state_dicts import State, weighted_mean

ADJUSTMENT = "adjustment"
"""The section of the state with each client's weight and the loss of its last model."""


def adjusted_weights(weights: Tensor, gaps: Tensor, step: float, centred: bool = True) -> Tensor:
    """Return the clients' next weights: larger where the generalization gap is above the mean of the gaps.

    A weight `a_i` becomes `a_i + step · g_i / max_j |g_j|`, with `g_i = G_i - mean(G)`. Weights below 0 become 0 and
    those above 1 become 1; then they are divided by their sum. A client without a gap keeps its weight before the
    division. If all `g` are 0, no weight changes.

    Args:
        weights: `a`, `(K,)`, non-negative, with sum 1.
        gaps: `G`, `(K,)`: the loss of the global model minus that of the client's own model; NaN if it is unknown.
        step: Largest change of a weight.
        centred: Whether the mean gap is subtracted. Otherwise `g` is `G`.

    Example:
        >>> adjusted_weights(torch.tensor([0.5, 0.5]), torch.tensor([1.0, 3.0]), 0.1)
        tensor([0.4000, 0.6000])
    """
    known = gaps.isfinite()
    g = torch.where(known, gaps, 0.0)
    if centred:
        g = torch.where(known, g - g.sum() / known.sum().clamp(min=1), 0.0)
    largest = g.abs().max()
    if not largest > 0 or step == 0:
        return weights
    moved = (weights + step * g / largest).clamp(0, 1)
    return moved / moved.sum()


class GeneralizationAdjustment(Aggregator):
    """Average the participants' models with weights that follow their generalization gaps.

    Clients send two losses on their training data: of the received model, `received_loss`, and of their trained model,
    `trained_loss`. The gap of a client is the first minus the `trained_loss` of the last round in which it took part.
    All uploads of a round are in memory at once.

    Args:
        step_size: `d`, in [0, 1].
        decay_rounds: `R`; the step of round r is `d (1 - r / R)`, and 0 after round R.
        reference: As in the authors' code: gaps are not centred, the step is divided by the number of clients, and it
            decreases three rounds later.
    """

    step_size: float = number(0.2, "[0, 1]", "the authors use 0.2")
    decay_rounds: int = number(40, "[1, inf)", "use the number of rounds")
    reference: bool = False

    only_in = "FedDGGA"
    leaves = ("weights",)

    def step(self, round: int) -> float:
        """Return the step of a round: `d (1 - r / R)`, or `d (1 - (r - 3) / R)` in the authors' code."""
        return self.step_size * max(0.0, 1 - (round - 3 * self.reference) / self.decay_rounds)

    def finish(self, folded: list[Upload], round: Round, knowledge: State) -> State:
        """Return the weighted mean of the participants' models, and the next weights of all clients."""
        before = round.before[ADJUSTMENT]
        clients = torch.tensor([upload.client for upload in folded])
        received, trained = (
            torch.tensor([upload.message.numbers[f"{kind}_loss"] for upload in folded], dtype=torch.float64)
            for kind in ("received", "trained")
        )
        gaps = torch.full_like(before["weight"], torch.nan)
        gaps[clients] = torch.where(before["trained"][clients], received - before["loss"][clients], torch.nan)
        weights = self._next_weights(before["weight"], gaps, self.step(round.number))
        loss, has_trained = before["loss"].clone(), before["trained"].clone()
        loss[clients], has_trained[clients] = trained, True
        own = weights[clients]
        if not own.any():  # otherwise there would be no mean
            own = torch.ones_like(own)
        models = [upload.message.section("model") for upload in folded]
        return {
            "model": weighted_mean(models, own.tolist()),
            "weights": {"client": clients, "value": own / own.sum()},
            ADJUSTMENT: {"weight": weights, "loss": loss, "trained": has_trained},
        }

    def _next_weights(self, weights: Tensor, gaps: Tensor, step: float) -> Tensor:
        """Return the next weights. They have the sum of `weights`, so that weights that do not change keep all bits."""
        total = weights.sum()
        shares = weights / total
        adjusted = adjusted_weights(shares, gaps, step / (len(gaps) if self.reference else 1), not self.reference)
        return weights if adjusted is shares else adjusted * total


class FedDGGA(Algorithm):
    """FedDG-GA: the weights of clients in the mean grow with the global model's excess loss on their data.

    The excess loss, or generalization gap, is the loss of the global model on a client's training data minus the loss
    of the client's own model of its last round. With `step_size` 0 this is FedAvg whose `weighting` is
    `initial_weights`, bit for bit.

    Bytes a round, each participant: down `model`, up `model + 24`.

    Kept by the server: each client's weight and last loss.

    Args:
        step_size: d, the largest change of a weight in a round. All weights together are 1.
        decay_rounds: R, the number of rounds in which the step decreases linearly to 0: `d (1 - r / R)` in round r. Use
            the number of rounds of the run.
        initial_weights: The weights of the first round: equal (`uniform`), or by number of `samples`.
        reference: As in the authors' code: the mean of the gaps is not subtracted, the step is divided by the number of
            clients, and it decreases three rounds later.
    """

    step_size: float = number(0.2, "[0, 1]", "the authors use 0.2")
    decay_rounds: int = number(40, "[1, inf)", "use the number of rounds")
    initial_weights: Weighting = "uniform"
    reference: bool = False
    aggregator: Aggregator = field(init=False)

    search_space: ClassVar = {  # around the default of the authors' code
        "step_size": {"distribution": "uniform", "min": 0.02, "max": 0.5},
    }
    starts_alike = True  # `prepare` only computes a loss

    def own_aggregator(self) -> Aggregator:
        """Return the aggregator that adjusts the clients' weights."""
        return GeneralizationAdjustment(self.step_size, self.decay_rounds, self.reference)

    def initial_state(self, backbone: nn.Module, num_classes: int, clients: int, rng: np.random.Generator) -> State:
        """Return the initial weights of the model and of the clients. No client has trained yet."""
        sizes = self.samples if self.initial_weights == "samples" else [1] * clients
        adjustment = {
            "weight": torch.tensor(sizes, dtype=torch.float64),
            "loss": torch.zeros(clients, dtype=torch.float64),
            "trained": torch.zeros(clients, dtype=torch.bool),
        }
        return super().initial_state(backbone, num_classes, clients, rng) | {ADJUSTMENT: adjustment}

    def prepare(self, module: ClientModule, batches: Batches, validation: Batches) -> None:
        """Compute the loss of the received model on the client's training data."""
        keep_received_loss(module, batches)

    def upload(self, module: ClientModule, batches: Batches, n_samples: int, num_classes: int) -> Message:
        """Return the trained weights, and the losses of the received and of the trained model."""
        message = super().upload(module, batches, n_samples, num_classes)
        return message.plus(received_loss=received_loss(module), trained_loss=float(mean_loss(module, batches)))
