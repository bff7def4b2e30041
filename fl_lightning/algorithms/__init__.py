"""One method, one file, in a folder a family; `base` holds what they share."""

from fl_lightning.algorithms.aggregators import Aggregator, ServerStep, WeightedMean
from fl_lightning.algorithms.base import Algorithm
from fl_lightning.algorithms.clustered.cfl import CFL, Splits
from fl_lightning.algorithms.clustered.ifca import IFCA, ClusterMeans
from fl_lightning.algorithms.decentralized.criticalfl import PeerCriticalFL
from fl_lightning.algorithms.decentralized.dfedavgm import DFedAvgM
from fl_lightning.algorithms.decentralized.dispfl import DisPFL
from fl_lightning.algorithms.decentralized.fedper import PeerFedPer
from fl_lightning.algorithms.decentralized.peers import PeerAlgorithm
from fl_lightning.algorithms.decentralized.ua_pdfl import UAPDFL, UnitAlignment, UnitRepresentation
from fl_lightning.algorithms.global_model.criticalfl import CriticalFL, EntryMean
from fl_lightning.algorithms.global_model.fedavg import FedAvg
from fl_lightning.algorithms.global_model.fedavgm import FedAvgM, ServerMomentum
from fl_lightning.algorithms.global_model.feddw import DistillingWeights, FedDW, SoftLabels
from fl_lightning.algorithms.global_model.fednh import FedNH, PrototypeAveraging
from fl_lightning.algorithms.global_model.fedopt import AdaptiveServer, FedAdagrad, FedAdam, FedYogi
from fl_lightning.algorithms.global_model.fedprox import FedProx, Proximal
from fl_lightning.algorithms.global_model.fedrcl import FedRCL, RelaxedContrastive
from fl_lightning.algorithms.global_model.fedsiam_da import (
    DualAggregation,
    FedSiamDA,
    HistoryContrast,
    SiameseAlignment,
)
from fl_lightning.algorithms.global_model.fedskc import (
    FedSKC,
    GlobalDiscrepancy,
    GlobalPeriodReview,
    LocalContrastive,
    StructuralKnowledge,
)
from fl_lightning.algorithms.global_model.feduv import ClassifierVariance, FedUV, HypersphericalUniformity
from fl_lightning.algorithms.global_model.moon import MOON, ModelContrast
from fl_lightning.algorithms.global_model.protonet import Prototypical
from fl_lightning.algorithms.global_model.scaffold import SCAFFOLD, ControlVariates
from fl_lightning.algorithms.graphs import Adjacency, Complete, ErdosRenyi, Graph, Ring, Torus
from fl_lightning.algorithms.personalized.apple import APPLE, Cores
from fl_lightning.algorithms.personalized.cwfedavg import ClassShares, ClassWise, CwFedAvg, WeightDistribution
from fl_lightning.algorithms.personalized.ditto import Ditto
from fl_lightning.algorithms.personalized.fedala import FedALA
from fl_lightning.algorithms.personalized.fedamp import FedAMP, HeurFedAMP, LastUploads
from fl_lightning.algorithms.personalized.fedbabu import FedBABU
from fl_lightning.algorithms.personalized.feddistill import (
    FedDistill,
    FedDistillPlus,
    LogitDistillation,
    MeanLogits,
)
from fl_lightning.algorithms.personalized.fedfomo import Affinities, FedFomo
from fl_lightning.algorithms.personalized.fedper import FedPer
from fl_lightning.algorithms.personalized.fedproto import FedProto, PrototypeAlignment, Prototypes
from fl_lightning.algorithms.personalized.fedrep import FedRep
from fl_lightning.algorithms.personalized.local import Local
from fl_lightning.algorithms.personalized.perfedavg import PerFedAvg
from fl_lightning.core.state import State

__all__ = [
    "APPLE",
    "CFL",
    "IFCA",
    "MOON",
    "SCAFFOLD",
    "UAPDFL",
    "AdaptiveServer",
    "Adjacency",
    "Affinities",
    "Aggregator",
    "Algorithm",
    "ClassShares",
    "ClassWise",
    "ClassifierVariance",
    "ClusterMeans",
    "Complete",
    "ControlVariates",
    "Cores",
    "CriticalFL",
    "CwFedAvg",
    "DFedAvgM",
    "DisPFL",
    "DistillingWeights",
    "Ditto",
    "DualAggregation",
    "EntryMean",
    "ErdosRenyi",
    "FedALA",
    "FedAMP",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedBABU",
    "FedDW",
    "FedDistill",
    "FedDistillPlus",
    "FedFomo",
    "FedNH",
    "FedPer",
    "FedProto",
    "FedProx",
    "FedRCL",
    "FedRep",
    "FedSKC",
    "FedSiamDA",
    "FedUV",
    "FedYogi",
    "GlobalDiscrepancy",
    "GlobalPeriodReview",
    "Graph",
    "HeurFedAMP",
    "HistoryContrast",
    "HypersphericalUniformity",
    "LastUploads",
    "Local",
    "LocalContrastive",
    "LogitDistillation",
    "MeanLogits",
    "ModelContrast",
    "PeerAlgorithm",
    "PeerCriticalFL",
    "PeerFedPer",
    "PerFedAvg",
    "PrototypeAlignment",
    "PrototypeAveraging",
    "Prototypes",
    "Prototypical",
    "Proximal",
    "RelaxedContrastive",
    "Ring",
    "ServerMomentum",
    "ServerStep",
    "SiameseAlignment",
    "SoftLabels",
    "Splits",
    "State",
    "StructuralKnowledge",
    "Torus",
    "UnitAlignment",
    "UnitRepresentation",
    "WeightDistribution",
    "WeightedMean",
]
