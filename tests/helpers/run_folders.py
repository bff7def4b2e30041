"""Write run folders without training: tests that only read runs use them."""

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

from fl_lightning.evaluation.summary import summarize

CONFIG: dict[str, Any] = {
    "scenario": {
        "dataset": {"class_path": "fl_lightning.data.Digits", "init_args": {"data_dir": "d"}},
        "partition": {"class_path": "fl_lightning.data.Dirichlet", "init_args": {"alpha": 0.1}},
        "clients": 4,
    },
    "model": {"class_path": "fl_lightning.models.MLP", "init_args": {"hidden": [8, 4]}},
    "algorithm": {"class_path": "fl_lightning.algorithms.FedSKC", "init_args": {"tau": 0.08}},
    "rounds": 3,
    "seed": 1,
    "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}},
    "evaluation": {"client_model": "trained", "target_accuracies": [0.5, 0.8]},
    "callbacks": [{"class_path": "mine.Watcher"}],
}
ROUNDS = [
    {"round": 1, "global/acc": 0.25, "comm/up_bytes": 10, "comm/down_bytes": 20, "time/round_s": 0.5},
    {"round": 2, "comm/up_bytes": 10, "comm/down_bytes": 20, "time/round_s": 0.25},
    {"round": 3, "global/acc": 0.75, "comm/up_bytes": 11, "comm/down_bytes": 20, "time/round_s": 1.0},
]


def as_rows(table) -> list[dict[str, Any]]:
    """Return a table as rows. Columns, given as a mapping, get the column `round`; None stands for a blank."""
    if not isinstance(table, Mapping):
        return list(table)
    columns = {"round": range(1, len(next(iter(table.values()))) + 1), **table}
    rows = [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]
    return [{name: cell for name, cell in row.items() if cell is not None} for row in rows]


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def write_run(folder, config=CONFIG, rounds=ROUNDS, finished=True, clients=None):
    """Write the folder of a run, given its metrics and those of clients as rows or as columns."""
    (folder / "final").mkdir(parents=True)
    if config is not None:
        (folder / "config.yaml").write_text(yaml.safe_dump(dict(config), sort_keys=False))
    rounds = as_rows(rounds)
    write_csv(folder / "metrics.csv", rounds)
    if finished:
        summary = summarize(rounds, ((config or {}).get("evaluation") or {}).get("target_accuracies", []))
        (folder / "final" / "summary.json").write_text(json.dumps(summary))
    if clients:
        write_csv(folder / "clients.csv", as_rows(clients))
    return folder


def write_counts(folder: Path, counts: np.ndarray) -> None:
    """Write a run's partition.csv; the test splits equal the training splits."""
    lines = [["client", "split", *(f"class_{j}" for j in range(counts.shape[1]))]]
    lines += [[k, split, *row] for split in ("train", "test") for k, row in enumerate(counts.tolist())]
    (folder / "partition.csv").write_text("".join(",".join(map(str, line)) + "\n" for line in lines))


def write_image(path: Path, pixels: np.ndarray) -> None:
    """Write an image of `(height, width, 3)` bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels.astype(np.uint8)).save(path)


def changed(**values):
    """Return the config with other values of `algorithm` (its path), its arguments, `alpha`, `lr`, `seed` and so on."""
    config = json.loads(json.dumps(CONFIG))
    places = {
        "algorithm": (config["algorithm"], "class_path"),
        "arguments": (config["algorithm"], "init_args"),
        "tau": (config["algorithm"]["init_args"], "tau"),
        "alpha": (config["scenario"]["partition"]["init_args"], "alpha"),
        "data_dir": (config["scenario"]["dataset"]["init_args"], "data_dir"),
        "lr": (config["optimizer"]["init_args"], "lr"),
    }
    for name, value in values.items():
        place, key = places.get(name, (config, name))
        place[key] = value
    return config
