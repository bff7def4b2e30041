"""FedDyn compared with Algorithm 1 (Acar et al., ICLR 2021)."""

import copy

import torch
from experiments import UNEQUAL, assert_near, descend, experiment, in_float64
from loops import assert_equals_loop, steps_of
from torch.nn import functional as F

from fl_lightning.algorithms import DynamicRegularizer, FedDyn
from fl_lightning.client.loss_term import Step


@in_float64
def test_a_run_equals_a_loop_by_hand(tmp_path):
    alpha = 0.3
    run = experiment(tmp_path, FedDyn(alpha=alpha), **UNEQUAL)
    run.load()
    model = copy.deepcopy(run.worker.template.backbone)
    zero = [torch.zeros_like(p) for p in model.parameters()]
    gradients, h = dict.fromkeys(range(4), zero), zero
    for round in range(1, 4):
        start, changes = [p.detach().clone() for p in model.parameters()], []
        for client in run.server.participants(round):
            local = copy.deepcopy(model)
            for x, y in steps_of(run, round, client):
                loss = F.cross_entropy(local(x), y)
                for p, s, g in zip(local.parameters(), start, gradients[client], strict=True):
                    loss = loss - (g * p).sum() + alpha / 2 * ((p - s) ** 2).sum()
                descend(local, loss, 0.2)
            change = [p.detach() - s for p, s in zip(local.parameters(), start, strict=True)]
            gradients[client] = [g - alpha * c for g, c in zip(gradients[client], change, strict=True)]
            changes.append(change)
        total = [sum(parts) for parts in zip(*changes, strict=True)]
        h = [one - alpha / 4 * t for one, t in zip(h, total, strict=True)]
        with torch.no_grad():
            for p, s, t, one in zip(model.parameters(), start, total, h, strict=True):
                p.copy_(s + t / 3 - one / alpha)
    run.fit()
    assert_equals_loop(run, run.state["model"], model.state_dict())
    for client, kept in run.memory.items():
        named = dict(zip(dict(model.named_parameters()), gradients[client], strict=True))
        assert_near(kept["term_dynamic_regularizer"], dict(sorted(named.items())), 1e-12)
    every = [torch.stack(parts).mean(0) for parts in zip(*gradients.values(), strict=True)]
    drift = run.state["drift"]  # -h / α, with h the mean of all clients' gradients
    assert_near({name: -alpha * value for name, value in drift.items()}, dict(zip(drift, every, strict=True)), 1e-12)


def test_the_term_is_zero_outside_a_fit():
    assert DynamicRegularizer().eval()(Step(torch.zeros(2, 3), torch.zeros(2).long())).item() == 0
