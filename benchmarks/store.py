"""Measure the memory and the written bytes of 1,000 clients with a ResNet-18 each and `client_store: disk`.

    python benchmarks/store.py

Each client has 4 samples of 8x8 pixels and trains for one step. So the time is spent on copying, mixing and writing
models. 50 of the 1,000 clients participate in a round, and each round ends with a checkpoint. Each method runs in its
own process.

For each round, the script prints the seconds and the bytes that the process wrote (`wchar` in /proc/self/io). For the
whole run it prints the peak of two kinds of memory:

- `RssAnon`: the memory of the process, sampled every 20 ms;
- `VmHWM`: all resident memory. It includes mapped files, which the system can release at any time.

The script needs Linux. It takes about 15 minutes and 10 GB of disk, which it frees.
"""

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from fl_lightning import FederatedOrchestrator, LocalTraining
from fl_lightning.algorithms import UAPDFL, FedAvg, HistoryContrast
from fl_lightning.callbacks import RoundCallback, RoundProgress
from fl_lightning.data import IID, Arrays, Scenario
from fl_lightning.models import ResNet18

METHODS = {
    "peers": ("UA-PDFL, 5 peers a client", UAPDFL),
    "personal": ("HistoryContrast, each client's last encoder", lambda: FedAvg(loss_terms=[HistoryContrast()])),
}


class Silent(RoundProgress):
    """Show no progress."""

    def on_fit_start(self, run):
        """Show nothing."""

    def on_round_end(self, run, metrics):
        """Show nothing."""

    def on_fit_end(self, run):
        """Show nothing."""


class Written(RoundCallback):
    """Print the seconds and the written bytes of each round, with its checkpoint."""

    def __init__(self) -> None:
        self.before, self.started = 0, 0.0

    def on_round_start(self, run, participants):
        """Report the previous round and reset the counters."""
        run.record.writer.wait()
        self.on_fit_end(run)
        self.before, self.started = written(), time.perf_counter()

    def on_fit_end(self, run):
        """Report the last round. Its checkpoint is on disk."""
        if run.round:
            seconds, gigabytes = time.perf_counter() - self.started, (written() - self.before) / 1e9
            print(f"  round {run.round}: {seconds:.0f} s, {gigabytes:.2f} GB written", flush=True)


def written() -> int:
    """Return the bytes that this process has written so far."""
    return field("/proc/self/io", "wchar")


def field(file: str, name: str) -> int:
    """Return a number from a file in /proc."""
    line = next(line for line in Path(file).read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1])


def watch(peak: list[int]) -> None:
    """Record the peak of RssAnon in KiB until the process ends."""
    while True:
        peak[0] = max(peak[0], field("/proc/self/status", "RssAnon"))
        time.sleep(0.02)


def measure(method: str, clients: int, rounds: int, folder: Path) -> None:
    """Run one method in this process."""
    rng, n = np.random.default_rng(0), 4 * clients
    x, y = rng.integers(0, 256, (n, 3, 8, 8), dtype=np.uint8), np.arange(n) % 10
    np.savez(folder / "data.npz", x_train=x, y_train=y, x_test=x[:100], y_test=y[:100])
    name, algorithm = METHODS[method]
    print(f"{name}: {clients} clients, {min(50, clients)} a round", flush=True)
    peak = [0]
    threading.Thread(target=watch, args=(peak,), daemon=True).start()
    started = time.perf_counter()
    FederatedOrchestrator(
        Scenario(Arrays(str(folder / "data.npz")), IID(), clients, local_test=0.0),
        ResNet18,
        algorithm(),
        rounds=rounds,
        clients_per_round=min(50, clients),
        client_store="disk",
        callbacks=[Silent(), Written()],
        training=LocalTraining(batch_size=4, trainer={"accelerator": "cpu", "max_steps": 1}),
        run_dir=str(folder / "run"),
    ).fit()
    resident = field("/proc/self/status", "VmHWM")
    print(f"  {time.perf_counter() - started:.0f} s in all; largest memory {peak[0] / 1e6:.2f} GB of its own, ", end="")
    print(f"{resident / 1e6:.2f} GB resident with mapped files", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--method", choices=METHODS, help="this one only, in this process")
    args = parser.parse_args()
    if args.method:
        with tempfile.TemporaryDirectory() as folder:
            measure(args.method, args.clients, args.rounds, Path(folder))
        return
    for method in METHODS:
        options = ["--clients", str(args.clients), "--rounds", str(args.rounds), "--method", method]
        subprocess.run([sys.executable, __file__, *options], check=True)


if __name__ == "__main__":
    main()
