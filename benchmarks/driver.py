"""Measure what the main process does for each result of a worker process, and compute how many workers it can serve.

    python benchmarks/driver.py [--workers 64] [--repeats 9]

Nothing is trained by other processes: this process makes a task, writes it to shared memory as `ProcessesEngine` does,
writes a result there as a worker process would, and then reads and aggregates the result. Clients train MLPs of three
sizes with FedAvg. The script prints, for each size, medians of:

- the bytes of a serialized task, without the shared model, and of a serialized result;
- the processor milliseconds of the main process for sending a task, for reading a result, and for aggregating it.

It then multiplies: the number of results per second that one main process can take, and the seconds that a client must
train so that the main process is not the bottleneck of the given number of workers.
"""

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from fl_lightning import FederatedOrchestrator, LocalTraining
from fl_lightning.algorithms import FedAvg
from fl_lightning.callbacks import RoundProgress
from fl_lightning.data import IID, Arrays, Scenario
from fl_lightning.engines.processes import MemoryFile
from fl_lightning.engines.serialization import SerializedValue, SharedTensorStore, deserialize
from fl_lightning.engines.task_server import Answer
from fl_lightning.models import MLP

SIZES = {"0.3 MB": (256, 256), "4.5 MB": (1024, 1024), "45.5 MB": (3335, 3335)}


class Stopwatch:
    """Collects the processor milliseconds of several parts of the work.

    Attributes:
        times: The measured times by name of the part.
    """

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {}
        self._started = 0.0

    def start(self) -> None:
        """Begin the first part."""
        self._started = time.process_time()

    def lap(self, name: str) -> None:
        """End a part, and begin the next one."""
        now = time.process_time()
        self.times.setdefault(name, []).append(1e3 * (now - self._started))
        self._started = now


def experiment(hidden: tuple[int, int], clients: int, folder: Path) -> FederatedOrchestrator:
    """Return a checked experiment whose clients have four samples of 8x8 pixels each."""
    rng, n = np.random.default_rng(0), 4 * clients
    x, y = rng.integers(0, 256, (n, 1, 8, 8), dtype=np.uint8), np.arange(n) % 10
    np.savez(folder / "data.npz", x_train=x, y_train=y, x_test=x[:40], y_test=y[:40])
    run = FederatedOrchestrator(
        Scenario(Arrays(str(folder / "data.npz")), IID(), clients, local_test=0.0),
        partial(MLP, hidden=hidden),
        FedAvg(),
        callbacks=[RoundProgress()],
        training=LocalTraining(batch_size=4, trainer={"accelerator": "cpu", "max_steps": 1}),
        run_dir=str(folder / "run"),
    )
    run.check()
    return run


def measure(hidden: tuple[int, int], repeats: int) -> tuple[int, int, dict[str, float]]:
    """Return the bytes of a task and of a result, and the median milliseconds of each part."""
    with tempfile.TemporaryDirectory() as folder:
        run = experiment(hidden, repeats, Path(folder))
    clients, watch = range(repeats), Stopwatch()
    store = SharedTensorStore(MemoryFile().append)
    run.server.begin_round(1)
    tasks = [run.server.task(1, k, d) for k, d in zip(clients, run.server.downloads(1, clients), strict=True)]
    for task in tasks:
        store.add(task)
    trained = run.worker.run(tasks[0])
    for task in tasks:
        watch.start()
        request = SerializedValue(task, store)
        MemoryFile().append(request)
        watch.lap("send")
        answer = SerializedValue(Answer(replace(trained, client=task.client)))
        place = MemoryFile().append(answer)
        watch.start()
        result = deserialize(place.file.read(place.spans), copy=True).result
        watch.lap("read")
        run.server.add(result)
        watch.lap("aggregate")
    sizes = [sum(map(len, value.parts)) for value in (request, answer)]
    return sizes[0], sizes[1], {name: statistics.median(times) for name, times in watch.times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    print("model     task, kB  result, MB  send, ms  read, ms  aggregate, ms  results/s  seconds per client")
    for name, hidden in SIZES.items():
        down, up, parts = measure(hidden, args.repeats)
        total = sum(parts.values())
        numbers = f"{parts['send']:8.2f} {parts['read']:9.2f} {parts['aggregate']:14.2f} {1e3 / total:10.0f}"
        print(f"{name:8} {down / 1e3:9.1f} {up / 1e6:11.2f} {numbers} {args.workers * total / 1e3:19.2f}", flush=True)


if __name__ == "__main__":
    main()
