"""FedProx compared with its equation (baselines: A2)."""

import copy

import pytest
from experiments import assert_near, descend, finished, full_batch, in_float64, samples_of
from torch.nn import functional as F

from fl_lightning.algorithms import FedProx

pytestmark = pytest.mark.numeric


@in_float64
def test_each_step_adds_mu_times_the_distance_to_the_gradient(tmp_path):
    mu, lr = 0.7, 0.1
    options = {"clients_per_round": 1, "rounds": 1} | full_batch(lr, 3)
    run = finished(tmp_path, FedProx(mu), **options)
    local = copy.deepcopy(run.worker.template.backbone)
    start = copy.deepcopy(local)
    x, y = samples_of(run, run.server.participants(1)[0])
    for _ in range(3):
        distance = sum(
            (p - s.detach()).square().sum() for p, s in zip(local.parameters(), start.parameters(), strict=True)
        )
        descend(local, F.cross_entropy(local(x), y) + mu / 2 * distance, lr)
    assert_near(run.state["model"], local.state_dict())
