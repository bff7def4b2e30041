"""Run all experiments of docs/results.md and print its tables.

    python benchmarks/results.py --data DATA_DIR --out runs/results --jobs 2

Learning rates: for each method and each Dirichlet parameter, use the best of RATES, among those with which no run
diverges. The criterion is the accuracy that the method is made for (AIMS) on TUNING_SEED; if it is evaluated by round,
it is a mean over the last five evaluated rounds.

Comparison: each method runs with SEEDS. A run is compared with FedAvg with the same seed, which has the same partition,
initial weights and participants.

The name of a run's folder contains a digest of the code. Runs that exist are not repeated. Each run has one thread, and
`--jobs` runs are executed at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import hashlib
import io
import json
import multiprocessing
import os
import shlex
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

os.environ["OMP_NUM_THREADS"] = "1"  # inherited by the runs' processes

import fl_lightning
from fl_lightning import open_run
from fl_lightning.analysis.result_table import mean_and_std
from fl_lightning.cli.main import main as fl_lightning_main

CONFIG = Path(__file__).with_name("results.yaml")
SIAMESE_HEAD = "--model.head.projection 256 --model.head.prediction 256"
METHODS = {
    "FedAvg": "--algorithm FedAvg",
    "FedAvg, uniform": "--algorithm FedAvg --algorithm.weighting uniform",
    "FedSKC": "--algorithm FedSKC",
    "FedSKC, literal review": "--algorithm FedSKC --algorithm.review literal",
    "FedSKC, LCL alone": "--algorithm FedSKC --algorithm.gda false --algorithm.gpr false",
    "FedSKC, GDA alone": "--algorithm FedSKC --algorithm.lcl false --algorithm.gpr false",
    "FedSKC, GPR alone": "--algorithm FedSKC --algorithm.lcl false --algorithm.gda false",
    "FedSKC, gda_scale share": "--algorithm FedSKC --algorithm.gda_scale share",
    "FedSKC, spread none": "--algorithm FedSKC --algorithm.spread none",
    "FedDW, mu 0.1": "--algorithm FedDW --algorithm.mu 0.1",
    "FedDW, mu 10": "--algorithm FedDW --algorithm.mu 10",
    "FedAvg, FedSiam-DA's head": f"--algorithm FedAvg {SIAMESE_HEAD}",
    "FedSiam-DA": f"--algorithm FedSiamDA {SIAMESE_HEAD}",
    "cwFedAVG + WDR": "--algorithm CwFedAvg",
    "UA-PDFL": "--algorithm UAPDFL --algorithm.mu 0.001",
}
BASELINES = {  # by the model that is evaluated: the global one, the one that a client receives, or the trained one
    "global": {
        "FedProx": "--algorithm FedProx",
        "SCAFFOLD": "--algorithm SCAFFOLD",
        "FedAvgM": "--algorithm FedAvgM",
        "FedAdagrad": "--algorithm FedAdagrad",
        "FedAdam": "--algorithm FedAdam",
        "FedYogi": "--algorithm FedYogi",
        "MOON": "--algorithm MOON --algorithm.mu 1",
        "FedUV": "--algorithm FedUV",
        "FedNH": "--algorithm FedNH",
        "FedRCL": "--algorithm FedRCL",
        "CriticalFL": "--algorithm CriticalFL",
        "FedDistill+": "--algorithm FedDistillPlus",
    },
    "sent": {
        "Local": "--algorithm Local",
        "FedPer": "--algorithm FedPer",
        "FedRep": "--algorithm FedRep",
        "FedBABU": "--algorithm FedBABU",
        "Per-FedAvg": "--algorithm PerFedAvg --algorithm.alpha 0.1",
        "Ditto": "--algorithm Ditto",
        "FedALA": "--algorithm FedALA",
        "FedProto": "--algorithm FedProto",
        "FedDistill": "--algorithm FedDistill",
        "FedAMP": "--algorithm FedAMP --algorithm.sigma 10 --algorithm.lam 0.1",
        "HeurFedAMP": "--algorithm HeurFedAMP --algorithm.lam 0.1",
        "FedFomo": "--algorithm FedFomo",
        "APPLE": "--algorithm APPLE --algorithm.dr_lr 0.01 --algorithm.length 2",
        "CFL": "--algorithm CFL --algorithm.min_rounds 3",
        "IFCA": "--algorithm IFCA",
    },
    "trained": {
        "FedAvg, peers": "--algorithm PeerAlgorithm --algorithm.n_com 5",
        "FedPer, peers": "--algorithm PeerFedPer --algorithm.n_com 5",
        "CriticalFL, peers": "--algorithm PeerCriticalFL",
        "DFedAvgM": "--algorithm DFedAvgM --algorithm.n_com 5 --optimizer.momentum 0.9",
        "DisPFL": "--algorithm DisPFL --algorithm.n_com 5",
    },
}
AIMS = {"cwFedAVG + WDR": "sent", "UA-PDFL": "trained"}  # the other methods of the five papers: "global"
AT_FIRST_ALPHA = [  # these run only with the first Dirichlet parameter
    "FedSKC, LCL alone",
    "FedSKC, GDA alone",
    "FedSKC, GPR alone",
    "FedSKC, gda_scale share",
    "FedSKC, spread none",
    "FedDW, mu 0.1",
]
for aim, baselines in BASELINES.items():
    METHODS |= baselines
    AIMS |= dict.fromkeys(baselines, aim)
    AT_FIRST_ALPHA += baselines
ALPHAS = (0.1, 0.5)
RATES = (0.02, 0.05, 0.1, 0.2)
LARGER = {"APPLE": 10}  # factor on RATES: APPLE multiplies its steps by its ratios, about 1/20 here
TUNING_SEED = 100
SEEDS = (0, 1, 2, 3)

DIGITS = {
    "digits_fedavg.yaml": "",
    "digits_fedavg.yaml, uniform": "--algorithm.weighting uniform",
    "digits_fedskc.yaml": "",
    "digits_fedskc.yaml, literal review": "--algorithm.review literal",
}
DIGITS_SEEDS = tuple(range(8))


class Point(NamedTuple):
    """The folder and the command line of a run."""

    folder: Path
    words: tuple[str, ...]

    @property
    def summary(self) -> dict[str, float] | None:
        """Return the final metrics, or None if the run has not ended."""
        file = self.folder / "final" / "summary.json"
        return json.loads(file.read_text()) if file.exists() else None

    @property
    def failure(self) -> Path:
        """Return the path of the file with the error of a failed run."""
        return self.folder / "failed.txt"


@cache
def digest() -> str:
    package = Path(fl_lightning.__file__).parent
    sources = [*sorted(package.rglob("*.py")), CONFIG]
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:8]


def slug(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name)


def fashion(out: Path, data: str, method: str, alpha: float, rate: float, seed: int) -> Point:
    words = ["--config", str(CONFIG), *shlex.split(METHODS[method])]
    words += ["--scenario.partition.alpha", str(alpha), "--optimizer.lr", str(rate), "--seed", str(seed)]
    words += ["--scenario.dataset.data_dir", data]
    return Point(out / digest() / f"{slug(method)}-alpha{alpha}-lr{rate}-seed{seed}", tuple(words))


def digits(out: Path, name: str, seed: int) -> Point:
    words = ["--config", name.split(",")[0], *shlex.split(DIGITS[name]), "--seed", str(seed), "--logger", "null"]
    return Point(out / digest() / f"{slug(name)}-seed{seed}", tuple(words))


def run(point: Point) -> None:
    if point.summary or point.failure.exists():
        return
    resume = ["--resume", str(point.folder)] if (point.folder / "config.yaml").exists() else []
    errors = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
        code = fl_lightning_main(["fit", *point.words, "--run_dir", str(point.folder), *resume])
    if code == 1:  # a loss became NaN
        point.failure.write_text(errors.getvalue())
    elif code:
        raise RuntimeError(errors.getvalue())
    print(point.folder.name, "done" if code == 0 else errors.getvalue().strip().splitlines()[-1], flush=True)


def last_rounds(folder: Path, name: str) -> float:
    with (folder / "metrics.csv").open() as file:
        values = [float(row[name]) for row in csv.DictReader(file) if row[name]]
    return mean(values[-5:])


def as_sent(folder: Path) -> float | None:
    """Return the mean client accuracy of the models that the server would send next, or None without a server."""
    cached = folder / "as_sent.json"
    if not cached.exists():
        experiment = open_run(folder)
        cached.write_text(json.dumps(experiment.test()["client/acc_mean"] if experiment.algorithm.server else None))
    return json.loads(cached.read_text())


def figure(method: str, point: Point) -> float:
    if AIMS.get(method) == "sent":
        return as_sent(point.folder) or 0.0
    return last_rounds(point.folder, "client/acc_mean" if AIMS.get(method) == "trained" else "global/acc")


def best_rate(out: Path, data: str, method: str, alpha: float) -> float:
    def points(rate: float) -> list[Point]:
        return [fashion(out, data, method, alpha, rate, seed) for seed in (TUNING_SEED, *SEEDS)]

    rates = [rate * LARGER.get(method, 1) for rate in RATES]
    sound = [rate for rate in rates if not any(point.failure.exists() for point in points(rate))]
    if not sound:
        raise SystemExit(f"{method} at Dirichlet {alpha} diverges with every rate of {rates}: add a smaller one")
    return max(sound, key=lambda rate: figure(method, points(rate)[0]))


def chosen(out: Path, data: str, method: str, alpha: float, seed: int) -> Point:
    return fashion(out, data, method, alpha, best_rate(out, data, method, alpha), seed)


def methods(alpha: float) -> list[str]:
    return [method for method in METHODS if alpha == ALPHAS[0] or method not in AT_FIRST_ALPHA]


def spread(values: list[float], sign: str = "") -> str:
    """Format the mean and the standard deviation in percent."""
    scaled = [100 * value for value in values]
    return mean_and_std(mean(scaled), stdev(scaled) if len(scaled) > 1 else None, f"{sign}.1f")


def measured(point: Point) -> dict[str, float | None]:
    summary, sent = point.summary, as_sent(point.folder)
    return {"global": summary.get("global/acc_last"), "trained": summary["client/acc_mean_last"], "sent": sent}


def cells(points: list[Point], baselines: list[Point], names: tuple[str, ...]) -> list[str]:
    """Return each metric as mean ± deviation, followed by its difference to the baseline with the same seed."""
    pairs = [(measured(a), measured(b)) for a, b in zip(points, baselines, strict=True)]
    row = []
    for name in names:
        known = [(a[name], b[name]) for a, b in pairs if a[name] is not None]
        row.append(spread([a for a, _ in known]) if known else "")
        row.append(spread([a - b for a, b in known], "+") if known and points != baselines else "")
    return row


def table(head: tuple[str, ...], rows: list[list[str]]) -> None:
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for row in rows:
        print(f"| {' | '.join(row)} |")


def fashion_table(out: Path, data: str, alpha: float) -> None:
    def points(method: str) -> list[Point]:
        return [chosen(out, data, method, alpha, seed) for seed in SEEDS]

    rows = []
    for method in methods(alpha):
        summaries = [point.summary for point in points(method)]
        crossed = mean(one["comm/total_up_bytes"] + one["comm/total_down_bytes"] for one in summaries)
        reached = ", ".join("-" if one["R_0.7"] is None else str(one["R_0.7"]) for one in summaries)
        found = cells(points(method), points("FedAvg"), ("global", "trained", "sent"))
        if AIMS.get(method, "global") != "global" and found[0]:
            found[0] += " †"  # the learning rate was chosen by another column
        rows.append([method, str(best_rate(out, data, method, alpha)), reached, f"{crossed / 1e6:.0f}", *found])
    figures = ("global %", "to FedAvg", "personal, trained", "to FedAvg", "personal, sent", "to FedAvg")
    print(f"\nDirichlet {alpha}:\n")
    table(("method", "lr", "R_0.7", "MB", *figures), rows)


def digits_table(out: Path) -> None:
    baselines = [digits(out, next(iter(DIGITS)), seed) for seed in DIGITS_SEEDS]
    rows = [
        [name, *cells([digits(out, name, seed) for seed in DIGITS_SEEDS], baselines, ("global",))] for name in DIGITS
    ]
    print("\nDigits:\n")
    table(("config", "global %", "to FedAvg"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="data", help="Folder of Fashion-MNIST.")
    parser.add_argument("--out", type=Path, default=Path("runs/results"))
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    out, data = given.out, given.data
    settings = [(method, alpha) for alpha in ALPHAS for method in methods(alpha)]
    with ProcessPoolExecutor(given.jobs, multiprocessing.get_context("spawn")) as pool:
        few = [digits(out, name, seed) for seed in DIGITS_SEEDS for name in DIGITS]
        rates = [(*one, rate * LARGER.get(one[0], 1)) for one in settings for rate in RATES]
        tuning = [fashion(out, data, *one, TUNING_SEED) for one in rates]
        list(pool.map(run, few + tuning))
        wanted = [(*one, seed) for seed in SEEDS for one in settings]
        while missing := [point for one in wanted if not (point := chosen(out, data, *one)).summary]:
            list(pool.map(run, missing[: len(settings)]))  # by seed: a method that diverges gets another rate
    digits_table(out)
    for alpha in ALPHAS:
        fashion_table(out, data, alpha)


if __name__ == "__main__":
    main()
