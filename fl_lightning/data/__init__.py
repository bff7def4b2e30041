"""Datasets, how they are split among clients, and the batches cut from them."""

from fl_lightning.data.datasets import (
    CIFAR10,
    CIFAR100,
    MNIST,
    Arrays,
    Dataset,
    Digits,
    FashionMNIST,
    LoadedData,
)
from fl_lightning.data.partitions import IID, Dirichlet, Partition, Pathological
from fl_lightning.data.scenario import FederatedData, Scenario, Shard

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "IID",
    "MNIST",
    "Arrays",
    "Dataset",
    "Digits",
    "Dirichlet",
    "FashionMNIST",
    "FederatedData",
    "LoadedData",
    "Partition",
    "Pathological",
    "Scenario",
    "Shard",
]
