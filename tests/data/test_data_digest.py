"""The digest of a run's data detects any change, in the changed part and in no other."""

import hashlib
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fl_lightning.data import IID, Digits, Dirichlet, FederatedData, LoadedData, Scenario, Shard
from fl_lightning.data.federated_data import sha256
from fl_lightning.data.transforms import Normalize

PARTS = ["x_train", "y_train", "x_test", "y_test", "partition"]


def tiny() -> FederatedData:
    x, y = torch.arange(24, dtype=torch.uint8).reshape(6, 1, 2, 2), torch.tensor([0, 1, 2, 0, 1, 2])
    data = LoadedData(x, y, x[:2] + 100, y[:2].clone(), 3, Normalize())
    return FederatedData(data, [Shard(torch.tensor([0, 3, 5]), torch.tensor([1])), Shard(torch.tensor([2, 4]), none())])


def none() -> Tensor:
    return torch.tensor([], dtype=torch.int64)


def changed(**parts: object) -> FederatedData:
    data = tiny()
    return replace(data, data=replace(data.data, **parts))


def with_shards(*shares: tuple[list[int], list[int]]) -> FederatedData:
    own = [Shard(torch.tensor(train), torch.tensor(test, dtype=torch.int64)) for train, test in shares]
    return replace(tiny(), shards=own)


def value(part: str, at: int) -> Callable[[], FederatedData]:
    def make() -> FederatedData:
        data = tiny()
        getattr(data.data, part).view(-1)[at] += 1
        return data

    return make


CHANGES = {
    **{f"{part} at {at}": (value(part, at), part) for part in PARTS[:4] for at in (0, -1)},
    "two images swapped": (lambda: changed(x_train=tiny().data.x_train[[1, 0, 2, 3, 4, 5]]), "x_train"),
    "two labels swapped": (lambda: changed(y_train=tiny().data.y_train[[1, 0, 2, 3, 4, 5]]), "y_train"),
    "two test images swapped": (lambda: changed(x_test=tiny().data.x_test.flip(0)), "x_test"),
    "two test labels swapped": (lambda: changed(y_test=tiny().data.y_test.flip(0)), "y_test"),
    "an image less": (lambda: changed(x_train=tiny().data.x_train[:-1]), "x_train"),
    "another dtype": (lambda: changed(x_train=tiny().data.x_train.view(torch.int8)), "x_train"),
    "another dtype of labels": (lambda: changed(y_test=tiny().data.y_test.view(torch.float64)), "y_test"),
    "another shape": (lambda: changed(x_test=tiny().data.x_test.reshape(2, 1, 1, 4)), "x_test"),
    "turned": (lambda: changed(x_train=tiny().data.x_train.transpose(2, 3)), "x_train"),
    "another number of classes": (lambda: changed(num_classes=4), "y_train"),
    "index moved": (lambda: with_shards(([0, 3], [1]), ([2, 4, 5], [])), "partition"),
    "index from training to test": (lambda: with_shards(([0, 3], [5, 1]), ([2, 4], [])), "partition"),
    "index to the next client's front": (lambda: with_shards(([0, 3, 5], []), ([1, 2, 4], [])), "partition"),
    "indices in another order": (lambda: with_shards(([3, 0, 5], [1]), ([2, 4], [])), "partition"),
    "clients swapped": (lambda: with_shards(([2, 4], []), ([0, 3, 5], [1])), "partition"),
    "a client more, with nothing": (lambda: with_shards(([0, 3, 5], [1]), ([2, 4], []), ([], [])), "partition"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_affects_only_the_digest_of_its_part(change: str) -> None:
    make, part = CHANGES[change]
    before, after = tiny().digest(), make().digest()
    assert [name for name in PARTS if before[name] != after[name]] == [part]


def test_the_digests_of_run_folders_stay_valid() -> None:
    """Fingerprints of runs contain these digests. With others, the data of all older runs would count as changed."""
    digest = tiny().digest()
    assert digest == {
        "x_train": "sha256:42c735da6eb6466053429f381af46faf46dc3916be80d628a6ced51ffaf0eaca",
        "y_train": "sha256:4cca7cea24f8174e9a63b4f128b2bcc84b94e50acd10ae30df1727ed27f5a500",
        "x_test": "sha256:3d86f2dd046a24c57ad776d833330d094298217cd7e2903276cc8e105a6b2f13",
        "y_test": "sha256:f67129a9014f8b453ddc274cb5ccac25503fc4d6e710af4358da240e812adbb7",
        "partition": "sha256:922d3357714e0ff078fa5388e4da1251e5a6d4e09b70f2d43b58bf37a28d497d",
    }
    labels = b"torch.int64 ()\n" + struct.pack("<q", 3) + b"torch.int64 (6,)\n" + struct.pack("<6q", 0, 1, 2, 0, 1, 2)
    assert digest["y_train"] == f"sha256:{hashlib.sha256(labels).hexdigest()}"
    shares = ([0, 3, 5], [1], [2, 4], [])
    held = (f"torch.int64 ({len(own)},)\n".encode() + struct.pack(f"<{len(own)}q", *own) for own in shares)
    assert digest["partition"] == f"sha256:{hashlib.sha256(b''.join(held)).hexdigest()}"


def test_the_memory_layout_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    turned_back = changed(x_train=tiny().data.x_train.transpose(2, 3).contiguous().transpose(2, 3))
    assert not turned_back.data.x_train.is_contiguous()
    assert turned_back.digest() == tiny().digest()
    monkeypatch.setattr("fl_lightning.data.federated_data.HASHED", 9)  # pieces of two images, and single labels
    assert turned_back.digest() == tiny().digest()


@pytest.mark.thorough
def test_one_seed_has_one_digest_in_every_process_and_another_seed_changes_the_partition_alone() -> None:
    digest = Scenario(Digits(), Dirichlet(0.5), clients=4).build(1).digest()
    code = (
        "from fl_lightning.data import *; import json;"
        "print(json.dumps(Scenario(Digits(), Dirichlet(0.5), clients=4).build(1).digest()))"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == str(digest).replace("'", '"')
    other = Scenario(Digits(), Dirichlet(0.5), clients=4).build(2).digest()
    assert [name for name in PARTS if digest[name] != other[name]] == ["partition"]


def test_official_test_data_in_the_training_table_counts_there_too() -> None:
    official = Scenario(Digits(), IID(), clients=3, local_test="official").build(0).digest()
    own = Scenario(Digits(), IID(), clients=3).build(0).digest()
    assert [name for name in PARTS if official[name] != own[name]] == ["x_train", "y_train", "partition"]


def test_one_value_may_be_laid_out_with_any_stride():
    assert sha256([torch.tensor([5]).as_strided((1,), (0,))]) == sha256([torch.tensor([5])])
