"""FedAvgM's server compared with its equations (baselines: A5)."""

import pytest
import torch
from aggregation import aggregate
from experiments import UNEQUAL, NormMLP, assert_near, experiment, in_float64, same_bytes
from loops import assert_equals_loop, rounds_by_hand
from servers import mean_of, watched

from fl_lightning.algorithms import FedAvgM
from fl_lightning.algorithms.global_model.fedavgm import momentum_step

pytestmark = pytest.mark.numeric


@pytest.mark.parametrize("nesterov", [True, False])
def test_a_momentum_step_equals_the_formula(nesterov):
    change, momentum, beta = torch.randn(7), torch.randn(7), 0.7
    direction, new = momentum_step(change, momentum, beta, nesterov)
    for i in range(7):
        v = beta * momentum[i].item() + change[i].item()
        assert new[i].item() == pytest.approx(v, abs=1e-6)
        assert direction[i].item() == pytest.approx(change[i].item() + beta * v if nesterov else v, abs=1e-6)


@pytest.mark.parametrize(("nesterov", "weighting"), [(True, "samples"), (False, "uniform")])
def test_a_run_equals_momentum_on_pseudo_gradients(tmp_path, nesterov, weighting):
    """With the usual signs of the literature: `d = w - mean`, `v = β v + d`, `w - η d` or `w - η (d + β v)`."""
    beta, lr = 0.6, 0.8
    method = FedAvgM(beta=beta, server_lr=lr, nesterov=nesterov, weighting=weighting)
    run, rounds = watched(tmp_path, method, rounds=4, model=NormMLP)
    parameters = dict(run.worker.template.backbone.named_parameters())
    v = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in parameters.items()}
    for before, uploads, after in rounds:
        expected = mean_of(uploads, weighting)
        for name in parameters:
            w = before["model"][name].double()
            d = w - expected[name]
            v[name] = beta * v[name] + d
            expected[name] = w - lr * (d + beta * v[name] if nesterov else v[name])
        assert_near(after["model"], expected, 1e-6)
        assert_near(after["momentum"], {name: -value for name, value in v.items()}, 1e-6)
        for name, value in before["model"].items():
            assert after["model"][name].dtype == value.dtype
            assert name not in parameters or after["momentum"][name].dtype == value.dtype


@in_float64
@pytest.mark.parametrize("nesterov", [True, False])
def test_a_run_equals_a_loop_by_hand(tmp_path, nesterov):
    beta, server_lr = 0.6, 0.8
    run = experiment(tmp_path, FedAvgM(beta=beta, server_lr=server_lr, nesterov=nesterov), **UNEQUAL)
    momentum = {}

    def serve(before, mean):
        for name, w in before.items():
            momentum[name] = beta * momentum.get(name, 0) + mean[name] - w
        ahead = {name: beta * v + mean[name] - before[name] for name, v in momentum.items()}
        moves = ahead if nesterov else momentum
        return {name: w + server_lr * moves[name] for name, w in before.items()}

    expected, _ = rounds_by_hand(run, serve=serve)
    run.fit()
    assert_equals_loop(run, run.state["model"], expected)
    assert_near(run.state["momentum"], momentum, 1e-12)


def test_aggregation_does_not_change_the_given_state(tmp_path):
    run, rounds = watched(tmp_path, FedAvgM(), rounds=1, trainer={"accelerator": "cpu", "precision": "64-true"})
    before, uploads, after = rounds[0]
    copies = {section: {name: value.clone() for name, value in before[section].items()} for section in before}
    again = aggregate(run.algorithm, after, uploads)
    assert all(same_bytes(before[section], copies[section]) for section in before)
    kept = {section: {name: value.clone() for name, value in again[section].items()} for section in again}
    aggregate(run.algorithm, again, uploads)
    assert all(same_bytes(again[section], kept[section]) for section in again)
