"""What 1,000 clients with a ResNet-18 each cost with `client_store: disk`: memory, and bytes written a round.

    python benchmarks/store.py

Each client has 4 samples of 8x8 pixels and trains one step: the time is that of carrying, mixing and writing models. 50
of 1,000 take part in a round; a checkpoint is written after each. Each method runs in a process of its own. Prints, for
each round, its seconds and what the process wrote (`wchar` in /proc/self/io); and the largest memory of the whole run:
the process's own (`RssAnon`, looked at every 20 ms) and all that was resident (`VmHWM`), mapped files included, which
the system takes back when it needs the room. Linux only; takes some 15 minutes and 10 GB of disk, which it frees.
"""

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from fl_lightning.callbacks import RoundCallback, RoundProgress

from fl_lightning import FederatedOrchestrator, LocalTraining
from fl_lightning.algorithms import UAPDFL, FedAvg, HistoryContrast
from fl_lightning.data import IID, Arrays, Scenario
from fl_lightning.models import ResNet18

METHODS = {
    "peers": ("UA-PDFL, 5 peers a client", UAPDFL),
    "personal": ("HistoryContrast, each client's last encoder", lambda: FedAvg(loss_terms=[HistoryContrast()])),
}


class Silent(RoundProgress):
    """No progress bars."""

    def on_fit_start(self, run):
        """Nothing to set up."""

    def on_round_end(self, run, metrics):
        """Nothing to show."""

    def on_fit_end(self, run):
        """Nothing to take down."""


class Written(RoundCallback):
    """Prints what each round, its checkpoint included, has written."""

    def __init__(self) -> None:
        self.before, self.started = 0, 0.0

    def on_round_start(self, run, participants):
        """Report the round before, and begin to count."""
        run.record.writer.wait()
        self.on_fit_end(run)
        self.before, self.started = written(), time.perf_counter()

    def on_fit_end(self, run):
        """Report the last round, whose checkpoint is on disk."""
        if run.round:
            seconds, gigabytes = time.perf_counter() - self.started, (written() - self.before) / 1e9
            print(f"  round {run.round}: {seconds:.0f} s, {gigabytes:.2f} GB written", flush=True)


def written() -> int:
    """Bytes that this process has written so far."""
    return field("/proc/self/io", "wchar")


def field(file: str, name: str) -> int:
    """A number in one of /proc's files."""
    line = next(line for line in Path(file).read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1])


def watch(peak: list[int]) -> None:
    """Note the largest RssAnon, in KiB, for as long as the process lives."""
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
