"""FedGen's losses and generator, and runs with it (Zhu, Hong, Zhou, ICML 2021)."""

import copy
from functools import partial
from math import exp

import pytest
import torch
from experiments import (
    ONE_EPOCH,
    UNEQUAL,
    assert_near,
    descend,
    digits,
    experiment,
    finished,
    in_float64,
    local_batches,
    samples_of,
)
from loops import assert_equals_loop
from torch import nn
from torch.nn import functional as F

from fl_lightning.algorithms import FedGen
from fl_lightning.algorithms.global_model.fedgen import (
    diversity_loss,
    draw_labels,
    ensemble_logits,
    ensemble_loss,
    label_bounds,
    share_weighted_loss,
)
from fl_lightning.client.loss_term import Step
from fl_lightning.core.seeding import Stream, generator, seed_everything
from fl_lightning.core.state_dicts import stack
from fl_lightning.models import MLP


def test_labels_are_drawn_in_proportion_to_the_counts_and_never_from_an_empty_class():
    rng = torch.Generator().manual_seed(0)
    drawn = draw_labels(label_bounds(torch.tensor([0.0, 1.0, 0.0, 6.0, 3.0, 0.0, 0.0])), 100_000, rng)
    shares = torch.bincount(drawn, minlength=7) / 100_000
    torch.testing.assert_close(shares, torch.tensor([0, 0.1, 0, 0.6, 0.3, 0, 0]), rtol=0, atol=0.01)
    assert shares[[0, 2, 5, 6]].eq(0).all()
    assert label_bounds(torch.tensor([3.0, 7.0, 11.0, 0.0]))[-1] == 1


def test_the_smallest_random_number_draws_no_empty_class(monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda *shape, **options: torch.zeros(shape))
    assert draw_labels(label_bounds(torch.tensor([0.0, 0.0, 2.0, 1.0])), 3).tolist() == [2, 2, 2]


@pytest.mark.parametrize("heads", [1, 3])
def test_the_losses_of_the_ensemble_equal_brute_force_loops(heads):
    logits, labels = torch.randn(heads, 6, 4, dtype=torch.float64), torch.tensor([0, 3, 3, 1, 0, 1])
    shares = torch.rand(heads, 4, dtype=torch.float64)
    mean = [-logits.mean(0)[b].log_softmax(0)[labels[b]].item() for b in range(6)]
    assert ensemble_loss(logits, labels).item() == pytest.approx(sum(mean) / 6)
    total = sum(
        -shares[k, y] * logits[k, b].log_softmax(0)[y] for k in range(heads) for b, y in enumerate(labels.tolist())
    )
    assert share_weighted_loss(logits, labels, shares).item() == pytest.approx(total.item() / 6)


def test_the_diversity_loss_equals_a_brute_force_loop():
    noise, features = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    total = 0.0
    for i in range(5):
        for j in range(5):
            of_noise = sum((noise[i, m] - noise[j, m]) ** 2 for m in range(3)) / 3
            of_features = sum(abs(features[i, m] - features[j, m]) for m in range(2)) / 2
            total += float(of_noise * of_features)
    assert diversity_loss(noise, features).item() == pytest.approx(exp(-total / 25))


def test_the_ensemble_computes_every_head():
    heads = [nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)).eval() for _ in range(3)]
    heads[1][1].running_mean.fill_(2.0)
    features = torch.randn(4, 3)
    found = ensemble_logits(heads[0], stack([head.state_dict() for head in heads]), features)
    torch.testing.assert_close(found, torch.stack([head(features) for head in heads]))


class GeneratorByHand(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Sequential(nn.Linear(5 + 10, 6), nn.BatchNorm1d(6), nn.ReLU())
        self.output = nn.Linear(6, 16)

    def forward(self, noise, labels):
        return self.output(self.hidden(torch.cat([noise, torch.eye(10)[labels].to(noise)], dim=1)))


def labels_by_hand(counts, number, rng=None):
    """Return labels from the inverse of the distribution function."""
    steps = (torch.cumsum(counts.double(), 0) / counts.double().sum()).float()
    return torch.searchsorted(steps, torch.rand(number, 1, dtype=torch.float32, generator=rng)[:, 0], right=True)


@in_float64
@pytest.mark.parametrize("reference", [False, True])
def test_a_run_equals_a_loop_by_hand(tmp_path, reference):
    alpha, beta, decay, lr = 0.7, 0.4, 0.9, 0.01
    sizes = {"generator_steps": 4, "generator_lr": lr, "generator_batch_size": 8, "noise_dim": 5, "hidden_dim": 6}
    run = experiment(
        tmp_path, FedGen(alpha=alpha, beta=beta, decay=decay, diversity=0.8, **sizes, reference=reference), **UNEQUAL
    )
    run.load()
    model = copy.deepcopy(run.worker.template.backbone)
    draw = partial(torch.rand if reference else torch.randn, dtype=torch.float64)
    seed = int(generator(0, Stream.RUN).integers(2**62))
    torch.manual_seed(seed)
    generating = GeneratorByHand().double()
    adam = torch.optim.Adam(generating.parameters(), lr=lr, weight_decay=0.01)
    counts = torch.stack([torch.bincount(samples_of(run, client)[1], minlength=10) for client in range(4)]).double()
    known = None

    def train(local, client, round):
        seed_everything(0, Stream.TRAINING, round, client)
        for x, y in (batch for epoch in local_batches(run, round, client) for batch in epoch):
            logits = local(x.double())
            loss = F.cross_entropy(logits, y)
            if known is not None:
                labels = labels_by_hand(known, len(y))
                generated = local.head(generating(draw(len(y), 5), labels))
                taught = local.head(generating(draw(len(y), 5), y)).detach().softmax(1)
                divergence = (taught * (taught.log() - logits.log_softmax(1))).sum(1).mean()
                scale = decay ** (round - 1)
                loss = loss + scale * (alpha * F.cross_entropy(generated, labels) + beta * divergence)
            descend(local, loss, 0.2)

    for round in range(1, 4):
        participants, ends = run.server.participants(round), []
        generating.eval()
        for client in participants:
            ends.append(copy.deepcopy(model))
            train(ends[-1], client, round)
        own = counts[participants]
        known = own.sum(0).clamp(max=1) if reference else own.sum(0)
        generating.train()
        adam.param_groups[0]["lr"] = lr * decay ** (round - 1)
        rng = torch.Generator().manual_seed(seed + round)
        for _ in range(4):
            labels = labels_by_hand(known, 8, rng)
            noise = draw(8, 5, generator=rng)
            features = generating(noise, labels)
            logits = [end.head(features) for end in ends]
            if reference:
                shares = own / own.sum(0)
                losses = [F.cross_entropy(each, labels, reduction="none") for each in logits]
                loss = sum(share[labels] * each for share, each in zip(shares, losses, strict=True)).mean()
            else:
                loss = F.cross_entropy(sum(logits) / 3, labels)
            apart = [
                (a - noise).pow(2).mean(1) * (z - features).abs().mean(1) for a, z in zip(noise, features, strict=True)
            ]
            adam.zero_grad()
            (loss + 0.8 * torch.exp(-torch.stack(apart).mean())).backward()
            adam.step()
        weights = (own.sum(1) / own.sum()).tolist()
        states = [end.state_dict() for end in ends]
        model.load_state_dict({n: sum(w * s[n] for w, s in zip(weights, states, strict=True)) for n in states[0]})
    run.fit()
    assert_equals_loop(run, run.state["model"], model.state_dict())
    assert_near(run.state["generator"], generating.state_dict() | {"label_counts": known}, 1e-12)


def test_a_frozen_head_which_is_not_sent_trains_the_generator(tmp_path):
    class Frozen(MLP):
        def __init__(self, in_shape, num_classes):
            super().__init__(in_shape, num_classes, hidden=(8,))
            self.head.requires_grad_(False)

    run = finished(tmp_path, FedGen(), model=Frozen, rounds=2, trainer=ONE_EPOCH, scenario=digits(4))
    assert not run.state["model"].keys() & {"head.weight", "head.bias"}
    assert all(value.isfinite().all() for value in run.state["generator"].values())


def test_the_term_is_zero_without_a_generator():
    module = FedGen().client_module(MLP(in_shape=(4,), num_classes=3))
    (term,) = module.terms()
    term.begin(module)
    step = Step(torch.randn(2, 3), torch.tensor([0, 1]), backbone=module.backbone)
    assert term(step).item() == 0
