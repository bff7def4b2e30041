"""FedNova compared with Eq. 8, and its effective steps with their closed forms (Wang et al., NeurIPS 2020)."""

import copy
from functools import partial

import pytest
import torch
from experiments import NoDropout, assert_near, digits, experiment, full_batch, in_float64, weights_after
from loops import assert_equals_loop, steps_of
from torch.nn import functional as F

from fl_lightning.algorithms import FedNova, FedProx
from fl_lightning.algorithms.global_model.fednova import effective_steps

OPTIONS = {"scenario": digits(4, alpha=0.1), "clients_per_round": 3, "batch_size": 32}


@pytest.mark.parametrize("steps", [0, 1, 2, 13])
def test_effective_steps_equal_their_closed_forms(steps):
    rho, mu, lr = 0.9, 0.5, 0.1
    assert effective_steps(steps, lr) == steps
    heavy = (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
    assert effective_steps(steps, lr, rho) == pytest.approx(heavy)
    assert effective_steps(steps, lr, mu=mu) == pytest.approx((1 - (1 - lr * mu) ** steps) / (lr * mu))


@pytest.mark.parametrize(
    "options",
    [{"momentum": 0.9}, {"momentum": 0.8, "nesterov": True}, {"momentum": 0.7, "dampening": 0.4}, {"momentum": 0.0}],
)
def test_effective_steps_equal_those_of_torchs_sgd(options):
    weight = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.05, **options)
    for _ in range(7):
        optimizer.zero_grad()
        (weight.sum() + 0.3 / 2 * weight.square().sum()).backward()
        optimizer.step()
    assert effective_steps(7, 0.05, mu=0.3, **options) == pytest.approx(-weight.item() / 0.05)


@in_float64
@pytest.mark.parametrize("mu", [0.0, 0.4])
def test_a_run_equals_a_loop_by_hand(tmp_path, mu):
    """With momentum, BatchNorm and unequal numbers of steps."""
    rho, lr = 0.9, 0.1
    sgd = partial(torch.optim.SGD, lr=lr, momentum=rho)

    run = experiment(tmp_path, FedNova(mu=mu), optimizer=sgd, model=NoDropout, **OPTIONS)
    run.load()
    model = copy.deepcopy(run.worker.template.backbone).train()
    lengths = set()
    for round in range(1, 4):
        clients = run.server.participants(round)
        sizes = [len(run.data.shards[k].train) for k in clients]
        shares, normalized, ends, effective = [n / sum(sizes) for n in sizes], [], [], []
        start = {name: p.detach().clone() for name, p in model.named_parameters()}
        for client in clients:
            local = copy.deepcopy(model)
            optimizer, steps = sgd(local.parameters()), 0
            for x, y in steps_of(run, round, client):
                loss = F.cross_entropy(local(x), y)
                loss = loss + mu / 2 * sum((p - start[name]).square().sum() for name, p in local.named_parameters())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                steps += 1
            # a_i: how much of gradient i is in the change, by the recursion of each gradient alone
            total = 0.0
            for first in range(steps):
                position = velocity = 0.0
                for i in range(steps):
                    velocity = rho * velocity + (i == first) + mu * lr * position
                    position -= velocity
                total -= position
            effective.append(total)
            lengths.add(steps)
            normalized.append({n: (start[n] - p.detach()) / total for n, p in local.named_parameters()})
            ends.append(dict(local.named_buffers()))
        tau = sum(p * a for p, a in zip(shares, effective, strict=True))
        with torch.no_grad():
            for name, value in model.named_parameters():
                value.copy_(start[name] - tau * sum(p * d[name] for p, d in zip(shares, normalized, strict=True)))
            for name, value in model.named_buffers():
                if value.is_floating_point():
                    value.copy_(sum(p * end[name] for p, end in zip(shares, ends, strict=True)))
                else:
                    value.copy_(max(end[name] for end in ends))
    assert len(lengths) > 1
    run.fit()
    assert_equals_loop(run, run.state["model"], model.state_dict(), 1e-10)


@in_float64
def test_with_equal_numbers_of_steps_it_is_fedprox_but_for_rounding(tmp_path):
    options = full_batch(0.1, 3) | {"scenario": digits(4, alpha=0.1)}
    nova = weights_after(tmp_path / "nova", FedNova(mu=0.2), **options)
    assert_near(nova, weights_after(tmp_path / "prox", FedProx(mu=0.2), **options), 1e-12)
