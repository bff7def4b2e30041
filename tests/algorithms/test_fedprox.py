"""FedProx against its equation (baselines: A2)."""

import copy

import pytest
import torch
from experiments import assert_near, finished, full_batch, in_float64
from torch.nn import functional as F

from fl_lightning.algorithms import FedProx

pytestmark = pytest.mark.numeric


@in_float64
def test_each_step_adds_mu_times_the_distance_to_the_gradient(tmp_path):
    mu, lr = 0.7, 0.1
    options = {"clients_per_round": 1, "rounds": 1} | full_batch(lr, 3)
    run = finished(tmp_path, FedProx(mu), **options)
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
    assert_near(run.state["model"], local.state_dict())
