"""Rounds of FedAvg: fl-lightning beside a hand-written loop and other simulators, on small and large clients.

    python -m venv peers && peers/bin/pip install -r benchmarks/cohort-requirements.txt
    python benchmarks/cohort.py --peers peers/bin/python

The workloads (`WORKLOADS`) are pfl-research's public benchmark (`w1`), a text classifier (`text`), and clients of a few
milliseconds (`a`, `a5`, `b`). Data are synthetic, training is SGD. The hand-written loop keeps one local model. Every
contestant runs in a process of its own, one after another, and all over again in each turn. A contestant that is not
installed is left out. A round lasts from the end of the one before it to its own end, with checkpoints. The first
rounds, in which much is built for the first time, and the last, after which models are evaluated, are left out.

The script prints, for each contestant, the median round and its ratio to the loop's of the same turn (median and range
over turns), processor time and page faults of a round, peak memory, and the loss of the final model. A turn in which
other processes used more than 4 % of the machine is repeated, and the script says how often. It stops if optimizer
steps or parameters differ, or if losses are not close. flwr's rounds run in two Ray workers of one thread each, whose
processor time is not counted; everything else runs in one process with as many threads as there are cores.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES, TEST_SAMPLES, WORDS = 10, 1000, 5000
WARM_UP = 3  # rounds that are not timed
FOREIGN = 0.04  # share of the machine that other processes may use in a turn
TURNS = 3  # times that a disturbed turn is repeated


@dataclass(frozen=True)
class Workload:
    """The experiment that all contestants run.

    Args:
        clients: Number of clients.
        per_round: Number of participants of a round.
        samples: Training samples of each client.
        batch: Batch size.
        shape: Shape of an input; one number for the length of a text.
        model: Builds the network, and says how fl-lightning builds the same.
        parameters: Number of its parameters.
        epochs: Local epochs.
        lr: Learning rate.
        rounds: Timed rounds of a turn.
    """

    clients: int
    per_round: int
    samples: int
    batch: int
    shape: tuple[int, ...]
    model: Callable[[], tuple[nn.Module, dict[str, Any]]]
    parameters: int
    epochs: int = 1
    lr: float = 0.1
    rounds: int = 5

    @property
    def steps(self) -> int:
        """Optimizer steps of a round."""
        return self.per_round * self.epochs * -(-self.samples // self.batch)


def convolutions() -> tuple[nn.Module, dict[str, Any]]:
    """Pfl's network for CIFAR-10."""
    parts = [nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    network = nn.Sequential(*parts, nn.Linear(64 * 14 * 14, 128), nn.ReLU(), nn.Linear(128, CLASSES))
    return network, {"class_path": "FromModule", "init_args": {"module": "cohort_parts.pfl_network", "head": "8"}}


def dense(*widths: int) -> Callable[[], tuple[nn.Module, dict[str, Any]]]:
    """A fully connected network."""

    def build() -> tuple[nn.Module, dict[str, Any]]:
        layers: list[nn.Module] = [nn.Flatten()]
        for narrow, wide in pairwise(widths):
            layers += [nn.Linear(narrow, wide), nn.ReLU()]
        network = nn.Sequential(*layers, nn.Linear(widths[-1], CLASSES))
        return network, {"class_path": "MLP", "init_args": {"hidden": list(widths[1:])}}

    return build


class TextNetwork(nn.Module):
    """Kim's network: convolutions over 3, 4 and 5 words, their maxima, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 64, padding_idx=0)
        self.convolutions = nn.ModuleList(nn.Conv1d(64, 100, size, padding="same") for size in (3, 4, 5))
        self.head = nn.Sequential(nn.Dropout(0.5), nn.Linear(300, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        """Logits of a batch of token ids."""
        vectors = self.words(x).transpose(1, 2)
        return self.head(torch.cat([F.relu(one(vectors)).amax(2) for one in self.convolutions], dim=1))


def words() -> tuple[nn.Module, dict[str, Any]]:
    """A text classifier."""
    return TextNetwork(), {"class_path": "TextCNN", "init_args": {"vocab_size": WORDS, "embedding_dim": 64}}


WORKLOADS = {
    "w1": Workload(1000, 50, 50, 10, (3, 32, 32), convolutions, 1_626_442),
    "text": Workload(100, 10, 60, 10, (64,), words, 400_110),
    "a": Workload(100, 10, 15, 5, (1, 8, 8), dense(64, 128, 64), 17_226, rounds=200),
    "a5": Workload(100, 10, 15, 5, (1, 8, 8), dense(64, 128, 64), 17_226, epochs=5, rounds=80),
    "b": Workload(10_000, 100, 20, 10, (1, 28, 28), dense(784, 200, 200), 199_210, rounds=30),
}


def network_of(work: Workload) -> nn.Module:
    """Return the network, with the same weights at each call."""
    torch.manual_seed(0)
    return work.model()[0]


def write_data(work: Workload, path: Path) -> None:
    """Write a pattern for each class under noise; for texts, words that partly belong to a class."""
    rng = np.random.default_rng(0)
    patterns = rng.normal(size=(CLASSES, *work.shape), scale=0.5).astype(np.float32)

    def split(n: int) -> tuple[np.ndarray, np.ndarray]:
        y = np.arange(n) % CLASSES
        if len(work.shape) == 1:
            x = rng.integers(1 + CLASSES, WORDS, (n, *work.shape))
            return np.where(rng.random(x.shape) < 0.2, 1 + y[:, None], x), y
        return patterns[y] + rng.standard_normal((n, *work.shape), dtype=np.float32), y

    x_train, y_train = split(work.clients * work.samples)
    x_test, y_test = split(TEST_SAMPLES)
    np.savez(path, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)


def read(path: Path, split: str = "train") -> tuple[Tensor, Tensor]:
    """Inputs and labels of `train` or `test`."""
    with np.load(path) as arrays:
        return torch.from_numpy(arrays[f"x_{split}"]), torch.from_numpy(arrays[f"y_{split}"])


# --- Clocks -----------------------------------------------------------------------------------------------------------

ENDS: list[tuple[float, float, int]] = []


def end_round() -> None:
    """Note the end of a round: wall time, processor time and page faults so far."""
    ENDS.append((time.perf_counter(), time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt))


def processor_time() -> tuple[float, float]:
    """Seconds that all processors were busy, and seconds of this process and its children."""
    busy = sum(
        int(n) for i, n in enumerate(Path("/proc/stat").read_text().split("\n")[0].split()[1:9]) if i not in (3, 4)
    )
    own = sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return busy / os.sysconf("SC_CLK_TCK"), own


# --- The contestants: each runs so many rounds, notes the end of each, and returns the final weights ------------------


def loop(work: Workload, data: Path, rounds: int, folder: Path) -> Iterable[Tensor]:
    """FedAvg as one would write it by hand."""
    x, y = read(data)
    shards = torch.randperm(len(y)).split(work.samples)
    model, local = network_of(work), network_of(work)
    for _ in range(rounds):
        sums = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
        for client in torch.randperm(work.clients)[: work.per_round].tolist():
            local.load_state_dict(model.state_dict())
            optimizer = torch.optim.SGD(local.parameters(), lr=work.lr)
            for _ in range(work.epochs):
                for batch in shards[client][torch.randperm(work.samples)].split(work.batch):
                    optimizer.zero_grad()
                    F.cross_entropy(local(x[batch]), y[batch]).backward()
                    optimizer.step()
            for name, value in local.state_dict().items():
                sums[name] += value / work.per_round
        model.load_state_dict(sums)
        end_round()
    return model.parameters()


def settings_of(work: Workload, data: Path, rounds: int, folder: Path) -> dict[str, Any]:
    """The experiment as a config of fl-lightning."""
    texts = len(work.shape) == 1
    return {
        "scenario": {
            "dataset": {"class_path": "cohort_parts.Texts" if texts else "Arrays", "init_args": {"path": str(data)}},
            "partition": "IID",
            "clients": work.clients,
            "local_test": 0.0,
        },
        "model": work.model()[1],
        "algorithm": "FedAvg",
        "rounds": rounds,
        "clients_per_round": work.per_round,
        "batch_size": work.batch,
        "optimizer": {"class_path": "SGD", "init_args": {"lr": work.lr}},
        "trainer": {"accelerator": "cpu", "max_epochs": work.epochs},
        "evaluation": {"every": rounds},
        "callbacks": ["cohort_parts.RoundEnds"],
        "run_dir": str(folder / "run"),
    }


def command_line(work: Workload, data: Path, rounds: int, folder: Path, **changes: Any) -> Iterable[Tensor]:
    """fl-lightning from a config file, with its default logger (W&B, offline)."""
    import yaml

    from fl_lightning.cli.main import main as fl_lightning

    (folder / "cohort.yaml").write_text(yaml.safe_dump(settings_of(work, data, rounds, folder) | changes))
    assert fl_lightning(["fit", "--config", str(folder / "cohort.yaml")]) == 0
    return torch.load(folder / "run" / "final" / "model.pt", weights_only=True).values()


def without_logger(work: Workload, data: Path, rounds: int, folder: Path) -> Iterable[Tensor]:
    """fl-lightning as from Python, where there is no logger beside metrics.csv."""
    return command_line(work, data, rounds, folder, logger=False)


def without_checkpoints(work: Workload, data: Path, rounds: int, folder: Path) -> Iterable[Tensor]:
    """The same, with no checkpoint before the last round: the other simulators write none."""
    callbacks = ["cohort_parts.RoundEnds", {"class_path": "Checkpointing", "init_args": {"every": rounds}}]
    return command_line(work, data, rounds, folder, logger=False, callbacks=callbacks)


def stacked(work: Workload, data: Path, rounds: int, folder: Path) -> Iterable[Tensor]:
    """fl-lightning's stacked engine."""
    return command_line(work, data, rounds, folder, logger=False, engine="stacked")


def processes(work: Workload, data: Path, rounds: int, folder: Path) -> Iterable[Tensor]:
    """fl-lightning's worker processes."""
    return command_line(work, data, rounds, folder, logger=False, engine="processes")


def pfl(work: Workload, data: Path, rounds: int, folder: Path) -> Iterable[Tensor]:
    """pfl-research's simulation in one process."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam.base import NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = network_of(work)

        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.layers(x), y)

        def metrics(self, x: Tensor, y: Tensor) -> dict:
            return {}

    class Progress(TrainingProcessCallback):
        def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
            end_round()
            return False, Metrics()

    x, y = read(data)
    shards = torch.randperm(len(y)).split(work.samples)
    users = FederatedDataset(
        lambda user: Dataset((x[shards[user]], y[shards[user]])),
        get_user_sampler("minimize_reuse", torch.randperm(work.clients).tolist()),
    )
    model = Model()
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=rounds + 1,
            train_cohort_size=work.per_round,
            val_cohort_size=0,
        ),
        SimulatedBackend(users, users),
        PyTorchModel(model, torch.optim.SGD, torch.optim.SGD(model.parameters(), lr=1.0)),
        NNTrainHyperParams(local_num_epochs=work.epochs, local_learning_rate=work.lr, local_batch_size=work.batch),
        callbacks=[Progress()],
    )
    return model.parameters()


def fluke(work: Workload, data: Path, rounds: int, folder: Path) -> Iterable[Tensor]:
    """One process of fluke, its evaluations switched off."""
    from fluke import DDict, FlukeENV
    from fluke.algorithms.fedavg import FedAVG
    from fluke.data import DataContainer, DataSplitter
    from fluke.utils import FederationObserver

    class Progress(FederationObserver):
        def end_round(self, round: int) -> None:
            end_round()

    FlukeENV().set_device("cpu")
    FlukeENV().set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
    optimizer, scheduler = DDict(name="SGD", lr=work.lr), DDict(name="StepLR", step_size=1, gamma=1.0)
    client = DDict(
        batch_size=work.batch,
        local_epochs=work.epochs,
        loss="CrossEntropyLoss",
        optimizer=optimizer,
        scheduler=scheduler,
    )
    settings = DDict(model=network_of(work), client=client, server=DDict(weighted=True))
    splitter = DataSplitter(DataContainer(*read(data), *read(data, "test"), num_classes=CLASSES), "iid")
    federation = FedAVG(work.clients, splitter, settings)
    federation.set_callbacks(Progress())
    federation.run(rounds, work.per_round / work.clients)
    return federation.server.model.parameters()


def flwr(work: Workload, data: Path, rounds: int, folder: Path) -> Iterable[Tensor]:
    """Flower's simulation engine, in two Ray workers of one thread each."""
    os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    client_app, server_app, final = ClientApp(), ServerApp(), []
    name = next(name for name, known in WORKLOADS.items() if known == work)

    @client_app.train()
    def train(message: Message, context: Context) -> Message:
        import cohort  # in a worker this file is no script: a module's cache outlasts the client

        work = cohort.WORKLOADS[name]
        torch.set_num_threads(1)
        x, y, shards = cohort.held(name, data)
        model, steps = cohort.network_of(work), 0
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=work.lr)
        for _ in range(work.epochs):
            for batch in shards[context.node_config["partition-id"]][torch.randperm(work.samples)].split(work.batch):
                optimizer.zero_grad()
                F.cross_entropy(model(x[batch]), y[batch]).backward()
                optimizer.step()
                steps += 1
        did = MetricRecord({"num-examples": work.samples, "steps": steps})
        return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": did}), reply_to=message)

    class Strategy(FedAvg):
        def aggregate_train(self, server_round, replies):
            replies = list(replies)
            for reply in replies:
                STEPS.count += int(reply.content["metrics"]["steps"])
            aggregated = super().aggregate_train(server_round, replies)
            end_round()
            return aggregated

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = Strategy(work.per_round / work.clients, fraction_evaluate=0.0, min_available_nodes=work.clients)
        result = strategy.start(grid, ArrayRecord(network_of(work).state_dict()), num_rounds=rounds)
        final.extend(result.arrays.to_torch_state_dict().values())

    resources = {"init_args": {"address": "local", "num_cpus": 2}, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server_app, client_app, work.clients, backend_config=resources)
    return final


@cache
def held(name: str, data: Path) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
    """What a worker of flwr keeps from client to client: the data, and who has which samples."""
    torch.manual_seed(0)
    x, y = read(data)
    return x, y, torch.randperm(len(y)).split(WORKLOADS[name].samples)


Contestant = Callable[[Workload, Path, int, Path], Iterable[Tensor]]
CONTESTANTS: dict[str, tuple[str, Contestant]] = {
    "loop": ("torch", loop),
    "ours": ("fl_lightning", without_logger),
    "ours, no checkpoints": ("fl_lightning", without_checkpoints),
    "ours, W&B": ("fl_lightning", command_line),
    "ours, stacked": ("fl_lightning", stacked),
    "ours, processes": ("fl_lightning", processes),
    "pfl": ("pfl", pfl),
    "fluke": ("fluke", fluke),
    "flwr": ("flwr", flwr),
}
ELSEWHERE = {"ours, stacked", "ours, processes"}  # their steps are batched, or in other processes


# --- One contestant, in a process of its own --------------------------------------------------------------------------


class Steps:
    """The clients' training steps, counted as losses with a gradient that this process computes."""

    count = 0

    def watch(self) -> None:
        """Count every cross-entropy with a gradient from now on."""
        cross_entropy = F.cross_entropy

        def counted(*args: Any, **options: Any) -> Tensor:
            loss = cross_entropy(*args, **options)
            self.count += loss.requires_grad
            return loss

        F.cross_entropy = counted


STEPS = Steps()


def compete(name: str, work: Workload, data: Path, rounds: int) -> None:
    """Run one contestant; its last line says what it did."""
    before = processor_time()
    STEPS.watch()
    with tempfile.TemporaryDirectory() as folder:
        weights = list(CONTESTANTS[name][1](work, data, rounds, Path(folder)))
    assert len(ENDS) == rounds, f"{name}: {len(ENDS)} rounds of {rounds}"
    busy, own = (after - start for after, start in zip(processor_time(), before, strict=True))
    model, (x, y) = network_of(work).eval(), read(data, "test")
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), weights, strict=True):
            parameter.copy_(value)
        loss = F.cross_entropy(model(x), y).item()
    seconds, cpu, faults = np.diff(np.array(ENDS), axis=0)[WARM_UP:-1].T
    result = {"seconds": statistics.median(seconds), "cpu": float(cpu.mean()), "faults": statistics.median(faults)}
    result |= {"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, "loss": loss}
    spent = (ENDS[-1][0] - ENDS[0][0]) * (os.cpu_count() or 1)
    parameters = sum(value.numel() for value in weights)
    result |= {"steps": STEPS.count, "parameters": parameters, "foreign": max(0.0, busy - own) / spent}
    print(json.dumps(result))


# --- All of them ------------------------------------------------------------------------------------------------------


def run_once(python: str, name: str, key: str, data: Path, rounds: int) -> dict[str, float]:
    """Run a contestant in a process of its own, and return what it printed."""
    command = [python, __file__, "--contestant", name, "--data", str(data), "--rounds", str(rounds), "--work", key]
    folder = Path(__file__).parent
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(folder)}, check=False
    )
    if done.returncode:
        sys.exit(f"{name} failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def verify(name: str, run: dict[str, float], beside: dict[str, float], work: Workload, rounds: int) -> None:
    """Refuse to compare runs that did not do the same."""
    assert run["parameters"] == work.parameters, f"{name}: {run['parameters']} parameters"
    if name not in ELSEWHERE:
        assert run["steps"] == rounds * work.steps, f"{name}: {run['steps']} steps, not {rounds * work.steps}"
    assert abs(run["loss"] - beside["loss"]) < max(0.25 * beside["loss"], 0.05), (
        f"{name}: loss {run['loss']}, loop {beside['loss']}"
    )


def installed(python: str, package: str) -> bool:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    return subprocess.run([python, "-c", code]).returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default=sys.executable, help="Python of the loop and fl-lightning (this one)")
    parser.add_argument("--peers", default=sys.executable, help="Python with the other simulators (this one)")
    parser.add_argument("--repeats", type=int, default=5, help="turns of each contestant (default 5)")
    parser.add_argument("--only", nargs="*", default=list(CONTESTANTS), help="contestants beside the loop (all)")
    parser.add_argument("--work", nargs="*", default=list(WORKLOADS), choices=list(WORKLOADS), help="workloads (all)")
    parser.add_argument("--rounds", type=int, help="timed rounds of a turn (as the workload says)")
    parser.add_argument("--foreign", type=float, default=FOREIGN, help="share of other processes that is accepted")
    parser.add_argument("--contestant", help=argparse.SUPPRESS)
    parser.add_argument("--data", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.contestant:
        compete(args.contestant, WORKLOADS[args.work[0]], args.data, args.rounds)
        return
    pythons = {}
    for name, (package, _) in CONTESTANTS.items():
        python = args.python if package in ("torch", "fl_lightning") else args.peers
        if name == "loop" or name in args.only:
            if installed(python, package):
                pythons[name] = python
            else:
                print(f"{name}: left out, {package} is not installed for {python}")
    for key in args.work:
        compare(args, key, pythons)


def compare(args: argparse.Namespace, key: str, pythons: dict[str, str]) -> None:
    """Let the contestants take turns at one workload and print its table."""
    work = WORKLOADS[key]
    rounds = (args.rounds or work.rounds) + WARM_UP + 2
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in pythons}
    disturbed = 0
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data.npz"
        write_data(work, data)
        for _ in range(args.repeats):
            for _ in range(TURNS):
                turn = {name: run_once(python, name, key, data, rounds) for name, python in pythons.items()}
                for name, run in turn.items():
                    verify(name, run, turn["loop"], work, rounds)
                if all(run["foreign"] <= args.foreign for run in turn.values()):
                    for name, run in turn.items():
                        runs[name].append(run)
                    break
                disturbed += 1
    turns = len(runs["loop"])
    print(f"\n{key}: {turns} turns of {rounds - WARM_UP - 2} timed rounds, {work.steps} steps a round")
    print(f"{disturbed} turns were thrown away, because other processes used more than {args.foreign:.0%}")
    if not turns:
        return
    head = (
        f"{'ms a round':>11}{'to the loop':>13}{'least':>8}{'most':>8}{'cpu ms':>10}{'faults':>9}{'MiB':>7}{'loss':>8}"
    )
    print(f"{'':22}{head}")
    for name, own in runs.items():
        ratios = [run["seconds"] / beside["seconds"] for run, beside in zip(own, runs["loop"], strict=True)]
        seconds, cpu, faults, peak, loss = (
            statistics.median(run[what] for run in own) for what in ("seconds", "cpu", "faults", "peak", "loss")
        )
        spread = f"{statistics.median(ratios):13.3f}{min(ratios):8.3f}{max(ratios):8.3f}"
        print(f"{name:22}{seconds * 1e3:11.2f}{spread}{cpu * 1e3:10.2f}{faults:9.0f}{peak:7.0f}{loss:8.3f}", flush=True)


if __name__ == "__main__":
    sys.modules["cohort"] = sys.modules["__main__"]  # cohort_parts.py shares the clocks
    main()
