"""Run folders as a run would leave them, written by hand."""

import csv
import json
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.evaluation.metrics import summarize

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


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def write_run(folder, config=CONFIG, rounds=ROUNDS, finished=True, clients=None):
    """A run's folder, as a run would leave it."""
    (folder / "final").mkdir(parents=True)
    if config is not None:
        (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    write_csv(folder / "metrics.csv", rounds)
    if finished:
        summary = summarize(rounds, ((config or {}).get("evaluation") or {}).get("target_accuracies", []))
        (folder / "final" / "summary.json").write_text(json.dumps(summary))
    if clients:
        write_csv(folder / "clients.csv", clients)
    return folder


def changed(**values):
    """The config with other values of `algorithm` (its path), its arguments, `alpha`, `lr`, `seed` and so on."""
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
