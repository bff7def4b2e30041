"""FedAdagrad's, FedAdam's and FedYogi's server compared with Algorithm 2 (baselines: A4)."""

import math

import pytest
import torch
from aggregation import finish
from experiments import UNEQUAL, NoDropout, NormMLP, assert_near, experiment, in_float64, same_bytes, weights_after
from hypothesis import given
from hypothesis import strategies as st
from loops import assert_equals_loop, rounds_by_hand

from fl_lightning.algorithms import AdaptiveServer, FedAdagrad, FedAdam, FedAvg, FedYogi
from fl_lightning.core.message import Message, Upload

pytestmark = pytest.mark.numeric

DOUBLE = {"trainer": {"accelerator": "cpu", "max_epochs": 2, "precision": "64-true"}}
METHODS = {"adagrad": FedAdagrad, "adam": FedAdam, "yogi": FedYogi}


def one(rule, v, m, d, beta1, beta2, tau):
    """Return the moments and the direction of one number by Algorithm 2."""
    m = beta1 * m + (1 - beta1) * d
    if rule == "adagrad":
        v = v + d * d
    elif rule == "adam":
        v = beta2 * v + (1 - beta2) * d * d
    elif v != d * d:
        v = v - (1 - beta2) * d * d * (1 if v > d * d else -1)
    return m, v, m / (math.sqrt(v) + tau)


numbers = st.floats(-2.0, 2.0)


@given(st.sampled_from(sorted(METHODS)), st.lists(st.tuples(numbers, numbers, st.floats(0.0, 4.0)), min_size=1))
def test_a_step_equals_algorithm_2_for_each_number(rule, rows):
    d, m, v = torch.tensor(rows, dtype=torch.float64).T
    server = AdaptiveServer(rule, beta1=0.8, beta2=0.7, tau=0.05)
    direction, moments = server.direction(d, {"first_moment": m, "second_moment": v})
    for i, (change, first, second) in enumerate(rows):
        wanted = one(rule, second, first, change, 0.8, 0.7, 0.05)
        found = [x[i].item() for x in (moments["first_moment"], moments["second_moment"], direction)]
        assert found == pytest.approx(wanted, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("rule", METHODS)
def test_a_change_of_zero_leaves_the_model_without_nan(rule):
    server = AdaptiveServer(rule, initial_v=0.0)
    model = {"w": torch.randn(3), "bn.running_var": torch.ones(3)}
    state = {"model": model, **server.initial(model, 2)}
    after = finish(server, [Upload(0, Message.pack({"model": model}, n_samples=1))], state)
    assert same_bytes(after["model"], model)
    assert not after["second_moment"]["w"].any()
    assert list(after["second_moment"]) == ["w"]


@pytest.mark.thorough
@pytest.mark.parametrize("rule", METHODS)
@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_a_huge_tau_is_fedavg(tmp_path, rule, weighting):
    options = DOUBLE | {"model": NormMLP}
    average = weights_after(tmp_path / "avg", FedAvg(weighting=weighting), **options)
    method = METHODS[rule](server_lr=1e8, beta1=0.0, tau=1e8, initial_v=0.0, weighting=weighting)
    for name, value in weights_after(tmp_path / "huge", method, **options).items():
        assert value.dtype == average[name].dtype
        torch.testing.assert_close(value, average[name], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("rule", "method"),
    [
        ("adagrad", FedAdagrad(server_lr=0.2, beta1=0.3, tau=0.05, weighting="uniform")),
        ("adam", FedAdam(server_lr=0.2, beta1=0.3, beta2=0.6, tau=0.05)),
        ("yogi", FedYogi(server_lr=0.2, beta1=0.3, beta2=0.6, tau=0.05)),
    ],
)
@in_float64
def test_a_run_equals_a_loop_by_hand(tmp_path, rule, method):
    run = experiment(tmp_path, method, model=NoDropout, **UNEQUAL)
    run.load()
    parameters = dict(run.worker.template.backbone.named_parameters())
    m = {name: torch.zeros_like(p) for name, p in parameters.items()}
    v = {name: torch.full_like(p, 0.05**2) for name, p in parameters.items()}

    def serve(before, mean):
        after = dict(mean)
        for name in parameters:
            d = mean[name] - before[name]
            m[name] = 0.3 * m[name] + 0.7 * d
            if rule == "adagrad":
                v[name] = v[name] + d**2
            elif rule == "adam":
                v[name] = 0.6 * v[name] + 0.4 * d**2
            else:
                v[name] = torch.where(v[name] > d**2, v[name] - 0.4 * d**2, v[name] + 0.4 * d**2)
            after[name] = before[name] + 0.2 * m[name] / (v[name].sqrt() + 0.05)
        return after

    expected, _ = rounds_by_hand(run, serve=serve, weighting="uniform" if rule == "adagrad" else "samples")
    run.fit()
    assert_equals_loop(run, run.state["model"], expected)
    assert_near(run.state["first_moment"], m, 1e-12)
    assert_near(run.state["second_moment"], v, 1e-12)


def test_defaults_are_those_of_the_paper_for_cifar10():
    found = [
        (server.server_lr, server.beta1, server.beta2, server.tau, server.moments["second_moment"])
        for server in (FedAdagrad().aggregator, FedAdam().aggregator, FedYogi().aggregator)
    ]
    assert found == [(0.1, 0.0, 0.99, 1e-2, 1e-2**2), *[(0.01, 0.9, 0.99, 1e-3, 1e-3**2)] * 2]
