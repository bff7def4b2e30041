"""Ditto: two models on the same batches, that do not affect each other (baselines: B11)."""

import copy
from functools import partial

import pytest
from experiments import (
    ALL_OPTIONS,
    RECEIVED,
    SGD,
    UNEQUAL,
    NormMLP,
    experiment,
    finished,
    in_float64,
    same_bytes,
    samples_of,
)
from loops import assert_equals_loop
from peers import mean_by_hand
from torch.nn import functional as F

from fl_lightning.algorithms import Ditto, FedAvg, Local
from fl_lightning.core.errors import ClientFailure
from fl_lightning.core.seeding import Stream, derive
from fl_lightning.data.loaders import Batches
from fl_lightning.evaluation.evaluation import Evaluation
from fl_lightning.models import MLP

SMALL = partial(MLP, hidden=(16,))


@pytest.mark.thorough
@pytest.mark.parametrize(("lam", "buffers"), [(1.0, "average"), pytest.param(5.0, "local", marks=pytest.mark.thorough)])
def test_the_shared_model_equals_fedavg_for_every_lambda(tmp_path, lam, buffers):
    one = finished(tmp_path / "ditto", Ditto(lam=lam, buffers=buffers), **ALL_OPTIONS)
    other = finished(tmp_path / "avg", FedAvg(buffers=buffers), **ALL_OPTIONS)
    assert same_bytes(one.state["model"], other.state["model"])
    for mine, theirs in zip(one.csv.rows, other.csv.rows, strict=True):
        for name in ("global/acc", "global/loss", "client/train_loss", "comm/total_bytes"):
            assert mine[name] == theirs[name]


@pytest.mark.filterwarnings("ignore:.* contain initial weights")
@pytest.mark.thorough
def test_with_lambda_zero_personalised_models_are_those_of_local(tmp_path):
    one = finished(tmp_path / "ditto", Ditto(lam=0.0), evaluation=RECEIVED, **ALL_OPTIONS)
    other = finished(tmp_path / "local", Local(), evaluation=RECEIVED, **ALL_OPTIONS)
    assert one.memory.keys() == other.memory.keys()
    for client in one.memory:
        assert same_bytes(one.memory[client]["personal_model"], other.memory[client]["personal"])
    for client in range(6):  # also clients that never took part
        mine, theirs = (run.client_module(client).backbone.state_dict() for run in (one, other))
        assert same_bytes(dict(mine), dict(theirs))
    for mine, theirs in zip(one.csv.rows, other.csv.rows, strict=True):
        assert mine["client/acc_mean"] == theirs["client/acc_mean"]


@in_float64
def test_a_run_equals_a_loop_by_hand(tmp_path):
    lam, rounds = 3.0, 3
    run = experiment(tmp_path, Ditto(lam=lam), **UNEQUAL | {"optimizer": SGD})
    run.load()
    initial = run.worker.template.backbone
    shared, own = copy.deepcopy(initial), {}
    x, y = run.data.data.x_train, run.data.data.y_train
    for round in range(1, rounds + 1):
        trained, weights = [], []
        for client in run.server.participants(round):
            w, v = copy.deepcopy(shared), own.setdefault(client, copy.deepcopy(initial))
            index = run.data.shards[client].train
            batches = Batches(x, y, index, 64, derive(0, Stream.BATCHES, round, client))
            optimizers = [SGD(model.parameters()) for model in (w, v)]
            for _ in range(2):
                for chosen, labels in batches:
                    for model, optimizer, strength in zip((w, v), optimizers, (0.0, lam), strict=True):
                        optimizer.zero_grad()
                        F.cross_entropy(model(chosen), labels).backward()
                        for p, received in zip(model.parameters(), shared.parameters(), strict=True):
                            p.grad += strength * (p.detach() - received.detach())
                        optimizer.step()
            trained.append(w.state_dict())
            weights.append(len(index))
        shared = copy.deepcopy(shared)
        shared.load_state_dict(mean_by_hand(trained, weights))
    run.fit()
    assert_equals_loop(run, run.state["model"], shared.state_dict())
    assert run.memory.keys() == own.keys()
    for client, v in own.items():
        assert_equals_loop(run, run.memory[client]["personal_model"], v.state_dict())
        handed_out = run.client_module(client).backbone.state_dict()
        assert same_bytes(dict(sorted(handed_out.items())), run.memory[client]["personal_model"])


@pytest.mark.filterwarnings("ignore:.* contain initial weights")
@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("clients", ["trained", "received"])
def test_the_personalised_model_is_evaluated(tmp_path, clients):
    run = finished(tmp_path, Ditto(), model=NormMLP, rounds=1, evaluation=Evaluation(client_model=clients))
    scores = []
    for client in run.server.participants(1) if clients == "trained" else range(6):
        net = copy.deepcopy(run.worker.template.backbone).eval()
        if client in run.memory:
            net.load_state_dict(run.memory[client]["personal_model"])
        x, y = samples_of(run, client, "test")
        scores.append(float((net(x).argmax(dim=1) == y).float().mean()))
    assert run.csv.rows[0]["client/acc_mean"] == pytest.approx(sum(scores) / len(scores))


def test_a_diverged_personalised_model_is_reported(tmp_path):
    run = experiment(tmp_path, Ditto(lam=1e30), model=SMALL, rounds=1)
    with pytest.raises(ClientFailure, match=r"personalised model's '.*' is NaN or Inf.* algorithm.lam"):
        run.fit()
