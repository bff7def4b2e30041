"""FedProx against its equation (baselines: A2)."""

import copy
from functools import partial

import pytest
import torch
from experiments import experiment, in_float64, same_bytes, weights_after
from torch.nn import functional as F

from fl_lightning.algorithms import FedAvg, FedProx
from fl_lightning.core.errors import ConfigError

pytestmark = pytest.mark.numeric


def test_mu_zero_is_fedavg_bit_for_bit(tmp_path):
    assert same_bytes(weights_after(tmp_path / "zero", FedProx(mu=0.0)), weights_after(tmp_path / "avg", FedAvg()))


@in_float64
def test_each_step_adds_mu_times_the_distance_to_the_gradient(tmp_path):
    mu, lr = 0.7, 0.1
    options = {
        "clients_per_round": 1,
        "rounds": 1,
        "batch_size": 10_000,
        "optimizer": partial(torch.optim.SGD, lr=lr),
        "trainer": {"accelerator": "cpu", "max_epochs": 3},
    }
    run = experiment(tmp_path, FedProx(mu), **options)
    run.fit()
    local = copy.deepcopy(run.worker.template.backbone)
    start = [p.detach().clone() for p in local.parameters()]
    own = run.data.shards[run.server.participants(1)[0]].train
    for _ in range(3):
        gradients = torch.autograd.grad(
            F.cross_entropy(local(run.data.data.x_train[own]), run.data.data.y_train[own]), list(local.parameters())
        )
        with torch.no_grad():
            for p, g, s in zip(local.parameters(), gradients, start, strict=True):
                p -= lr * (g + mu * (p - s))
    for name, value in local.state_dict().items():
        torch.testing.assert_close(run.state["model"][name], value, rtol=1e-9, atol=1e-9)


def test_mu_below_zero_is_refused():
    with pytest.raises(ConfigError, match=r"algorithm.mu: -0.1 is below 0"):
        FedProx(mu=-0.1)
