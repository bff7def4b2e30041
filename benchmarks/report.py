"""Measure `fl-lightning report` on synthetic runs: the size of the page, the time and the peak memory.

Run it with `python benchmarks/report.py [--runs 20] [--rounds 200] [--clients 100] [--folder KEPT]`.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import yaml
from PIL import Image

METHODS = ("FedAvg", "FedProx", "FedSKC", "FedDW", "FedSiamDA")
CLASSES = 10
COST = """
import resource, sys, time
from fl_lightning.cli.main import main
code = main(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
print(time.process_time())
print("torch" in sys.modules)
sys.exit(code)
"""


def write_run(folder: Path, method: str, seed: int, rounds: int, clients: int) -> None:
    """Write a run folder like that of `fit`, with metrics of callbacks for each client and four images."""
    random = np.random.default_rng([seed, METHODS.index(method)])
    (folder / "final").mkdir(parents=True)
    partition = {"class_path": "fl_lightning.data.Dirichlet", "init_args": {"alpha": 0.1}}
    config = {
        "scenario": {"dataset": {"class_path": "fl_lightning.data.Digits"}, "partition": partition, "clients": clients},
        "algorithm": {"class_path": f"fl_lightning.algorithms.{method}", "init_args": {"mu": METHODS.index(method)}},
        "rounds": rounds,
        "seed": seed,
        "evaluation": {"target_accuracies": [0.5, 0.7]},
        **{f"option_{i}": f"value {i}" for i in range(40)},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    level = 0.6 + 0.05 * METHODS.index(method) + 0.02 * random.normal()
    accuracy = level * (1 - np.exp(-np.arange(1, rounds + 1) / (rounds / 6))) + 0.01 * random.normal(size=rounds)
    metrics = {"round": np.arange(1, rounds + 1), "global/acc": accuracy, "global/loss": 2.3 * (1 - accuracy)}
    for name in ("acc_mean", "acc_weighted", "acc_std", "acc_worst_decile", "loss_mean", "train_loss", "train_ce"):
        metrics[f"client/{name}"] = accuracy + 0.02 * random.normal(size=rounds)
    metrics |= {f"comm/{way}_bytes": np.full(rounds, 8_751_040 + seed) for way in ("up", "down")}
    metrics["comm/total_bytes"] = np.cumsum(metrics["comm/up_bytes"] + metrics["comm/down_bytes"])
    metrics |= {f"time/{what}_s": 1.2 + 0.1 * random.random(rounds) for what in ("fit", "round")}
    metrics |= {f"drift/{what}_mean": random.random(rounds) for what in ("distance", "cosine")}
    write_csv(folder / "metrics.csv", metrics)
    lines = {"round": np.repeat(np.arange(1, rounds + 1), clients), "client": np.tile(np.arange(clients), rounds)}
    for name in ("acc", "train_loss", "weight", "drift_distance", "drift_cosine"):
        lines[name] = np.repeat(accuracy, clients) + 0.1 * random.normal(size=rounds * clients)
    write_csv(folder / "clients.csv", lines)
    counts = (random.dirichlet(np.full(CLASSES, 0.1), size=clients) * 600).astype(int)
    with (folder / "partition.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["client", "split", *(f"class_{label}" for label in range(CLASSES))])
        writer.writerows([client, split, *row] for split in ("train", "test") for client, row in enumerate(counts))
    for name in ("row_norms", "divergence", "drift", "class_relations"):
        (folder / "figures" / name).mkdir(parents=True)
        smooth = np.kron(random.integers(0, 255, (17, 30)), np.ones((24, 24))).astype(np.uint8)
        Image.fromarray(smooth).save(folder / "figures" / name / f"round-{rounds:06d}.png")
    (folder / "final" / "summary.json").write_text(json.dumps({"rounds": rounds, "global/acc_last": accuracy[-1]}))


def write_csv(path: Path, columns: dict[str, np.ndarray]) -> None:
    """Write columns as a CSV file, with numbers in the format of `fit`."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(zip(*(column.tolist() for column in columns.values()), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("runs", 20), ("rounds", 200), ("clients", 100)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--folder", type=Path, help="Keep runs and page here; by default nothing is kept.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        for i in range(options.runs):
            method, seed = METHODS[i % len(METHODS)], i // len(METHODS)
            write_run(folder / "runs" / f"{method}-seed{seed}", method, seed, options.rounds, options.clients)
        started = time.monotonic()
        command = [sys.executable, "-c", COST, "report", str(folder / "runs"), "-o", str(folder / "report.html")]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        *lines, peak, cpu_seconds, torch = done.stdout.splitlines()
        seconds = time.monotonic() - started
        size = (folder / "report.html").stat().st_size
        print(*lines, sep="\n")
        print(f"{options.runs} runs x {options.rounds} rounds x {options.clients} clients")
        print(f"{size / 1e6:.2f} MB, {int(peak) / 1e6:.2f} GB at its peak, torch imported: {torch}")
        print(f"{seconds:.1f} s, {float(cpu_seconds):.1f} s of CPU time")


if __name__ == "__main__":
    main()
