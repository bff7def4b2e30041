"""FedSKC's aggregators: global discrepancy aggregation (GDA, Eq. 4) and global period review (GPR, Eq. 5)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fl_lightning.algorithms.aggregators import Aggregator, WeightedMean
from fl_lightning.algorithms.global_model.fedskc.knowledge import StructuralKnowledge, knowledge_class
from fl_lightning.client.knowledge import SharedKnowledge, class_values
from fl_lightning.core.errors import ConfigError, check_number
from fl_lightning.core.message import Upload
from fl_lightning.core.round import Round
from fl_lightning.core.state_dicts import State, extrapolate, weighted_mean

GdaScale = Literal["count", "share"]
Review = Literal["interpolation", "literal"]

# --- Global discrepancy aggregation (GDA) ------------------------------------------------------------------------


def discrepancy(local: Tensor, held: Tensor, knowledge: Tensor, scale: GdaScale = "count") -> Tensor:
    """Return the distance of each client's class-wise mean logits to the global ones, `d_k = Σ_j ||c_k^j - c̃^j||_2`.

    Args:
        local: `(K, C, C)` knowledge of the participants.
        held: `(K, C)` bool.
        knowledge: `(C, C)`, global.
        scale: `share` uses the mean over a client's classes, because the sum penalises clients with many classes.
    """
    distances = (local.double() - knowledge.double()).norm(dim=2)
    total = (distances * held).sum(dim=1)
    return total if scale == "count" else total / held.sum(dim=1).clamp(min=1)


def aggregation_weights(discrepancies: Tensor, samples: Tensor, scale: GdaScale = "count") -> Tensor:
    """Return the clients' weights by Eq. 4, `e_k = sigmoid(N_k - a_k d_k + b_k) / Σ_i sigmoid(N_i - a_i d_i + b_i)`.

    With raw counts the sigmoid saturates at 1, so `e_k = 1/K`, the uniform mean. `scale="share"` replaces `N_k` by
    `K · N_k / Σ N`, so that the sigmoid does not saturate and the discrepancy has an effect.

    Args:
        discrepancies: `d_k`, `(K,)`.
        samples: `N_k`, `(K,)`.
        scale: `count` is the paper's.

    Returns:
        `(K,)`, in float64.
    """
    d, n = discrepancies.double(), samples.double()
    a = d / d.sum() if d.sum() > 0 else torch.zeros_like(d)
    b = n / n.sum()
    size = n if scale == "count" else b * len(n)
    gate = torch.sigmoid(size - a * d + b)
    # Huge discrepancies can make all gates zero. All clients then get the same weight.
    return gate / gate.sum() if gate.sum() > 0 else torch.full_like(gate, 1 / len(gate))


class GlobalDiscrepancy(Aggregator):
    """GDA: give less weight to clients whose class-wise mean logits are far from the global ones.

    The weights depend on every client's knowledge, so all uploads of a round are in memory at once.

    Args:
        gda_scale: The paper's `count`, or `share`: see `aggregation_weights` and `discrepancy`.
        similar_clients: M of Eq. 1.
        knowledge: Use this instance instead of a new one.
    """

    leaves = ("weights",)

    def __init__(
        self,
        gda_scale: GdaScale = "count",
        similar_clients: int = 1,
        knowledge: StructuralKnowledge | None = None,
    ) -> None:
        self.gda_scale: GdaScale = gda_scale
        self.structural = knowledge or StructuralKnowledge(similar_clients)

    @property
    def knowledge(self) -> tuple[SharedKnowledge, ...]:
        """The structural knowledge (mean logits per class), from which the aggregation weights are computed."""
        return (self.structural,)

    def finish(self, folded: list[Upload], round: Round, knowledge: State) -> State:
        """Return the weighted mean of the clients' models, `w_g = Σ e_k w_k`, and the weights `e_k` (Eq. 4)."""
        local, held = class_values(folded, StructuralKnowledge.name)
        distances = discrepancy(local, held, knowledge[self.structural.name]["values"], self.gda_scale)
        samples = torch.tensor([upload.n_samples for upload in folded])
        weights = aggregation_weights(distances, samples, self.gda_scale)
        return {
            "model": weighted_mean((u.message.section("model") for u in folded), weights.tolist()),
            "weights": {"client": torch.tensor([u.client for u in folded]), "value": weights},
        }


# --- Global period review (GPR) ----------------------------------------------------------------------------------


def review_ratio(now: Tensor, before: Tensor) -> float:
    """Return the ratio in Eq. 5: the relative growth of the global mean logits' variance since the previous round.

    That is `Σ_j (σ²_{r(j)} - σ²_{r-1(j)}) / Σ_j σ²_{r-1(j)}`.

    `σ²_{(j)}` is the variance of row j. The authors' code uses the unbiased variance. The factor `C / (C - 1)` cancels.

    Args:
        now: This round's global knowledge, `(J, C)`, with one row per counted class.
        before: The last round's global knowledge, `(I, C)`.

    Returns:
        The ratio; 0 if all of the last round's rows are constant.
    """
    now_var, before_var = (rows.double().var(dim=1, correction=0).sum() for rows in (now, before))
    return float((now_var - before_var) / before_var) if before_var > 0 else 0.0


def known_in_both_rounds(now: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """Return two equal masks, one per round, of the classes that some client had in both rounds (Eq. 5).

    Args:
        now: `(C,)` bool, the classes known in this round.
        before: `(C,)` bool, the classes known in the last round.
    """
    return now & before, now & before


def known_in_each_round(now: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two masks unchanged: one marks the classes that some client had in this round, one in the last round.

    This is the authors' code; Eq. 5 compares the classes known in both rounds.
    """
    return now, before


class GlobalPeriodReview(Aggregator):
    """GPR: wrap another aggregator, and correct its model with the previous round's global model, from round 2 on.

    Eq. 5 as printed, `review="literal"`, is `β w_r + (1-β) · ratio · (w_{r-1} - w_r)`. Its first term shrinks every
    weight by `1 - β` per round, including BatchNorm's statistics. This explains its whole loss of accuracy compared
    with plain averaging (docs/results.md). In the paper's text, GPR combines the two models "via linear interpolation"
    by a relative confidence. The default, `interpolation`, is therefore `w_r + c (w_{r-1} - w_r)` with `c = (1-β) ·
    ratio`, clamped to [0, 1].

    Args:
        inner: The aggregator that computes the model to review; the weighted mean by default.
        beta: β, in [0, 1]; 1 does not change the model.
        review: `interpolation` or `literal`.
        similar_clients: M of Eq. 1.
        reference: As in the authors' code, sum variances over all classes known in each round, instead of the classes
            known in both rounds.
        knowledge: Use this instance instead of a new one.

    Raises:
        ConfigError: `beta` is outside [0, 1], or the inner aggregator does not send its model unchanged to all clients.
    """

    def __init__(
        self,
        inner: Aggregator | None = None,
        beta: float = 0.95,
        review: Review = "interpolation",
        similar_clients: int = 1,
        reference: bool = False,
        knowledge: StructuralKnowledge | None = None,
    ) -> None:
        check_number("algorithm.beta", beta, "[0, 1]", "the paper uses 0.95")
        self.inner: Aggregator = self.wrap(inner or WeightedMean())
        if not self.inner.sends_one_model:
            name = type(self.inner).__name__
            reason = f"{name} sends clients other weights than its model, which GlobalPeriodReview corrects"
            raise ConfigError(f"algorithm.aggregator.inner: {reason}. Use one of them without the other.")
        self.beta, self.review = beta, review
        self.compared = known_in_each_round if reference else known_in_both_rounds
        self.structural = knowledge or knowledge_class(reference)(similar_clients)

    @property
    def knowledge(self) -> tuple[SharedKnowledge, ...]:
        """The shared knowledge of GPR (mean logits per class) and of the inner aggregator."""
        return (self.structural, *self.inner.knowledge)

    def finish(self, folded: object, round: Round, knowledge: State) -> State:
        """Return the inner (wrapped) aggregator's model, corrected with the previous round's global model (Eq. 5)."""
        inner = self.inner.finish(folded, round, knowledge)
        last, now = round.before[self.structural.name], knowledge[self.structural.name]
        if not bool(last["known"].any()):  # round 1
            return inner
        classes_now, classes_last = self.compared(now["known"], last["known"])
        ratio = review_ratio(now["values"][classes_now], last["values"][classes_last])
        keep, step = self.beta, (1 - self.beta) * ratio
        if self.review == "interpolation":
            keep, step = 1.0, min(max(step, 0.0), 1.0)
        return inner | {"model": extrapolate(inner["model"], round.before["model"], keep, step)}
