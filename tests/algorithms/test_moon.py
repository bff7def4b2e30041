"""MOON's loss compared with its equation, and the encoders that a client keeps (baselines: A6)."""

import copy
import math
from functools import partial

import pytest
import torch
from experiments import (
    UNEQUAL,
    NoDropout,
    NormMLP,
    descend,
    experiment,
    finished,
    in_float64,
    same_bytes,
    samples_of,
    task_of_round,
    weights_after,
)
from loops import assert_equals_loop, steps_of
from peers import mean_by_hand
from servers import watched
from torch.nn import functional as F

from fl_lightning.algorithms import MOON, ModelContrast
from fl_lightning.algorithms.global_model.moon import contrastive_loss
from fl_lightning.client.loss_term import Step
from fl_lightning.client.module import ClientModule
from fl_lightning.core.errors import ConfigError
from fl_lightning.models import MLP, Head, frozen_encoder

pytestmark = pytest.mark.numeric

PROJECTED = partial(MLP, hidden=(16,), head=Head(projection=8))


def cosine(one, other):
    return sum(a * b for a, b in zip(one, other, strict=True)) / math.hypot(*one) / math.hypot(*other)


@pytest.mark.parametrize("history", [1, 3])
@pytest.mark.parametrize("batch", [1, 5])
def test_the_loss_equals_a_brute_force_loop(history, batch):
    tau, (now, received, *previous) = 0.3, torch.randn(2 + history, batch, 4, dtype=torch.float64)
    total = 0.0
    for b in range(batch):
        drawn = math.exp(cosine(now[b].tolist(), received[b].tolist()) / tau)
        pushed = sum(math.exp(cosine(now[b].tolist(), other[b].tolist()) / tau) for other in previous)
        total -= math.log(drawn / (drawn + pushed))
    assert contrastive_loss(now, received, previous, tau).item() == pytest.approx(total / batch, rel=1e-9)


def test_with_the_received_model_as_previous_one_the_loss_is_log_2():
    now, received = torch.randn(6, 8, requires_grad=True), torch.randn(6, 8)
    loss = contrastive_loss(now, received, [received], 0.5)
    loss.backward()
    assert loss.item() == pytest.approx(math.log(2))
    assert not now.grad.any()


def test_features_of_norm_zero_give_no_nan():
    now = torch.zeros(2, 4, requires_grad=True)
    loss = contrastive_loss(now, torch.randn(2, 4), [torch.zeros(2, 4)], 0.01)
    loss.backward()
    assert loss.item() == pytest.approx(math.log(2))
    assert now.grad.isfinite().all()


def test_a_frozen_encoder_is_a_copy_without_dropout_and_gradients():
    model = NormMLP((4,), 3).train()
    other = {name: value + 1 for name, value in model.encoder.state_dict().items()}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    own, frozen = frozen_encoder(model), frozen_encoder(model, other)
    assert same_bytes(dict(own.state_dict()), dict(model.encoder.state_dict()))
    assert same_bytes(dict(frozen.state_dict()), other)
    x = torch.randn(5, 4)
    assert torch.equal(frozen(x), frozen(x))
    assert not any(p.requires_grad for p in frozen.parameters())
    assert same_bytes(dict(model.state_dict()), before)
    assert all(p.requires_grad for p in model.parameters())


def test_the_term_is_zero_outside_a_fit():
    step = Step(torch.zeros(2, 3), torch.zeros(2).long(), torch.randn(2, 4), torch.randn(2, 4))
    assert ModelContrast().eval()(step).item() == 0


# --- Identities ---


def test_a_clients_first_round_equals_fedavg_bit_for_bit(tmp_path):
    run = finished(tmp_path / "moon", MOON(mu=3.0), model=NormMLP, rounds=1)
    assert same_bytes(run.state["model"], weights_after(tmp_path / "avg", model=NormMLP, rounds=1))
    assert run.csv.rows[0]["client/train_model_contrast"] == pytest.approx(3.0 * math.log(2))


def test_a_layer_that_the_network_does_not_have_is_refused():
    with pytest.raises(ConfigError, match=r"algorithm\.layer.*head\.7"):
        ModelContrast(layer="head.7").begin(ClientModule(MLP((4,), 3)))


# --- Whole runs ---


MAPPED = partial(MLP, hidden=(16,), head=Head(mapping=(12, 8)))


@in_float64
@pytest.mark.parametrize(
    ("network", "layer", "compared"),
    [(PROJECTED, None, lambda net, x: net.encoder(x)), (MAPPED, "head.3", lambda net, x: net.head[:3](net.encoder(x)))],
    ids=["encoder", "layer"],
)
def test_a_run_equals_a_loop_by_hand(network, layer, compared, tmp_path):
    """Some clients take part for the first time after round 1."""
    mu, tau = 2.0, 0.4
    run = experiment(tmp_path, MOON(mu=mu, tau=tau, layer=layer), model=network, **UNEQUAL)
    run.load()
    model, last = copy.deepcopy(run.worker.template.backbone), {}
    came_back = came_late = 0
    for round in range(1, 4):
        ends, sizes = [], []
        for client in run.server.participants(round):
            came_back += client in last
            came_late += round > 1 and client not in last
            local, previous = copy.deepcopy(model), last.get(client, model)
            for x, y in steps_of(run, round, client):
                z = compared(local, x)
                others = (compared(other, x).detach() for other in (model, previous))
                pulled, pushed = (torch.exp(F.cosine_similarity(z, other) / tau) for other in others)
                loss = F.cross_entropy(local(x), y) - mu * (pulled / (pulled + pushed)).log().mean()
                descend(local, loss, 0.2)
            last[client] = local
            ends.append(local.state_dict())
            sizes.append(len(run.data.shards[client].train))
        model = copy.deepcopy(model)
        model.load_state_dict(mean_by_hand(ends, sizes))
    assert came_back
    assert came_late
    run.fit()
    assert_equals_loop(run, run.state["model"], model.state_dict())


@pytest.mark.thorough
def test_a_client_keeps_its_last_encoders_in_order(tmp_path):
    run, rounds = watched(tmp_path, MOON(history=2), rounds=4, model=NoDropout)
    uploads = {client: [] for client in range(6)}
    for _, arrived, _ in rounds:
        for client, message, *_ in arrived:
            encoder = {k: v for k, v in message.section("model").items() if k.startswith("encoder.")}
            uploads[client].insert(0, encoder)
    assert {len(theirs) for theirs in uploads.values()} >= {2, 3}  # some clients trained more than twice
    for client, memory in run.memory.items():
        kept, theirs = memory["term_model_contrast"], uploads[client][:2]
        assert same_bytes(kept, {f"{age}/{k[8:]}": v for age, own in enumerate(theirs) for k, v in own.items()})
        module = run.worker.modules.receive(task_of_round(run, 5, client))
        module.on_fit_start()
        x, y = samples_of(run, client)
        with torch.no_grad():
            previous = [frozen_encoder(module.backbone, {k[8:]: v for k, v in own.items()})(x) for own in theirs]
            received = frozen_encoder(module.backbone)(x)
            expected = contrastive_loss(module.backbone.encoder(x), received, previous, MOON().tau)
            torch.testing.assert_close(module.losses(module.step((x, y)))["model_contrast"], MOON().mu * expected)
