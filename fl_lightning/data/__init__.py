"""Datasets, how they are split among clients, and the batches cut from them."""

from fl_lightning.data.arrays import Arrays
from fl_lightning.data.datasets import Dataset, LoadedData
from fl_lightning.data.few_shot import FC100, FewShot
from fl_lightning.data.hugging_face import HuggingFace
from fl_lightning.data.images import (
    CIFAR10,
    CIFAR100,
    EMNIST,
    MNIST,
    SVHN,
    Digits,
    FashionMNIST,
    PathMNIST,
    TinyImageNet,
)
from fl_lightning.data.partitions import (
    IID,
    Dirichlet,
    DisjointClasses,
    Partition,
    Pathological,
    QuantitySkew,
    Shards,
)
from fl_lightning.data.pictures import ImageFolder
from fl_lightning.data.scenario import FederatedData, Scenario, Shard
from fl_lightning.data.tables import Table, TextTable
from fl_lightning.data.text import IMDB, AGNews
from fl_lightning.data.torch_dataset import TorchDataset

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "EMNIST",
    "FC100",
    "IID",
    "IMDB",
    "MNIST",
    "SVHN",
    "AGNews",
    "Arrays",
    "Dataset",
    "Digits",
    "Dirichlet",
    "DisjointClasses",
    "FashionMNIST",
    "FederatedData",
    "FewShot",
    "HuggingFace",
    "ImageFolder",
    "LoadedData",
    "Partition",
    "PathMNIST",
    "Pathological",
    "QuantitySkew",
    "Scenario",
    "Shard",
    "Shards",
    "Table",
    "TextTable",
    "TinyImageNet",
    "TorchDataset",
]
