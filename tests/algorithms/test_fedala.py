"""FedALA's equations against brute force, its identities, and what a client keeps (baselines: B4)."""

import copy
import statistics
from functools import partial

import pytest
import torch
from experiments import (
    UNEQUAL,
    NormMLP,
    assert_near,
    experiment,
    finished,
    in_float64,
    same_bytes,
    samples_of,
    task_of_round,
)
from loops import assert_equals_loop, cross_entropy_steps, rounds_by_hand
from torch.func import functional_call
from torch.nn import functional as F

from fl_lightning.algorithms import FedALA
from fl_lightning.algorithms.personalized import fedala as ala
from fl_lightning.client.loss_term import FitContext
from fl_lightning.core.message import Message
from fl_lightning.core.seeding import Stream, seed_everything
from fl_lightning.evaluation.evaluation import Evaluation
from fl_lightning.models import MLP, Head

pytestmark = pytest.mark.numeric

RECEIVED = {"evaluation": Evaluation(client_model="received")}
SMALL = partial(MLP, (6,), 4, hidden=(5,))


def random_entries(seed, like):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(value.shape, generator=generator) for name, value in like.items()}


def client(method, seed=0, weights=None):
    """Return a client's module that has received a model and kept another model's top layers, and both models."""
    module = method.client_module(SMALL())
    received, local = (
        random_entries(seed, module.backbone.state_dict()),
        random_entries(seed + 1, module.backbone.state_dict()),
    )
    kept = {name: local[name] for name in ala.top_names(module.backbone, method.layers)}
    memory = {ala.LOCAL: kept} | ({ala.WEIGHTS: weights} if weights else {})
    method.receive(module, Message.pack({"model": received}), memory)
    return module, received, local


def data(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 6, generator=generator), torch.randint(0, 4, (n,), generator=generator)


# --- The equations ---


def test_eq6_is_a_clipped_gradient_step_in_the_weights():
    backbone = SMALL()
    names = ala.top_names(backbone, 2)
    local, received = ({n: random_entries(seed, backbone.state_dict())[n] for n in names} for seed in (1, 2))
    weights = {n: torch.rand(value.shape, requires_grad=True) for n, value in local.items()}
    x, y = data(7)
    model = ala.mix_models(local, received, weights)
    loss = F.cross_entropy(functional_call(backbone, model, (x,)), y)
    by_chain_rule = torch.autograd.grad(loss, list(model.values()), retain_graph=True)
    in_weights = dict(zip(names, torch.autograd.grad(loss, list(weights.values())), strict=True))
    held = {n: w.detach() for n, w in weights.items()}
    for eta in (0.1, 5.0):
        new = ala.update_weights(held, dict(zip(names, by_chain_rule, strict=True)), local, received, eta)
        for n in names:
            torch.testing.assert_close(new[n], (held[n] - eta * in_weights[n]).clamp(0, 1))
    assert any((w == 0).any() or (w == 1).any() for w in new.values())


def test_eq5_interpolates_between_the_local_and_the_received_model():
    one, other = {"w": torch.tensor([1.0, 1.0, 1.0])}, {"w": torch.tensor([3.0, 3.0, 3.0])}
    assert ala.mix_models(one, other, {"w": torch.tensor([0.0, 0.25, 1.0])})["w"].tolist() == [1.0, 1.5, 3.0]


def test_convergence_needs_ten_similar_losses():
    wild, calm = [5.0, 1.0] * 5, [1.0, 1.01] * 5
    assert not ala.has_converged(calm, 0.1)
    assert ala.has_converged([9.0, *calm], 0.1)
    assert not ala.has_converged([*calm, 9.0], 0.1)
    assert not ala.has_converged([1.0, *wild], 0.1)
    spread = statistics.pstdev(wild)
    assert ala.has_converged([0.0, *wild], spread * 1.001)
    assert not ala.has_converged([0.0, *wild], spread * 0.999)


def test_top_names_count_tensors_and_skip_the_predictor():
    backbone = SMALL(head=Head(hidden=(7,), prediction=8))
    assert ala.top_names(backbone, 0) == []
    assert ala.top_names(backbone, 3) == ["head.0.bias", "head.2.weight", "head.2.bias"]
    assert ala.top_names(backbone, 99) == [n for n, _ in backbone.named_parameters() if not n.startswith("predictor")]


# --- What a client does before it trains ---


@pytest.mark.parametrize("later", [False, True])
def test_the_mixture_equals_a_loop_by_hand(later):
    """With all data in one batch: eleven passes the first time, and one pass later."""
    method = FedALA(layers=2, rand_percent=100, eta=0.5, threshold=1e9)
    module, received, local = client(method)
    names = ["head.weight", "head.bias"]
    start = {n: torch.full_like(local[n], 0.5) for n in names} if later else None
    module, received, local = client(method, weights=start)
    x, y = data(40)
    method.prepare(module, [(x[:30], y[:30]), (x[30:], y[30:])], [])
    weights = start or {n: torch.ones_like(local[n]) for n in names}
    hidden = F.relu(x @ received["encoder.1.weight"].T + received["encoder.1.bias"])
    for _ in range(1 if later else 11):
        head = {n: (local[n] + (received[n] - local[n]) * weights[n]).requires_grad_() for n in names}
        loss = F.cross_entropy(hidden @ head["head.weight"].T + head["head.bias"], y)
        gradients = torch.autograd.grad(loss, list(head.values()))
        for n, g in zip(names, gradients, strict=True):
            weights[n] = (weights[n] - 0.5 * g * (received[n] - local[n])).clamp(0, 1)
    expected = received | {n: local[n] + (received[n] - local[n]) * weights[n] for n in names}
    torch.testing.assert_close(dict(module.backbone.state_dict()), expected)
    torch.testing.assert_close(module.notes[ala.WEIGHTS], weights)
    assert all(p.grad is None for p in module.backbone.parameters())


@pytest.mark.parametrize(("threshold", "first"), [(1e9, 11), (0.0, 15)])
def test_mixing_weights_are_learnt_on_a_sample_in_batches(threshold, first):
    method = FedALA(rand_percent=50, threshold=threshold, max_epochs=15)
    for weights, passes in ((None, first), ({n: torch.ones(s) for n, s in HEAD.items()}, 1)):
        module, _, _ = client(method, weights=weights)
        module.context = FitContext(batch_size=8)
        seen = []
        module.backbone.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0]))
        x, y = data(41)
        method.prepare(module, [(x, y)], [])
        assert [len(batch) for batch in seen] == [8, 8, 4] * passes
        sample = {tuple(row.tolist()) for batch in seen for row in batch}
        assert len(sample) == 20
        assert sample < {tuple(row.tolist()) for row in x}


def test_the_loss_of_a_pass_is_that_of_its_last_batch(monkeypatch):
    asked, outputs = [], []
    monkeypatch.setattr(ala, "has_converged", lambda losses, threshold: asked.append((list(losses), threshold)))
    method = FedALA(rand_percent=50, threshold=0.3, max_epochs=4)
    module, _, _ = client(method)
    module.context = FitContext(batch_size=8)
    module.backbone.register_forward_hook(lambda _, args, logits: outputs.append((args[0], logits.detach())))
    x, y = data(41)
    target = {tuple(row.tolist()): label for row, label in zip(x, y, strict=True)}
    method.prepare(module, [(x, y)], [])
    last = outputs[2::3]
    expected = [F.cross_entropy(o, torch.stack([target[tuple(r.tolist())] for r in batch])).item() for batch, o in last]
    assert len(set(expected)) == 4
    assert asked == [(expected[:passes], 0.3) for passes in range(4)]


HEAD = {"head.weight": (4, 5), "head.bias": (4,)}


def test_nothing_is_learnt_if_both_models_are_equal():
    method = FedALA()
    module = method.client_module(SMALL())
    before = {name: value.clone() for name, value in module.backbone.state_dict().items()}
    method.receive(module, Message.pack({"model": before}), {})
    method.prepare(module, [data(20)], [])
    assert same_bytes(dict(module.backbone.state_dict()), before)
    assert not module.notes[ala.WEIGHTS]


# --- Runs ---


@in_float64
def test_a_run_equals_a_loop_by_hand(tmp_path):
    """A client's first mixture takes up to fifteen passes over its data, later ones take one pass."""
    eta, threshold = 0.8, 0.05
    run = experiment(
        tmp_path, FedALA(layers=2, rand_percent=100, eta=eta, threshold=threshold, max_epochs=15), **UNEQUAL
    )
    run.load()
    last, mixing, rounds = {}, {}, iter([(r, k) for r in (1, 2, 3) for k in run.server.participants(r)])
    initial = copy.deepcopy(run.worker.template.backbone.head.state_dict())

    def train(local, client, batches):
        round, _ = next(rounds)
        received, own = copy.deepcopy(local.head.state_dict()), last.get(client, initial)
        if not same_bytes(own, received):
            x, y = samples_of(run, client)
            seed_everything(0, Stream.PREPARATION, round, client)
            chunks, losses = torch.randperm(len(y)).split(64), []
            weights = mixing.get(client, {name: torch.ones_like(value) for name, value in own.items()})
            for _ in range(1 if client in mixing else 15):
                if len(losses) > 10 and statistics.pstdev(losses[-10:]) < threshold:
                    break
                for chosen in chunks:
                    head = {n: (v + (received[n] - v) * weights[n]).requires_grad_() for n, v in own.items()}
                    logits = F.linear(local.encoder(x[chosen]), head["weight"], head["bias"])
                    loss = F.cross_entropy(logits, y[chosen])
                    gradients = torch.autograd.grad(loss, list(head.values()))
                    for (n, v), g in zip(own.items(), gradients, strict=True):
                        weights[n] = (weights[n] - eta * g * (received[n] - v)).clamp(0, 1)
                losses.append(loss.item())
            mixing[client] = weights
            local.head.load_state_dict({n: v + (received[n] - v) * weights[n] for n, v in own.items()})
        cross_entropy_steps(local, batches)
        last[client] = copy.deepcopy(local.head.state_dict())

    expected, _ = rounds_by_hand(run, train)
    run.fit()
    assert_equals_loop(run, run.state["model"], expected)
    for client, weights in mixing.items():
        assert_near(run.memory[client][ala.WEIGHTS], {f"head.{n}": w for n, w in weights.items()}, 1e-12)


@pytest.mark.filterwarnings("ignore:.* contain initial weights")
def test_a_client_starts_from_its_mixture_and_keeps_its_trained_top_layers(tmp_path):
    run = finished(tmp_path, FedALA(layers=3), model=NormMLP, rounds=1, **RECEIVED)
    trained, fresh = run.server.participants(1), [k for k in range(6) if k not in run.server.participants(1)]
    assert sorted(run.memory) == trained
    assert all(set(run.memory[k]) == {ala.LOCAL} for k in trained)  # round 1 has nothing to mix
    for k in (trained[0], fresh[0]):  # a new client mixes with the initial model
        task = task_of_round(run, 2, k)
        module, received = run.worker.modules.receive(task), task.download.section("model")
        start, names = module.backbone.state_dict(), ala.top_names(module.backbone, 3)
        initial = run.worker.template.backbone.state_dict()
        own = run.memory[k][ala.LOCAL] if k in trained else {n: initial[n] for n in names}
        assert list(own) == names or sorted(own) == sorted(names)
        for name, value in start.items():
            if name in names:
                low, high = torch.minimum(own[name], received[name]), torch.maximum(own[name], received[name])
                assert ((value >= low - 1e-5) & (value <= high + 1e-5)).all()
                weights = module.notes[ala.WEIGHTS][name]
                torch.testing.assert_close(value, own[name] + (received[name] - own[name]) * weights)
            else:
                assert torch.equal(value, received[name])
        assert any(not torch.equal(start[n], received[n]) for n in names)
        assert same_bytes(run.worker.modules.personalize(task).backbone.state_dict(), start)
        result = run.worker.run(task)
        kept = result.memory
        assert same_bytes(kept[ala.LOCAL], {n: result.upload.section("model")[n] for n in kept[ala.LOCAL]})
        assert same_bytes(kept[ala.WEIGHTS], {n: module.notes[ala.WEIGHTS][n] for n in kept[ala.WEIGHTS]})
