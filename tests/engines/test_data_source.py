"""A run's dataset that another machine loads from its own files."""

import numpy as np
import pytest
import torch

from fl_lightning.core.errors import ConfigError
from fl_lightning.data import CIFAR10, IID, Arrays, ByClient, Digits, PredefinedSplit, Scenario, Table
from fl_lightning.engines.data_source import DatasetParts, DataSource, in_folder, matching_parts
from fl_lightning.engines.serialization import SerializedValue, deserialize


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    sizes = {"train": 40, "test": 10}
    inputs = {f"x_{part}": rng.normal(size=(n, 3)).astype(np.float32) for part, n in sizes.items()}
    return inputs | {f"y_{part}": rng.integers(0, 2, n) for part, n in sizes.items()}


def scenario_in(folder, arrays) -> Scenario:
    folder.mkdir()
    np.savez(folder / "own.npz", **arrays)
    return Scenario(Arrays(str(folder / "own.npz")), IID(), 2)


def test_another_machine_finds_the_same_values_in_its_own_folder(tmp_path, arrays, monkeypatch):
    source = DataSource(scenario_in(tmp_path / "here", arrays), seed=1)
    scenario_in(tmp_path / "there", arrays)
    monkeypatch.setenv("STAGED", str(tmp_path / "there"))
    (tmp_path / "here" / "own.npz").rename(tmp_path / "here" / "gone.npz")
    parts = DatasetParts(DataSource(Scenario(Arrays(str(tmp_path / "there" / "own.npz")), IID(), 2), 1).load("$STAGED"))
    found = matching_parts(source, "$STAGED", parts.digests)
    assert all(torch.equal(one, other) for one, other in zip(found, parts.values, strict=True))


def test_a_part_with_other_values_is_left_out(tmp_path, arrays):
    here = scenario_in(tmp_path / "here", arrays)
    scenario_in(tmp_path / "there", arrays | {"y_train": 1 - arrays["y_train"]})
    parts = DatasetParts(here.build(1))
    found = matching_parts(DataSource(here, 1), str(tmp_path / "there"), parts.digests)
    assert [value is None for value in found] == [False, True, False, False]


def test_a_serialized_value_refers_to_the_parts(tmp_path, arrays):
    data = scenario_in(tmp_path / "here", arrays).build(1)
    parts = DatasetParts(data)
    serialized = SerializedValue(data, parts).parts
    assert sum(map(len, serialized)) < sum(map(len, SerializedValue(data).parts)) - arrays["x_train"].nbytes
    read = deserialize(serialized, lambda block: parts.values)
    assert read.digest() == data.digest()
    assert read.data.x_train is data.data.x_train


def test_files_keep_their_names_in_another_folder():
    table = in_folder(Table("old/a.csv", label="y", test_path="old/b.csv"), "new")
    assert (table.path, table.test_path) == ("new/a.csv", "new/b.csv")
    assert in_folder(CIFAR10("old"), "new").data_dir == "new"
    assert in_folder(PredefinedSplit("old/split.json"), "new").path == "new/split.json"
    assert vars(in_folder(ByClient(), "new")) == vars(ByClient())


def test_a_dataset_without_files_is_refused():
    with pytest.raises(ConfigError, match=r"^engine.data_dir: Digits"):
        DataSource(Scenario(Digits(), IID(), 2), 1).check()
    DataSource(Scenario(CIFAR10(), IID(), 2), 1).check()
