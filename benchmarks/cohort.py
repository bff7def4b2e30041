"""A round of 50 out of 1,000 clients: fl-lightning beside a hand-written loop and other simulators.

    python -m venv peers && peers/bin/pip install -r benchmarks/cohort-requirements.txt
    python benchmarks/cohort.py --peers peers/bin/python

FedAvg on the workload of pfl-research's public benchmark: images of CIFAR-10's shape, 1,000 clients of 50 samples, 50
of them a round, one epoch in batches of 10, SGD, a network of two convolutions with 1,626,442 parameters; the images
are synthetic. Every contestant runs in a process of its own, one after another, and all over again for each repeat;
what is not installed is left out. A round lasts from the end of the one before it to its own, checkpoints and all; the
first, in which much is made for the first time, and the last, after which models are scored, are left out.

Prints each contestant's seconds a round over the loop's of the same repeat, its quickest round of all over the loop's
quickest, which a busy machine disturbs least, and the final model's loss on the test set.
Refuses to where optimizer steps or parameters are not the same, or losses not close. flwr's rounds run in two Ray
workers of one thread each, everything else in one process with as many threads as there are cores.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook

CLIENTS, PER_ROUND, SAMPLES, BATCH, CLASSES, LR = 1000, 50, 50, 10, 10, 0.1
SHAPE, TEST_SAMPLES, PARAMETERS = (3, 32, 32), 1000, 1_626_442


def network() -> nn.Sequential:
    """The benchmark's network, the same weights at each call."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 14 * 14, 128),
        nn.ReLU(),
        nn.Linear(128, CLASSES),
    )


def write_data(path: Path) -> None:
    """A pattern for each class under noise, float32."""
    rng = np.random.default_rng(0)
    patterns = rng.normal(size=(CLASSES, *SHAPE), scale=0.5).astype(np.float32)

    def split(n: int) -> tuple[np.ndarray, np.ndarray]:
        y = np.arange(n) % CLASSES
        return patterns[y] + rng.standard_normal((n, *SHAPE), dtype=np.float32), y

    x_train, y_train = split(CLIENTS * SAMPLES)
    x_test, y_test = split(TEST_SAMPLES)
    np.savez(path, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)


def read(path: Path, split: str = "train") -> tuple[Tensor, Tensor]:
    """Inputs and labels of `train` or `test`."""
    with np.load(path) as arrays:
        return torch.from_numpy(arrays[f"x_{split}"]), torch.from_numpy(arrays[f"y_{split}"])


# --- The contestants: each runs so many rounds, tells the end of each, and returns the final weights ------------------


def loop(data: Path, rounds: int, folder: Path) -> Iterable[Tensor]:
    """FedAvg as one would write it by hand."""
    x, y = read(data)
    shards = torch.randperm(len(y)).split(SAMPLES)
    model = network()
    for done in range(1, rounds + 1):
        sums = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
        for client in torch.randperm(CLIENTS)[:PER_ROUND].tolist():
            local = copy.deepcopy(model)
            optimizer = torch.optim.SGD(local.parameters(), lr=LR)
            for batch in shards[client][torch.randperm(SAMPLES)].split(BATCH):
                optimizer.zero_grad()
                F.cross_entropy(local(x[batch]), y[batch]).backward()
                optimizer.step()
            for name, value in local.state_dict().items():
                sums[name] += value / PER_ROUND
        model.load_state_dict(sums)
        print(f"round {done}/{rounds}", flush=True)
    return model.parameters()


def from_python(data: Path, rounds: int, folder: Path) -> Iterable[Tensor]:
    """fl-lightning from Python."""
    from functools import partial

    from fl_lightning import Evaluation, FederatedOrchestrator, LocalTraining
    from fl_lightning.algorithms import FedAvg
    from fl_lightning.data import IID, Arrays, Scenario
    from fl_lightning.models import FromModule

    run = FederatedOrchestrator(
        Scenario(Arrays(str(data)), IID(), CLIENTS, local_test=0.0),
        partial(FromModule, module="cohort.network", head="8"),
        FedAvg(),
        rounds=rounds,
        clients_per_round=PER_ROUND,
        training=LocalTraining(
            batch_size=BATCH, optimizer=partial(torch.optim.SGD, lr=LR), trainer={"accelerator": "cpu", "max_epochs": 1}
        ),
        evaluation=Evaluation(every=rounds),
        run_dir=str(folder / "run"),
    )
    run.fit()
    return run.state["model"].values()


def command_line(data: Path, rounds: int, folder: Path) -> Iterable[Tensor]:
    """fl-lightning from a config file, with the logger it has unless told otherwise (W&B, offline)."""
    import yaml

    from fl_lightning.cli.main import main as fl_lightning

    settings = {
        "scenario": {
            "dataset": {"class_path": "Arrays", "init_args": {"path": str(data)}},
            "partition": "IID",
            "clients": CLIENTS,
            "local_test": 0.0,
        },
        "model": {"class_path": "FromModule", "init_args": {"module": "cohort.network", "head": "8"}},
        "algorithm": "FedAvg",
        "rounds": rounds,
        "clients_per_round": PER_ROUND,
        "batch_size": BATCH,
        "optimizer": {"class_path": "SGD", "init_args": {"lr": LR}},
        "trainer": {"accelerator": "cpu", "max_epochs": 1},
        "evaluation": {"every": rounds},
        "run_dir": str(folder / "run"),
    }
    (folder / "cohort.yaml").write_text(yaml.safe_dump(settings))
    assert fl_lightning(["fit", "--config", str(folder / "cohort.yaml")]) == 0
    return torch.load(folder / "run" / "final" / "model.pt", weights_only=True).values()


def pfl(data: Path, rounds: int, folder: Path) -> Iterable[Tensor]:
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
            self.layers = network()

        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.layers(x), y)

        def metrics(self, x: Tensor, y: Tensor) -> dict:
            return {}

    class Progress(TrainingProcessCallback):
        def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
            print(f"round {central_iteration + 1}/{rounds}", flush=True)
            return False, Metrics()

    x, y = read(data)
    shards = torch.randperm(len(y)).split(SAMPLES)
    users = FederatedDataset(
        lambda user: Dataset((x[shards[user]], y[shards[user]])),
        get_user_sampler("minimize_reuse", torch.randperm(CLIENTS).tolist()),
    )
    model = Model()
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=rounds + 1,
            train_cohort_size=PER_ROUND,
            val_cohort_size=0,
        ),
        SimulatedBackend(users, users),
        PyTorchModel(model, torch.optim.SGD, torch.optim.SGD(model.parameters(), lr=1.0)),
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=LR, local_batch_size=BATCH),
        callbacks=[Progress()],
    )
    return model.parameters()


def fluke(data: Path, rounds: int, folder: Path) -> Iterable[Tensor]:
    """One process of fluke, its evaluations switched off."""
    from fluke import DDict, FlukeENV
    from fluke.algorithms.fedavg import FedAVG
    from fluke.data import DataContainer, DataSplitter
    from fluke.utils import FederationObserver

    class Progress(FederationObserver):
        def end_round(self, round: int) -> None:
            print(f"round {round}/{rounds}", flush=True)

    FlukeENV().set_device("cpu")
    FlukeENV().set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
    optimizer, scheduler = DDict(name="SGD", lr=LR), DDict(name="StepLR", step_size=1, gamma=1.0)
    client = DDict(batch_size=BATCH, local_epochs=1, loss="CrossEntropyLoss", optimizer=optimizer, scheduler=scheduler)
    settings = DDict(model=network(), client=client, server=DDict(weighted=True))
    splitter = DataSplitter(DataContainer(*read(data), *read(data, "test"), num_classes=CLASSES), "iid")
    federation = FedAVG(CLIENTS, splitter, settings)
    federation.set_callbacks(Progress())
    federation.run(rounds, PER_ROUND / CLIENTS)
    return federation.server.model.parameters()


def flwr(data: Path, rounds: int, folder: Path) -> Iterable[Tensor]:
    """Flower's simulation engine, in two Ray workers of one thread each."""
    os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    client_app, server_app, final = ClientApp(), ServerApp(), []

    @client_app.train()
    def train(message: Message, context: Context) -> Message:
        import cohort  # in a worker this file is no script: a module's cache outlasts the client

        torch.set_num_threads(1)
        x, y, shards = cohort.held(data)
        model, steps = network(), 0
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        for batch in shards[context.node_config["partition-id"]][torch.randperm(SAMPLES)].split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
            steps += 1
        did = MetricRecord({"num-examples": SAMPLES, "steps": steps, "parameters": moved(optimizer)})
        return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": did}), reply_to=message)

    class Strategy(FedAvg):
        def aggregate_train(self, server_round, replies):
            replies = list(replies)
            for reply in replies:
                WORK.count += int(reply.content["metrics"]["steps"])
                WORK.parameters = int(reply.content["metrics"]["parameters"])
            aggregated = super().aggregate_train(server_round, replies)
            print(f"round {server_round}/{rounds}", flush=True)
            return aggregated

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = Strategy(PER_ROUND / CLIENTS, fraction_evaluate=0.0, min_available_nodes=CLIENTS)
        result = strategy.start(grid, ArrayRecord(network().state_dict()), num_rounds=rounds)
        final.extend(result.arrays.to_torch_state_dict().values())

    resources = {"init_args": {"address": "local", "num_cpus": 2}, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server_app, client_app, CLIENTS, backend_config=resources)
    return final


@cache
def held(data: Path) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
    """What a worker of flwr keeps from client to client: the data, and who has which samples."""
    torch.manual_seed(0)
    x, y = read(data)
    return x, y, torch.randperm(len(y)).split(SAMPLES)


CONTESTANTS: dict[str, tuple[str, Callable[[Path, int, Path], Iterable[Tensor]]]] = {
    "loop": ("torch", loop),
    "ours, Python": ("fl_lightning", from_python),
    "ours, command line": ("fl_lightning", command_line),
    "pfl": ("pfl", pfl),
    "fluke": ("fluke", fluke),
    "flwr": ("flwr", flwr),
}


# --- One contestant, in a process of its own --------------------------------------------------------------------------


class Work:
    """The clients' optimizer steps, and the parameters that they move."""

    count = parameters = 0

    def watch(self) -> None:
        """Note every step of this process, but those of a server, and one that tries an optimizer out."""
        register_optimizer_step_post_hook(self._note)

    def _note(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if optimizer.param_groups[0]["lr"] == LR and (self.count or any_gradient(optimizer)):
            self.count += 1
            self.parameters = moved(optimizer)


WORK = Work()


def any_gradient(optimizer: torch.optim.Optimizer) -> bool:
    """Whether some gradient is not zero."""
    return any(bool(p.grad.any()) for group in optimizer.param_groups for p in group["params"])


def moved(optimizer: torch.optim.Optimizer) -> int:
    """How many parameters an optimizer moves."""
    return sum(p.numel() for group in optimizer.param_groups for p in group["params"])


def compete(name: str, data: Path, rounds: int) -> None:
    """Run one contestant; its last line says what it did."""
    WORK.watch()
    with tempfile.TemporaryDirectory() as folder:
        weights = list(CONTESTANTS[name][1](data, rounds, Path(folder)))
    model, (x, y) = network(), read(data, "test")
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), weights, strict=True):
            parameter.copy_(value)
        loss = F.cross_entropy(model(x), y).item()
    print(json.dumps({"steps": WORK.count, "parameters": WORK.parameters, "loss": loss}))


# --- All of them ------------------------------------------------------------------------------------------------------


def timed(python: str, name: str, data: Path, rounds: int) -> dict[str, float]:
    """A contestant's seconds a round, the median and the least, and what it did."""
    command = [python, __file__, "--contestant", name, "--data", str(data), "--rounds", str(rounds)]
    ends, lines = [], []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout
        for line in process.stdout:
            lines.append(line)
            if re.match(r"round \d+/", line):
                ends.append(time.perf_counter())
    if process.returncode:
        sys.exit(f"{name} failed:\n{''.join(lines[-20:])}")
    assert len(ends) == rounds, f"{name}: {len(ends)} rounds of {rounds}"
    rounds_s = np.diff(ends)[:-1]
    return {"seconds": statistics.median(rounds_s), "quickest": min(rounds_s), **json.loads(lines[-1])}


def verify(name: str, run: dict[str, float], loop: dict[str, float], rounds: int) -> None:
    """Refuse to compare runs that did not do the same."""
    assert run["parameters"] == PARAMETERS, f"{name}: {run['parameters']} parameters"
    assert run["steps"] == rounds * PER_ROUND * SAMPLES // BATCH, f"{name}: {run['steps']} steps"
    assert abs(run["loss"] - loop["loss"]) < 0.1 * loop["loss"], f"{name}: loss {run['loss']}, loop {loop['loss']}"


def installed(python: str, package: str) -> bool:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    return subprocess.run([python, "-c", code]).returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default=sys.executable, help="Python of the loop and fl-lightning (this one)")
    parser.add_argument("--peers", default=sys.executable, help="Python with the other simulators (this one)")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each contestant (default 5)")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds a run (default 5)")
    parser.add_argument("--only", nargs="*", default=list(CONTESTANTS), help="contestants beside the loop (all)")
    parser.add_argument("--contestant", help=argparse.SUPPRESS)
    parser.add_argument("--data", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.contestant:
        return compete(args.contestant, args.data, args.rounds)
    compare(args)
    return None


def compare(args: argparse.Namespace) -> None:
    """Let the contestants take turns and print the table."""
    pythons = {}
    for name, (package, _) in CONTESTANTS.items():
        python = args.python if package in ("torch", "fl_lightning") else args.peers
        if name == "loop" or name in args.only:
            if installed(python, package):
                pythons[name] = python
            else:
                print(f"{name}: left out, {package} is not installed for {python}")
    rounds = args.rounds + 2
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in pythons}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data.npz"
        write_data(data)
        for _ in range(args.repeats):
            for name, python in pythons.items():
                runs[name].append(timed(python, name, data, rounds))
                verify(name, runs[name][-1], runs["loop"][-1], rounds)
    print(f"{args.repeats} runs of {args.rounds} timed rounds; {rounds * PER_ROUND * SAMPLES // BATCH} steps in all")
    print(f"{'':20}{'s a round':>10}{'over the loop':>15}{'least':>8}{'most':>8}{'quickest':>10}{'final loss':>12}")
    for name, own in runs.items():
        ratios = [run["seconds"] / beside["seconds"] for run, beside in zip(own, runs["loop"], strict=True)]
        seconds, loss = (statistics.median(run[what] for run in own) for what in ("seconds", "loss"))
        quickest = min(run["quickest"] for run in own) / min(run["quickest"] for run in runs["loop"])
        spread = f"{statistics.median(ratios):15.3f}{min(ratios):8.3f}{max(ratios):8.3f}{quickest:10.3f}"
        print(f"{name:20}{seconds:10.2f}{spread}{loss:12.3f}")


if __name__ == "__main__":
    main()
