"""FedCM compared with Algorithm 2 (Xu et al. 2021)."""

import copy

import pytest
import torch
from experiments import UNEQUAL, assert_near, experiment, in_float64, weights_after
from loops import assert_equals_loop, steps_of
from torch.nn import functional as F

from fl_lightning.algorithms import FedAvg, FedCM, WeightedMean


@in_float64
@pytest.mark.parametrize("server_lr", [1.0, 0.7])
def test_a_run_equals_a_loop_by_hand(tmp_path, server_lr):
    alpha, lr = 0.3, 0.2
    run = experiment(tmp_path, FedCM(alpha=alpha, server_lr=server_lr), **UNEQUAL)
    run.load()
    model = copy.deepcopy(run.worker.template.backbone)
    direction = [torch.zeros_like(p) for p in model.parameters()]
    for round in range(1, 4):
        start, changes, paths = [p.detach().clone() for p in model.parameters()], [], []
        for client in run.server.participants(round):
            local, steps = copy.deepcopy(model), 0
            for x, y in steps_of(run, round, client):
                gradients = torch.autograd.grad(F.cross_entropy(local(x), y), list(local.parameters()))
                with torch.no_grad():
                    for p, g, d in zip(local.parameters(), gradients, direction, strict=True):
                        p -= lr * (alpha * g + (1 - alpha) * d)
                steps += 1
            changes.append([p.detach() - s for p, s in zip(local.parameters(), start, strict=True)])
            paths.append(steps * lr)
        direction = [
            -sum(c / path for c, path in zip(parts, paths, strict=True)) / 3 for parts in zip(*changes, strict=True)
        ]
        with torch.no_grad():
            for p, s, parts in zip(model.parameters(), start, zip(*changes, strict=True), strict=True):
                p.copy_(s + server_lr * sum(parts) / 3)
    assert len(set(paths)) > 1
    run.fit()
    assert_equals_loop(run, run.state["model"], model.state_dict())
    assert_near(run.state["direction"], dict(zip(run.state["direction"], direction, strict=True)), 1e-11)


@in_float64
def test_with_alpha_1_it_is_fedavg_but_for_rounding(tmp_path):
    uniform = FedAvg(aggregator=WeightedMean("uniform"))
    assert_near(
        weights_after(tmp_path / "cm", FedCM(alpha=1.0), **UNEQUAL), weights_after(tmp_path / "avg", uniform, **UNEQUAL)
    )
