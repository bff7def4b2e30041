"""FedACG compared with Algorithm 1 (Kim et al., CVPR 2024)."""

import copy

import torch
from experiments import UNEQUAL, assert_near, descend, experiment, in_float64
from loops import assert_equals_loop, steps_of
from torch.nn import functional as F

from fl_lightning.algorithms import FedACG


@in_float64
def test_a_run_equals_a_loop_by_hand(tmp_path):
    lam, beta = 0.8, 0.3
    run = experiment(tmp_path, FedACG(lam=lam, beta=beta), **UNEQUAL)
    run.load()
    model = copy.deepcopy(run.worker.template.backbone)
    momentum = [torch.zeros_like(p) for p in model.parameters()]
    for round in range(1, 4):
        ahead, changes = copy.deepcopy(model), []
        with torch.no_grad():
            for p, m in zip(ahead.parameters(), momentum, strict=True):
                p += lam * m
        for client in run.server.participants(round):
            local = copy.deepcopy(ahead)
            for x, y in steps_of(run, round, client):
                near = zip(local.parameters(), ahead.parameters(), strict=True)
                distance = sum((p - a.detach()).square().sum() for p, a in near)
                descend(local, F.cross_entropy(local(x), y) + beta / 2 * distance, 0.2)
            ends = zip(local.parameters(), ahead.parameters(), strict=True)
            changes.append([(p - a).detach() for p, a in ends])
        mean = [sum(parts) / 3 for parts in zip(*changes, strict=True)]
        momentum = [lam * m + c for m, c in zip(momentum, mean, strict=True)]
        with torch.no_grad():
            for p, m in zip(model.parameters(), momentum, strict=True):
                p += m
    run.fit()
    assert_equals_loop(run, run.state["model"], model.state_dict())
    assert_near(run.state["momentum"], dict(zip(run.state["momentum"], momentum, strict=True)), 1e-11)
