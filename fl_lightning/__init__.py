"""Federated learning with non-IID clients on PyTorch Lightning."""

from typing import TYPE_CHECKING, Any

from fl_lightning.core.lazy_import import load
from fl_lightning.core.public_names import public_classes

if TYPE_CHECKING:  # the same names for type checkers
    from fl_lightning import runs as runs
    from fl_lightning.algorithms import *
    from fl_lightning.algorithms.base import Aggregation as Aggregation
    from fl_lightning.analysis.figures import plot_runs as plot_runs
    from fl_lightning.attacks import *
    from fl_lightning.attacks.base import DataAttack as DataAttack
    from fl_lightning.attacks.base import UpdateAttack as UpdateAttack
    from fl_lightning.callbacks import *
    from fl_lightning.callbacks import RoundFigure as RoundFigure
    from fl_lightning.cli.experiment import open_run as open_run
    from fl_lightning.client.dp_sgd import DPSGD as DPSGD
    from fl_lightning.client.knowledge import SharedKnowledge as SharedKnowledge
    from fl_lightning.client.local_training import LocalTraining as LocalTraining
    from fl_lightning.client.loss_term import FitContext as FitContext
    from fl_lightning.client.loss_term import LossTerm as LossTerm
    from fl_lightning.client.loss_term import Step as Step
    from fl_lightning.client.module import ClientModule as ClientModule
    from fl_lightning.client.schedules import WarmupCosine as WarmupCosine
    from fl_lightning.compression import *
    from fl_lightning.core.errors import CheckpointError as CheckpointError
    from fl_lightning.core.errors import ClientFailure as ClientFailure
    from fl_lightning.core.errors import ConfigError as ConfigError
    from fl_lightning.core.errors import FLError as FLError
    from fl_lightning.core.errors import Interrupted as Interrupted
    from fl_lightning.core.errors import NonFiniteError as NonFiniteError
    from fl_lightning.core.errors import TooFewClients as TooFewClients
    from fl_lightning.core.message import Message as Message
    from fl_lightning.core.message import Upload as Upload
    from fl_lightning.core.objectives import *
    from fl_lightning.core.round import Round as Round
    from fl_lightning.core.state_dicts import weighted_mean as weighted_mean
    from fl_lightning.core.task import Score as Score
    from fl_lightning.data import *
    from fl_lightning.data.transforms import CropFlip as CropFlip
    from fl_lightning.data.transforms import Normalize as Normalize
    from fl_lightning.data.transforms import PerImage as PerImage
    from fl_lightning.engines import *
    from fl_lightning.evaluation.evaluation import Evaluation as Evaluation
    from fl_lightning.loggers.files import CSVLogger as CSVLogger
    from fl_lightning.loggers.files import MLFlowLogger as MLFlowLogger
    from fl_lightning.loggers.files import TensorBoardLogger as TensorBoardLogger
    from fl_lightning.loggers.wandb import WandbRoundLogger as WandbRoundLogger
    from fl_lightning.models import *
    from fl_lightning.orchestrator import FederatedOrchestrator as FederatedOrchestrator
    from fl_lightning.runs.reader import Run as Run
    from fl_lightning.scheduling import *

__version__ = "0.1.0"

_NAMES = {
    "algorithms": " ".join(["State", *public_classes()]),
    "algorithms.base": "Aggregation",
    "analysis.figures": "plot_runs",
    "attacks": "Adversary ALIE Backdoor Canaries GaussianNoise IPM LabelFlip MinMax MinSum ModelReplacement SignFlip",
    "attacks.base": "DataAttack UpdateAttack",
    "callbacks": """
        AggregationWeights BytesByRound Checkpointing ClassRelations ClientDrift ClusterNorms CommunicationMeter
        ConfusionMatrix EarlyStopping KnowledgeMap MembershipAudit PredictedMasks RoundCallback RoundFigure
        RoundProgress RowNorms UnitDivergence
    """,
    "client.dp_sgd": "DPSGD",
    "client.local_training": "LocalTraining",
    "client.loss_term": "FitContext LossTerm Step",
    "client.module": "ClientModule",
    "client.schedules": "WarmupCosine",
    "compression": "Compressor Float16 QSGD RandomK SignSGD TopK",
    "data": """
        AGNews Arrays ByClient CIFAR10 CIFAR100 ClientSplits Dataset Digits Dirichlet DisjointClasses DomainFolder
        Domains EMNIST FashionMNIST FC100 FederatedData FEMNIST FewShot HuggingFace IID ImageFolder ImageTable IMDB
        Inputs InstructionFile LoadedData MaskFolder MNIST Partition PathMNIST Pathological PredefinedSplit
        QuantitySkew RemoteClients RotatedDigits Scenario Sent140 Shakespeare Shard Shards SVHN Table TableSchema
        TextFile TextTable TinyImageNet
        TorchDataset
    """,
    "data.transforms": "CropFlip Normalize PerImage",
    "engines": """
        AutoEngine Engine engine_of EngineName FlowerEngine ProcessesEngine RayEngine Result SequentialEngine
        StackedEngine Task Tasks Worker
    """,
    "core.errors": "CheckpointError ClientFailure ConfigError FLError Interrupted NonFiniteError TooFewClients",
    "evaluation.evaluation": "Evaluation Score",
    "cli.experiment": "open_run",
    "loggers.files": "CSVLogger MLFlowLogger TensorBoardLogger",
    "client.knowledge": "SharedKnowledge",
    "core.message": "Message Upload",
    "core.round": "Round",
    "models": """
        Adapted Adapter Backbone BiLSTM CausalTransformer classification_layer CNN CNN4 CosineLinear FastText FromModule
        frozen_encoder Head LeNet LoRA Mixed MLP MobileNetV2 ModelFactory NetworkFactory Pretrained ResizedFeatures
        ResNet18 ResNet50 ResNet8 ShuffleNetV2 TextCNN UNet VGG11 with_encoder
    """,
    "core.objectives": "CausalLM Classification MultiLabel Objective Regression Segmentation TokenClassification",
    "orchestrator": "FederatedOrchestrator",
    "runs": "Run",
    "scheduling": "Buffered ClientWork Clock Deadline DeviceClock DeviceTrace RoundPolicy Synchronous Tiers",
    "core.state_dicts": "weighted_mean",
    "loggers.wandb": "WandbRoundLogger",
}
"""The public names, by the module that they are imported from."""

HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}
"""The module of each public name. It is imported on first use, because torch takes seconds."""

__all__ = sorted({"runs", *HOMES})


def __getattr__(name: str) -> Any:
    """Import a public name, or a module that defines public names, on first use."""
    if name in _NAMES:
        return load(f"{__name__}.{name}")
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = getattr(load(f"{__name__}.{HOMES[name]}"), name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
