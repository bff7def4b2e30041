"""FedAvgM's server compared with its equations (baselines: A5)."""

import pytest
import torch
from aggregation import aggregate
from experiments import UNEQUAL, NoDropout, assert_near, experiment, in_float64, same_bytes
from loops import assert_equals_loop, rounds_by_hand
from servers import watched

from fl_lightning.algorithms import FedAvgM
from fl_lightning.algorithms.global_model.fedavgm import momentum_step
from fl_lightning.core.state_dicts import parameter_names

pytestmark = pytest.mark.numeric


@pytest.mark.parametrize("nesterov", [True, False])
def test_a_momentum_step_equals_the_formula(nesterov):
    change, momentum, beta = torch.randn(7), torch.randn(7), 0.7
    direction, new = momentum_step(change, momentum, beta, nesterov)
    for i in range(7):
        v = beta * momentum[i].item() + change[i].item()
        assert new[i].item() == pytest.approx(v, abs=1e-6)
        assert direction[i].item() == pytest.approx(change[i].item() + beta * v if nesterov else v, abs=1e-6)


@in_float64
@pytest.mark.parametrize(("nesterov", "weighting"), [(True, "samples"), (False, "uniform")])
def test_a_run_equals_a_loop_by_hand(tmp_path, nesterov, weighting):
    beta, server_lr = 0.6, 0.8
    method = FedAvgM(beta=beta, server_lr=server_lr, nesterov=nesterov, weighting=weighting)
    run = experiment(tmp_path, method, model=NoDropout, **UNEQUAL)
    momentum = {}

    def serve(before, mean):
        for name in parameter_names(before):
            momentum[name] = beta * momentum.get(name, 0) + mean[name] - before[name]
        ahead = {name: beta * v + mean[name] - before[name] for name, v in momentum.items()}
        moves = ahead if nesterov else momentum
        return mean | {name: before[name] + server_lr * move for name, move in moves.items()}

    expected, _ = rounds_by_hand(run, serve=serve, weighting=weighting)
    run.fit()
    assert_equals_loop(run, run.state["model"], expected)
    assert_near(run.state["momentum"], momentum, 1e-12)


def test_aggregation_does_not_change_the_given_state(tmp_path):
    run, rounds = watched(tmp_path, FedAvgM(), rounds=1, trainer={"accelerator": "cpu", "precision": "64-true"})
    before, uploads, after = rounds[0]
    for name, value in before["model"].items():
        assert after["model"][name].dtype == value.dtype
        assert name not in after["momentum"] or after["momentum"][name].dtype == value.dtype
    copies = {section: {name: value.clone() for name, value in before[section].items()} for section in before}
    again = aggregate(run.algorithm, after, uploads)
    assert all(same_bytes(before[section], copies[section]) for section in before)
    kept = {section: {name: value.clone() for name, value in again[section].items()} for section in again}
    aggregate(run.algorithm, again, uploads)
    assert all(same_bytes(again[section], kept[section]) for section in again)
