import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fl_lightning.core.seeding import Stream, generator
from fl_lightning.data import (
    IID,
    Dataset,
    Dirichlet,
    FederatedData,
    LoadedData,
    Partition,
    Pathological,
    Scenario,
    Shard,
)
from fl_lightning.data.assignment import indices_by_class
from fl_lightning.data.federated_data import PackedShards
from fl_lightning.data.transforms import Normalize

seeds = st.integers(0, 2**32)


def loaded(labels: Any, num_classes: int) -> LoadedData:
    y = torch.as_tensor(labels)
    return LoadedData(torch.zeros(len(y), 1), y, torch.zeros(1, 1), y[:1], num_classes, Normalize())


@dataclass
class Labels(Dataset):
    """Labels without inputs."""

    labels: np.ndarray
    num_classes: int = 5

    def load(self) -> LoadedData:
        return loaded(self.labels, self.num_classes)


@dataclass
class FixedPartition(Partition):
    """Returns given parts."""

    parts: list[np.ndarray]

    def split(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        return self.parts[:clients]


LABELS = np.random.default_rng(0).integers(0, 5, 400)


def lists(shards: Sequence[Shard]) -> list[tuple[list[int], list[int]]]:
    return [(shard.train.tolist(), shard.test.tolist()) for shard in shards]


@given(
    partition=st.sampled_from([IID(), Dirichlet(0.5), Pathological(2)]),
    clients=st.integers(1, 8),
    local_test=st.floats(0, 0.999),
    seed=seeds,
)
def test_training_and_test_samples_of_a_client_together_are_its_part(
    partition: Partition, clients: int, local_test: float, seed: int
) -> None:
    data = Scenario(Labels(LABELS), partition, clients, local_test).build(seed)
    parts = partition.split(LABELS, clients, generator(seed, Stream.PARTITION))
    assert len(data.shards) == clients
    for shard, part in zip(data.shards, parts, strict=True):
        assert shard.train.dtype == shard.test.dtype == torch.int64
        assert sorted([*shard.train.tolist(), *shard.test.tolist()]) == part.tolist()
        assert len(shard.test) == min(round(local_test * len(part)), len(part) - 1)


def test_the_split_depends_on_the_seed() -> None:
    scenario = Scenario(Labels(LABELS), Dirichlet(0.5), 4)
    assert lists(scenario.build(3).shards) == lists(scenario.build(3).shards) != lists(scenario.build(4).shards)


def test_a_clients_local_split_does_not_depend_on_the_other_clients() -> None:
    parts = [np.arange(k, 400, 4) for k in range(4)]
    two, four = (Scenario(Labels(LABELS), FixedPartition(parts), clients).build(0).shards for clients in (2, 4))
    assert lists(two) == lists(four[:2])


def test_clients_with_the_same_labels_split_differently() -> None:
    parts = [np.arange(100), np.arange(100, 200)]
    first, second = Scenario(Labels(np.zeros(200, int)), FixedPartition(parts), 2).build(0).shards
    assert first.test.tolist() != (second.test - 100).tolist()


def test_a_quarter_is_held_out_by_default() -> None:
    data = Scenario(Labels(LABELS), IID()).build(0)
    assert [(len(shard.train), len(shard.test)) for shard in data.shards] == [(30, 10)] * 10


def test_class_counts_equal_those_of_a_plain_loop() -> None:
    data = Scenario(Labels(LABELS, num_classes=7), Dirichlet(0.3), 6).build(1)
    for part in ("train", "test"):
        expected = [[0] * 7 for _ in range(6)]
        for client, shard in enumerate(data.shards):
            for index in getattr(shard, part):
                expected[client][LABELS[index]] += 1
        assert data.class_counts(part).tolist() == expected
    assert data.class_counts().tolist() == data.class_counts("train").tolist()


def test_a_client_without_test_samples_counts_as_zeros() -> None:
    shard = Shard(torch.tensor([0, 2]), torch.tensor([], dtype=torch.int64))
    assert FederatedData(loaded([1, 0, 1], 2), [shard]).class_counts("test").tolist() == [[0, 0]]


# --- Stable splits ---


@given(st.lists(st.integers(-2, 6), min_size=1, max_size=40))
def test_samples_are_grouped_by_class_in_ascending_order(labels: list[int]) -> None:
    expected = [[i for i, label in enumerate(labels) if label == j] for j in sorted(set(labels))]
    assert [rows.tolist() for rows in indices_by_class(np.array(labels))] == expected


# Digests of the splits of earlier versions: a change would change published results.
LOCAL_SPLITS: dict[float | None, str] = {
    None: "12741cb98d9a",
    0: "81a061521701",
    0.04: "3e2a55e61e52",
    0.5: "05432cb00f2c",
    0.99: "c0ba9d8c809b",
}


@pytest.mark.parametrize("share", LOCAL_SPLITS)
def test_a_seed_gives_the_same_split_as_in_earlier_versions(share: float | None) -> None:
    labels = np.arange(300) * 7 % 5
    data = Scenario(Labels(labels), Dirichlet(0.3, min_samples=1), 25, local_test=share).build(2**40)
    assert data.digest()["partition"].startswith(f"sha256:{LOCAL_SPLITS[share]}")


def test_shards_do_not_share_memory_with_the_partition() -> None:
    shared = np.arange(6)

    class Views(Partition):
        def split(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
            shared.flags.writeable = False
            return [shared[::2], shared[1::2]]

    data = Scenario(Labels(np.zeros(6, int)), Views(), 2, local_test=0.0).build(0)
    data.shards[0].train[0] = 5
    assert [shard.train.tolist() for shard in data.shards] == [[5, 2, 4], [1, 3, 5]]
    assert shared.tolist() == list(range(6))


def test_packed_shards_can_be_used_like_a_list() -> None:
    parts = [np.array([4, 1]), np.array([0, 2, 3]), np.array([5])]
    tests = [np.array([7]), np.array([], np.int64), np.array([6, 8])]
    plain = [(train.tolist(), test.tolist()) for train, test in zip(parts, tests, strict=True)]
    packed = PackedShards(parts, tests)
    assert lists(packed) == lists([packed[0], packed[1], packed[-1]]) == plain
    assert lists(packed[1:]) == plain[1:]
    assert lists(packed[::-2]) == plain[::-2]
    assert len(packed) == 3
    with pytest.raises(IndexError):
        packed[3]


def test_packed_shards_take_less_than_twice_their_indices() -> None:
    data = Scenario(Labels(np.zeros(20_000, int)), IID(), 2_000, local_test=0.25).build(0)
    assert len(pickle.dumps(data.shards)) < 2 * 8 * 20_000
