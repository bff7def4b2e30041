"""CriticalFL's detector, masked entries and rounds, compared with loops by hand (baselines: A10)."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from aggregation import finish
from experiments import UNEQUAL, NormMLP, finished, full_batch, in_float64, same_bytes
from hypothesis import example, given
from hypothesis import strategies as st
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import MixedPrecision
from loops import assert_equals_loop
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning.algorithms import CriticalFL, EntryMean
from fl_lightning.algorithms.global_model.criticalfl import (
    MASK,
    VALUES,
    CriticalPeriods,
    growth,
    largest_changes,
    mask_entries,
)
from fl_lightning.core.message import Message, Upload
from fl_lightning.engines.trainer import quiet_lightning, quiet_trainer
from fl_lightning.models import MLP

pytestmark = pytest.mark.numeric

CRITICAL = "critical"


# --- The detector ---


class ByHand:
    """The authors' server: a growing list of norms, and the number of participants."""

    def __init__(self, least, most, delta):
        self.norms, self.m, self.least, self.most, self.delta = [0.0] * 12, least, least, most, delta
        self.looks, self.achieved, self.critical = 0, False, True

    def look(self, norm):
        self.looks += 1
        self.norms.append(norm)
        old, new = max(float(np.mean(self.norms[-11:-1])), 1e-7), float(np.mean(self.norms[-10:]))
        self.critical = (new - old) / old > self.delta or self.looks <= 5
        if self.m == self.most:
            self.achieved = True
        if self.critical and not self.achieved:
            self.m = min(self.most, 2 * self.m)
        if not self.critical:
            self.m = max(self.least, self.m - max(self.m // 2, 1))


@given(
    st.integers(1, 6),
    st.integers(6, 40),
    st.sampled_from([0.01, 0.2, -0.5]),
    st.lists(st.floats(0, 10), min_size=20, max_size=60),
)
@example(2, 6, 0.0, [1.0] * 40)  # a growth of exactly delta is not critical
def test_the_detector_equals_the_authors_list(least, most, delta, norms):
    periods, server = CriticalPeriods(delta), ByHand(least, most, delta)
    state = periods.initial() | {"most": torch.tensor(most)}
    method = CriticalFL(delta=delta)
    for round, norm in enumerate(norms, start=1):
        m = method.cohort({CRITICAL: state}, least, 100)
        assert m == server.m
        assert bool(state["critical"]) is server.critical
        before = {name: value.clone() for name, value in state.items()}
        after = periods.update(state, norm, m)
        assert same_bytes(state, before)
        state = after
        if (round + 1) % 2 == 0:  # before rounds 2, 4, ..., at the norms of the round before
            server.look(norm)


@pytest.mark.parametrize(("share", "clients", "most"), [(0.75, 10, 7), (0.75, 128, 96), (1.0, 6, 6), (0.0, 6, 0)])
def test_the_maximum_number_of_participants_is_rounded_down(share, clients, most):
    state = CriticalFL(max_share=share).initial_state(MLP((4,), 3), 3, clients, np.random.default_rng(0))
    assert int(state[CRITICAL]["most"]) == most


def test_growth_compares_two_moving_averages():
    norms = torch.tensor([0.0, 2.0, 4.0, 9.0], dtype=torch.float64)
    assert growth(norms, 3) == pytest.approx((5.0 - 2.0) / 2.0)
    assert growth(torch.tensor([0.0, 0.0, 3.0]), 2) == pytest.approx((1.5 - 1e-7) / 1e-7)


# --- Single entries ---


@given(st.integers(1, 60), st.floats(0.01, 1.0))
def test_the_largest_changes_are_those_above_the_quantile(size, keep):
    changes = torch.randn(size).round(decimals=1)
    kept = largest_changes(changes, keep)
    threshold = np.percentile(changes.abs().double().numpy(), 100 * (1 - keep))
    for change, chosen in zip(changes.tolist(), kept.tolist(), strict=True):
        if abs(abs(change) - threshold) > 1e-6:
            assert chosen == (abs(change) > threshold)
    assert kept.sum() >= keep * (size - 1)
    assert kept[changes.abs().argmax()]


def test_masked_entries_cost_their_values_and_one_bit_per_entry():
    model = {"a": torch.randn(70, 10), "n": torch.tensor(3), "b": torch.randn(303)}
    chosen = largest_changes(torch.randn(1003), 0.2)
    sent = mask_entries(model, ["a", "b"], chosen)
    assert sent.keys() == {"n", MASK, VALUES}
    assert int(chosen.sum()) == 201
    assert Message.pack({"model": sent}).nbytes == 8 + 126 + 4 * 201
    assert torch.equal(sent[VALUES], torch.cat([model["a"].flatten(), model["b"]])[chosen])


@given(st.integers(1, 4), st.integers(0, 1000))
def test_each_entry_is_averaged_over_the_clients_that_sent_it(clients, seed):
    torch.manual_seed(seed)
    shapes = {"w": (3, 4), "b": (5,)}
    before = {name: torch.randn(shape) for name, shape in shapes.items()} | {"stat": torch.zeros(2)}
    before = {name: before[name] for name in ("w", "stat", "b")}
    models = [{name: torch.randn_like(value) for name, value in before.items()} for _ in range(clients)]
    chosen = torch.rand(clients, 17) < 0.4
    samples = torch.randint(1, 50, (clients,)).tolist()
    uploads = [
        Upload(k, Message.pack({"model": mask_entries(model, ["w", "b"], chosen[k])}, n_samples=samples[k]))
        for k, model in enumerate(models)
    ]
    mean = EntryMean()
    held = {name: value.clone() for name, value in before.items()}
    after = finish(mean, uploads, {"model": before})["model"]
    assert list(after) == list(before)
    assert same_bytes(before, held)
    flat = [torch.cat([model["w"].flatten(), model["b"]]) for model in models]
    own, old = torch.cat([after["w"].flatten(), after["b"]]), torch.cat([before["w"].flatten(), before["b"]])
    for e in range(17):
        senders = [k for k in range(clients) if chosen[k, e]]
        if not senders:
            assert own[e] == old[e]
        elif len(senders) == 1:
            assert own[e] == flat[senders[0]][e]
        else:
            total = sum(samples[k] * float(flat[k][e]) for k in senders)
            assert float(own[e]) == pytest.approx(total / sum(samples[k] for k in senders), rel=1e-5, abs=1e-6)
    stat = sum(n * model["stat"].double() for n, model in zip(samples, models, strict=True)) / sum(samples)
    torch.testing.assert_close(after["stat"], stat.float())


# --- The method ---


@pytest.mark.parametrize(("clip", "participants"), [(None, 3), (0.5, 2)])
@in_float64
def test_a_run_equals_a_loop_by_hand(tmp_path, clip, participants):
    """Full-batch steps, gradient norms, the largest changes and their means; of two participants, three in round 2."""
    lr, keep = 0.5, 0.3
    trainer = {"accelerator": "cpu", "max_epochs": 3, "gradient_clip_val": clip}
    options = UNEQUAL | full_batch(lr) | {"trainer": trainer, "clients_per_round": participants}
    decay = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
    run = finished(tmp_path, CriticalFL(every=1, keep=keep), round_lr_scheduler=decay, **options)
    net = copy.deepcopy(run.worker.template.backbone)
    x, y = run.data.data.x_train, run.data.data.y_train
    shared, norms = {k: v.clone() for k, v in net.state_dict().items()}, [0.0] * 11
    for round, rate in ((1, lr), (2, lr / 2), (3, lr / 4)):
        total = {k: torch.zeros_like(v, dtype=torch.float64) for k, v in shared.items()}
        weight = {k: torch.zeros_like(v, dtype=torch.float64) for k, v in shared.items()}
        seen = []
        ended, run.server.state = run.state, {CRITICAL: {"participants": torch.tensor(participants)}}
        clients, run.server.state = run.server.participants(round), ended
        assert len(clients) == participants
        for client in clients:
            own = run.data.shards[client].train
            net.load_state_dict(shared)
            squares = 0.0
            for _ in range(3):
                gradients = torch.autograd.grad(F.cross_entropy(net(x[own]), y[own]), list(net.parameters()))
                norm = torch.cat([g.flatten() for g in gradients]).norm()
                factor = min(1.0, float(clip / (norm + 1e-6))) if clip else 1.0
                squares += float((norm * factor) ** 2)
                with torch.no_grad():
                    for p, g in zip(net.parameters(), gradients, strict=True):
                        p -= rate * factor * g
            seen.append(rate * squares / 3)
            changes = torch.cat([(v - shared[k]).abs().flatten() for k, v in net.state_dict().items()])
            threshold = float(np.quantile(changes.numpy(), 1 - keep))
            n = len(own)
            for k, v in net.state_dict().items():
                sent = (v - shared[k]).abs() >= threshold
                total[k] += n * sent * v
                weight[k] += n * sent
        shared = {k: torch.where(weight[k] > 0, total[k] / weight[k], v) for k, v in shared.items()}
        norms = [*norms[1:], sum(seen) / len(seen)]
        participants = 3  # at most 0.75 of 4
    assert_equals_loop(run, run.state["model"], shared)
    torch.testing.assert_close(run.state[CRITICAL]["norms"], torch.tensor(norms), rtol=1e-9, atol=1e-9)


def test_steps_skipped_by_a_loss_scaler_do_not_count_in_the_norm():
    torch.manual_seed(0)
    module = CriticalFL().client_module(MLP((6,), 4, hidden=(5,)), partial(torch.optim.SGD, lr=0.1))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22)
    seen = []

    class Watch(Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            seen.append(sum(float(p.grad.square().sum()) for p in pl_module.backbone.parameters()))

    options = {
        "accelerator": "cpu",
        "plugins": MixedPrecision("16-mixed", "cpu", scaler=scaler),
        "callbacks": [Watch()],
    }
    data = DataLoader(TensorDataset(torch.randn(96, 6), torch.arange(96) % 4), 8)
    with quiet_lightning():
        quiet_trainer(options).fit(module, data)
    finite = [square for square in seen if np.isfinite(square)]
    assert 0 < len(finite) < len(seen) == 12
    assert module.gradient_norm == pytest.approx(0.1 * sum(finite), rel=1e-5)


def test_the_bytes_of_a_critical_round(tmp_path):
    run = finished(tmp_path, CriticalFL(), model=NormMLP, rounds=1)
    p = sum(t.numel() for t in run.worker.template.backbone.parameters())
    buffers = 4 * (16 + 16) + 8
    kept = run.csv.rows[0]["comm/up_bytes"] / 4 - buffers - 16 - -(-p // 8)
    assert kept == 4 * -(-p // 5)
    assert run.csv.rows[0]["comm/down_bytes"] / 4 == 4 * p + buffers + 8
