from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from fl_lightning.core.errors import ConfigError
from fl_lightning.data import (
    IID,
    Arrays,
    ByClient,
    Digits,
    Dirichlet,
    FederatedData,
    ImageTable,
    Scenario,
    Table,
    TextTable,
)
from fl_lightning.data.truncation import truncate_dataset
from fl_lightning.runs.partition import read_counts, write_counts


def scenario(clients: int | None = 6, **options: Any) -> Scenario:
    return Scenario(Digits(), Dirichlet(0.5, min_samples=10), clients, **options)


def samples(data: FederatedData, client: int) -> tuple[list[int], list[int]]:
    """Return the training and the test samples of a client."""
    return data.shard(client).train.tolist(), data.shard(client).test.tolist()


@pytest.mark.parametrize(("wanted", "count"), [(2, 2), (0.2, 1), (0.5, 3), (0.01, 1), (0.7, 4)])
def test_a_number_or_a_rounded_share_of_the_clients_is_held_out(wanted: int | float, count: int) -> None:
    data = scenario(held_out_clients=wanted).build(0)
    assert (len(data.shards), len(data.held_out)) == (6 - count, count)
    assert data.held_out_clients == range(6 - count, 6)


def test_the_partition_is_that_of_all_clients_and_every_client_keeps_its_number() -> None:
    everybody, data = scenario().build(3), scenario(held_out_clients=2).build(3)
    assert sorted(data.client_ids) == list(range(6))
    assert data.client_ids[:4] == sorted(data.client_ids[:4])
    assert [samples(data, k) for k in range(6)] == [samples(everybody, k) for k in data.client_ids]
    assert torch.equal(data.data.x_test, everybody.data.x_test)
    assert data.class_counts().tolist() == everybody.class_counts()[data.client_ids[:4]].tolist()
    assert (
        data.class_counts("test", held_out=True).tolist()
        == everybody.class_counts("test")[data.client_ids[4:]].tolist()
    )


def test_the_draw_depends_on_the_seed_alone() -> None:
    drawn = [tuple(sorted(scenario(held_out_clients=2).build(seed).client_ids[4:])) for seed in range(8)]
    other = Scenario(Digits(), IID(), 6, held_out_clients=2).build(3)
    assert tuple(other.client_ids[4:]) == drawn[3]
    assert len(set(drawn)) > 3


def test_clients_of_the_data_keep_their_names(tmp_path: Path) -> None:
    owners = np.repeat(["ann", "bert", "cleo", "dora"], 10)
    x, y = np.random.default_rng(0).random((40, 3), dtype=np.float32), np.arange(40) % 2
    arrays = {"x_train": x, "y_train": y, "x_test": x, "y_test": y, "client_train": owners, "client_test": owners}
    np.savez(tmp_path / "data.npz", **arrays)
    data = Scenario(Arrays(str(tmp_path / "data.npz")), ByClient(), held_out_clients=0.25).build(1)
    assert sorted(data.client_ids) == ["ann", "bert", "cleo", "dora"]
    new = data.client_ids[3]
    assert samples(data, 3)[0] == np.flatnonzero(owners == new).tolist()
    assert data.names.client(3) == f"client 3 ({new})"


def test_held_out_clients_are_in_partition_csv_under_splits_of_their_own(tmp_path: Path) -> None:
    data = scenario(held_out_clients=2).build(1)
    write_counts(tmp_path / "partition.csv", data)
    for split in ("train", "test"):
        trained, held_out = (read_counts(tmp_path / "partition.csv", f"{part}{split}") for part in ("", "held_out_"))
        assert trained.counts.tolist() == data.class_counts(split).tolist()
        assert held_out.counts.tolist() == data.class_counts(split, held_out=True).tolist()
        assert [*trained.names.clients, *held_out.names.clients] == [str(k) for k in data.client_ids]


def test_settings_are_tuned_without_the_samples_of_held_out_clients() -> None:
    data = scenario(held_out_clients=2, validation_share=0.25).build(0)
    before = scenario(held_out_clients=2).build(0)
    everything, sizes = data.concatenate("test")
    assert torch.equal(data.data.x_test, before.data.x_train[everything])
    for client in range(6):
        assert set(chain(*samples(data, client))) == set(samples(before, client)[0])
    assert sizes.sum() == len(data.data.x_test)


def test_held_out_clients_belong_to_the_digest_and_are_truncated_in_a_dry_run() -> None:
    data, other = (scenario(held_out_clients=2).build(0) for _ in range(2))
    assert data.digest() == other.digest()
    other.held_out = other.held_out[::-1]
    assert [part for part in data.digest() if data.digest()[part] != other.digest()[part]] == ["partition"]
    assert [len(shard.train) for shard in truncate_dataset(data, 5).held_out] == [5, 5]


# --- Statistics of the dataset ---

OWNERS = np.repeat(["ann", "bert", "cleo", "dora"], 15)


def frame(folder: Path) -> pd.DataFrame:
    """Return rows of four clients, each with numbers, categories, words and grey values of its own."""
    own = np.unique(OWNERS, return_inverse=True)[1]
    rng = np.random.default_rng(0)
    names = [f"{row}.png" for row in range(len(own))]
    for name, client in zip(names, own, strict=True):
        Image.fromarray(rng.integers(60 * client, 60 * client + 50, (4, 4), dtype=np.uint8)).save(folder / name)
    return pd.DataFrame(
        {
            "number": rng.normal(own * 10.0),
            "kind": [f"kind {client}" for client in own],
            "text": [f"word{client} again" for client in own],
            "image": names,
            "label": np.tile(["no", "yes", "no"], 20),
            "client": OWNERS,
            "split": np.tile(["train"] * 4 + ["test"], 12),
        }
    )


COLUMNS: dict[str, Any] = {"label": "label", "client": "client", "split": "split"}
DATASETS = {
    "table": lambda path: Table(path, features=["number", "kind"], **COLUMNS),
    "codes": lambda path: Table(path, features=["number", "kind"], encoding="codes", **COLUMNS),
    "texts": lambda path: TextTable(path, length=3, **COLUMNS),
    "images": lambda path: ImageTable(path, image="image", **COLUMNS),
}


@pytest.mark.parametrize("name", DATASETS)
def test_statistics_are_those_of_data_without_the_held_out_clients(tmp_path: Path, name: str) -> None:
    rows = frame(tmp_path)
    rows.to_csv(tmp_path / "all.csv", index=False)
    data = Scenario(DATASETS[name](str(tmp_path / "all.csv")), ByClient(), held_out_clients=1).build(0)
    new = data.client_ids[-1]
    rest = rows[(rows.client != new) | (rows.split == "test")]
    rest.to_csv(tmp_path / "rest.csv", index=False)
    expected = Scenario(DATASETS[name](str(tmp_path / "rest.csv")), ByClient()).build(0)
    assert expected.client_ids == data.client_ids[:-1]
    for part in ("train", "test"):
        mine, theirs = data.concatenate(part)[0], expected.concatenate(part)[0]
        inputs = data.data.prepare(data.data.x_train[mine])
        assert torch.equal(inputs, expected.data.prepare(expected.data.x_train[theirs]))
    assert len(data.shard(3).train) == 12


@pytest.mark.parametrize("options", [{"train_samples": 30}, {"long_tail": 4.0}])
def test_statistics_have_no_sample_of_a_held_out_client_of_the_data(tmp_path: Path, options: dict[str, Any]) -> None:
    rows = frame(tmp_path)
    rows.to_csv(tmp_path / "all.csv", index=False)
    table = Table(str(tmp_path / "all.csv"), features=["number"], **COLUMNS)
    data = Scenario(table, ByClient(), held_out_clients=1, **options).build(0)
    rest = rows.number[(rows.client != data.client_ids[-1]) & (rows.split == "train")]
    (column,) = data.data.schema.columns
    assert (column.mean, column.scale) == pytest.approx((rest.mean(), rest.std(ddof=0)))


def test_samples_that_train_samples_leaves_out_still_count_in_statistics(tmp_path: Path) -> None:
    rows = frame(tmp_path)
    rows.to_csv(tmp_path / "all.csv", index=False)
    table = Table(str(tmp_path / "all.csv"), label="label", features=["number"], split="split")
    options = {"clients": 3, "train_samples": 30, "long_tail": 2.0}
    data = Scenario(table, IID(), held_out_clients=1, **options).build(0)
    raw = Scenario(Table(**vars_of(table), standardize=False), IID(), held_out_clients=1, **options).build(0)
    own = [raw.data.x_train[part].flatten() for part in (raw.shard(2).train, raw.shard(2).test)]
    everything = torch.tensor(rows.number[rows.split == "train"].to_numpy(), dtype=torch.float32)
    fitted = everything[~torch.isin(everything, torch.cat(own))].double()
    assert len(fitted) == 48 - sum(map(len, own)) < 48
    (column,) = data.data.schema.columns
    assert (column.mean, column.scale) == pytest.approx((fitted.mean().item(), fitted.std(correction=0).item()), 1e-5)


def vars_of(table: Table) -> dict[str, Any]:
    return {"path": table.path, "label": "label", "features": ["number"], "split": "split"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"held_out_clients": 6}, "6 of 6 clients"),
        ({"held_out_clients": 0.95}, "0.95 of 6 clients"),
        ({"held_out_clients": 1, "clients": 1}, "1 of 1 clients"),
        ({"held_out_clients": 2, "local_test": 0}, ".* scenario.local_test"),
    ],
)
def test_options_that_leave_nothing_to_train_or_to_test_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^scenario.held_out_clients: {message}"):
        scenario(**options).build(0)
