"""FedSKC: clients share mean logits per class, used in local training, aggregation and a correction on the server.

Wang, Li, Chen, Yan, Wang, Shi, Chen, Shen: "FedSKC: Federated Learning with Non-IID Data via Structural Knowledge
Collaboration", 2025. The sections and equations below are the paper's.

The method has three parts: local contrastive learning (LCL, a loss term), global discrepancy aggregation (GDA, an
aggregator) and global period review (GPR, an aggregator around another). Each can be switched off or used in another
method. docs/algorithms.md lists our choices where the paper is ambiguous, and the differences of the authors' published
code (`preset="reference"`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fl_lightning.algorithms.aggregators import Aggregator, WeightedMean
from fl_lightning.algorithms.base import Algorithm, Buffers
from fl_lightning.client.knowledge import SharedKnowledge, class_sums, class_sums_over
from fl_lightning.client.module import ClientModule, LossTerm, Step
from fl_lightning.core.errors import ConfigError, check_number
from fl_lightning.core.message import Tensors, Upload
from fl_lightning.core.state_dicts import State, at_least_float32, extrapolate, weighted_mean

GdaScale = Literal["count", "share"]
Spread = Literal["batch", "none"]
Review = Literal["interpolation", "literal"]


# --- Section III-A: structural knowledge -------------------------------------------------------------------------


def local_knowledge(sums: Tensor, counts: Tensor, silu: bool = True) -> Tensor:
    """Return a client's structural knowledge `c_k^j = m_j · sigmoid(m_j)`, with `m_j` the mean logits of class j.

    Args:
        sums: `(C, C)`; row j is the sum of the logits of the client's samples of class j.
        counts: Samples per class, `(C,)`.
        silu: Whether to multiply by the sigmoid. The authors' code does not.

    Returns:
        `(C, C)`; rows of classes without samples on the client are zero.
    """
    means = sums / counts.clamp(min=1)[:, None]
    return F.silu(means) if silu else means


def global_knowledge(local: Tensor, held: Tensor, similar_clients: int) -> tuple[Tensor, Tensor]:
    """Merge the clients' class-wise mean logits (Eq. 1): average each client with similar clients, then over clients.

    The knowledge of a class is averaged over the clients with samples of it. For h such clients, `min(M, h - 1)`
    neighbours are used.

    Args:
        local: `(K, C, C)` knowledge of the participants.
        held: `(K, C)` bool, the classes that each client has samples of.
        similar_clients: M, the number of nearest clients that are averaged with each client.

    Returns:
        Global knowledge `(C, C)` and the `(C,)` mask of classes with samples on any client; other rows are zero.
    """
    merged = torch.zeros_like(local[0])
    for j in range(held.shape[1]):
        own = local[held[:, j], j].double()
        if len(own):
            distance = (own[:, None] - own[None, :]).norm(dim=2).fill_diagonal_(-1)  # each client is its own nearest
            group = distance.argsort(dim=1, stable=True)[:, : min(similar_clients, len(own) - 1) + 1]
            merged[j] = own[group].mean(dim=1).mean(dim=0).to(merged.dtype)
    return merged, held.any(dim=0)


class StructuralKnowledge(SharedKnowledge):
    """FedSKC's shared knowledge: the clients' mean logits per class, merged (Eq. 1), and a mask of known classes.

    Args:
        similar_clients: M of Eq. 1, 0 or more.
    """

    needs_classes = True
    name = "structural"

    def __init__(self, similar_clients: int = 1) -> None:
        super().__init__()
        check_number("algorithm.similar_clients", similar_clients, "[0, inf)")
        self.similar_clients = similar_clients
        self.values: Tensor | None
        self.known: Tensor | None
        self.register_buffer("values", None, persistent=False)
        self.register_buffer("known", None, persistent=False)

    def initial(self, num_classes: int) -> Tensors:
        """Return the global knowledge before round 1: all zeros, with no class marked as known."""
        return {
            "values": torch.zeros(num_classes, num_classes),
            "known": torch.zeros(num_classes, dtype=torch.bool),
        }

    def summarize(self, module: ClientModule, batches: Iterable[tuple[Tensor, Tensor]], num_classes: int) -> Tensors:
        """Return the client's class-wise knowledge `c_k`, and the mask of the classes that it has samples of."""
        sums, counts = class_sums_over(batches, module, num_classes)
        return {"values": local_knowledge(sums, counts), "known": counts > 0}

    def merge(self, previous: Tensors, uploads: Sequence[Upload]) -> Tensors:
        """Return the global knowledge (Eq. 1); a class without samples in this round keeps its last values."""
        values, known = global_knowledge(*stacked_knowledge(uploads), self.similar_clients)
        values = torch.where(known[:, None], values, previous["values"])
        return {"values": values, "known": known | previous["known"]}


class ReferenceKnowledge(StructuralKnowledge):
    """Class-wise mean logits as in the authors' code: from the last local epoch, without the sigmoid.

    The logits are summed during training. A class without samples among the round's participants becomes unknown.

    Args:
        similar_clients: M of Eq. 1.
    """

    observes = True

    def __init__(self, similar_clients: int = 1) -> None:
        super().__init__(similar_clients)
        self._observed: tuple[int, Tensor, Tensor] | None = None

    def observe(self, step: Step, epoch: int) -> None:
        """Add the logits of a training batch to the epoch's sum for each class."""
        sums, counts = class_sums(step.logits.detach(), step.targets, step.logits.shape[1])
        if self._observed and self._observed[0] == epoch:
            sums, counts = sums + self._observed[1], counts + self._observed[2]
        self._observed = (epoch, sums, counts)

    def summarize(self, module: ClientModule, batches: Iterable[tuple[Tensor, Tensor]], num_classes: int) -> Tensors:
        """Return the mean training logits of each class, and the mask of the classes that the client has."""
        _, sums, counts = self._observed or (0, *class_sums_over(batches, module, num_classes))
        return {"values": local_knowledge(sums, counts, silu=False), "known": counts > 0}

    def merge(self, previous: Tensors, uploads: Sequence[Upload]) -> Tensors:
        """Return the global knowledge (Eq. 1); a class without samples in this round becomes unknown."""
        values, known = global_knowledge(*stacked_knowledge(uploads), self.similar_clients)
        return {"values": values, "known": known}


def knowledge_class(reference: bool) -> type[StructuralKnowledge]:
    """Return the class that computes structural knowledge as in the paper, or as in the authors' code."""
    return ReferenceKnowledge if reference else StructuralKnowledge


def stacked_knowledge(uploads: Sequence[Upload]) -> tuple[Tensor, Tensor]:
    """Return the knowledge that the clients uploaded, `(K, C, C)`, and its masks of known classes, `(K, C)`."""
    sections = [upload.message.section(StructuralKnowledge.name) for upload in uploads]
    return torch.stack([s["values"] for s in sections]), torch.stack([s["known"] for s in sections])


# --- Local contrastive learning (LCL) ----------------------------------------------------------------------------


def similarity(logits: Tensor, knowledge: Tensor, spread: Spread = "batch") -> Tensor:
    """Return each sample's similarity to the mean logits of each class: cosine divided by mean distance (Eq. 2).

    This is `cos(l_i, c̃^j) / U_j`. `U_j` is the batch's mean distance to `c̃^j`, at least 1e-6 and without gradient. In
    the paper it is the mean over the client's whole data.

    Args:
        logits: `(B, C)`.
        knowledge: `(J, C)`, one row per class.
        spread: `none` omits `U_j`, as in the authors' code.

    Returns:
        `(B, J)`.
    """
    if spread == "none":
        return cosine(logits, knowledge)
    distances = (logits.detach()[:, None] - knowledge[None]).norm(dim=2)
    return cosine(logits, knowledge) / distances.mean(dim=0).clamp(min=1e-6)


def cosine(logits: Tensor, knowledge: Tensor) -> Tensor:
    """Return the cosine of every sample's logits with every class's knowledge, `(B, J)`; zero where a norm is zero."""
    return F.normalize(logits, dim=1) @ F.normalize(knowledge, dim=1).T


def local_contrastive_loss(
    logits: Tensor, targets: Tensor, knowledge: Tensor, known: Tensor | None, tau: float, spread: Spread = "batch"
) -> Tensor:
    """Return the contrastive loss (Eq. 3), the mean cross-entropy of the similarities divided by `τ`.

    Classes without knowledge are omitted from the sum, and their samples add nothing.

    Args:
        logits: `(B, C)`.
        targets: `(B,)`.
        knowledge: `(C, C)` global knowledge.
        known: `(C,)` bool, or None if every class is known.
        tau: Temperature, above 0.
        spread: The divisor of the cosines, see `similarity`.
    """
    scores = similarity(logits, knowledge, spread) / tau
    if known is None:
        return F.cross_entropy(scores, targets)
    scores = scores.masked_fill(~known, -torch.inf)
    loss = F.cross_entropy(scores, targets.masked_fill(~known[targets], -100), reduction="sum")
    return loss / len(targets)


def reference_contrastive_loss(logits: Tensor, targets: Tensor, knowledge: Tensor, known: Tensor, tau: float) -> Tensor:
    """Return the contrastive loss of the authors' code: Eq. 3 without `U_j`, and with the positive counted twice.

    For a sample of an unknown class, the positive is its own detached logits.
    """
    scores = cosine(logits, knowledge) / tau
    own = F.cosine_similarity(logits, logits.detach(), dim=1) / tau
    positive = torch.where(known[targets], scores.gather(1, targets[:, None])[:, 0], own)
    negatives = scores.masked_fill(~known, -torch.inf)
    return (torch.logsumexp(torch.cat([positive[:, None], negatives], dim=1), dim=1) - positive).mean()


class PaperContrast(NamedTuple):
    """The local contrastive loss of the paper, at full weight in every round.

    Attributes:
        spread: The divisor of the cosines, see `similarity`.
    """

    spread: Spread

    def scale(self, round: int) -> float:
        """Return the weight of the contrastive loss in a round: always 1."""
        return 1.0

    def loss(self, logits: Tensor, targets: Tensor, knowledge: Tensor, known: Tensor | None, tau: float) -> Tensor:
        """Return the paper's contrastive loss (Eq. 3); for the arguments see `local_contrastive_loss`."""
        return local_contrastive_loss(logits, targets, knowledge, known, tau, self.spread)


class ReferenceContrast(NamedTuple):
    """The local contrastive loss of the authors' code. Its weight rises to 1 over the first 100 rounds."""

    def scale(self, round: int) -> float:
        """Return the weight of the contrastive loss in a round, which rises to 1 over 100 rounds."""
        return min(round / 100, 1.0)

    def loss(self, logits: Tensor, targets: Tensor, knowledge: Tensor, known: Tensor | None, tau: float) -> Tensor:
        """Return the authors' contrastive loss; for the arguments see `reference_contrastive_loss`."""
        if known is None:
            known = torch.ones(len(knowledge), dtype=torch.bool, device=logits.device)
        return reference_contrastive_loss(logits, targets, knowledge, known, tau)


class LocalContrastive(LossTerm):
    """LCL: pulls a sample's logits towards the global mean logits of its class, away from those of other classes.

    It is computed in float32 under mixed precision. It is off before there is knowledge, as in round 1.

    Args:
        tau: Temperature `τ` of Eq. 3, above 0.
        similar_clients: M of Eq. 1; the server uses it to merge the knowledge.
        spread: `batch` divides the similarities by `U_j` (Eq. 2), `none` does not, as in the authors' code.
        reference: As in the authors' code, scale by `min(round / 100, 1)`. There is no `U_j`; `spread` is ignored.
        knowledge: Use this instance instead of a new one from `similar_clients` and `reference`.

    Example:
        >>> term = LocalContrastive(tau=0.08)
        >>> term.load(values=torch.eye(3), known=torch.tensor([True, True, True]))
        >>> round(float(term(Step(logits=2 * torch.eye(3), targets=torch.arange(3)))), 4)
        0.0021
    """

    name = "lcl"

    def __init__(
        self,
        tau: float = 0.08,
        similar_clients: int = 1,
        spread: Spread = "batch",
        reference: bool = False,
        knowledge: StructuralKnowledge | None = None,
    ) -> None:
        super().__init__()
        check_number("algorithm.tau", tau, "(0, inf)", "the paper uses 0.08")
        self.tau = tau
        self.contrast: PaperContrast | ReferenceContrast = ReferenceContrast() if reference else PaperContrast(spread)
        self.structural = knowledge or knowledge_class(reference)(similar_clients)
        self.scale = 1.0
        self.all_known = False

    def load(self, values: Tensor, known: Tensor) -> None:
        """Store the received global knowledge: `values` `(C, C)` and `known` `(C,)` bool."""
        self.structural.load({"values": values, "known": known})
        self.all_known = bool(known.all())

    def begin(self, module: ClientModule) -> None:
        """Switch the loss term off for this fit if no class has global knowledge yet."""
        known = self.structural.known
        self.active = known is not None and bool(known.any())
        self.all_known = known is not None and bool(known.all())
        self.scale = self.contrast.scale(module.round)

    def forward(self, step: Step) -> Tensor:
        """Return the contrastive loss (Eq. 3) on a batch, or zero without global knowledge."""
        values, known = self.structural.values, self.structural.known
        if values is None or known is None:
            return step.logits.new_zeros(())
        with torch.autocast(step.logits.device.type, enabled=False):
            logits, values = at_least_float32(step.logits), at_least_float32(values)
            mask = None if self.all_known else known
            return self.scale * self.contrast.loss(logits, step.targets, values, mask, self.tau)


# --- Global discrepancy aggregation (GDA) ------------------------------------------------------------------------


def discrepancy(local: Tensor, held: Tensor, knowledge: Tensor, scale: GdaScale = "count") -> Tensor:
    """Return each client's distance to the global knowledge, `d_k = Σ_j ||c_k^j - c̃^j||_2`, `(K,)` (Section III-B).

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
        """The structural knowledge, from which the aggregation weights are computed."""
        return (self.structural,)

    def fold(self, uploads: Iterable[Upload]) -> list[Upload]:
        """Return the list of the round's uploads: the weights (Eq. 4) depend on the class means of all clients."""
        return list(uploads)

    def finish(self, folded: list[Upload], before: State, knowledge: State) -> State:
        """Return the weighted mean of the clients' models, `w_g = Σ e_k w_k`, and the weights `e_k` (Eq. 4)."""
        local, held = stacked_knowledge(folded)
        distances = discrepancy(local, held, knowledge[self.structural.name]["values"], self.gda_scale)
        samples = torch.tensor([upload.n_samples for upload in folded])
        weights = aggregation_weights(distances, samples, self.gda_scale)
        return {
            "model": weighted_mean((u.message.section("model") for u in folded), weights.tolist()),
            "weights": {"client": torch.tensor([u.client for u in folded]), "value": weights},
        }


# --- Global period review (GPR) ----------------------------------------------------------------------------------


def review_ratio(now: Tensor, before: Tensor) -> float:
    """Return the relative growth of the variance of the global knowledge since the previous round (Eq. 5).

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
    """Return the classes over which Eq. 5 sums variances: those known in this round and the previous one.

    Args:
        now: `(C,)` bool, the classes known in this round.
        before: `(C,)` bool, the classes known in the last round.
    """
    return now & before, now & before


def known_in_each_round(now: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """Return the classes whose variances the authors' code sums: for each of two rounds, all classes known in it."""
    return now, before


class GlobalPeriodReview(Aggregator):
    """GPR: from round 2 on, correct another aggregator's model by the previous round's model.

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
        self.inner: Aggregator = inner or WeightedMean()
        if not self.inner.sends_one_model:
            name = type(self.inner).__name__
            reason = f"{name} sends clients other weights than its model, which GlobalPeriodReview corrects"
            raise ConfigError(f"algorithm.aggregator.inner: {reason}. Use one of them without the other.")
        self.leaves = self.inner.leaves
        self.beta, self.review = beta, review
        self.compared = known_in_each_round if reference else known_in_both_rounds
        self.structural = knowledge or knowledge_class(reference)(similar_clients)

    @property
    def knowledge(self) -> tuple[SharedKnowledge, ...]:
        """The structural knowledge, and the shared knowledge that the inner aggregator reads."""
        return (self.structural, *self.inner.knowledge)

    def initial(self, model: Tensors, num_classes: int) -> State:
        """Return the inner aggregator's entries of the server's state before round 1."""
        self.inner.clients = self.clients
        return self.inner.initial(model, num_classes)

    @property
    def only_averages(self) -> bool:  # type: ignore[override]
        """Whether the inner aggregator only averages the uploaded weights."""
        return self.inner.only_averages

    def fold(self, uploads: Iterable[Upload]) -> object:
        """Pass a round's uploads to the inner aggregator's `fold`, and return its result."""
        return self.inner.fold(uploads)

    def finish(self, folded: object, before: State, knowledge: State) -> State:
        """Return the model of the wrapped aggregator, corrected with the previous round's global model (Eq. 5)."""
        inner = self.inner.finish(folded, before, knowledge)
        last, now = before[self.structural.name], knowledge[self.structural.name]
        if not bool(last["known"].any()):  # round 1
            return inner
        classes_now, classes_last = self.compared(now["known"], last["known"])
        ratio = review_ratio(now["values"][classes_now], last["values"][classes_last])
        keep, step = self.beta, (1 - self.beta) * ratio
        if self.review == "interpolation":
            keep, step = 1.0, min(max(step, 0.0), 1.0)
        return inner | {"model": extrapolate(inner["model"], before["model"], keep, step)}


# --- The method --------------------------------------------------------------------------------------------------


class FedSKC(Algorithm):
    """Contrastive training, weighted aggregation and a correction on the server, all based on mean logits per class.

    With `lcl`, `gda` and `gpr` all off this is FedAvg, bit for bit.

    Bytes a round, each participant: down `model + 4 * C**2 + C`, up `model + 4 * C**2 + C + 8`.

    Args:
        tau: Temperature τ of the contrastive loss (Eq. 3).
        similar_clients: M, the number of nearest clients that are averaged with each client in Eq. 1.
        beta: β of the period review (Eq. 5). By default 0.95 (the paper), or 0.99 with `preset: reference`.
        lcl: Local contrastive learning.
        gda: Global discrepancy aggregation. It is off with `preset: reference`, because that code overwrites its
            result.
        gpr: Global period review.
        gda_scale: `count` (the paper) or `share`, see `aggregation_weights` and `discrepancy`.
        spread: `batch` divides similarities by `U_j` (Eq. 2). `none` does not, as in the authors' code, and may need a
            smaller learning rate.
        review: `interpolation`, or `literal` for Eq. 5 as printed, see `GlobalPeriodReview`. By default
            `interpolation`, or `literal` with `preset: reference`.
        preset: `paper`, or `reference` for the authors' published code.
        aggregator: Replaces GDA and GPR.
    """

    search_space: ClassVar = {  # around Fig. 3(a), (b): 0.07 to 0.11 are alike, many neighbours are worse
        "tau": {"distribution": "log_uniform_values", "min": 0.03, "max": 0.5},
        "similar_clients": {"values": [0, 1, 2, 3]},
    }

    def __init__(
        self,
        tau: float = 0.08,
        similar_clients: int = 1,
        beta: float | None = None,
        lcl: bool = True,
        gda: bool = True,
        gpr: bool = True,
        gda_scale: GdaScale = "count",
        spread: Spread = "batch",
        review: Review | None = None,
        preset: Literal["paper", "reference"] = "paper",
        loss_terms: list[LossTerm] | None = None,
        aggregator: Aggregator | None = None,
        buffers: Buffers = "average",
    ) -> None:
        reference = preset == "reference"
        shared = knowledge_class(reference)(similar_clients)
        terms: list[LossTerm] = []
        if lcl:
            terms.append(LocalContrastive(tau, spread=spread, reference=reference, knowledge=shared))
        if aggregator is None:
            aggregator = GlobalDiscrepancy(gda_scale, knowledge=shared) if gda and not reference else WeightedMean()
            if gpr:
                beta = beta if beta is not None else (0.99 if reference else 0.95)
                review = review or ("literal" if reference else "interpolation")
                aggregator = GlobalPeriodReview(aggregator, beta, review, reference=reference, knowledge=shared)
        super().__init__([*terms, *(loss_terms or [])], aggregator, buffers)
