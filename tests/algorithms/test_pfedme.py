"""pFedMe compared with Algorithm 1 (T. Dinh et al., NeurIPS 2020)."""

import copy

import pytest
import torch
from experiments import UNEQUAL, NoDropout, assert_near, experiment, in_float64
from loops import assert_equals_loop, steps_of
from torch.nn import functional as F

from fl_lightning.algorithms import PFedMe


@in_float64
def test_a_run_equals_a_loop_by_hand(tmp_path):
    lam, inner, personal_lr, beta, lr = 4.0, 3, 0.05, 0.8, 0.2
    run = experiment(
        tmp_path, PFedMe(lam=lam, inner_steps=inner, personal_lr=personal_lr, beta=beta), model=NoDropout, **UNEQUAL
    )
    run.load()
    model, personal, recorded = copy.deepcopy(run.worker.template.backbone).train(), {}, []
    for round in range(1, 4):
        start, ends, statistics, means = [p.detach().clone() for p in model.parameters()], [], [], []
        for client in run.server.participants(round):
            w = [p.clone() for p in start]
            theta, losses = copy.deepcopy(model), []
            for x, y in steps_of(run, round, client):
                for step in range(inner):
                    loss = F.cross_entropy(theta(x), y)
                    losses += [] if step else [loss.item()]
                    gradients = torch.autograd.grad(loss, list(theta.parameters()))
                    with torch.no_grad():
                        for t, own, g in zip(theta.parameters(), w, gradients, strict=True):
                            t -= personal_lr * (g + lam * (t - own))
                w = [own - lr * lam * (own - t.detach()) for own, t in zip(w, theta.parameters(), strict=True)]
            personal[client] = theta
            means.append(sum(losses) / len(losses))
            ends.append(w)
            statistics.append(dict(theta.named_buffers()))
        recorded.append(sum(means) / len(means))
        with torch.no_grad():
            for i, p in enumerate(model.parameters()):
                p.copy_((1 - beta) * start[i] + beta * sum(end[i] for end in ends) / 3)
            for name, buffer in model.named_buffers():
                values = [one[name] for one in statistics]
                buffer.copy_(sum(values) / 3 if buffer.is_floating_point() else max(values))
    run.fit()
    assert [row["client/train_ce"] for row in run.csv.rows] == pytest.approx(recorded, rel=1e-9)
    assert_equals_loop(run, run.state["model"], model.state_dict())
    for client, kept in run.memory.items():
        assert_equals_loop(run, kept["personal_model"], personal[client].state_dict())
        assert_near(dict(run.client_module(client).backbone.state_dict()), dict(personal[client].state_dict()), 1e-11)
