"""The shipped FedAvg config of each data set, run small on files in the data set's own layout."""

import csv
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from jsonargparse import ArgumentParser
from layouts import (
    write_ag_news,
    write_arrays,
    write_cifar,
    write_emnist,
    write_imdb_folder,
    write_mnist,
    write_pathmnist,
    write_svhn,
    write_tiny_imagenet,
)
from torch import nn

from fl_lightning import data
from fl_lightning.catalogue import things
from fl_lightning.cli import config_path, main
from fl_lightning.models import ModelFactory


def lay_out(config: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writers = {
        "agnews": partial(write_ag_news, root),
        "arrays": partial(write_arrays, root / "arrays.npz"),
        "cifar10": partial(write_cifar, root, 10, monkeypatch, (60, 20)),
        "cifar10lt": partial(write_cifar, root, 10, monkeypatch, (1000, 20)),
        "cifar100": partial(write_cifar, root, 100, monkeypatch, (200, 20)),
        "emnist": partial(write_emnist, root, "bymerge"),
        "fc100": partial(write_cifar, root, 100, monkeypatch, (300, 100)),
        "fashionmnist": partial(write_mnist, root, "FashionMNIST"),
        "imdb": partial(write_imdb_folder, root),
        "mnist": partial(write_mnist, root),
        "pathmnist": partial(write_pathmnist, root),
        "svhn": partial(write_svhn, root, monkeypatch),
        "tinyimagenet": partial(write_tiny_imagenet, root, classes=4, n=(4, 1)),
    }
    writers[config]()


CONFIGS = {
    "agnews": "AGNews",
    "arrays": "Arrays",
    "cifar10": "CIFAR10",
    "cifar100": "CIFAR100",
    "cifar10lt": "CIFAR10",
    "emnist": "EMNIST",
    "fashionmnist": "FashionMNIST",
    "fc100": "FC100",
    "imdb": "IMDB",
    "mnist": "MNIST",
    "pathmnist": "PathMNIST",
    "svhn": "SVHN",
    "tinyimagenet": "TinyImageNet",
}
SMALL = [
    "--rounds=1",
    "--batch_size=4",
    "--scenario.clients=3",
    "--trainer.max_steps=1",
    "--trainer.accelerator=cpu",
    "--trainer.precision=32-true",
    "--logger=null",
]


def read(config: str) -> dict:
    return yaml.safe_load(Path(config_path(f"{config}_fedavg.yaml")).read_text())


@pytest.mark.parametrize("config", CONFIGS)
def test_a_config_runs_at_reduced_size(config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    lay_out(config, tmp_path, monkeypatch)
    source = f"path={tmp_path / 'arrays.npz'}" if config == "arrays" else f"data_dir={tmp_path}"
    small = [*SMALL, f"--scenario.dataset.{source}", f"--run_dir={tmp_path / 'run'}"]
    shape = read(config)
    if shape["scenario"]["partition"]["class_path"] == "Dirichlet":
        small.append("--scenario.partition.min_samples=1")
    if config == "tinyimagenet":
        small.append("--model=ResNet18")  # a ResNet-50 takes its time without a GPU
    if config == "fc100":
        small += [f"--scenario.dataset.few_shot.{name}=1" for name in ("shots", "queries")]
    if "clients_per_round" in shape:
        small.append("--clients_per_round=2")
    assert main(["fit", "--config", f"{config}_fedavg.yaml", *small]) == 0, capsys.readouterr().err
    with (tmp_path / "run" / "metrics.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert 0 <= float(row["global/acc"]) <= 1
    assert ("client/acc_mean" in row) == (shape["scenario"]["local_test"] != 0)


@pytest.mark.parametrize(("config", "dataset"), CONFIGS.items())
def test_a_config_is_of_its_dataset_in_mixed_precision_where_there_is_a_gpu(config: str, dataset: str) -> None:
    given = read(config)
    named = given["scenario"]["dataset"]
    assert (named if isinstance(named, str) else named["class_path"]) == dataset
    assert given["trainer"]["precision"] == "bf16-mixed"
    assert given["trainer"]["accelerator"] == "auto"
    method = given["algorithm"]
    assert (method if isinstance(method, str) else method["class_path"]) == "FedAvg"


def test_every_dataset_has_a_config() -> None:
    assert set(CONFIGS.values()) | {"Digits"} == set(things("datasets"))


@pytest.mark.parametrize("kind", ["datasets", "models", "partitions", "configs"])
def test_everything_that_can_be_named_is_described(kind: str) -> None:
    described = things(kind)
    assert described
    assert all(line.endswith(".") and 20 < len(line) <= 120 for line in described.values())


def test_partitions_and_datasets_are_listed_by_name() -> None:
    assert set(things("partitions")) == {
        "IID",
        "Dirichlet",
        "DisjointClasses",
        "Pathological",
        "QuantitySkew",
        "Shards",
    }
    assert set(things("datasets")) <= set(data.__all__)


def test_a_module_of_ones_own_trains_from_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar(tmp_path, 10, monkeypatch)
    model = {
        "class_path": "FromModule",
        "init_args": {
            "module": "torchvision.models.resnet18",
            "module_args": {"num_classes": 10, "width_per_group": 64},
            "head": "fc",
        },
    }
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({**read("cifar10"), "model": model}))
    where = [f"--scenario.dataset.data_dir={tmp_path}", f"--run_dir={tmp_path / 'run'}"]
    options = ["--clients_per_round=2", "--scenario.partition.min_samples=1"]
    assert main(["fit", "--config", str(tmp_path / "mine.yaml"), *SMALL, *where, *options]) == 0
    assert (tmp_path / "run" / "final" / "model.pt").is_file()


def flat_network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))


def test_initial_weights_of_ones_own_module_follow_the_seed(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    model = {"class_path": "FromModule", "init_args": {"module": f"{__name__}.flat_network", "head": "1"}}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({**read("mnist"), "model": model}))
    start = [f"--config={tmp_path / 'mine.yaml'}", *SMALL, f"--scenario.dataset.data_dir={tmp_path}"]
    runs = [tmp_path / name for name in ("one", "two")]
    for run in runs:
        assert main(["fit", *start, "--scenario.partition.min_samples=1", f"--run_dir={run}"]) == 0
    one, two = (torch.load(run / "final" / "model.pt", weights_only=True) for run in runs)
    assert one.keys() == two.keys() == {"head.weight", "head.bias"}
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_options_of_a_head_come_from_yaml() -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--model", type=ModelFactory)
    head = {"projection": 16, "hidden": [8], "classifier": "cosine"}
    given = parser.parse_object({"model": {"class_path": "fl_lightning.models.CNN4", "init_args": {"head": head}}})
    backbone = parser.instantiate(given).model(in_shape=(1, 28, 28), num_classes=5)
    assert backbone.feature_dim == 16
    assert backbone.classifier.weight.shape == (5, 8)
