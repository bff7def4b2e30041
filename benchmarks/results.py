"""Run every line of docs/results.md and print its tables.

    python benchmarks/results.py --data DATA_DIR --out runs/results --jobs 2

Lines that are already there are not run again. Each run gets one thread, so that `--jobs` of them run side by side.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, median, stdev

from fl_lightning.cli import open_run

CONFIG = Path(__file__).with_name("results.yaml")
METHODS = {
    "FedAvg": "--algorithm FedAvg",
    "FedSKC": "--algorithm FedSKC",
    "FedDW": "--algorithm FedDW",
    "FedDW mu=10": "--algorithm FedDW --algorithm.mu 10",
    "FedSiam-DA": "--algorithm FedSiamDA --model.head.projection 256 --model.head.prediction 256",
    "cwFedAVG + WDR": "--algorithm CwFedAvg",
    "UA-PDFL": "--algorithm UAPDFL --algorithm.mu 0.001",
}
COLUMNS = ("method", "global acc %", "personal, trained", "personal, sent", "R_0.6", "R_0.7", "MB", "seconds", "seeds")
ALPHAS = (0.1, 0.5)
SEEDS = (0, 1, 2)


def options(method: str, alpha: float, seed: int) -> list[str]:
    return [*shlex.split(METHODS[method]), "--scenario.partition.alpha", str(alpha), "--seed", str(seed)]


def folder(out: Path, method: str, alpha: float, seed: int) -> Path:
    return out / f"{method.replace(' ', '')}-alpha{alpha}-seed{seed}"


def run(out: Path, data: str, method: str, alpha: float, seed: int) -> None:
    run_dir = folder(out, method, alpha, seed)
    if (run_dir / "final" / "summary.json").exists():
        return
    command = [sys.executable, "-m", "fl_lightning", "fit", "--config", str(CONFIG), *options(method, alpha, seed)]
    place = ["--scenario.dataset.data_dir", data, "--run_dir", str(run_dir)]
    resume = ["--resume", str(run_dir)] if (run_dir / "config.yaml").exists() else []
    done = subprocess.run(
        [*command, *place, *resume], env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    print(run_dir.name, done.stderr.strip() or "done", flush=True)


def spread(values: list[float], digits: int = 2, scale: float = 1.0) -> str:
    scaled = [value * scale for value in values]
    return f"{mean(scaled):.{digits}f}" + (f" ± {stdev(scaled):.{digits}f}" if len(scaled) > 1 else "")


def rounds_to(values: list[int | None]) -> str:
    return ", ".join("-" if value is None else str(value) for value in values)


def seconds(run_dir: Path) -> float:
    with (run_dir / "metrics.csv").open() as file:
        return sum(float(row["time/round_s"]) for row in csv.DictReader(file))


def accuracy_as_sent(run_dir: Path) -> float | None:
    """Mean accuracy of what the server would send each client now, on its own test split; None without a server."""
    cache = run_dir / "as_sent.json"
    if not cache.exists():
        run = open_run(run_dir)
        cache.write_text(json.dumps(run.test()["client/acc_mean"] if run.algorithm.server else None))
    return json.loads(cache.read_text())


def line(out: Path, method: str, alpha: float) -> str:
    places = [folder(out, method, alpha, seed) for seed in SEEDS]
    places = [place for place in places if (place / "final" / "summary.json").exists()]
    if not places:
        return f"| {method} | no run ended |"
    found = [json.loads((place / "final" / "summary.json").read_text()) for place in places]
    sent = [accuracy_as_sent(place) for place in places]
    columns = [
        spread([one["global/acc_last"] for one in found], scale=100),
        spread([one["client/acc_mean_last"] for one in found], scale=100),
        "" if None in sent else spread(sent, scale=100),
        *(rounds_to([one[f"R_{target}"] for one in found]) for target in ("0.6", "0.7")),
        spread([one["comm/total_up_bytes"] + one["comm/total_down_bytes"] for one in found], digits=0, scale=1e-6),
        f"{median(seconds(place) for place in places):.0f}",
        str(len(found)),
    ]
    return f"| {method} | {' | '.join(columns)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="data", help="Folder of Fashion-MNIST.")
    parser.add_argument("--out", type=Path, default=Path("runs/results"))
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    points = [(method, alpha, seed) for seed in SEEDS for alpha in ALPHAS for method in METHODS]
    with ThreadPoolExecutor(given.jobs) as pool:
        list(pool.map(lambda point: run(given.out, given.data, *point), points))
    for alpha in ALPHAS:
        print(f"\nDirichlet {alpha}\n")
        print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
        for method in METHODS:
            print(line(given.out, method, alpha))


if __name__ == "__main__":
    main()
