"""Small experiments, their data and comparisons, for all tests."""

import csv
from collections.abc import Callable, Collection
from dataclasses import fields, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import ExponentialLR

from fl_lightning import Evaluation, FederatedOrchestrator
from fl_lightning.algorithms import FedAvg
from fl_lightning.callbacks import Checkpointing, RoundProgress
from fl_lightning.callbacks.monitor import is_among, round_metrics
from fl_lightning.client.local_training import LocalTraining
from fl_lightning.data import Digits, Dirichlet, FederatedData, Scenario, Shard
from fl_lightning.engines import Task
from fl_lightning.models import MLP, Backbone

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ONE_EPOCH = {"accelerator": "cpu", "max_epochs": 1}


class NormMLP(Backbone):
    """One hidden layer with BatchNorm and dropout."""

    def __init__(self, in_shape: tuple[int, ...], num_classes: int) -> None:
        encoder = nn.Sequential(
            nn.Flatten(), nn.Linear(prod(in_shape), 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2)
        )
        super().__init__(encoder, nn.Linear(16, num_classes), 16)


class NoDropout(NormMLP):
    """One hidden layer with BatchNorm, without dropout."""

    def __init__(self, in_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__(in_shape, num_classes)
        self.encoder[-1] = nn.Identity()


class Silent(RoundProgress):
    """A progress callback that shows nothing."""

    def on_fit_start(self, run):
        pass

    def on_round_end(self, run, metrics):
        pass


def in_float64(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test that compares several training steps in float64: in float32, rounding grows with every step."""
    return pytest.mark.numeric(pytest.mark.usefixtures("float64")(test))


def digits(clients: int = 6, alpha: float = 0.3) -> Scenario:
    return Scenario(Digits(), Dirichlet(alpha, min_samples=10), clients)


UNEQUAL = {"optimizer": partial(torch.optim.SGD, lr=0.2), "scenario": digits(4, alpha=0.1), "clients_per_round": 3}
"""Options of an experiment with plain SGD and clients of very different sizes and classes, three of four per round."""


ALL_OPTIONS = {
    "model": NormMLP,
    "rounds": 2,
    "clients_per_round": 2,
    "lr_scheduler": partial(ExponentialLR, gamma=0.5),
    "round_lr_scheduler": partial(ExponentialLR, gamma=0.9),
    "trainer": {"accelerator": "cpu", "max_epochs": 2, "gradient_clip_val": 0.3},
    "optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
}
"""Options with dropout, BatchNorm, momentum, schedules in the fit and over rounds, and clipping."""

RECEIVED = Evaluation(client_model="received")


def experiment(run_dir: Path | None, algorithm=None, **options: Any) -> FederatedOrchestrator:
    """Return an experiment: three rounds of digits with four of six clients, by default.

    Options are those of the orchestrator and of `LocalTraining`; `checkpoint_every`, `keep_checkpoints` and
    `evaluate_every` are short for arguments of `Checkpointing` and `Evaluation`.
    """
    settings = {
        "scenario": digits(),
        "model": partial(MLP, hidden=(16,)),
        "algorithm": algorithm or FedAvg(),
        "rounds": 3,
        "clients_per_round": 4,
        "batch_size": 64,
        "optimizer": SGD,
        "trainer": {"accelerator": "cpu", "max_epochs": 2},
        "run_dir": run_dir,
    }
    settings |= options
    given = list(options.get("callbacks") or [])
    kept = {"every": settings.pop("checkpoint_every", 1), "keep_last": settings.pop("keep_checkpoints", 2)}
    if not any(isinstance(callback, Checkpointing) for callback in given):
        given.append(Checkpointing(**kept))
    if every := settings.pop("evaluate_every", None):
        settings["evaluation"] = replace(settings.get("evaluation", Evaluation()), every=every)
    local = {one.name: settings.pop(one.name) for one in fields(LocalTraining) if one.name in settings}
    settings["training"] = LocalTraining(**local)
    shown = any(isinstance(callback, RoundProgress) for callback in given)
    settings["callbacks"] = [*([] if shown else [Silent()]), *given]
    return FederatedOrchestrator(**settings)


def finished(run_dir: Path, algorithm=None, **options: Any) -> FederatedOrchestrator:
    """Run an experiment to its end and return it."""
    run = experiment(run_dir, algorithm, **options)
    run.fit()
    return run


def weights_after(run_dir: Path, algorithm=None, **options: Any) -> dict[str, torch.Tensor]:
    """Return the shared weights that an experiment ends with."""
    return finished(run_dir, algorithm, **options).state["model"]


def in_two_parts(
    folder: Path, method: Callable[[], Any], stop: int, **options: Any
) -> tuple[FederatedOrchestrator, FederatedOrchestrator]:
    """Run an experiment at one go, and again with an interruption after the round `stop`. Return both runs."""
    whole = finished(folder / "whole", method(), **options)
    finished(folder / "parts", method(), **options | {"rounds": stop})
    rest = experiment(folder / "parts", method(), **options)
    rest.fit(resume=True)
    return whole, rest


def full_batch(lr: float, epochs: int = 2, **sgd: Any) -> dict[str, Any]:
    """Return options with which every local step is one of SGD on all of a client's data."""
    return {
        "batch_size": 10_000,
        "optimizer": partial(torch.optim.SGD, lr=lr, **sgd),
        "trainer": {"accelerator": "cpu", "max_epochs": epochs},
    }


def samples_of(run: FederatedOrchestrator, client: int, part: str = "train") -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs and labels of a client's `train` or `test` split."""
    own = getattr(run.data.shards[client], part)
    return run.data.data.x_train[own], run.data.data.y_train[own]


def descend(network: nn.Module, loss: torch.Tensor, lr: float, decay: float = 0.0) -> None:
    """Take a step of plain gradient descent on the parameters that require a gradient."""
    parameters = [p for p in network.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(loss, parameters)
    with torch.no_grad():
        for p, gradient in zip(parameters, gradients, strict=True):
            p -= lr * (gradient + decay * p)


def assert_near(state: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 1e-9) -> None:
    """Compare all entries of two state dicts in float64."""
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(state[name].double(), value.double(), rtol=tolerance, atol=tolerance)


def record_rounds(run: FederatedOrchestrator) -> list[tuple[Any, list[Any], Any]]:
    """Return a list that receives, for each round, the state before, the uploads and the state after."""
    rounds: list[tuple[Any, list[Any], Any]] = []
    begin = run.algorithm.aggregation

    def watch(round):
        aggregation, uploads = begin(round), []
        add, finish = aggregation.add, aggregation.finish

        def note(upload):
            uploads.append(upload)
            add(upload)

        def end():
            rounds.append((round.before, uploads, finish()))
            return rounds[-1][-1]

        aggregation.add, aggregation.finish = note, end
        return aggregation

    run.algorithm.aggregation = watch
    return rounds


def same_bytes(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and one[name].numpy().tobytes() == other[name].numpy().tobytes()
        for name in one
    )


def client_series(run_dir: Path, round: int) -> dict[str, float]:
    """Return the metrics of one round in `clients.csv`, as `client_<id>/<name>`."""
    with (run_dir / "clients.csv").open(newline="") as file:
        lines = [line for line in csv.DictReader(file) if int(line["round"]) == round]
    return {
        f"client_{line['client']}/{name}": float(text)
        for line in lines
        for name, text in line.items()
        if text and name not in ("round", "client")
    }


def untimed(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    """Return rows of metrics without times."""
    return [{name: value for name, value in row.items() if not name.startswith("time/")} for row in rows]


def untested(data: FederatedData, clients: Collection[int]) -> list[Shard]:
    """Return the shards, without test samples for these clients."""
    return [Shard(own.train, own.test[:0] if k in clients else own.test) for k, own in enumerate(data.shards)]


def publish(run: FederatedOrchestrator) -> None:
    """Let every client publish its untrained model, as at the start of a run without a server."""
    run.server.begin_round(0)
    run.evaluator.initial_uploads(range(run.clients), run.server.add)
    run.server.end_round()


def local_batches(run: FederatedOrchestrator, round: int, client: int) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Return the batches of each epoch of a client's fit, in the order in which the run trains on them.

    They are derived as docs/design.md says, without the package's code, so that a wrong shuffle is noticed.
    """
    number = np.random.SeedSequence(run.seed, spawn_key=(4, round, client)).generate_state(1, np.uint64)[0]
    shuffle = torch.Generator().manual_seed(int(number) // 2)
    x, y, size = run.data.data.x_train, run.data.data.y_train, run.training.batch_size
    index = run.data.shard(client).train
    normalized = any(isinstance(layer, nn.BatchNorm1d) for layer in run.worker.template.modules())
    kept = len(index) - (len(index) % size == 1 and normalized)
    epochs = []
    for _ in range(run.training.trainer["max_epochs"]):
        order = index[torch.randperm(len(index), generator=shuffle)][:kept]
        epochs.append([(x[order[i : i + size]], y[order[i : i + size]]) for i in range(0, kept, size)])
    return epochs


def task_of_round(run: FederatedOrchestrator, round: int, client: int) -> Task:
    """Return a client's task in a round that follows the current state."""
    return Task(round, client, run.server.download(round, client), run.memory.get(client, {}))


def accuracy_and_loss(module, x, y):
    """Return the accuracy and the mean cross-entropy of a module in eval mode."""
    with torch.no_grad():
        logits = module.eval()(x)
    return float((logits.argmax(dim=1) == y).double().mean()), float(F.cross_entropy(logits, y))


def check_metric_names(run):
    """Compare the names of all metrics of a finished run with those that are known before it."""
    clients = (client_series(run.run_dir, round) for round in range(1, run.round + 1))
    known, logged = round_metrics(run), {name for row in (*run.csv.rows, *clients) for name in row} - {"round"}
    assert {name for name in logged if not is_among(name, known)} == set()
    assert {name for name in known if not any(is_among(each, [name]) for each in logged)} == set()
