"""Comparisons of the stacked engine with the sequential one, and the loss terms and scenarios they train on."""

import random

import numpy as np
import pytest
import torch
from experiments import experiment
from task_runners import run_tasks

from fl_lightning.algorithms import FedAvg
from fl_lightning.client.loss_term import LossTerm
from fl_lightning.core.errors import ConfigError
from fl_lightning.data import Scenario
from fl_lightning.data.transforms import CropFlip
from fl_lightning.engines import SequentialEngine, StackedEngine, Task

DOUBLE = {"accelerator": "cpu", "precision": "64-true"}


def tasks(run, round, **options):
    """Return a task for each client. Some clients have a client state, others do not."""
    return [
        Task(round, client, run.server.download(round, client), run.memory.get(client, {}), **options)
        for client in range(run.scenario.clients)
    ]


def results(run, engine, round, **options):
    engine.check(run.worker)
    return {result.client: result for result in run_tasks(engine, run.worker, tasks(run, round, **options))}


def assert_close(one, other, tolerance):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value.dtype == other[name].dtype
        scale = max(1.0, float(value.double().abs().max())) if value.numel() else 1.0
        assert (
            float((value.double() - other[name].double()).abs().max() if value.numel() else 0) <= tolerance * scale
        ), name


def assert_equal_rounds(one, other, tolerance):
    """Compare results of the same tasks: uploads, client state, losses and scores."""
    assert one.keys() == other.keys()
    for client, result in one.items():
        stacked = other[client]
        assert result.failure is None
        assert stacked.failure is None
        assert stacked.upload.numbers == pytest.approx(result.upload.numbers, rel=tolerance, abs=tolerance)
        assert_close(result.upload.tensors, stacked.upload.tensors, tolerance)
        assert result.memory.keys() == stacked.memory.keys()
        for section in result.memory:
            assert_close(result.memory[section], stacked.memory[section], tolerance)
        assert list(result.losses) == list(stacked.losses)
        assert stacked.losses == pytest.approx(result.losses, rel=tolerance, abs=tolerance)
        assert stacked.local.values["acc"] == pytest.approx(result.local.values["acc"], abs=2 * tolerance)


def compare(tmp_path, algorithm=None, tolerance=1e-9, **options):
    """Train round 1 of some clients sequentially, then round 2 of all clients by either engine, in float64."""
    run = experiment(tmp_path, algorithm, rounds=1, **{"trainer": DOUBLE | {"max_epochs": 2}} | options)
    run.fit()
    one, other = (
        results(run, engine, 2, evaluate=True, lr_scale=0.5) for engine in (SequentialEngine(), StackedEngine())
    )
    assert_equal_rounds(one, other, tolerance)
    return run


LOCAL_WORK = {
    "one_epoch": {"max_epochs": 1},
    "steps": {"max_steps": 5},
    "steps_within_epochs": {"max_epochs": 2, "max_steps": 9},
    "limit": {"max_epochs": 2, "limit_train_batches": 2},
    "norm": {"max_epochs": 2, "gradient_clip_val": 0.2},
    "value": {"max_epochs": 2, "gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
}


class Augmented(Scenario):
    """Digits with training batches that are shifted and flipped by random numbers of torch, NumPy and Python."""

    def build(self, seed):
        data = super().build(seed)
        shift = CropFlip(1)

        def augment(x):
            return shift(x) * (1 + 0.1 * float(np.random.rand())) if np.random.rand() < 0.8 else x

        data.data.augment = augment
        return data


class DrawingHooks(LossTerm):
    """A loss term that draws random numbers when the fit and each epoch start, and in each step."""

    def begin(self, module):
        self.noise = torch.rand(()) + random.random()

    def begin_epoch(self, module):
        self.noise = self.noise + torch.rand(()) * float(np.random.rand())

    def forward(self, step):
        drawn = torch.rand(()) + torch.randn(2, 1).square().sum()
        return step.logits.square().mean() * (self.noise + drawn).to(step.logits)


class NoisyUpload(FedAvg):
    """FedAvg that draws random numbers after the fit."""

    def upload(self, module, batches, n_samples, num_classes):
        message = super().upload(module, batches, n_samples, num_classes)
        message.tensors["model/head.bias"].add_(torch.rand(()))
        return message


class Spoilt(LossTerm):
    """A loss term that fails for clients of some sizes: by a NaN loss, or an error when the fit or an epoch starts."""

    def __init__(self, how, sizes):
        super().__init__()
        self.how, self.sizes = how, sizes
        self.factor = torch.zeros(())

    def begin(self, module):
        self.bad = int(module.context.class_counts.sum()) in self.sizes
        self.factor = torch.tensor(float("nan") if self.bad and self.how == "nan" else 0.0)
        if self.bad and self.how == "begin":
            raise ConfigError("not me")

    def begin_epoch(self, module):
        if self.bad and self.how == "epoch" and module.current_epoch == 1:
            raise ConfigError("not me")

    def forward(self, step):
        return step.logits.mean() * self.factor.to(step.logits)
