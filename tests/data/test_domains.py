"""Domains: the law of the partition against plain loops, the left-out domain, and folders of domains."""

from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import rows, run_page
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import STYLES, write_domains
from refusals import refusal

from fl_lightning.data import (
    ByClient,
    Dataset,
    Digits,
    DomainFolder,
    Domains,
    FederatedData,
    LoadedData,
    RotatedDigits,
    Scenario,
)
from fl_lightning.data.domains import listed_images, mixed_counts, spread_clients
from fl_lightning.data.files import BadFile
from fl_lightning.data.transforms import Normalize


@dataclass
class Styles(Dataset):
    """Samples whose input is their number, and their domains. Test samples are numbered after training samples."""

    train: tuple[int, ...] = (60, 40, 23)
    test: tuple[int, ...] = (12, 9, 7)
    tells_test: bool = True

    def load(self) -> LoadedData:
        n, m = sum(self.train), sum(self.test)
        x = torch.arange(n + m).float()[:, None]
        y = x[:, 0].long() % 2
        domains = [np.random.default_rng(0).permutation(np.repeat(STYLES, sizes)) for sizes in (self.train, self.test)]
        fields = {"client_train": domains[0], "client_test": domains[1] if self.tells_test else None}
        return LoadedData(x[:n], y[:n], x[n:], y[n:], 2, Normalize(), **fields)


def numbers_of(data: FederatedData, part: str) -> list[list[int]]:
    """Return the numbers of each client's `train` or `test` samples."""
    return [data.data.x_train[getattr(shard, part)][:, 0].long().tolist() for shard in data.shards]


def domain_of_each(data: LoadedData) -> np.ndarray:
    return np.concatenate([data.client_train, data.client_test])


PAGE = (Path(__file__).parents[2] / "docs" / "domains.md").read_text()


# --- The law ---


@given(
    domains=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 4)), min_size=1, max_size=5),
    mixing=st.floats(0, 1),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_client_gets_the_share_of_the_law_up_to_rounding(
    domains: list[tuple[int, int]], mixing: float, seed: int
) -> None:
    sizes, clients = map(np.array, zip(*domains, strict=True))
    counts = mixed_counts(sizes, clients, mixing, np.random.default_rng(seed))
    assert counts.sum(axis=0).tolist() == sizes.tolist()
    k = 0
    for home, own in enumerate(clients):
        for _ in range(own):
            for d, size in enumerate(sizes):
                share = mixing * size / clients.sum() + (1 - mixing) * size / own * (d == home)
                assert abs(counts[k, d] - share) < (2.5 if d == home else 1.5)
            k += 1
    assert k == len(counts)


def test_without_mixing_each_client_has_one_domain_and_with_full_mixing_all_have_the_same() -> None:
    sizes, clients = np.array([60, 30, 10]), np.array([2, 1, 2])
    apart, mixed = (mixed_counts(sizes, clients, mixing, np.random.default_rng(0)) for mixing in (0.0, 1.0))
    assert apart.tolist() == [[30, 0, 0], [30, 0, 0], [0, 30, 0], [0, 0, 5], [0, 0, 5]]
    assert mixed.tolist() == [[12, 6, 2]] * 5


def test_the_rounding_favours_no_client() -> None:
    drawn = [mixed_counts(np.array([7]), np.array([3]), 0.0, np.random.default_rng(seed)) for seed in range(30)]
    assert {tuple(counts[:, 0].tolist()) for counts in drawn} == {(3, 2, 2), (2, 3, 2), (2, 2, 3)}


@given(sizes=st.lists(st.integers(1, 500), min_size=1, max_size=6), more=st.integers(0, 12))
def test_each_further_client_goes_to_the_domain_with_most_samples_per_client(sizes: list[int], more: int) -> None:
    expected = [1] * len(sizes)
    for _ in range(more):
        shares = [size / count for size, count in zip(sizes, expected, strict=True)]
        expected[shares.index(max(shares))] += 1
    assert spread_clients(np.array(sizes), len(sizes) + more).tolist() == expected


# --- The partition ---


@given(mixing=st.sampled_from([0.0, 0.3, 1.0]), leave_out=st.sampled_from([None, *STYLES]), seed=st.integers(0, 2**31))
@settings(max_examples=20)
def test_every_sample_is_used_once_and_no_client_has_one_of_the_domain_left_out(
    mixing: float, leave_out: str | None, seed: int
) -> None:
    partition = Domains({style: 2 for style in STYLES if style != leave_out}, mixing, leave_out)
    loaded, data = Styles().load(), Scenario(Styles(), partition).build(seed)
    of_clients = [*chain(*numbers_of(data, "train"), *numbers_of(data, "test"))]
    whole = data.data.x_test[:, 0].long().tolist()
    everything = list(range(len(domain_of_each(loaded))))
    if leave_out is None:
        assert sorted(of_clients) == everything
        assert whole == loaded.x_test[:, 0].long().tolist()
        return
    assert sorted(of_clients + whole) == everything
    domains = domain_of_each(loaded)
    assert set(domains[whole]) == {leave_out}
    assert leave_out not in set(domains[of_clients])
    assert torch.equal(data.data.y_test, data.data.x_test[:, 0].long() % 2)  # labels stay with their samples
    assert torch.equal(data.data.y_train, data.data.x_train[:, 0].long() % 2)


def test_a_client_without_mixing_trains_and_is_tested_on_the_domain_of_its_name() -> None:
    loaded = Styles().load()
    data = Scenario(Styles(), Domains(2, leave_out="photo")).build(4)
    assert data.client_ids == ["art/0", "art/1", "sketch/0", "sketch/1"]
    assert data.names.clients == data.client_ids
    for name, train, test in zip(data.client_ids, numbers_of(data, "train"), numbers_of(data, "test"), strict=True):
        assert set(domain_of_each(loaded)[train + test]) == {name.split("/")[0]}
        assert max(train) < len(loaded.y_train) <= min(test)  # the data's own test samples


def test_the_split_depends_on_the_seed_only() -> None:
    def split(seed: int, **options: Any) -> list[list[int]]:
        return numbers_of(Scenario(Styles(), Domains(2, 0.5, "art"), **options).build(seed), "train")

    assert split(1) == split(1)
    assert split(1) != split(2)


def test_the_number_of_clients_follows_from_the_config_or_from_the_sizes() -> None:
    assert Scenario(Styles(), Domains()).build(0).client_ids == ["art/0", "photo/0", "sketch/0"]
    named = Scenario(Styles(), Domains({"art": 1, "photo": 1, "sketch": 3})).build(0).client_ids
    assert [name.split("/")[0] for name in named] == ["art", "photo", *["sketch"] * 3]
    by_size = Scenario(Styles(), Domains(), clients=5).build(0).client_ids
    assert [name.split("/")[0] for name in by_size] == ["art", "art", "photo", "photo", "sketch"]
    assert len(Scenario(Styles(), Domains(2), clients=6).build(0).shards) == 6
    numbers: dict[Any, int] = {0: 1, 45: 2}  # as YAML reads the names of the domains
    rotated = Scenario(RotatedDigits(angles=(0, 45)), Domains(numbers)).build(0).client_ids
    assert rotated == ["0/0", "45/0", "45/1"]


def test_data_whose_test_samples_have_no_domain_are_tested_on_a_share_of_each_client() -> None:
    data = Scenario(Styles(tells_test=False), Domains()).build(0)
    assert [len(shard.test) for shard in data.shards] == [15, 10, 6]
    assert len(data.data.y_test) == 28
    key = "scenario.partition: Domains: leave_out"
    assert refusal(lambda: Scenario(Styles(tells_test=False), Domains(leave_out="art")).build(0)).startswith(key)


def test_other_options_of_the_scenario_keep_the_domain_left_out() -> None:
    loaded = Styles().load()
    for options in ({"local_test": 0.2}, {"held_out_clients": 1}, {"train_samples": 60}, {"validation_share": 0.2}):
        data = Scenario(Styles(), Domains(2, leave_out="sketch"), **options).build(3)
        held = [*data.shards, *data.held_out]
        rows = torch.cat([part for shard in held for part in (shard.train, shard.test)])
        of_clients = data.data.x_train[rows][:, 0].long().tolist()
        assert "sketch" not in set(domain_of_each(loaded)[of_clients])
        whole = set(domain_of_each(loaded)[data.data.x_test[:, 0].long().tolist()])
        # a validation set consists of training samples of the clients
        assert whole == ({"art", "photo"} if "validation_share" in options else {"sketch"})
        assert bool(data.held_out) == ("held_out_clients" in options)
    tested = Scenario(Styles(), Domains(2, leave_out="sketch"), validation_share=0.2).build(3, test_set=True)
    assert set(domain_of_each(loaded)[tested.data.x_test[:, 0].long().tolist()]) == {"sketch"}


@pytest.mark.parametrize(
    ("partition", "options", "key"),
    [
        (Domains(leave_out="cartoon"), {}, "scenario.partition.leave_out"),
        (Domains({"art": 1, "photo": 1}), {}, "scenario.partition.clients_per_domain"),
        (Domains({"art": 1, "photo": 1, "sketch": 1, "cartoon": 1}), {}, "scenario.partition.clients_per_domain"),
        (Domains({"art": 1, "photo": 1, "sketch": 1}, 0.0, "art"), {}, "scenario.partition.clients_per_domain"),
        (Domains(2), {"clients": 5}, "scenario.clients"),
        (Domains(), {"clients": 2}, "scenario.clients"),
        (Domains(leave_out="art"), {"local_test": "official"}, "scenario.local_test"),
        (Domains(40), {}, "scenario.partition"),
    ],
)
def test_options_that_do_not_fit_the_data_are_refused_by_their_key(
    partition: Domains, options: dict[str, Any], key: str
) -> None:
    assert refusal(lambda: Scenario(Styles(), partition, **options).build(0)).startswith(f"{key}:")


@pytest.mark.parametrize(
    ("options", "key"),
    [({"clients_per_domain": 0}, "clients_per_domain"), ({"clients_per_domain": {"a": 0}}, "clients_per_domain")]
    + [({"mixing": value}, "mixing") for value in (-0.1, 1.1, float("nan"))],
)
def test_numbers_out_of_range_are_refused(options: dict[str, Any], key: str) -> None:
    assert refusal(lambda: Domains(**options)).startswith(f"scenario.partition.{key}:")


def test_data_without_domains_or_with_one_are_refused() -> None:
    assert refusal(lambda: Scenario(Digits(), Domains()).build(0)).startswith("scenario.partition: Domains:")
    one = RotatedDigits(angles=(30,))
    assert refusal(lambda: Scenario(one, Domains(leave_out=30)).build(0)).startswith("scenario.partition.leave_out:")


# --- RotatedDigits ---


def test_each_domain_of_the_rotated_digits_has_its_angle_and_an_equal_share_of_each_class() -> None:
    plain, data = Digits().load(), RotatedDigits(angles=(0, 90, 180)).load()
    for split in ("train", "test"):
        x, y, angles = (getattr(data, f"{name}_{split}") for name in ("x", "y", "client"))
        upright = getattr(plain, f"x_{split}")
        assert torch.equal(y, getattr(plain, f"y_{split}"))
        for i, angle in enumerate(angles):
            assert torch.equal(x[i], torch.rot90(upright[i], int(angle) // 90, dims=(1, 2)))
        counts = [np.bincount(y.numpy()[angles == angle], minlength=10) for angle in (0, 90, 180)]
        assert np.ptp(counts, axis=0).max() <= 1


def test_angles_between_right_angles_are_rounded_to_the_levels_of_the_digits() -> None:
    data = RotatedDigits().load()
    assert set(np.unique(data.client_train)) == {0, 15, 30, 45, 60, 75}
    levels = 16 * data.x_train
    assert torch.equal(levels, levels.round())
    assert levels.min() == 0
    assert levels.max() == 16


@pytest.mark.parametrize("angles", [(), (1, 1), (0, 360), tuple(range(27))])
def test_angles_that_are_no_different_domains_are_refused(angles: tuple[int, ...]) -> None:
    assert refusal(lambda: RotatedDigits(angles=angles)).startswith("scenario.dataset.angles:")


def test_the_most_angles_leave_a_test_image_of_each_class_in_each_domain() -> None:
    data = RotatedDigits(angles=tuple(range(26))).load()
    pairs = set(zip(data.client_test.tolist(), data.y_test.tolist(), strict=True))
    assert len(pairs) == 260


# --- Folders ---


def write_lists(root: Path, n: int = 10) -> None:
    """Write DomainNet's lists: every fifth image is a test image, and the last is in no list."""
    for domain in STYLES:
        for split, chosen in (("train", lambda i: i % 5), ("test", lambda i: i % 5 == 0)):
            names = [f"{domain}/{('cat', 'dog')[i % 2]}/{i:02}.png {i % 2}" for i in range(n - 1) if chosen(i)]
            (root / f"{domain}_{split}.txt").write_text("\n".join(names) + "\n")


def values_of(images: torch.Tensor) -> list[int]:
    return images[:, 0, 0, 0].tolist()


def test_a_folder_of_domains_is_read_with_the_domain_of_each_image(tmp_path: Path) -> None:
    write_domains(tmp_path)
    (tmp_path / "imagelist.txt").write_text("ignored")
    data = DomainFolder(str(tmp_path)).checked()
    assert data.class_names == ["cat", "dog"]
    for split in ("train", "test"):
        values = values_of(getattr(data, f"x_{split}"))
        assert [value % 2 for value in values] == getattr(data, f"y_{split}").tolist()
        assert [STYLES[value // 20] for value in values] == getattr(data, f"client_{split}").tolist()
    assert np.unique(data.client_test, return_counts=True)[1].tolist() == [2, 2, 2]  # a fifth of each domain
    some = DomainFolder(str(tmp_path), domains=["sketch", "art"]).checked()
    assert set(some.client_train) == {"art", "sketch"}


def test_lists_name_the_training_and_the_test_images(tmp_path: Path) -> None:
    write_domains(tmp_path)
    write_lists(tmp_path)
    data = DomainFolder(str(tmp_path)).checked()
    for d in range(3):
        for split, expected in (("train", [1, 2, 3, 4, 6, 7, 8]), ("test", [0, 5])):
            values = values_of(getattr(data, f"x_{split}"))
            assert sorted(value % 20 for value in values if value // 20 == d) == expected


@pytest.mark.parametrize("held_out", [None, 1])
def test_the_mean_of_the_images_is_that_of_the_clients_that_train(tmp_path: Path, held_out: int | None) -> None:
    write_domains(tmp_path)
    partition = Domains(2, leave_out="sketch")
    data = Scenario(DomainFolder(str(tmp_path)), partition, held_out_clients=held_out).build(0)
    train = torch.cat([data.data.x_train[shard.train] for shard in data.shards]).double()
    prepare = data.data.prepare
    assert float(prepare.mean) == pytest.approx(float(train.mean()) / 255, rel=1e-6)
    assert float(prepare.std) == pytest.approx(float(train.std(correction=0)) / 255, rel=1e-6)
    fixed = DomainFolder(str(tmp_path), mean=[0.5], std=[0.2])
    assert not fixed.has_statistics  # so the images are read once


def damage(root: Path, how: str) -> dict[str, Any]:
    """Damage a folder of domains, and return the options of the dataset."""
    if how == "no such domain":
        return {"domains": ["art", "clipart"]}
    if how == "no domains":
        return {"path": str(root / "art")}
    if how == "one list":
        (root / "art_train.txt").write_text("art/cat/00.png 0\n")
    if how == "both lists":
        write_lists(root)
        (root / "art_test.txt").write_text((root / "art_train.txt").read_text())
    if how in ("short line", "other folder", "no file"):
        write_lists(root)
        line = {"short line": "cat/00.png 0", "other folder": "../cat/00.png 0", "no file": "art/cat/77.png 0"}[how]
        (root / "art_train.txt").write_text(f"art/dog/01.png 1\n{line}\n")
    return {}


@pytest.mark.parametrize(
    ("how", "key"),
    [
        ("no such domain", "domains"),
        ("no domains", "path"),
        ("one list", "path"),
        ("both lists", "path"),
        ("short line", "path"),
        ("other folder", "path"),
        ("no file", "path"),
    ],
)
def test_bad_folders_are_refused_by_their_key(how: str, key: str, tmp_path: Path) -> None:
    write_domains(tmp_path)
    options = {"path": str(tmp_path)} | damage(tmp_path, how)
    assert refusal(lambda: DomainFolder(**options).checked()).startswith(f"scenario.dataset.{key}:")


def test_a_name_in_a_list_may_contain_spaces_and_need_no_number(tmp_path: Path) -> None:
    path = tmp_path / "art_train.txt"
    path.write_bytes(b"\xef\xbb\xbfart/big cat/a 1.png\t3\r\n\r\nart/dog/b.png\r\n")
    assert [str(image.relative_to(tmp_path)) for image in listed_images(tmp_path, path)] == [
        "art/big cat/a 1.png",
        "art/dog/b.png",
    ]
    path.write_text("art/cat\n")
    with pytest.raises(BadFile, match="line 1"):
        listed_images(tmp_path, path)


def test_domains_can_also_be_clients(tmp_path: Path) -> None:
    write_domains(tmp_path)
    assert Scenario(DomainFolder(str(tmp_path)), ByClient()).build(0).client_ids == list(STYLES)


# --- docs/domains.md ---


@pytest.mark.thorough
def test_the_snippets_of_the_page_run_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The comparison of methods leaves out one domain, with one round and one seed."""
    monkeypatch.chdir(tmp_path)

    def reduced(block: str) -> str:
        one_domain = block.replace("\\\n", "").replace("0,15,30,45,60,75", "75")
        return one_domain.replace("--evaluation.every 10", "--rounds 1").replace("--seeds 0 1 2", "--seeds 0")

    *_, last = run_page(PAGE, reduced)
    assert float(rows(Path("runs/rotated"))[-1]["global/acc"]) > 0.3
    assert {"15", "30"} < {line.split()[0] for line in capsys.readouterr().out.splitlines() if line.split()}
    assert "FedBN" in last.out
