"""Compare fl-lightning with a hand-written loop: the time of long and short client fits, and the peak memory.

    python benchmarks/overhead.py

Both train FedAvg on synthetic data of the shape of digits and of Fashion-MNIST, in alternation in one process.
fl-lightning runs through the code of the command line: config file, parser, orchestrator, Lightning, CSV and
checkpoints, without W&B. The number of steps of a fit is chosen so that the loop takes a given time. The script prints
ratios, because single times depend on the machine.
"""

import argparse
import contextlib
import copy
import io
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import yaml
from torch.nn import functional as F

from fl_lightning.cli.main import main as fl_lightning
from fl_lightning.models import CNN

SHAPES = {"digits": ((1, 8, 8), 128), "fashion-mnist": ((1, 28, 28), 64)}
CLIENTS = 5
ROUNDS = 3


def write_data(path: Path, shape: tuple[int, ...], samples: int) -> None:
    """Write random inputs and labels."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(samples, *shape)).astype(np.float32)
    y = np.arange(samples) % 10
    np.savez(path, x_train=x, y_train=y, x_test=x[:200], y_test=y[:200])


def config(data: Path, run_dir: Path, batch_size: int, clients: int, rounds: int) -> dict:
    """Return a FedAvg config in which all clients participate and only the last round is evaluated."""
    return {
        "scenario": {
            "dataset": {"class_path": "Arrays", "init_args": {"path": str(data)}},
            "partition": "IID",
            "clients": clients,
            "local_test": 0.0,
        },
        "model": "CNN",
        "algorithm": "FedAvg",
        "rounds": rounds,
        "batch_size": batch_size,
        "optimizer": {"class_path": "SGD", "init_args": {"lr": 0.01}},
        "trainer": {"accelerator": "cpu", "max_epochs": 1},
        "evaluation": {"every": rounds},
        "logger": None,
        "run_dir": str(run_dir),
    }


def framework(settings: dict) -> None:
    """Run the experiment as the command line does."""
    path = Path(settings["run_dir"]).with_suffix(".yaml")
    path.write_text(yaml.safe_dump(settings))
    with contextlib.redirect_stdout(io.StringIO()):
        code = fl_lightning(["fit", "--config", str(path)])
    assert code == 0


def plain(data: Path, batch_size: int, rounds: int) -> None:
    """Train FedAvg with a hand-written loop."""
    arrays = np.load(data)
    x, y = torch.from_numpy(arrays["x_train"]), torch.from_numpy(arrays["y_train"])
    shards = torch.randperm(len(y)).chunk(CLIENTS)
    model = CNN(in_shape=tuple(x.shape[1:]), num_classes=10)
    for _ in range(rounds):
        sums = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
        for shard in shards:
            local = copy.deepcopy(model)
            optimizer = torch.optim.SGD(local.parameters(), lr=0.01)
            for batch in shard[torch.randperm(len(shard))].split(batch_size):
                optimizer.zero_grad()
                F.cross_entropy(local(x[batch]), y[batch]).backward()
                optimizer.step()
            for name, value in local.state_dict().items():
                sums[name] += value * (len(shard) / len(y))
        model.load_state_dict(sums)
    with torch.no_grad():
        model(torch.from_numpy(arrays["x_test"])).argmax(dim=1)


def step_time(shape: tuple[int, ...], batch_size: int) -> float:
    """Return the median seconds of a training step in plain PyTorch."""
    model, x, y = CNN(in_shape=shape, num_classes=10), torch.randn(batch_size, *shape), torch.arange(batch_size) % 10
    times = []
    for _ in range(20):
        started = time.perf_counter()
        F.cross_entropy(model(x), y).backward()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def wall_ratio(name: str, work: float, repeats: int, folder: Path) -> None:
    """Print the time of fl-lightning relative to the loop, for client fits of `work` seconds, without the start."""
    shape, batch_size = SHAPES[name]
    steps = max(1, round(work / step_time(shape, batch_size)))
    data = folder / f"{name}-{work}.npz"
    write_data(data, shape, CLIENTS * steps * batch_size)
    ratios, ours, theirs = [], [], []
    for i in range(repeats):
        spent = []
        for rounds in (1, 1 + ROUNDS):
            settings = config(data, folder / f"{name}-{work}-{i}-{rounds}", batch_size, CLIENTS, rounds)
            pair = []
            for job in (lambda s=settings: framework(s), lambda r=rounds: plain(data, batch_size, r)):
                started = time.perf_counter()
                job()
                pair.append(time.perf_counter() - started)
            spent.append(pair)
        framework_round, plain_round = ((spent[1][k] - spent[0][k]) / ROUNDS for k in (0, 1))
        ours.append(framework_round / CLIENTS)
        theirs.append(plain_round / CLIENTS)
        ratios.append(framework_round / plain_round)
    print(
        f"{name:14} {steps:4} steps a fit: plain {statistics.median(theirs) * 1e3:7.1f} ms, "
        f"framework {statistics.median(ours) * 1e3:7.1f} ms, ratio {statistics.median(ratios):.3f} "
        f"(min {min(ratios):.3f}, max {max(ratios):.3f}, {repeats} pairs)",
        flush=True,
    )


def peak_memory(clients: int) -> None:
    """Print the peak memory of this process after two rounds with one training step per client."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(folder / "data.npz", (1, 28, 28), 6400)
        framework(config(folder / "data.npz", folder / "run", 64, clients, 2))
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def memory_ratio() -> None:
    """Print the peak memory with 100 clients per round relative to 10, each in its own process."""
    peaks = []
    for clients in (10, 100):
        command = [sys.executable, __file__, "--peak", str(clients)]
        peaks.append(float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1]))
    few, many = peaks
    print(f"peak memory: 10 clients a round {few:.0f} MiB, 100 clients {many:.0f} MiB, ratio {many / few:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5, help="pairs a setting (default 5)")
    parser.add_argument("--peak", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peak:
        peak_memory(args.peak)
        return
    with tempfile.TemporaryDirectory() as folder:
        for name in SHAPES:
            for work in (1.0, 0.05):
                wall_ratio(name, work, args.repeats, Path(folder))
    memory_ratio()


if __name__ == "__main__":
    main()
