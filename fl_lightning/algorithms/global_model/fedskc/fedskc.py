"""FedSKC: clients share mean logits per class, used in local training, aggregation and a correction on the server.

Wang, Li, Chen, Yan, Wang, Shi, Chen, Shen: "FedSKC: Federated Learning with Non-IID Data via Structural Knowledge
Collaboration", 2025. The sections and equations in this folder are the paper's.

The files of this folder:

- `knowledge.py`: the structural knowledge (Section III-A, Eq. 1);
- `contrastive_loss.py`: local contrastive learning (LCL, Eq. 2 and 3), a loss term;
- `aggregation.py`: global discrepancy aggregation (GDA, Eq. 4), an aggregator, and global period review (GPR, Eq. 5),
  an aggregator around another;
- `fedskc.py`: the method, which combines these parts. Each can be switched off or used in another method.

docs/methods/fedskc.md lists our choices where the paper is ambiguous, and the differences of the authors' published
code (`preset="reference"`). Its variant of a part is in the part's file.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from fl_lightning.algorithms.aggregators import Aggregator, WeightedMean
from fl_lightning.algorithms.base import Algorithm
from fl_lightning.algorithms.global_model.fedskc.aggregation import (
    GdaScale,
    GlobalDiscrepancy,
    GlobalPeriodReview,
    Review,
)
from fl_lightning.algorithms.global_model.fedskc.contrastive_loss import LocalContrastive, Spread
from fl_lightning.algorithms.global_model.fedskc.knowledge import knowledge_class
from fl_lightning.client.loss_term import LossTerm


class FedSKC(Algorithm):
    """Clients share mean logits per class, which are used in local training, in aggregation and to correct the model.

    With `lcl`, `gda` and `gpr` all off this is FedAvg, bit for bit.

    Bytes a round, each participant: down `model + 4 * C**2 + C`, up `model + 4 * C**2 + C + 8`.

    Kept by the server: the global mean logits of each class.

    Args:
        tau: Temperature τ of the contrastive loss (Eq. 3).
        similar_clients: M, the number of nearest clients that are averaged with each client in Eq. 1.
        beta: β of the period review (Eq. 5). By default 0.95 (the paper), or 0.99 with `preset: reference`.
        lcl: Local contrastive learning.
        gda: Global discrepancy aggregation. It is off with `preset: reference`, because that code overwrites its
            result.
        gpr: Global period review.
        gda_scale: `count` uses the sample counts as printed in Eq. 4. `share` divides them by their mean, so that the
            discrepancy has an effect.
        spread: `batch` divides the similarity to class j by `U_j` (Eq. 2), the batch's mean distance to its
            knowledge. `none` does not, as in the authors' code, and may need a smaller learning rate.
        review: `interpolation`, or `literal` for Eq. 5 as printed, see `GlobalPeriodReview`. By default
            `interpolation`, or `literal` with `preset: reference`.
        preset: `paper`, or `reference` for the authors' published code.
        aggregator: Replaces GDA and GPR.
    """

    tau: float = 0.08
    similar_clients: int = 1
    beta: float | None = None
    lcl: bool = True
    gda: bool = True
    gpr: bool = True
    gda_scale: GdaScale = "count"
    spread: Spread = "batch"
    review: Review | None = None
    preset: Literal["paper", "reference"] = "paper"

    search_space: ClassVar = {  # around Fig. 3(a), (b): 0.07 to 0.11 are alike, many neighbours are worse
        "tau": {"distribution": "log_uniform_values", "min": 0.03, "max": 0.5},
        "similar_clients": {"values": [0, 1, 2, 3]},
    }
    aggregator_options = ("beta", "gda_scale", "review")

    def __post_init__(self) -> None:
        """Create the knowledge that the loss term and the aggregator share."""
        self.shared = knowledge_class(self.reference)(self.similar_clients)
        super().__post_init__()

    @property
    def reference(self) -> bool:
        """Whether to follow the authors' code."""
        return self.preset == "reference"

    def own_terms(self) -> list[LossTerm]:
        """Return the contrastive loss, unless it is switched off."""
        term = LocalContrastive(self.tau, spread=self.spread, reference=self.reference, knowledge=self.shared)
        return [term] if self.lcl else []

    def own_aggregator(self) -> Aggregator:
        """Return the aggregator with the parts that are switched on."""
        uses_gda, reference = self.gda and not self.reference, self.reference
        inner = GlobalDiscrepancy(self.gda_scale, knowledge=self.shared) if uses_gda else WeightedMean()
        if not self.gpr:
            return inner
        beta = self.beta if self.beta is not None else (0.99 if reference else 0.95)
        review = self.review or ("literal" if reference else "interpolation")
        return GlobalPeriodReview(inner, beta, review, reference=reference, knowledge=self.shared)
