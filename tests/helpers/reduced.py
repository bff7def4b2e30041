"""Reduce shipped configs for tests: few samples in the dataset's own layout, one round, one step."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from layouts import (
    write_ag_news,
    write_arrays,
    write_cifar,
    write_domains,
    write_emnist,
    write_femnist,
    write_hugging_face,
    write_image_folder,
    write_image_table,
    write_imdb_folder,
    write_instructions,
    write_masks,
    write_mnist,
    write_pathmnist,
    write_sent140,
    write_shakespeare,
    write_svhn,
    write_table,
    write_text_table,
    write_texts,
    write_tiny_imagenet,
)

from fl_lightning.core.config_files import config_path

SMALL = [
    "--rounds=1",
    "--batch_size=4",
    "--scenario.clients=2",
    "--trainer.max_steps=1",
    "--trainer.limit_train_batches=1",
    "--trainer.accelerator=cpu",
    "--trainer.precision=32-true",
    "--logger=null",
]

WRITERS: dict[str, Callable[[Path, pytest.MonkeyPatch], object]] = {
    "AGNews": lambda root, patch: write_ag_news(root),
    "Arrays": lambda root, patch: write_arrays(root / "arrays.npz"),
    "CIFAR10": lambda root, patch: write_cifar(root, 10, patch, (60, 20)),
    "CIFAR100": lambda root, patch: write_cifar(root, 100, patch, (200, 20)),
    "Digits": lambda root, patch: None,
    "DomainFolder": lambda root, patch: write_domains(root / "pacs"),
    "EMNIST": lambda root, patch: write_emnist(root, "bymerge"),
    "FC100": lambda root, patch: write_cifar(root, 100, patch, (300, 100)),
    "FEMNIST": lambda root, patch: write_femnist(root),
    "FashionMNIST": lambda root, patch: write_mnist(root, "FashionMNIST"),
    "HuggingFace": lambda root, patch: write_hugging_face(root / "saved"),
    "IMDB": lambda root, patch: write_imdb_folder(root),
    "ImageFolder": lambda root, patch: write_image_folder(root / "images"),
    "InstructionFile": lambda root, patch: write_instructions(root / "instructions.jsonl"),
    "ImageTable": lambda root, patch: write_image_table(root / "images.csv"),
    "MNIST": lambda root, patch: write_mnist(root),
    "MaskFolder": lambda root, patch: write_masks(root / "sites"),
    "PathMNIST": lambda root, patch: write_pathmnist(root),
    "Sent140": lambda root, patch: write_sent140(root),
    "Shakespeare": lambda root, patch: write_shakespeare(root),
    "SVHN": lambda root, patch: write_svhn(root, patch),
    "Table": lambda root, patch: write_table(root / "table.csv"),
    "TextFile": lambda root, patch: write_texts(root / "texts"),
    "TextTable": lambda root, patch: write_text_table(root / "texts.csv"),
    "TinyImageNet": lambda root, patch: write_tiny_imagenet(root, classes=4, n=(4, 1)),
}


def read(config: str) -> dict:
    """Return the content of a shipped config."""
    return yaml.safe_load(Path(config_path(config)).read_text())


def name_of(value: str | dict) -> str:
    """Return the name of a class, given as `MLP` or as `class_path: MLP`."""
    return (value["class_path"] if isinstance(value, dict) else value).rpartition(".")[2]


def reduced(config: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Write fake files for a shipped config below `root`. Return the overrides that reduce the config to them."""
    given = read(config)
    scenario = given["scenario"]
    dataset = name_of(scenario["dataset"])
    words = [*SMALL]
    if "long_tail" in scenario:
        words.append("--scenario.long_tail=2")
        classes = {"CIFAR10": 10, "CIFAR100": 100}[dataset]
        write_cifar(root, classes, monkeypatch, (max(3 * classes, 60), 20))  # the last classes keep a sample
    else:
        WRITERS[dataset](root, monkeypatch)
    if "path" in (own := scenario["dataset"] if isinstance(scenario["dataset"], dict) else {}).get("init_args", {}):
        words.append(f"--scenario.dataset.path={root / Path(own['init_args']['path']).name}")
    elif dataset != "Digits":
        words.append(f"--scenario.dataset.data_dir={root}")
    if dataset == "FC100":
        words += [f"--scenario.dataset.few_shot.{option}=1" for option in ("shots", "queries")]
        words.append("--scenario.dataset.few_shot.episodes=2")
    if name_of(scenario["partition"]) == "Domains":
        words.append("--scenario.clients=null")
    if name_of(scenario["partition"]) == "Dirichlet":
        words.append("--scenario.partition.min_samples=4")
    if "clients_per_round" in given:
        words.append("--clients_per_round=1")
    if name_of(given["algorithm"]) == "UAPDFL" or "n_com" in str(given["algorithm"]):
        words.append("--algorithm.n_com=1")
    if name_of(given["model"]) in ("ResNet18", "ResNet50"):
        words.append("--model=ResNet8")  # the others take seconds a step without a GPU, and gigabytes
    return words
