"""Write a part of CIFAR-10 or CIFAR-100, the first images of each class, as an `.npz` file for the dataset `Arrays`.

With it, the papers' tables can be run with smaller networks on a CPU. `Arrays` scales the images to 0-1.

    python examples/cifar_subset.py FOLDER [--dataset CIFAR10] [--out cifar_subset.npz] [--train 400] [--test 100]
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from torch import Tensor

from fl_lightning.data import CIFAR10, CIFAR100

DATASETS = {"CIFAR10": CIFAR10, "CIFAR100": CIFAR100}


def first_of_each_class(labels: Tensor, count: int) -> Tensor:
    """Return the positions, in ascending order, of the first samples of each class."""
    positions = [torch.nonzero(labels == label).flatten()[:count] for label in labels.unique()]
    return torch.cat(positions).sort().values


def main(data: str, dataset: str = "CIFAR10", out: str = "cifar_subset.npz", train: int = 400, test: int = 100) -> None:
    """Write the file."""
    loaded = DATASETS[dataset](data_dir=data).load()
    arrays = {}
    for split, inputs, labels, count in (
        ("train", loaded.x_train, loaded.y_train, train),
        ("test", loaded.x_test, loaded.y_test, test),
    ):
        chosen = first_of_each_class(labels, count)
        arrays |= {f"x_{split}": inputs[chosen].numpy(), f"y_{split}": labels[chosen].numpy()}
    np.savez(out, **arrays)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="Folder that contains cifar-10-batches-py or cifar-100-python.")
    parser.add_argument("--dataset", choices=DATASETS, default="CIFAR10")
    parser.add_argument("--out", default="cifar_subset.npz")
    parser.add_argument("--train", type=int, default=400, help="Number of training images of each class.")
    parser.add_argument("--test", type=int, default=100, help="Number of test images of each class.")
    main(**vars(parser.parse_args()))
