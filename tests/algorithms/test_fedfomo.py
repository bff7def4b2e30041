"""FedFomo's equations against brute force, its identities, and the choice of models (baselines: B9)."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from aggregation import finish
from experiments import (
    UNEQUAL,
    NormMLP,
    digits,
    experiment,
    finished,
    in_float64,
    same_bytes,
    samples_of,
    task_of_round,
)
from loops import assert_equals_loop, cross_entropy_steps, steps_of
from peers import mean_by_hand
from torch.nn import functional as F

from fl_lightning.algorithms import FedFomo
from fl_lightning.algorithms.personalized import fedfomo as fomo
from fl_lightning.core.message import Message, Upload, bundle, message_to_tensors, tensors_to_message, unbundle
from fl_lightning.core.state_dicts import VisibleState
from fl_lightning.models import MLP

pytestmark = pytest.mark.numeric

SMALL = partial(MLP, (6,), 4, hidden=(5,))
X, Y = torch.randn(30, 6, generator=torch.Generator().manual_seed(0)), torch.arange(30) % 4


def model(seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return {n: scale * torch.randn(v.shape, generator=generator) for n, v in SMALL().state_dict().items()}


def loss_of(weights, x=X, y=Y):
    backbone = SMALL()
    backbone.load_state_dict(weights)
    with torch.no_grad():
        return float(F.cross_entropy(backbone(x), y))


def mixed_module(own, previous, sent, validation=((X, Y),), training=((X, Y),)):
    """Return a client's module after it has mixed the models."""
    method = FedFomo()
    module = method.client_module(SMALL())
    download = bundle({j: Message.pack({"model": weights}, n_samples=7) for j, weights in sent.items()})
    memory = {fomo.UPLOADED: message_to_tensors(Message.pack({"model": own}, n_samples=3)), fomo.PREVIOUS: previous}
    method.receive(module, download, memory)
    module.eval()
    method.prepare(module, list(training), list(validation))
    return module


def by_hand(own, previous, sent):
    """Return the benefits of the models (Eq. 3), the client's own first, and the mixture (Eq. 4)."""
    worths = []
    for weights in [own, *sent.values()]:
        distance = sum(float(((weights[n] - previous[n]).double() ** 2).sum()) for n in weights) ** 0.5
        worths.append((loss_of(previous) - loss_of(weights)) / (distance + 1e-5))
    positive = [max(w, 0.0) for w in worths]
    if not sum(positive):
        return worths, own
    parts = list(zip(positive, [own, *sent.values()], strict=True))
    return worths, {n: previous[n] + sum(w / sum(positive) * (m[n] - previous[n]) for w, m in parts) for n in own}


# --- The equations ---


@pytest.mark.parametrize("peers", [(), (4,), (1, 2, 5)])
@pytest.mark.parametrize("seed", range(3))
def test_a_mixture_equals_a_loop_by_hand(peers, seed):
    own, previous = model(seed + 10, 0.5), model(seed + 20)
    sent = {j: model(seed + j, 0.8 * j) for j in peers}
    module = mixed_module(own, previous, sent)
    worths, expected = by_hand(own, previous, sent)
    assert len(peers) < 2 or (min(worths) < 0 < max(worths))
    torch.testing.assert_close(dict(module.backbone.state_dict()), expected, rtol=1e-4, atol=1e-5)
    found = module.notes[fomo.AFFINITY]
    assert found["peer"].tolist() == list(peers)
    assert found["worth"].tolist() == pytest.approx(worths[1:], rel=1e-4)
    assert same_bytes(module.notes[fomo.PREVIOUS], dict(module.backbone.state_dict()))


def test_the_order_of_a_models_entries_does_not_matter():
    """Entries of the client state are sorted by name, those of a module are not."""
    own, previous, sent = model(1, 0.5), model(2), {3: model(4, 0.3)}
    worths, mixtures = [], []
    for order in (list, sorted, lambda names: sorted(names, reverse=True)):
        kept = {name: previous[name] for name in order(previous)}
        module = mixed_module(own, kept, {j: {n: m[n] for n in order(m)} for j, m in sent.items()})
        worths.append(module.notes[fomo.AFFINITY]["worth"])
        mixtures.append(dict(module.backbone.state_dict()))
    expected, mixture = by_hand(own, previous, sent)
    assert min(expected) > 0
    for worth, mixed in zip(worths, mixtures, strict=True):
        assert worth.tolist() == pytest.approx(expected[1:], rel=1e-4)
        torch.testing.assert_close(mixed, mixture, rtol=1e-4, atol=1e-5)


def test_a_client_keeps_its_own_model_if_no_model_has_a_benefit():
    best = model(0, 0.0)  # uniform outputs
    own, worse = model(1, 3.0), model(2, 4.0)
    module = mixed_module(own, best, {3: worse, 5: model(4, 5.0)})
    assert (module.notes[fomo.AFFINITY]["worth"] < 0).all()
    assert same_bytes(dict(module.backbone.state_dict()), own)


def test_a_copy_of_the_previous_model_has_no_benefit():
    own = model(1)
    module = mixed_module(own, own, {3: own})
    assert module.notes[fomo.AFFINITY]["worth"].tolist() == [0.0]
    assert same_bytes(dict(module.backbone.state_dict()), own)
    assert fomo.model_benefit(1.0, 0.5, 0.0) == pytest.approx(5e4)


def test_benefits_use_the_validation_data_or_else_the_training_data():
    own, previous, sent = model(1, 0.5), model(2), {3: model(4, 0.3)}
    other = X.flip(0) * 2, Y
    one = mixed_module(own, previous, sent, validation=[(X[:20], Y[:20]), (X[20:], Y[20:])], training=[other])
    without = mixed_module(own, previous, sent, validation=[], training=[(X, Y)])
    worths, _ = by_hand(own, previous, sent)
    for module in (one, without):
        assert module.notes[fomo.AFFINITY]["worth"].tolist() == pytest.approx(worths[1:], rel=1e-4)


def test_eq4_normalises_the_positive_benefits():
    assert fomo.mixing_shares(torch.tensor([3.0, -2.0, 1.0])).tolist() == [0.75, 0.0, 0.25]
    assert fomo.mixing_shares(torch.tensor([-1.0, 0.0])).tolist() == [0.0, 0.0]


@in_float64
def test_a_run_equals_a_loop_by_hand(tmp_path):
    """Clients receive the models of all others that have trained, and weigh them by their own training data."""
    run = experiment(
        tmp_path, FedFomo(models=3, epsilon=0.0, validation=0.0), **UNEQUAL | {"scenario": digits(4, alpha=10.0)}
    )
    run.load()
    models = {k: copy.deepcopy(run.worker.template.backbone) for k in range(4)}
    previous, trained, positive = copy.deepcopy(models), set(), []

    def flat(model):
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    def measured_loss(model, x, y):
        """Return the mean loss, which evaluation sums in float32 over batches of 128."""
        batches = zip(x.split(128), y.split(128), strict=True)
        return sum(F.cross_entropy(model(a).float(), b, reduction="sum").item() for a, b in batches) / len(y)

    for round in range(1, 4):
        before, participants = copy.deepcopy(models), run.server.participants(round)
        for k in participants:
            x, y = samples_of(run, k)
            losses = {id(m): measured_loss(m, x, y) for m in [previous[k], *before.values()]}
            heard = [before[k], *(before[j] for j in sorted(trained - {k}))]
            lengths = [float((flat(m) - flat(previous[k])).norm()) + 1e-5 for m in heard]
            gains = [losses[id(previous[k])] - losses[id(m)] for m in heard]
            worths = [max(gain / length, 0.0) for gain, length in zip(gains, lengths, strict=True)]
            if sum(worths):
                models[k].load_state_dict(mean_by_hand([m.state_dict() for m in heard], worths))
                positive.append(sum(worth > 0 for worth in worths))
            previous[k] = copy.deepcopy(models[k])
            cross_entropy_steps(models[k], steps_of(run, round, k))
        trained |= set(participants)
    assert max(positive) > 1
    run.fit()
    for k, memory in run.memory.items():
        uploaded = tensors_to_message(memory[fomo.UPLOADED]).section("model")
        assert_equals_loop(run, uploaded, models[k].state_dict())


# --- The choice of models ---


def test_the_models_of_highest_affinity_are_chosen_and_ties_are_random():
    row = torch.tensor([9.0, -1.0, 3.0, 0.0, 0.0, 0.0])
    rngs = [np.random.default_rng(seed) for seed in range(40)]
    picks = [fomo.choose_models(row, [1, 2, 3, 4, 5], 2, False, rng) for rng in rngs]
    assert all(2 in pick and 1 not in pick for pick in picks)
    assert {j for pick in picks for j in pick} == {2, 3, 4, 5}
    assert fomo.choose_models(row, [1, 3], 5, False, rngs[0]) == [1, 3]
    assert fomo.choose_models(row, [], 5, True, rngs[0]) == []
    explored = {j for rng in rngs for j in fomo.choose_models(row, [1, 2, 3, 4, 5], 2, True, rng)}
    assert explored == {1, 2, 3, 4, 5}


def test_benefits_are_added_to_the_clients_row_of_affinities():
    state = FedFomo().initial_state(SMALL(), 4, 4, np.random.default_rng(0))
    state = {fomo.AFFINITY: state[fomo.AFFINITY]}
    start = state[fomo.AFFINITY]["matrix"].clone()
    assert torch.equal(start, torch.eye(4, dtype=torch.float64))
    after = state
    for _ in range(2):
        found = {"peer": torch.tensor([0, 3]), "worth": torch.tensor([0.5, -2.0], dtype=torch.float64)}
        upload = Upload(1, Message.pack({fomo.AFFINITY: found}, n_samples=3))
        after = finish(fomo.Affinities(), [upload], after)
    assert after[fomo.AFFINITY]["matrix"][1].tolist() == [1.0, 1.0, 0.0, -4.0]
    assert torch.equal(after[fomo.AFFINITY]["matrix"][[0, 2, 3]], start[[0, 2, 3]])
    assert after[fomo.AFFINITY]["trained"].tolist() == [False, True, False, False]
    assert int(after[fomo.AFFINITY]["rounds"]) == 2
    assert torch.equal(state[fomo.AFFINITY]["matrix"], start)
    assert not state[fomo.AFFINITY]["trained"].any()


class FixedRandom:
    """A random generator whose next number is given."""

    def __init__(self, number):
        self.number, self.rest = number, np.random.default_rng(0)

    def random(self):
        return self.number

    def permutation(self, values):
        return self.rest.permutation(values)


@pytest.mark.parametrize(("rounds", "chance"), [(0, 0.3), (1, 0.25), (4, 0.1), (6, 0.0), (9, 0.0)])
def test_the_probability_to_explore_falls_each_round(monkeypatch, rounds, chance):
    method, seen = FedFomo(), []
    state = method.initial_state(SMALL(), 4, 4, np.random.default_rng(0))
    state[fomo.AFFINITY] |= {"rounds": torch.tensor(rounds)}
    monkeypatch.setattr(fomo, "choose_models", lambda row, others, models, explores, rng: seen.append(explores) or [])
    for number in (chance - 1e-6, chance + 1e-6):
        method.download(VisibleState(state, {}.get), 0, FixedRandom(max(number, 0.0)))
    assert seen == [chance > 0, False]


def test_a_client_receives_last_uploads_of_clients_that_have_trained(tmp_path):
    run = finished(tmp_path, FedFomo(models=3), rounds=2)
    trained = {k for round in (1, 2) for k in run.server.participants(round)}
    assert len(trained) < 6 or run.state[fomo.AFFINITY]["trained"].all()
    for client in range(6):
        sent = unbundle(run.server.download(3, client))
        assert len(sent) == min(3, len(trained - {client}))
        assert {each.client for each in sent} <= trained - {client}
        for j, message, *_ in sent:
            last = run.worker.algorithm.public
            held = tensors_to_message(run.memory[j][last]).section("model")
            assert same_bytes(message.section("model"), held)
    assert "model" not in [name.split("/")[0] for name in run.server.download(3, 0).tensors]


# --- Runs ---


def test_a_client_keeps_its_mixture_and_its_trained_model(tmp_path):
    run = finished(tmp_path, FedFomo(models=3), model=NormMLP, rounds=2, clients_per_round=6)
    task = task_of_round(run, 3, 0)
    start = run.worker.modules.receive(task)
    result = run.worker.run(task)
    assert same_bytes(result.memory[fomo.PREVIOUS], start.notes[fomo.PREVIOUS])
    assert same_bytes(result.memory[fomo.PREVIOUS], dict(start.backbone.state_dict()))
    kept = tensors_to_message(result.memory[fomo.UPLOADED])
    assert same_bytes(kept.section("model"), result.upload.section("model"))
    assert not same_bytes(kept.section("model"), result.memory[fomo.PREVIOUS])
    assert same_bytes(result.upload.section(fomo.AFFINITY), start.notes[fomo.AFFINITY])
    statistics = [n for n in kept.section("model") if n.endswith("running_mean")]
    assert statistics
    assert not torch.equal(result.memory[fomo.PREVIOUS][statistics[0]], torch.zeros(16))
