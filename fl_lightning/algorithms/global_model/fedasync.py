"""FedAsync: the server mixes each model into its own as it arrives; old ones have less weight.

Xie, Koyejo, Gupta: "Asynchronous Federated Optimization", OPT 2020 (arXiv 2019), Algorithm 1 and Section 5.2.
"""

from __future__ import annotations

from dataclasses import field
from typing import ClassVar, Literal

from fl_lightning.algorithms.aggregators import Aggregator
from fl_lightning.algorithms.base import Algorithm
from fl_lightning.core.arguments import number
from fl_lightning.core.message import Upload
from fl_lightning.core.round import Round
from fl_lightning.core.state_dicts import State, extrapolate

Adaptation = Literal["constant", "polynomial", "hinge"]


def adapted_weight(alpha: float, staleness: int, adaptation: Adaptation, a: float, b: float) -> float:
    """Return the weight of a client's model, `α_t = α s(τ)`.

    Args:
        alpha: α.
        staleness: τ, the number of server steps since the client got its model.
        adaptation: `s(τ)`: 1 (`constant`), `(1 + τ)^-a` (`polynomial`), or 1 up to b and `1 / (a (τ - b) + 1)` above it
            (`hinge`).
        a: a.
        b: b.
    """
    if adaptation == "constant":
        return alpha
    if adaptation == "polynomial":
        return float(alpha * (1 + staleness) ** -a)
    return alpha / (a * max(0.0, staleness - b) + 1)


class ModelMixing(Aggregator):
    """FedAsync's server: for each model that arrives, `w ← (1 - α_t) w + α_t w_k`.

    If several models arrive in a round, they are mixed in one after another, in ascending order of client ids.

    Args:
        alpha: α, in (0, 1].
        adaptation: See `adapted_weight`.
        a: See `adapted_weight`.
        b: See `adapted_weight`.
    """

    alpha: float = number(0.6, "(0, 1]", "1 replaces the model")
    adaptation: Adaptation = "polynomial"
    a: float = number(0.5, "[0, inf)")
    b: float = number(4.0, "[0, inf)")

    accepts_stale = True

    def finish(self, folded: list[Upload], round: Round, knowledge: State) -> State:
        """Return the model with the clients' models mixed in."""
        model = round.before["model"]
        for upload in folded:
            weight = adapted_weight(self.alpha, upload.staleness, self.adaptation, self.a, self.b)
            model = extrapolate(model, upload.message.section("model"), 1.0, weight)
        return {"model": model}


class FedAsync(Algorithm):
    """FedAsync: the server mixes a client's model into its own as soon as it arrives.

    It needs a `clock` and `round_policy: {class_path: Buffered, init_args: {concurrency: 10}}`, with
    `clients_per_round: 1`. The paper's clients also have a proximal term: add `ProximalTerm` to `loss_terms`.

    Bytes a round, each participant: down `model`, up `model + 8`.

    Args:
        alpha: α, the weight of a new model.
        adaptation: How the weight of a model decreases with its age τ: not at all (`constant`), as `(1 + τ)^-a`
            (`polynomial`), or as `1 / (a (τ - b) + 1)` from the age b on (`hinge`).
        a: a of the adaptation. The paper uses 0.5 with `polynomial` and 10 with `hinge`.
        b: b of `hinge`. The paper uses 4.
    """

    alpha: float = number(0.6, "(0, 1]", "the paper uses 0.6")
    adaptation: Adaptation = "polynomial"
    a: float = number(0.5, "[0, inf)")
    b: float = number(4.0, "[0, inf)")
    aggregator: Aggregator = field(init=False)

    search_space: ClassVar = {"alpha": {"values": [0.2, 0.4, 0.6, 0.8]}}

    def own_aggregator(self) -> Aggregator:
        """Return the server that mixes models in."""
        return ModelMixing(self.alpha, self.adaptation, self.a, self.b)
