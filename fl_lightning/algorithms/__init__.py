"""One paper, one file; `base` holds what they share."""

from fl_lightning.algorithms.base import Aggregator, Algorithm, State, WeightedMean
from fl_lightning.algorithms.cwfedavg import ClassShares, ClassWise, CwFedAvg, WeightDistribution
from fl_lightning.algorithms.fedavg import FedAvg
from fl_lightning.algorithms.feddw import DistillingWeights, FedDW, SoftLabels
from fl_lightning.algorithms.fedprox import FedProx, Proximal
from fl_lightning.algorithms.fedsiam_da import DualAggregation, FedSiamDA, HistoryContrast, SiameseAlignment
from fl_lightning.algorithms.fedskc import (
    FedSKC,
    GlobalDiscrepancy,
    GlobalPeriodReview,
    LocalContrastive,
    StructuralKnowledge,
)
from fl_lightning.algorithms.peers import PeerAlgorithm
from fl_lightning.algorithms.protonet import Prototypical
from fl_lightning.algorithms.ua_pdfl import UAPDFL, UnitAlignment, UnitRepresentation
from fl_lightning.graphs import Adjacency, Complete, ErdosRenyi, Graph, Ring, Torus

__all__ = [
    "UAPDFL",
    "Adjacency",
    "Aggregator",
    "Algorithm",
    "ClassShares",
    "ClassWise",
    "Complete",
    "CwFedAvg",
    "DistillingWeights",
    "DualAggregation",
    "ErdosRenyi",
    "FedAvg",
    "FedDW",
    "FedProx",
    "FedSKC",
    "FedSiamDA",
    "GlobalDiscrepancy",
    "GlobalPeriodReview",
    "Graph",
    "HistoryContrast",
    "LocalContrastive",
    "PeerAlgorithm",
    "Prototypical",
    "Proximal",
    "Ring",
    "SiameseAlignment",
    "SoftLabels",
    "State",
    "StructuralKnowledge",
    "Torus",
    "UnitAlignment",
    "UnitRepresentation",
    "WeightDistribution",
    "WeightedMean",
]
