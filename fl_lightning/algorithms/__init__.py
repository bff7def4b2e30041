"""One paper, one file; `base` holds what they share."""

from fl_lightning.algorithms.base import Aggregator, Algorithm, State, WeightedMean
from fl_lightning.algorithms.fedavg import FedAvg
from fl_lightning.algorithms.feddw import DistillingWeights, FedDW, SoftLabels
from fl_lightning.algorithms.fedprox import FedProx, Proximal
from fl_lightning.algorithms.fedskc import (
    FedSKC,
    GlobalDiscrepancy,
    GlobalPeriodReview,
    LocalContrastive,
    StructuralKnowledge,
)
from fl_lightning.algorithms.protonet import Prototypical

__all__ = [
    "Aggregator",
    "Algorithm",
    "DistillingWeights",
    "FedAvg",
    "FedDW",
    "FedProx",
    "FedSKC",
    "GlobalDiscrepancy",
    "GlobalPeriodReview",
    "LocalContrastive",
    "Prototypical",
    "Proximal",
    "SoftLabels",
    "State",
    "StructuralKnowledge",
    "WeightedMean",
]
