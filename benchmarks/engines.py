"""What the engines make of one round: wall time of a cohort's fits, each engine against the sequential one.

    python benchmarks/engines.py [ENGINE ...] [--case mlp cnn ...] [--clients 50] [--epochs 1] [--accelerator cpu]

FedAvg on synthetic data, all clients in every round, engines in turn in one process; a run's first round is a warm-up
and not counted. An engine is a class of `fl_lightning.engines`, with arguments if any, `StackedEngine:clients=16`, and
after an @ how many threads torch has in this process, `SequentialEngine@1`. Prints the median and the range of the
ratio to the sequential engine of the same turn: above 1, the engine is faster. Single times vary by
machine; ratios on a busy one are noisy.
"""

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import yaml
from rich.console import Console

from fl_lightning import Evaluation, FederatedOrchestrator, LocalTraining, engines
from fl_lightning.algorithms import FedAvg
from fl_lightning.callbacks import Checkpointing, RoundProgress
from fl_lightning.data import IID, Arrays, Scenario
from fl_lightning.models import CNN, MLP, ModelFactory, ResNet8, ResNet18

THREADS = torch.get_num_threads()


@dataclass
class Case:
    """A model, the shape of its data, and the local work of a client."""

    model: ModelFactory
    shape: tuple[int, ...]
    clients: int
    samples: int
    batch_size: int


CASES = {
    "mlp": Case(partial(MLP, hidden=(64,)), (1, 8, 8), 50, 40, 10),
    "mlp-wide": Case(partial(MLP, hidden=(128, 64)), (1, 8, 8), 50, 64, 32),
    "cnn": Case(CNN, (1, 28, 28), 10, 128, 32),
    "resnet8": Case(ResNet8, (3, 32, 32), 8, 64, 32),
    "resnet18": Case(ResNet18, (3, 32, 32), 8, 64, 32),
}


def engine_of(words: str) -> engines.Engine:
    """An engine from its class and arguments: `StackedEngine:clients=16,...`."""
    name, _, arguments = words.partition("@")[0].partition(":")
    pairs = (argument.split("=") for argument in arguments.split(",") if argument)
    return getattr(engines, name)(**{key: yaml.safe_load(value) for key, value in pairs})


def round_times(case: Case, data: Path, engine: str, rounds: int, run_dir: Path, trainer: dict) -> list[float]:
    """Seconds of each round's fits and aggregation, after the first."""
    run = FederatedOrchestrator(
        Scenario(Arrays(str(data)), IID(), case.clients, local_test=0.0),
        case.model,
        FedAvg(),
        rounds=1 + rounds,
        engine=engine_of(engine),
        callbacks=[RoundProgress(Console(quiet=True)), Checkpointing(every=1 + rounds)],
        training=LocalTraining(
            batch_size=case.batch_size, optimizer=partial(torch.optim.SGD, lr=0.01, momentum=0.9), trainer=trainer
        ),
        evaluation=Evaluation(every=1 + rounds),
        run_dir=str(run_dir),
    )
    torch.set_num_threads(int(engine.partition("@")[2] or THREADS))
    run.fit()
    torch.set_num_threads(THREADS)
    return [row["time/fit_s"] for row in run.csv.rows[1:]]


def write_data(path: Path, case: Case) -> None:
    """Noise and labels."""
    x = np.random.default_rng(0).normal(size=(case.clients * case.samples, *case.shape)).astype(np.float32)
    y = np.arange(len(x)) % 10
    np.savez(path, x_train=x, y_train=y, x_test=x[:200], y_test=y[:200])


def compare(name: str, case: Case, chosen: list[str], repeats: int, rounds: int, trainer: dict) -> None:
    """Print a line for each engine."""
    ratios: dict[str, list[float]] = {engine: [] for engine in chosen}
    seconds: dict[str, list[float]] = {engine: [] for engine in chosen}
    with tempfile.TemporaryDirectory() as folder:
        write_data(data := Path(folder) / "data.npz", case)
        for turn in range(repeats):
            for number, engine in enumerate(chosen):
                run_dir = Path(folder) / f"{turn}-{number}"
                seconds[engine].append(statistics.median(round_times(case, data, engine, rounds, run_dir, trainer)))
                ratios[engine].append(seconds[chosen[0]][-1] / seconds[engine][-1])
    for engine in chosen:
        values = ratios[engine]
        milliseconds = statistics.median(seconds[engine]) * 1e3
        print(
            f"{name:9} {case.clients:3} clients  {engine:24} {milliseconds:8.1f} ms a round, "
            f"ratio {statistics.median(values):5.2f} (min {min(values):.2f}, max {max(values):.2f}, {repeats} turns)",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engines", nargs="*", default=["StackedEngine"], help="beside SequentialEngine")
    parser.add_argument("--case", nargs="+", choices=CASES, default=["mlp", "mlp-wide", "cnn"])
    parser.add_argument("--clients", type=int, help="clients a round (default: the case's)")
    parser.add_argument("--epochs", type=int, default=1, help="local epochs (default 1)")
    parser.add_argument("--repeats", type=int, default=5, help="turns (default 5)")
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds a turn (default 5)")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--precision", default="32-true")
    args = parser.parse_args()
    started = time.time()
    trainer = {"accelerator": args.accelerator, "precision": args.precision, "max_epochs": args.epochs}
    for name in args.case:
        case = CASES[name]
        case.clients = args.clients or case.clients
        compare(name, case, ["SequentialEngine", *args.engines], args.repeats, args.rounds, trainer)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {time.time() - started:.0f} s")


if __name__ == "__main__":
    main()
