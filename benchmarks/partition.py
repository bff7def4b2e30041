"""Measure how long each partition takes to split 1,000,000 samples over 1,000 clients, with 10 and 100 classes.

Run it with `python benchmarks/partition.py`.
"""

import time

import numpy as np

from fl_lightning.data import IID, Dirichlet, DisjointClasses, Partition, Pathological, QuantitySkew, Shards

CLIENTS, SAMPLES = 1000, 1_000_000

PARTITIONS: dict[str, Partition] = {
    "IID": IID(),
    "Dirichlet class 0.5": Dirichlet(0.5),
    "Dirichlet balanced 0.1": Dirichlet(0.1, form="balanced"),
    "Dirichlet groups 0.2": Dirichlet(0.2, form="groups"),
    "Pathological 2": Pathological(2),
    "Shards 2": Shards(2),
    "QuantitySkew 2": QuantitySkew(2.0),
    "DisjointClasses 2": DisjointClasses(2),
}


def main() -> None:
    print(f"{CLIENTS:,} clients, {SAMPLES:,} samples; seconds")
    print(f"{'partition':<24}{'10 classes':>12}{'100 classes':>12}")
    for name, partition in PARTITIONS.items():
        print(f"{name:<24}" + "".join(f"{seconds(partition, classes):>12.2f}" for classes in (10, 100)))


def seconds(partition: Partition, classes: int) -> float:
    labels = np.random.default_rng(0).integers(classes, size=SAMPLES)
    started = time.perf_counter()
    partition.split(labels, CLIENTS, np.random.default_rng(1))
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
