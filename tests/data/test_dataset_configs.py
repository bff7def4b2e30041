"""Every shipped config of a dataset in files, run small on files in the dataset's own layout."""

import csv
from pathlib import Path

import pytest
import torch
import yaml
from jsonargparse import ArgumentParser
from layouts import write_cifar, write_mnist
from reduced import SMALL, name_of, read, reduced
from torch import nn

from fl_lightning import data
from fl_lightning.cli.catalogue import descriptions
from fl_lightning.cli.main import main
from fl_lightning.models import ModelFactory

CONFIGS = [name for name in descriptions("configs") if "digits_" not in name]
FAST_CONFIGS = ("mnist_fedavg.yaml", "table_fedavg.yaml")


@pytest.mark.parametrize(
    "config", [pytest.param(name, marks=() if name in FAST_CONFIGS else pytest.mark.thorough) for name in CONFIGS]
)
def test_a_config_runs_at_reduced_size(config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    words = ["--config", config, *reduced(config, tmp_path, monkeypatch), f"--run_dir={tmp_path / 'run'}"]
    assert main(["fit", *words]) == 0, capsys.readouterr().err
    with (tmp_path / "run" / "metrics.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert 0 <= float(row["global/acc"]) <= 1
    assert ("client/acc_mean" in row) == (read(config)["scenario"].get("local_test") != 0)


@pytest.mark.parametrize("config", CONFIGS)
def test_a_config_is_in_mixed_precision_where_there_is_a_gpu(config: str) -> None:
    given = read(config)
    assert given["trainer"]["precision"] == "bf16-mixed"
    assert given["trainer"]["accelerator"] == "auto"


def test_every_dataset_has_a_config() -> None:
    configured = {name_of(read(config)["scenario"]["dataset"]) for config in CONFIGS if config.endswith("_fedavg.yaml")}
    unconfigured = {"TorchDataset", "RemoteClients"}  # a class of the user; data on the clients' machines
    unconfigured |= {"Digits", "RotatedDigits"}  # in no files
    assert configured | unconfigured == set(descriptions("datasets"))


@pytest.mark.parametrize("kind", ["datasets", "models", "partitions", "configs"])
def test_everything_that_is_listed_has_a_description(kind: str) -> None:
    described = descriptions(kind)
    assert described
    assert all(line.endswith(".") and 20 < len(line) <= 120 for line in described.values())


@pytest.mark.parametrize(("kind", "base"), [("partitions", data.Partition), ("datasets", data.Dataset)])
def test_partitions_and_datasets_are_listed_by_name(kind: str, base: type) -> None:
    exported = {name for name in data.__all__ if issubclass(getattr(data, name), base)}
    assert set(descriptions(kind)) == exported - {base.__name__}


@pytest.mark.thorough
def test_a_torchvision_network_trains_from_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar(tmp_path, 10, monkeypatch)
    arguments = {"module": "torchvision.models.shufflenet_v2_x0_5", "module_args": {"num_classes": 10}, "head": "fc"}
    model = {"class_path": "FromModule", "init_args": arguments}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({**read("cifar10_fedavg.yaml"), "model": model}))
    where = [f"--scenario.dataset.data_dir={tmp_path}", f"--run_dir={tmp_path / 'run'}"]
    options = ["--clients_per_round=2", "--scenario.partition.min_samples=1"]
    assert main(["fit", "--config", str(tmp_path / "mine.yaml"), *SMALL, *where, *options]) == 0
    assert (tmp_path / "run" / "final" / "model.pt").is_file()


def flat_network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))


def test_initial_weights_of_a_custom_module_follow_the_seed(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    model = {"class_path": "FromModule", "init_args": {"module": f"{__name__}.flat_network", "head": "1"}}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({**read("mnist_fedavg.yaml"), "model": model}))
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
