"""FedDC compared with Algorithm 1 (Gao et al., CVPR 2022)."""

import copy

import torch
from experiments import UNEQUAL, assert_near, experiment, in_float64
from loops import assert_equals_loop, steps_of
from torch.nn import functional as F

from fl_lightning.algorithms import DriftPenalty, FedDC
from fl_lightning.client.loss_term import Step


@in_float64
def test_a_run_equals_a_loop_by_hand(tmp_path):
    alpha, lr = 0.3, 0.2
    run = experiment(tmp_path, FedDC(alpha=alpha), **UNEQUAL)
    run.load()
    model = copy.deepcopy(run.worker.template.backbone)
    zero = [torch.zeros_like(p) for p in model.parameters()]
    drifts, updates = dict.fromkeys(range(4), zero), dict.fromkeys(range(4), zero)  # h_k, and the gradient estimates
    for round in range(1, 4):
        start, ends = [p.detach().clone() for p in model.parameters()], []
        overall = [sum(parts) / 4 for parts in zip(*updates.values(), strict=True)]
        for client in run.server.participants(round):
            local, steps = copy.deepcopy(model), 0
            for x, y in steps_of(run, round, client):
                gradients = torch.autograd.grad(F.cross_entropy(local(x), y), list(local.parameters()))
                with torch.no_grad():
                    for i, (p, g) in enumerate(zip(local.parameters(), gradients, strict=True)):
                        pull = alpha * (drifts[client][i] + p - start[i])
                        p -= lr * (g + pull + overall[i] - updates[client][i])
                steps += 1
            change = [p.detach() - s for p, s in zip(local.parameters(), start, strict=True)]
            updates = updates | {
                client: [u - o - c / (steps * lr) for u, o, c in zip(updates[client], overall, change, strict=True)]
            }
            drifts[client] = [h + c for h, c in zip(drifts[client], change, strict=True)]
            ends.append([p.detach() for p in local.parameters()])
        with torch.no_grad():
            for i, p in enumerate(model.parameters()):
                p.copy_(sum(end[i] for end in ends) / 3 + sum(h[i] for h in drifts.values()) / 4)
    run.fit()
    assert_equals_loop(run, run.state["model"], model.state_dict())
    for client, kept in run.memory.items():
        named = dict(zip(dict(model.named_parameters()), drifts[client], strict=True))
        assert_near(kept["term_drift_penalty"], dict(sorted(named.items())), 1e-11)


def test_without_drift_the_penalty_is_fedproxs():
    network = torch.nn.Linear(3, 2)
    term, start = DriftPenalty(0.4), copy.deepcopy(network)

    class Module:
        backbone = network

    term.begin(Module())
    with torch.no_grad():
        network.weight += 0.5
    expected = 0.2 * sum((p - s).square().sum() for p, s in zip(network.parameters(), start.parameters(), strict=True))
    step = Step(torch.zeros(1, 2), torch.zeros(1).long(), backbone=network)
    torch.testing.assert_close(term(step), expected)


def test_the_term_is_zero_outside_a_fit():
    assert DriftPenalty().eval()(Step(torch.zeros(2, 3), torch.zeros(2).long())).item() == 0
