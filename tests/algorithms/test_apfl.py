"""APFL compared with Algorithm 1 and Eq. 10 (Deng et al. 2020)."""

import copy

import pytest
import torch
from experiments import (
    UNEQUAL,
    NormMLP,
    assert_near,
    descend,
    experiment,
    finished,
    in_float64,
    same_bytes,
    samples_of,
    weights_after,
)
from loops import assert_equals_loop, steps_of
from torch.nn import functional as F

from fl_lightning.algorithms import APFL, FedAvg
from fl_lightning.core.errors import NonFiniteError
from fl_lightning.core.message import Message


@in_float64
@pytest.mark.parametrize("adaptive", [False, True])
def test_a_run_equals_a_loop_by_hand(tmp_path, adaptive):
    lr = 0.2
    run = experiment(tmp_path, APFL(alpha=0.3, adaptive=adaptive), **UNEQUAL)
    run.load()
    initial = copy.deepcopy(run.worker.template.backbone)
    model = copy.deepcopy(initial)
    own, alphas = {k: copy.deepcopy(initial) for k in range(4)}, dict.fromkeys(range(4), 0.3)
    for round in range(1, 4):
        ends, sizes = [], []
        for client in run.server.participants(round):
            local, v, first = copy.deepcopy(model), own[client], True
            for x, y in steps_of(run, round, client):
                mixed, share = copy.deepcopy(v), alphas[client]
                with torch.no_grad():
                    for m, a, b in zip(mixed.parameters(), v.parameters(), local.parameters(), strict=True):
                        m.copy_(share * a + (1 - share) * b)
                gradients = torch.autograd.grad(F.cross_entropy(mixed(x), y), list(mixed.parameters()))
                if adaptive and first:
                    parts = zip(v.parameters(), local.parameters(), gradients, strict=True)
                    slope = sum(((a - b) * g).sum().item() for a, b, g in parts)
                    alphas[client] = min(max(share - lr * slope, 0.0), 1.0)
                first = False
                descend(local, F.cross_entropy(local(x), y), lr)
                with torch.no_grad():
                    for a, g in zip(v.parameters(), gradients, strict=True):
                        a -= lr * share * g
            ends.append(local.state_dict())
            sizes.append(len(run.data.shards[client].train))
        mean = {n: sum(s * e[n] for s, e in zip(sizes, ends, strict=True)) / sum(sizes) for n in ends[0]}
        model.load_state_dict(mean)
    run.fit()
    assert_equals_loop(run, run.state["model"], model.state_dict())
    assert len({alphas[client] for client in run.memory}) == (len(run.memory) if adaptive else 1)
    for client, kept in run.memory.items():
        assert kept["mixing"]["alpha"].item() == pytest.approx(alphas[client], rel=1e-10)
        assert_equals_loop(run, kept["own_model"], own[client].state_dict())
        mixed = {
            n: alphas[client] * v + (1 - alphas[client]) * model.state_dict()[n]
            for n, v in own[client].state_dict().items()
        }
        assert_near(dict(run.client_module(client).backbone.state_dict()), mixed, 1e-11)


@pytest.mark.thorough
@pytest.mark.parametrize("alpha", [0.0, 0.7])
def test_the_shared_model_equals_fedavg_for_every_share(tmp_path, alpha):
    options = UNEQUAL | {"model": NormMLP}
    shared = weights_after(tmp_path / "apfl", APFL(alpha=alpha), **options)
    assert same_bytes(shared, weights_after(tmp_path / "avg", FedAvg(), **options))


@pytest.mark.thorough
def test_with_a_share_of_0_a_client_is_evaluated_with_the_shared_model(tmp_path):
    run = finished(tmp_path, APFL(alpha=0.0, adaptive=False), **UNEQUAL)
    client = next(iter(run.memory))
    x, _ = samples_of(run, client, "test")
    shared = copy.deepcopy(run.worker.template.backbone)
    shared.load_state_dict(run.state["model"])
    torch.testing.assert_close(run.client_module(client).eval()(x), shared.eval()(x))


def test_an_own_model_that_diverges_is_reported(tmp_path):
    run = experiment(tmp_path, APFL(alpha=1.0, adaptive=False), **UNEQUAL)
    run.load()
    module = run.worker.modules.build()
    with torch.no_grad():
        next(module.own.parameters()).fill_(float("nan"))
    with pytest.raises(NonFiniteError, match=r"^the client's own model's 'encoder\.1\.weight'"):
        run.algorithm.remember(module, Message())
