"""Federated methods (algorithms): one file or folder per method, in one folder per family.

Every `Algorithm`, `LossTerm`, `Aggregator`, `SharedKnowledge`, `Graph` and `ClientSampler` in a file of this folder is
exported. A new method needs no change here.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fl_lightning.core.public_names import public_classes
from fl_lightning.core.state_dicts import State as State

if TYPE_CHECKING:  # for editors and type checkers, to which a class that is not listed here is `Any`
    from fl_lightning.algorithms.adapters.fedex_lora import FedExLoRA as FedExLoRA, ResidualServer as ResidualServer
    from fl_lightning.algorithms.adapters.fedit import FedIT as FedIT
    from fl_lightning.algorithms.adapters.fedsa_lora import FedSALoRA as FedSALoRA
    from fl_lightning.algorithms.adapters.ffa_lora import FFALoRA as FFALoRA
    from fl_lightning.algorithms.adapters.flexlora import FlexLoRA as FlexLoRA, SVDServer as SVDServer
    from fl_lightning.algorithms.adapters.flora import FLoRA as FLoRA, StackingServer as StackingServer
    from fl_lightning.algorithms.adapters.rolora import AlternatingMean as AlternatingMean, RoLoRA as RoLoRA
    from fl_lightning.algorithms.aggregators import (
        Aggregator as Aggregator,
        DriftCorrection as DriftCorrection,
        ServerStep as ServerStep,
        WeightedMean as WeightedMean,
    )
    from fl_lightning.algorithms.base import Algorithm as Algorithm
    from fl_lightning.algorithms.client_sampling import (
        AvailabilityFile as AvailabilityFile,
        ClientSampler as ClientSampler,
        MarkovAvailability as MarkovAvailability,
        PoissonSampling as PoissonSampling,
        RoundRobin as RoundRobin,
        UniformSampling as UniformSampling,
        WeightedSampling as WeightedSampling,
    )
    from fl_lightning.algorithms.clustered.cfl import CFL as CFL, Splits as Splits
    from fl_lightning.algorithms.clustered.ifca import IFCA as IFCA, ClusterMeans as ClusterMeans
    from fl_lightning.algorithms.decentralized.criticalfl import PeerCriticalFL as PeerCriticalFL
    from fl_lightning.algorithms.decentralized.dfedavgm import DFedAvgM as DFedAvgM
    from fl_lightning.algorithms.decentralized.dispfl import DisPFL as DisPFL
    from fl_lightning.algorithms.decentralized.fedper import PeerFedPer as PeerFedPer
    from fl_lightning.algorithms.decentralized.peers import PeerAlgorithm as PeerAlgorithm
    from fl_lightning.algorithms.decentralized.ua_pdfl import (
        UAPDFL as UAPDFL,
        UnitAlignment as UnitAlignment,
        UnitRepresentation as UnitRepresentation,
    )
    from fl_lightning.algorithms.global_model.afl import AFL as AFL, AgnosticMean as AgnosticMean
    from fl_lightning.algorithms.global_model.ccvr import CCVR as CCVR
    from fl_lightning.algorithms.global_model.criticalfl import CriticalFL as CriticalFL, EntryMean as EntryMean
    from fl_lightning.algorithms.global_model.fedacg import FedACG as FedACG, LookAhead as LookAhead
    from fl_lightning.algorithms.global_model.fedavg import FedAvg as FedAvg
    from fl_lightning.algorithms.global_model.fedasync import FedAsync as FedAsync, ModelMixing as ModelMixing
    from fl_lightning.algorithms.global_model.fedat import FedAT as FedAT, TieredMean as TieredMean
    from fl_lightning.algorithms.global_model.fedavgm import FedAvgM as FedAvgM, ServerMomentum as ServerMomentum
    from fl_lightning.algorithms.global_model.fedbuff import BufferedUpdates as BufferedUpdates, FedBuff as FedBuff
    from fl_lightning.algorithms.global_model.fedcm import (
        ClientMomentum as ClientMomentum,
        DirectionServer as DirectionServer,
        FedCM as FedCM,
    )
    from fl_lightning.algorithms.global_model.feddc import DriftPenalty as DriftPenalty, FedDC as FedDC
    from fl_lightning.algorithms.global_model.feddw import (
        DistillingWeights as DistillingWeights,
        FedDW as FedDW,
        SoftLabels as SoftLabels,
    )
    from fl_lightning.algorithms.global_model.feddyn import DynamicRegularizer as DynamicRegularizer, FedDyn as FedDyn
    from fl_lightning.algorithms.global_model.fedgen import (
        FedGen as FedGen,
        GeneratedFeatures as GeneratedFeatures,
        SharedGenerator as SharedGenerator,
    )
    from fl_lightning.algorithms.global_model.fedlc import CalibratedLoss as CalibratedLoss, FedLC as FedLC
    from fl_lightning.algorithms.global_model.fednh import FedNH as FedNH, PrototypeAveraging as PrototypeAveraging
    from fl_lightning.algorithms.global_model.fednova import (
        FedNova as FedNova,
        NormalizedAveraging as NormalizedAveraging,
    )
    from fl_lightning.algorithms.global_model.fedntd import FedNTD as FedNTD, NotTrueDistillation as NotTrueDistillation
    from fl_lightning.algorithms.global_model.fedopt import (
        AdaptiveServer as AdaptiveServer,
        FedAdagrad as FedAdagrad,
        FedAdam as FedAdam,
        FedYogi as FedYogi,
    )
    from fl_lightning.algorithms.global_model.fedprox import FedProx as FedProx, Proximal as Proximal
    from fl_lightning.algorithms.global_model.fedrcl import FedRCL as FedRCL, RelaxedContrastive as RelaxedContrastive
    from fl_lightning.algorithms.global_model.fedsam import FedSAM as FedSAM, MoFedSAM as MoFedSAM
    from fl_lightning.algorithms.global_model.fedsiam_da import (
        DualAggregation as DualAggregation,
        FedSiamDA as FedSiamDA,
        HistoryContrast as HistoryContrast,
        SiameseAlignment as SiameseAlignment,
    )
    from fl_lightning.algorithms.global_model.fedskc.aggregation import (
        GlobalDiscrepancy as GlobalDiscrepancy,
        GlobalPeriodReview as GlobalPeriodReview,
    )
    from fl_lightning.algorithms.global_model.fedskc.contrastive_loss import LocalContrastive as LocalContrastive
    from fl_lightning.algorithms.global_model.fedskc.fedskc import FedSKC as FedSKC
    from fl_lightning.algorithms.global_model.fedskc.knowledge import (
        ReferenceKnowledge as ReferenceKnowledge,
        StructuralKnowledge as StructuralKnowledge,
    )
    from fl_lightning.algorithms.global_model.feduv import (
        ClassifierVariance as ClassifierVariance,
        FedUV as FedUV,
        HypersphericalUniformity as HypersphericalUniformity,
    )
    from fl_lightning.algorithms.global_model.heterofl import HeteroFL as HeteroFL, SliceMean as SliceMean
    from fl_lightning.algorithms.global_model.moon import MOON as MOON, ModelContrast as ModelContrast
    from fl_lightning.algorithms.global_model.protonet import Prototypical as Prototypical
    from fl_lightning.algorithms.global_model.qffl import QFFL as QFFL, FairAveraging as FairAveraging
    from fl_lightning.algorithms.global_model.scaffold import SCAFFOLD as SCAFFOLD, ControlVariates as ControlVariates
    from fl_lightning.algorithms.decentralized.topology import (
        Adjacency as Adjacency,
        Complete as Complete,
        ErdosRenyi as ErdosRenyi,
        Graph as Graph,
        Ring as Ring,
        Torus as Torus,
    )
    from fl_lightning.algorithms.personalized.apfl import APFL as APFL
    from fl_lightning.algorithms.personalized.apple import APPLE as APPLE, Cores as Cores
    from fl_lightning.algorithms.personalized.cwfedavg import (
        ClassShares as ClassShares,
        ClassWise as ClassWise,
        CwFedAvg as CwFedAvg,
        WeightDistribution as WeightDistribution,
    )
    from fl_lightning.algorithms.personalized.ditto import Ditto as Ditto
    from fl_lightning.algorithms.personalized.fedala import FedALA as FedALA
    from fl_lightning.algorithms.personalized.fedamp import (
        FedAMP as FedAMP,
        HeurFedAMP as HeurFedAMP,
        LastUploads as LastUploads,
    )
    from fl_lightning.algorithms.personalized.fedbabu import FedBABU as FedBABU
    from fl_lightning.algorithms.personalized.fedbn import FedBN as FedBN
    from fl_lightning.algorithms.personalized.feddistill import (
        FedDistill as FedDistill,
        FedDistillPlus as FedDistillPlus,
        LogitDistillation as LogitDistillation,
        MeanLogits as MeanLogits,
    )
    from fl_lightning.algorithms.personalized.fedfomo import Affinities as Affinities, FedFomo as FedFomo
    from fl_lightning.algorithms.personalized.fedgh import (
        FedGH as FedGH,
        HeadTraining as HeadTraining,
        Representations as Representations,
    )
    from fl_lightning.algorithms.personalized.fedkd import CompressedMean as CompressedMean, FedKD as FedKD
    from fl_lightning.algorithms.personalized.fedpac import (
        Centroids as Centroids,
        ClassifierCollaboration as ClassifierCollaboration,
        FeatureAlignment as FeatureAlignment,
        FeatureStatistics as FeatureStatistics,
        FedPAC as FedPAC,
    )
    from fl_lightning.algorithms.personalized.fedper import FedPer as FedPer
    from fl_lightning.algorithms.personalized.fedproto import (
        FedProto as FedProto,
        PrototypeAlignment as PrototypeAlignment,
        Prototypes as Prototypes,
    )
    from fl_lightning.algorithms.personalized.fedrep import FedRep as FedRep
    from fl_lightning.algorithms.personalized.fedrod import BalancedSoftmax as BalancedSoftmax, FedROD as FedROD
    from fl_lightning.algorithms.personalized.fedtgp import (
        FedTGP as FedTGP,
        TrainedPrototypeAlignment as TrainedPrototypeAlignment,
        TrainedPrototypes as TrainedPrototypes,
    )
    from fl_lightning.algorithms.personalized.fml import FML as FML
    from fl_lightning.algorithms.personalized.lgfedavg import LGFedAvg as LGFedAvg
    from fl_lightning.algorithms.personalized.local import Local as Local
    from fl_lightning.algorithms.personalized.perfedavg import PerFedAvg as PerFedAvg
    from fl_lightning.algorithms.personalized.pfedme import PFedMe as PFedMe
    from fl_lightning.algorithms.private_mean import PrivateMean as PrivateMean
    from fl_lightning.algorithms.robust.bucketing import Bucketing as Bucketing
    from fl_lightning.algorithms.robust.bulyan import Bulyan as Bulyan
    from fl_lightning.algorithms.robust.clipping import CenteredClipping as CenteredClipping, NormBound as NormBound
    from fl_lightning.algorithms.robust.geometric_median import GeometricMedian as GeometricMedian
    from fl_lightning.algorithms.robust.krum import Krum as Krum, MultiKrum as MultiKrum
    from fl_lightning.algorithms.robust.median import Median as Median
    from fl_lightning.algorithms.robust.nearest_neighbor_mixing import NearestNeighborMixing as NearestNeighborMixing
    from fl_lightning.algorithms.robust.signguard import SignGuard as SignGuard
    from fl_lightning.algorithms.robust.trimmed_mean import TrimmedMean as TrimmedMean

if not TYPE_CHECKING:  # type checkers export the names above, and cannot read a computed list
    __all__ = sorted(["State", *public_classes()])

for _name, _module in public_classes().items():
    globals()[_name] = getattr(import_module(f"{__name__}.{_module}"), _name)


def __getattr__(name: str) -> Any:
    """Raise an AttributeError. Python calls this only for names that the package does not have."""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
