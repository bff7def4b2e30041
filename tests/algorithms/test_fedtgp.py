"""FedTGP: margin, contrastive loss and server training against brute force, and a whole run by hand."""

import copy

import numpy as np
import pytest
import torch
from experiments import UNEQUAL, descend, finished, full_batch, in_float64, same_bytes, samples_of
from loops import assert_equals_loop
from torch import nn
from torch.nn import functional as F

from fl_lightning.algorithms import FedTGP, TrainedPrototypeAlignment, TrainedPrototypes
from fl_lightning.algorithms.personalized import fedtgp as tgp
from fl_lightning.core.message import Message, Upload
from fl_lightning.core.round import Round
from fl_lightning.core.seeding import Stream, derive

pytestmark = pytest.mark.numeric

C, WIDTH = 4, 3
SERVER = {"server_epochs": 3, "server_lr": 0.05, "server_batch_size": 4}


def uploads(local, held):
    sections = [{"trained_prototypes": {"values": v, "known": h}} for v, h in zip(local, held, strict=True)]
    return [Upload(k, Message.pack(section, n_samples=10**k)) for k, section in enumerate(sections)]


def distance(one, other):
    return float(sum((a - b) ** 2 for a, b in zip(one.tolist(), other.tolist(), strict=True))) ** 0.5


# --- The formulas ---


@in_float64
@pytest.mark.parametrize("kind", ["max", "nearest"])
def test_the_margin_is_the_largest_distance_up_to_the_threshold(kind):
    centers = torch.randn(5, WIDTH)
    pairs = [[distance(centers[i], centers[j]) for j in range(5) if j != i] for i in range(5)]
    largest = max(max(row) if kind == "max" else min(row) for row in pairs)
    assert tgp.adaptive_margin(centers, 100.0, kind) == pytest.approx(largest, rel=1e-12)
    assert tgp.adaptive_margin(centers, 0.1, kind) == 0.1
    assert tgp.adaptive_margin(centers[:1], 100.0, kind) == tgp.adaptive_margin(centers[:0], 100.0, kind) == 0


def test_the_two_margins_differ():
    centers = torch.tensor([[0.0], [1.0], [10.0]])
    assert tgp.adaptive_margin(centers, 100.0, "max") == 10
    assert tgp.adaptive_margin(centers, 100.0, "nearest") == 9


@in_float64
def test_the_contrastive_loss_is_the_equation_in_a_loop():
    uploaded, prototypes, margin = torch.randn(6, WIDTH), torch.randn(C, WIDTH), 1.7
    classes = torch.tensor([0, 1, 1, 3, 2, 0])
    total = 0.0
    for one, c in zip(uploaded, classes.tolist(), strict=True):
        apart = [distance(one, other) for other in prototypes]
        own = np.exp(-(apart[c] + margin))
        total -= np.log(own / (own + sum(np.exp(-apart[k]) for k in range(C) if k != c)))
    loss = tgp.contrastive_loss(uploaded, classes, prototypes, margin)
    assert float(loss) == pytest.approx(total / 6, rel=1e-12)
    assert tgp.contrastive_loss(uploaded, classes, prototypes, margin + 1) > loss


def test_a_prototype_at_the_place_of_an_uploaded_one_has_a_finite_gradient():
    prototypes = torch.randn(C, WIDTH, requires_grad=True)
    tgp.contrastive_loss(prototypes.detach(), torch.arange(C), prototypes, 1.0).backward()
    assert prototypes.grad.isfinite().all()


# --- The server ---


class ByHand(nn.Module):
    """The server's network, written again."""

    def __init__(self, size, dtype):
        super().__init__()
        self.table = nn.Embedding(C if size == WIDTH else 10, size)
        self.one, self.two = nn.Linear(size, size), nn.Linear(size, size)
        self.to(dtype)

    def forward(self):
        return self.two(self.one(self.table.weight).clamp(min=0))

    def train_on(self, pairs, means, tau, rng, epochs, lr, size):
        """Train on pairs of a prototype and a class, by plain gradient descent."""
        margin = min(max((a - b).square().sum().sqrt() for a in means for b in means), tau)
        draws = torch.Generator().manual_seed(int(rng.integers(2**62)))
        for _ in range(epochs):
            order = torch.randperm(len(pairs), generator=draws).tolist()
            for i in range(0, len(order), size):
                losses = []
                for j in order[i : i + size]:
                    prototype, c = pairs[j]
                    gaps = (prototype - self()).square().sum(dim=1).sqrt()
                    gaps = gaps + margin * F.one_hot(torch.tensor(c), len(gaps))
                    losses.append(gaps[c] + torch.logsumexp(-gaps, dim=0))
                descend(self, torch.stack(losses).mean(), lr)


def seeded(rng, size, dtype=torch.float32):
    """Return the network with the initial weights that the server draws in its first round."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(rng.integers(2**62)))
        return ByHand(size, dtype)


def test_without_epochs_the_prototypes_are_the_random_start():
    local, held = torch.randn(2, C, WIDTH), torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]], dtype=torch.bool)
    state = torch.get_rng_state()
    merged = TrainedPrototypes(server_epochs=0).merge({}, uploads(local, held), Round(1, {}, seed=5))
    assert torch.equal(torch.get_rng_state(), state)  # the run's other random numbers do not change
    torch.testing.assert_close(merged["values"], seeded(np.random.default_rng(5), WIDTH)().detach())
    assert merged["known"].tolist() == [True, True, False, False]
    other = TrainedPrototypes(server_epochs=0).merge({}, uploads(local, held), Round(1, {}, seed=6))
    assert not torch.equal(merged["values"], other["values"])


@in_float64
def test_the_margin_is_that_of_the_uploaded_classes():
    """The other classes have the mean zero, far away from these prototypes."""
    local, held = 5 + torch.randn(2, C, WIDTH), torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]], dtype=torch.bool)
    merged = TrainedPrototypes(**SERVER).merge({}, uploads(local, held), Round(1, {}, seed=3))
    rng = np.random.default_rng(3)
    network, pairs = seeded(rng, WIDTH, torch.float64), [(local[0, 0], 0), (local[0, 1], 1), (local[1, 0], 0)]
    network.train_on(pairs, [local[:, 0].mean(dim=0), local[0, 1]], 100.0, rng, *SERVER.values())
    torch.testing.assert_close(merged["values"], network().detach(), rtol=1e-10, atol=1e-10)


def test_the_network_is_trained_further_in_each_round_and_stays_on_the_server():
    local, held = torch.randn(2, C, WIDTH), torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0]], dtype=torch.bool)
    piece = TrainedPrototypes(**SERVER)
    first = piece.merge({}, uploads(local, held), Round(1, {}, seed=1))
    again = piece.merge({}, uploads(local, held), Round(1, {}, seed=1))
    assert same_bytes(first, again)
    second = piece.merge(first, uploads(local[:1], ~held[:1]), Round(2, {}, seed=2))
    assert second["known"].tolist() == [True] * C
    assert not torch.equal(first["values"], second["values"])
    kept = TrainedPrototypes(server_epochs=0).merge(first, uploads(local, held), Round(2, {}, seed=2))
    assert torch.equal(kept["values"], first["values"])
    assert piece.sent(first).keys() == {"values", "known"}
    assert len(first) == 7


def test_training_pulls_the_prototypes_to_the_uploaded_ones_and_keeps_them_apart():
    local = torch.eye(C)[None].repeat(3, 1, 1) + 0.05 * torch.randn(3, C, C)
    held = torch.ones(3, C, dtype=torch.bool)
    piece = TrainedPrototypes(server_epochs=200, server_lr=0.1)
    merged = piece.merge({}, uploads(local, held), Round(1, {}, seed=1))
    assert torch.cdist(local.mean(dim=0), merged["values"]).argmin(dim=1).tolist() == list(range(C))
    assert torch.pdist(merged["values"]).min() > torch.pdist(local.mean(dim=0)).min()


# --- The method ---


@in_float64
def test_a_run_equals_a_loop_by_hand(tmp_path):
    lam, lr, tau = 2.0, 0.1, 1.5
    method = FedTGP(lam=lam, tau=tau, **SERVER)
    run = finished(tmp_path, method, **UNEQUAL | full_batch(lr))
    models = {k: copy.deepcopy(run.worker.template.backbone) for k in range(4)}
    values, known = torch.zeros(10, 16), set()
    for round in (1, 2, 3):
        pairs = []
        for k in run.server.participants(round):
            x, y = samples_of(run, k)
            model = models[k]
            for _ in range(2):
                features = model.encoder(x)
                aims = torch.stack(
                    [values[int(c)] if int(c) in known else z.detach() for z, c in zip(features, y, strict=True)]
                )
                loss = F.cross_entropy(model.head(features), y) + lam * (features - aims).square().mean()
                descend(model, loss, lr)
            with torch.no_grad():
                features = model.encoder(x)
            pairs += [(features[y == c].mean(dim=0), c) for c in y.unique().tolist()]
        rng = np.random.default_rng(derive(0, Stream.AGGREGATION, round))
        if round == 1:
            server = seeded(rng, 16, torch.float64)
        held = sorted({c for _, c in pairs})
        means = [torch.stack([p for p, one in pairs if one == c]).mean(dim=0) for c in held]
        server.train_on(pairs, means, tau, rng, *SERVER.values())
        values, known = server().detach(), known | set(held)
    torch.testing.assert_close(run.state["trained_prototypes"]["values"], values, rtol=1e-10, atol=1e-10)
    assert run.state["trained_prototypes"]["known"].nonzero()[:, 0].tolist() == sorted(known)
    for k, memory in run.memory.items():
        assert_equals_loop(run, memory["personal"], models[k].state_dict())


def test_the_term_uses_its_own_prototypes():
    term = TrainedPrototypeAlignment(lam=1.0, tau=3.0, margin="nearest", **SERVER)
    (piece,) = term.knowledge
    assert (type(piece), piece.tau, piece.margin) == (TrainedPrototypes, 3.0, "nearest")
    assert (piece.server_epochs, piece.server_lr, piece.server_batch_size) == (3, 0.05, 4)
