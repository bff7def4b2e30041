"""Measure the peak memory of a round with one slow client, relative to a round of equally fast clients.

    python benchmarks/straggler.py [processes ray] [--clients 31] [--workers 2] [--held 256]

31 clients train a model of 45.5 MB for one step. The slow client has the lowest id, so all other results wait for it.
It finishes when no other client has begun for some seconds. Each round runs in its own process. The script prints:

- `main`: the peak of the resident memory of the main process, which holds the results (`VmHWM`);
- `all`: the peak of the memory of the main process and its worker processes together (`Pss`), sampled every 50 ms.
  Shared pages count once. With Ray it has only the main process, because actors are not its children;
- a digest of the global model;
- the ratios of the slow round to the equal one.

The script needs Linux.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np

from fl_lightning import FederatedOrchestrator, LocalTraining
from fl_lightning.algorithms import FedAvg
from fl_lightning.callbacks import RoundProgress
from fl_lightning.client.loss_term import LossTerm
from fl_lightning.data import IID, Arrays, Scenario
from fl_lightning.engines import ProcessesEngine, RayEngine
from fl_lightning.models import MLP

ENGINES = {"processes": ProcessesEngine, "ray": RayEngine}
SAMPLES = 4  # of each client except the first, which has one more
QUIET = 5.0  # seconds without a new client until the slow one finishes
HIDDEN = (3335, 3335)  # 45.5 MB


class Slow(LossTerm):
    """Let the client with the most samples wait until no other client begins any more.

    Args:
        folder: A folder in which each client leaves a file.
        waits: Whether the client waits.
    """

    folder: str = ""
    waits: bool = True

    def begin(self, module):
        """Leave a file, and wait."""
        os.close(tempfile.mkstemp(dir=self.folder)[0])
        if not self.waits or int(module.context.class_counts.sum()) == SAMPLES:
            return
        seen, since = 0, time.monotonic()
        while time.monotonic() - since < QUIET:
            if (found := len(os.listdir(self.folder))) > seen:
                seen, since = found, time.monotonic()
            time.sleep(0.1)

    def forward(self, step):
        """Add nothing to the loss."""
        return step.logits.sum() * 0


class Silent(RoundProgress):
    """Show no progress."""

    def on_fit_start(self, run):
        """Show nothing."""

    def on_round_end(self, run, metrics):
        """Show nothing."""

    def on_fit_end(self, run):
        """Show nothing."""


def field(file: str, name: str) -> int:
    """Return a number from a file in /proc."""
    line = next(line for line in Path(file).read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1])


def family(pid: int) -> list[int]:
    """Return the ids of a process and of all its descendants."""
    found = [pid]
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in (thread / "children").read_text().split():
                found += family(int(child))
    return found


def watch(peak: list[int]) -> None:
    """Record the peak of the memory of this process and its worker processes in KiB, until the process ends."""
    while True:
        total = 0
        for pid in family(os.getpid()):
            with suppress(OSError, StopIteration):  # a process that has just ended
                total += field(f"/proc/{pid}/smaps_rollup", "Pss")
        peak[0] = max(peak[0], total)
        time.sleep(0.05)


def measure(engine: str, slow: bool, clients: int, workers: int, held: float | None, folder: Path) -> None:
    """Run one round in this process, and print its peaks in MB and the digest of the global model."""
    from straggler import Slow  # worker processes import it by this name

    rng, n = np.random.default_rng(0), SAMPLES * clients + 1
    x, y = rng.integers(0, 256, (n, 1, 8, 8), dtype=np.uint8), np.arange(n) % 10
    np.savez(folder / "data.npz", x_train=x, y_train=y, x_test=x[:100], y_test=y[:100])
    (folder / "begun").mkdir()
    options = {} if held is None else {"held_megabytes": held}
    options |= {"address": "local"} if engine == "ray" else {}  # a new cluster, also if another one runs here
    run = FederatedOrchestrator(
        Scenario(Arrays(str(folder / "data.npz")), IID(), clients, local_test=0.0),
        partial(MLP, hidden=HIDDEN),
        FedAvg(loss_terms=[Slow(folder=str(folder / "begun"), waits=slow)]),
        rounds=1,
        engine=ENGINES[engine](workers=workers, **options),
        callbacks=[Silent()],
        training=LocalTraining(batch_size=4, trainer={"accelerator": "cpu", "max_steps": 1}),
        run_dir=str(folder / "run"),
    )
    peak = [0]
    threading.Thread(target=watch, args=(peak,), daemon=True).start()
    run.fit()
    digest = hashlib.sha256()
    for value in run.state["model"].values():
        digest.update(value.numpy().tobytes())
    print(field("/proc/self/status", "VmHWM") / 1e3, peak[0] / 1e3, digest.hexdigest()[:12])


def peaks(engine: str, slow: bool, args: argparse.Namespace) -> tuple[float, float, str]:
    """Return the peaks of a round in MB, and the digest of its model. It runs in another process."""
    words = [engine, "--clients", args.clients, "--workers", args.workers, "--case", "slow" if slow else "equal"]
    words += [] if args.held is None else ["--held", args.held]
    command = [sys.executable, __file__, *map(str, words)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    main, everything, digest = done.stdout.splitlines()[-1].split()
    return float(main), float(everything), digest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engines", nargs="*", default=["processes"], metavar="ENGINE", help="processes, ray")
    parser.add_argument("--clients", type=int, default=31)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--held", type=float, help="the engine's `held_megabytes`")
    parser.add_argument("--case", choices=["equal", "slow"], help="this one only, in this process")
    args = parser.parse_args()
    if args.case:
        with tempfile.TemporaryDirectory() as folder:
            common = (args.clients, args.workers, args.held, Path(folder))
            measure(args.engines[0], args.case == "slow", *common)
        return
    for engine in args.engines:
        found = [peaks(engine, slow, args) for slow in (False, True)]
        for name, (own, everything, digest) in zip(("equal", "slow"), found, strict=True):
            print(f"{engine} {name}: main {own:.0f} MB, all {everything:.0f} MB, model {digest}", flush=True)
        ratios = [slow / equal for equal, slow in zip(found[0][:2], found[1][:2], strict=True)]
        print(f"{engine} ratio: main {ratios[0]:.2f}, all {ratios[1]:.2f}", flush=True)


if __name__ == "__main__":
    main()
