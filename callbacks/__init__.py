"""Round callbacks: hooks that are called at fixed stages of a run."""

from fl_lightning.callbacks.aggregation_weights import AggregationWeights
from fl_lightning.callbacks.base import RoundCallback
from fl_lightning.callbacks.checkpointing import Checkpointing
from fl_lightning.callbacks.class_relations import ClassRelations
from fl_lightning.callbacks.cluster_norms import ClusterNorms
from fl_lightning.callbacks.communication import BytesByRound, CommunicationMeter
from fl_lightning.callbacks.confusion_matrix import ConfusionMatrix
from fl_lightning.callbacks.divergence import UnitDivergence
from fl_lightning.callbacks.drift import ClientDrift
from fl_lightning.callbacks.early_stopping import EarlyStopping
from fl_lightning.callbacks.figures import RoundFigure as RoundFigure  # a base class, which `list` does not show
from fl_lightning.callbacks.knowledge_map import KnowledgeMap
from fl_lightning.callbacks.membership_audit import MembershipAudit
from fl_lightning.callbacks.predicted_masks import PredictedMasks
from fl_lightning.callbacks.progress import RoundProgress
from fl_lightning.callbacks.row_norms import RowNorms
from fl_lightning.evaluation.round_metrics import RoundMetrics as RoundMetrics  # what `RoundFigure.numbers` may return

__all__ = [
    "AggregationWeights",
    "BytesByRound",
    "Checkpointing",
    "ClassRelations",
    "ClientDrift",
    "ClusterNorms",
    "CommunicationMeter",
    "ConfusionMatrix",
    "EarlyStopping",
    "KnowledgeMap",
    "MembershipAudit",
    "PredictedMasks",
    "RoundCallback",
    "RoundProgress",
    "RowNorms",
    "UnitDivergence",
]
