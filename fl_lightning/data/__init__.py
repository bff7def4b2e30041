"""Datasets, partitions among clients, and batches."""

from fl_lightning.core.inputs import Inputs
from fl_lightning.data.arrays import Arrays
from fl_lightning.data.datasets import Dataset
from fl_lightning.data.domains import DomainFolder, Domains
from fl_lightning.data.federated_data import FederatedData, Shard
from fl_lightning.data.few_shot import FC100, FewShot
from fl_lightning.data.hugging_face import HuggingFace
from fl_lightning.data.image_folder import ImageFolder
from fl_lightning.data.images import (
    CIFAR10,
    CIFAR100,
    EMNIST,
    MNIST,
    SVHN,
    Digits,
    FashionMNIST,
    PathMNIST,
    RotatedDigits,
    TinyImageNet,
)
from fl_lightning.data.instructions import InstructionFile
from fl_lightning.data.leaf import FEMNIST, Sent140, Shakespeare
from fl_lightning.data.loaded_data import LoadedData
from fl_lightning.data.mask_folder import MaskFolder
from fl_lightning.data.natural_partitions import ByClient, PredefinedSplit
from fl_lightning.data.partitions import (
    IID,
    ClientSplits,
    Dirichlet,
    DisjointClasses,
    Partition,
    Pathological,
    QuantitySkew,
    Shards,
)
from fl_lightning.data.remote import RemoteClients
from fl_lightning.data.scenario import Scenario
from fl_lightning.data.schema import TableSchema
from fl_lightning.data.tables import ImageTable, Table, TextTable
from fl_lightning.data.text import IMDB, AGNews
from fl_lightning.data.token_texts import TextFile
from fl_lightning.data.torch_dataset import TorchDataset

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "EMNIST",
    "FC100",
    "FEMNIST",
    "IID",
    "IMDB",
    "MNIST",
    "SVHN",
    "AGNews",
    "Arrays",
    "ByClient",
    "ClientSplits",
    "Dataset",
    "Digits",
    "Dirichlet",
    "DisjointClasses",
    "DomainFolder",
    "Domains",
    "FashionMNIST",
    "FederatedData",
    "FewShot",
    "HuggingFace",
    "ImageFolder",
    "ImageTable",
    "Inputs",
    "InstructionFile",
    "LoadedData",
    "MaskFolder",
    "Partition",
    "PathMNIST",
    "Pathological",
    "PredefinedSplit",
    "QuantitySkew",
    "RemoteClients",
    "RotatedDigits",
    "Scenario",
    "Sent140",
    "Shakespeare",
    "Shard",
    "Shards",
    "Table",
    "TableSchema",
    "TextFile",
    "TextTable",
    "TinyImageNet",
    "TorchDataset",
]
