"""FedProx compared with its equation (baselines: A2)."""

import copy

from experiments import UNEQUAL, descend, experiment, in_float64
from loops import assert_equals_loop, rounds_by_hand
from torch.nn import functional as F

from fl_lightning.algorithms import FedProx


@in_float64
def test_a_run_equals_a_loop_by_hand(tmp_path):
    mu = 0.7
    run = experiment(tmp_path, FedProx(mu=mu), **UNEQUAL)

    def train(local, client, batches):
        start = copy.deepcopy(local)
        for x, y in batches:
            ends = zip(local.parameters(), start.parameters(), strict=True)
            distance = sum((p - s.detach()).square().sum() for p, s in ends)
            descend(local, F.cross_entropy(local(x), y) + mu / 2 * distance, 0.2)

    expected, _ = rounds_by_hand(run, train)
    run.fit()
    assert_equals_loop(run, run.state["model"], expected)
