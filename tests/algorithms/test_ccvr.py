"""CCVR: merged class moments, virtual features, and runs with a calibrated head (Luo et al., NeurIPS 2021)."""

import copy
from functools import partial

import pytest
import torch
from experiments import UNEQUAL, assert_near, experiment, finished, in_float64, same_bytes, samples_of, weights_after
from loops import assert_equals_loop, rounds_by_hand
from torch.nn import functional as F

from fl_lightning.algorithms import CCVR
from fl_lightning.algorithms.global_model.ccvr import ClassMoments, class_moments, merge_moments, virtual_features
from fl_lightning.analysis.export import network_of
from fl_lightning.core.seeding import Stream, seed_everything


def test_merged_moments_are_those_of_all_samples():
    """With classes that some clients or all of them lack, and a client with one sample of a class."""
    clients = [(torch.randn(n, 4, dtype=torch.float64) + n, torch.randint(0, 3, (n,))) for n in (9, 1, 6)]
    clients[1][1].fill_(1)
    found = merge_moments(class_moments(x, y, 5) for x, y in clients)
    x, y = (torch.cat(part) for part in zip(*clients, strict=True))
    for label in range(5):
        own = x[y == label]
        assert found.counts[label] == len(own)
        if len(own) > 1:
            torch.testing.assert_close(found.means[label], own.mean(dim=0))
            torch.testing.assert_close(found.covariances[label], torch.cov(own.T))
    assert not found.covariances[3:].any()


def test_a_client_sends_means_and_unbiased_covariances():
    x, y = torch.randn(8, 3, dtype=torch.float64), torch.tensor([0, 0, 0, 0, 0, 2, 2, 1])
    own = class_moments(x, y, 4)
    assert own.counts.tolist() == [5, 1, 2, 0]
    torch.testing.assert_close(own.means[0], x[:5].mean(dim=0))
    torch.testing.assert_close(own.covariances[0], torch.cov(x[:5].T))
    assert not own.covariances[1].any()
    assert not own.means[3].any()


def test_virtual_features_have_the_moments_and_the_classes():
    spread = torch.randn(3, 3, dtype=torch.float64)
    covariances = torch.stack([spread @ spread.T, torch.eye(3).double(), torch.zeros(3, 3).double()])
    moments = ClassMoments(torch.tensor([5.0, 0.0, 1.0]), torch.randn(3, 3, dtype=torch.float64), covariances)
    drawn, classes = virtual_features(moments, 40_000)
    assert classes.unique(return_counts=True)[1].tolist() == [40_000, 40_000]
    for label in (0, 2):
        own = drawn[classes == label]
        torch.testing.assert_close(own.mean(dim=0), moments.means[label], rtol=0, atol=0.1)
        torch.testing.assert_close(torch.cov(own.T), covariances[label], rtol=0.05, atol=0.2)


@in_float64
def test_a_run_equals_a_loop_by_hand(tmp_path):
    run = experiment(tmp_path, CCVR(features=7, epochs=2), **UNEQUAL)

    def train(local, client, batches):
        for x, y in batches:
            step(local, F.cross_entropy(local(x), y))

    def step(network, loss):
        gradients = torch.autograd.grad(loss, list(network.parameters()))
        with torch.no_grad():
            for p, gradient in zip(network.parameters(), gradients, strict=True):
                p -= 0.2 * gradient

    trained, _ = rounds_by_hand(run, train)
    run.fit()
    assert_equals_loop(run, run.state["model"], trained)
    model = copy.deepcopy(run.worker.template.backbone)
    model.load_state_dict(trained)
    x, y = (torch.cat(part) for part in zip(*(samples_of(run, client) for client in range(4)), strict=True))
    with torch.no_grad():
        features = model.encoder(x.double())
    seed_everything(0, Stream.CALIBRATION, 3)
    noise = torch.randn(10, 7, features.shape[1], dtype=torch.float64)
    drawn = []
    for label in range(10):
        own = features[y == label]
        u, s, _ = torch.linalg.svd(torch.cov(own.T))
        drawn.append(own.mean(dim=0) + noise[label] @ (u * s.sqrt()) @ u.T)
    drawn, classes = torch.cat(drawn), torch.arange(70) // 7
    for _ in range(2):
        for chosen in torch.randperm(70).split(64):
            step(model.head, F.cross_entropy(model.head(drawn[chosen]), classes[chosen]))
    final = torch.load(tmp_path / "final" / "model.pt", weights_only=True)
    assert_near(final, model.state_dict(), 1e-6)  # roots of eigenvalues near 0
    with torch.no_grad():
        row, test = run.csv.rows[-1], run.data.data
        for network, name in ((model, "global/acc"), (run.worker.template.backbone, "global/uncalibrated_acc")):
            if name == "global/uncalibrated_acc":
                network.load_state_dict(trained)
            right = network(test.x_test.double()).argmax(dim=1) == test.y_test
            assert row[name] == pytest.approx(right.double().mean().item())


@pytest.mark.thorough
def test_calibration_improves_a_model_of_skewed_clients_and_training_goes_on_without_it(tmp_path):
    run = finished(tmp_path / "ccvr", CCVR(), **UNEQUAL)
    row = run.csv.rows[-1]
    assert row["global/acc"] > row["global/uncalibrated_acc"] + 0.05
    assert same_bytes(run.state["model"], weights_after(tmp_path / "avg", **UNEQUAL))
    assert run.test()["global/acc"] == row["global/acc"]
    written = torch.load(run.run_dir / "final" / "model.pt", weights_only=True)
    assert same_bytes(network_of(run).backbone.state_dict(), written)


def test_calibration_follows_the_schedule_over_rounds(tmp_path):
    schedule = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
    run = experiment(tmp_path, CCVR(epochs=1), rounds=2, round_lr_scheduler=schedule)
    run.fit()
    assert run.evaluator.global_module(2).context.lr_scale == 0.5
