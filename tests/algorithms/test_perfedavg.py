"""Per-FedAvg's meta-gradient against brute force, and its identities (baselines: B5)."""

import copy
from functools import partial

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
    task_of_round,
)
from hypothesis import given
from hypothesis import strategies as st
from loops import assert_equals_loop, rounds_by_hand
from torch.nn import functional as F

from fl_lightning.algorithms import FedAvg, PerFedAvg, Proximal
from fl_lightning.algorithms.personalized import perfedavg as per
from fl_lightning.client.module import ClientModule
from fl_lightning.models import MLP

ORDERS = {"first": 2, "hessian_free": 3}
DECAY = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)


class TrainsOnSecondPart(ClientModule):
    """FedAvg's client, trained on the second of `parts` parts of each batch."""

    parts = 2

    def training_step(self, batch, batch_idx):
        x, y = batch
        if len(y) >= 2 * self.parts:
            x, y = x.tensor_split(self.parts)[1], y.tensor_split(self.parts)[1]
        return super().training_step((x, y), batch_idx)


class TrainsOnSecondThird(TrainsOnSecondPart):
    parts = 3


class NormMLPWithoutDropout(NormMLP):
    """A network with BatchNorm, without dropout because FedAvg uses random numbers in another order."""

    def __init__(self, in_shape, num_classes):
        super().__init__(in_shape, num_classes)
        self.encoder = self.encoder[:-1]


# --- The meta-gradient ---


@given(st.integers(1, 6), st.floats(0.0, 2.0), st.floats(0.001, 10.0), st.integers(0, 999))
def test_the_meta_gradient_of_a_quadratic_is_exact(size, alpha, delta, seed):
    """With `∇f(w) = A w`: `A (I - αA) w` in first order, and `(I - αA) A (I - αA) w` without a Hessian, for any δ."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(size, size, generator=generator, dtype=torch.float64)
    a, w = (a + a.T) / 2, torch.randn(size, generator=generator, dtype=torch.float64)
    shrunk = torch.eye(size, dtype=torch.float64) - alpha * a
    for found, expected in (
        (per.meta_gradient(lambda at, _: {"w": a @ at["w"]}, {"w": w}, "01", alpha), a @ shrunk @ w),
        (per.meta_gradient(lambda at, _: {"w": a @ at["w"]}, {"w": w}, "012", alpha, delta), shrunk @ a @ shrunk @ w),
    ):
        torch.testing.assert_close(found["w"], expected, rtol=1e-6, atol=1e-6 * (1 + float(a.norm()) ** 3))


def test_each_gradient_uses_its_own_batch():
    a = [torch.randn(3, 3, dtype=torch.float64) for _ in range(3)]
    w = torch.randn(3, dtype=torch.float64)
    v = a[1] @ (w - 0.3 * a[0] @ w)
    for batches, delta, expected in ((a[:2], None, v), (a, 0.1, v - 0.3 * a[2] @ v)):
        found = per.meta_gradient(lambda at, m: {"w": m @ at["w"]}, {"w": w}, batches, 0.3, delta)["w"]
        torch.testing.assert_close(found, expected)


def test_the_meta_gradient_is_the_gradient_of_the_loss_after_a_step():
    """If all three batches are equal, the Hessian-free estimate is autograd's gradient of `f(w - α ∇f(w))`."""
    x, y = torch.randn(9, 4, dtype=torch.float64), torch.arange(9) % 3
    w = torch.randn(3, 4, dtype=torch.float64)

    def loss(weights):
        return F.cross_entropy(x @ weights.T, y)

    def gradient(at, _):
        leaf = at["w"].detach().requires_grad_()
        return {"w": torch.autograd.grad(loss(leaf), leaf)[0]}

    leaf = w.clone().requires_grad_()
    (inner,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
    (exact,) = torch.autograd.grad(loss(leaf - 0.5 * inner), leaf)
    found = per.meta_gradient(gradient, {"w": w}, [None] * 3, 0.5, 1e-4)["w"]
    torch.testing.assert_close(found, exact, rtol=1e-6, atol=1e-8)


def test_weights_without_a_gradient_do_not_change():
    def gradient(at, _):
        assert torch.equal(at["idle"], torch.ones(2))
        return {"w": at["w"]}

    found = per.meta_gradient(gradient, {"w": torch.ones(1), "idle": torch.ones(2)}, "012", 0.1, 0.1)
    assert found.keys() == {"w"}


@given(st.integers(1, 40), st.sampled_from([2, 3]))
def test_a_batch_is_split_into_disjoint_parts_of_equal_size(size, parts):
    x, y = torch.arange(size)[:, None], torch.arange(size)
    found = per.split_batch((x, y), parts)
    assert len(found) == parts
    assert all(torch.equal(a[:, 0], b) for a, b in found)
    if size < 2 * parts:
        assert all(torch.equal(b, y) for _, b in found)
    else:
        sizes = [len(b) for _, b in found]
        assert min(sizes) >= 2
        assert max(sizes) - min(sizes) <= 1
        assert torch.equal(torch.cat([b for _, b in found]), y)


# --- A client's step ---


@pytest.mark.parametrize("order", ORDERS)
def test_a_step_equals_the_formula(order):
    torch.manual_seed(0)
    method = PerFedAvg(order=order, alpha=0.4, delta=0.01)
    module = method.client_module(MLP((4,), 3, (5,)).double()).train()
    x, y = torch.randn(12, 4, dtype=torch.float64), torch.arange(12) % 3
    n = ORDERS[order]
    parts = [(x[i * 12 // n : (i + 1) * 12 // n], y[i * 12 // n : (i + 1) * 12 // n]) for i in range(n)]
    start = {name: p.detach().clone() for name, p in module.backbone.named_parameters()}

    def loss_at(weights, batch):
        return F.cross_entropy(torch.func.functional_call(module.backbone, weights, batch[0]), batch[1])

    def gradient(weights, batch):
        leaves = {name: w.detach().requires_grad_() for name, w in weights.items()}
        return dict(zip(leaves, torch.autograd.grad(loss_at(leaves, batch), list(leaves.values())), strict=True))

    g = gradient(start, parts[0])
    there = {name: start[name] - 0.4 * g[name] for name in start}
    v = gradient(there, parts[1])
    expected = v
    if order == "hessian_free":
        up, down = (gradient({k: start[k] + s * 0.01 * v[k] for k in start}, parts[2]) for s in (1, -1))
        expected = {k: v[k] - 0.4 / 0.02 * (up[k] - down[k]) for k in v}
    loss = module.training_step((x, y), 0)
    loss.backward()
    torch.testing.assert_close(loss.detach(), loss_at(there, parts[1]).detach())
    assert module.train_losses()["ce"] == pytest.approx(loss.item())
    assert module.steps == 1
    for name, parameter in module.backbone.named_parameters():
        assert torch.equal(parameter, start[name])  # restored
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-9, atol=1e-12)


@in_float64
@pytest.mark.parametrize("order", ORDERS)
def test_a_run_equals_a_loop_by_hand(tmp_path, order):
    alpha, delta = 0.3, 0.05
    run = experiment(tmp_path, PerFedAvg(order=order, alpha=alpha, delta=delta), **UNEQUAL)

    def gradients_at(local, batch, moves, length):
        there = copy.deepcopy(local)
        with torch.no_grad():
            for p, move in zip(there.parameters(), moves, strict=True):
                p -= length * move
        x, y = batch
        return torch.autograd.grad(F.cross_entropy(there(x), y), list(there.parameters()))

    def train(local, client, batches):
        for x, y in batches:
            n = 2 if order == "first" else 3
            parts = list(zip(x.tensor_split(n), y.tensor_split(n), strict=True)) if len(y) >= 2 * n else [(x, y)] * n
            v = gradients_at(local, parts[1], gradients_at(local, parts[0], list(local.parameters()), 0.0), alpha)
            slopes = v
            if order == "hessian_free":
                ups, downs = (gradients_at(local, parts[2], v, length) for length in (-delta, delta))
                curve = [(up - down) / (2 * delta) for up, down in zip(ups, downs, strict=True)]
                slopes = [g - alpha * c for g, c in zip(v, curve, strict=True)]
            with torch.no_grad():
                for p, slope in zip(local.parameters(), slopes, strict=True):
                    p -= 0.2 * slope

    expected, _ = rounds_by_hand(run, train, weighting="uniform")
    run.fit()
    assert_equals_loop(run, run.state["model"], expected)


def test_loss_terms_are_part_of_the_meta_objective():
    torch.manual_seed(0)
    module = PerFedAvg(alpha=0.5, loss_terms=[Proximal(2.0)]).client_module(MLP((4,), 3, (5,))).train()
    module.on_fit_start()
    start = [p.detach().clone() for p in module.backbone.parameters()]
    x, y = torch.randn(8, 4), torch.arange(8) % 3
    inner = torch.autograd.grad(F.cross_entropy(module(x[:4]), y[:4]), list(module.backbone.parameters()))
    net = copy.deepcopy(module.backbone)
    with torch.no_grad():
        for p, g in zip(net.parameters(), inner, strict=True):
            p -= 0.5 * g  # the term has no gradient at its anchor
    F.cross_entropy(net(x[4:]), y[4:]).backward()
    module.training_step((x, y), 0).backward()
    for p, there, s in zip(module.backbone.parameters(), net.parameters(), start, strict=True):
        torch.testing.assert_close(p.grad, there.grad + 2.0 * (there.detach() - s), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("order", ORDERS)
def test_batchnorm_statistics_come_from_the_adapted_model_only(order):
    torch.manual_seed(0)
    module = PerFedAvg(order=order, alpha=0.0).client_module(NormMLP((4,), 3)).train()
    x, y = torch.randn(12, 4), torch.arange(12) % 3
    net = copy.deepcopy(module.backbone)
    n = 12 // ORDERS[order]
    net(x[n : 2 * n])
    module.training_step((x, y), 0)
    assert same_bytes(dict(module.backbone.named_buffers()), dict(net.named_buffers()))


def test_both_gradients_of_the_difference_use_the_same_dropout_mask():
    """With a tiny δ, different dropout masks would give a huge difference."""
    torch.manual_seed(0)
    module = PerFedAvg(order="hessian_free", alpha=10.0, delta=1e-9).client_module(NormMLP((4,), 3).double()).train()
    x, y = torch.randn(60, 4, dtype=torch.float64), torch.arange(60) % 3
    module.training_step((x, y), 0).backward()
    assert all(p.grad.abs().max() < 1e3 for p in module.backbone.parameters())


def test_the_difference_is_computed_in_full_precision():
    module = PerFedAvg(order="hessian_free").client_module(MLP((4,), 3, (5,))).train()
    seen = []
    module.backbone.head.register_forward_hook(lambda layer, inputs, output: seen.append(output.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        module.training_step((torch.randn(12, 4), torch.arange(12) % 3), 0)
    assert seen == [torch.bfloat16, torch.bfloat16, torch.float32, torch.float32]


def test_autocasts_cache_holds_no_old_weights():
    grads = []
    for context in (torch.autocast("cpu", torch.bfloat16, cache_enabled=cached) for cached in (True, False)):
        torch.manual_seed(0)
        module = PerFedAvg(alpha=5.0).client_module(MLP((4,), 3, (5,))).train()
        with context:
            loss = module.training_step((torch.randn(12, 4), torch.arange(12) % 3), 0)
        loss.backward()
        grads.append([p.grad for p in module.backbone.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))


# --- The method ---


@pytest.mark.thorough
@pytest.mark.parametrize("model", [partial(MLP, hidden=(16,)), NormMLPWithoutDropout])
@pytest.mark.parametrize("order", ORDERS)
def test_with_alpha_zero_it_is_fedavg_on_the_second_parts(tmp_path, order, model):
    options = {"model": model, "optimizer": DECAY, "rounds": 2, "clients_per_round": 2}
    one = experiment(tmp_path / "per", PerFedAvg(order=order, alpha=0.0), **options)
    plain = FedAvg(weighting="uniform")
    plain.module_class = TrainsOnSecondPart if order == "first" else TrainsOnSecondThird
    other = experiment(tmp_path / "avg", plain, **options)
    for run in (one, other):
        run.fit()
    assert same_bytes(one.state["model"], other.state["model"])
    assert [row["client/acc_mean"] for row in one.csv.rows] == [row["client/acc_mean"] for row in other.csv.rows]


@in_float64
def test_the_evaluated_model_is_the_global_model_after_full_batch_steps(tmp_path):
    run = finished(tmp_path, PerFedAvg(alpha=0.7, adapt_steps=2), model=NormMLP, rounds=1, clients_per_round=2)
    for client in (0, 3):
        net = run.worker.modules.build_shared(run.state["model"]).backbone.eval()
        x, y = samples_of(run, client)
        for _ in range(2):
            descend(net, F.cross_entropy(net(x), y), 0.7)
        run.worker.client_data.eval_batch_size = 7
        module = run.client_module(client)
        assert_near(module.backbone.state_dict(), net.state_dict())
    assert not run.memory


def test_adaptation_ignores_and_clears_gradients():
    torch.manual_seed(0)
    method = PerFedAvg(alpha=0.5)
    module = method.client_module(MLP((4,), 3, (5,))).eval()
    x, y = torch.randn(12, 4), torch.arange(12) % 3
    start = [p.detach().clone() for p in module.backbone.parameters()]
    gradients = torch.autograd.grad(F.cross_entropy(module(x), y), list(module.backbone.parameters()))
    for p in module.backbone.parameters():
        p.grad = torch.full_like(p, 1e3)  # of a fit's last batch
    with torch.no_grad():
        method.personalize(module, [(x, y)])
    for p, w, g in zip(module.backbone.parameters(), start, gradients, strict=True):
        torch.testing.assert_close(p.detach(), w - 0.5 * g)
        assert p.grad is None


def test_the_adapted_model_is_evaluated_in_mixed_precision():
    method = PerFedAvg(alpha=5.0, adapt_steps=2)
    x, y = torch.randn(12, 4), torch.arange(12) % 3
    logits = []
    for cached in (True, False):
        torch.manual_seed(0)
        module = method.client_module(MLP((4,), 3, (5,))).eval()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, cache_enabled=cached):
            method.personalize(module, [(x, y)])
            logits.append(module(x))
    assert torch.equal(*logits)


def test_a_frozen_weight_does_not_change(tmp_path):
    backbone = MLP((4,), 3, (5,))
    backbone.head.bias.requires_grad_(False)
    before = backbone.head.bias.clone()
    method = PerFedAvg(order="hessian_free", alpha=0.5)
    module = method.client_module(backbone).train()
    x, y = torch.randn(12, 4), torch.arange(12) % 3
    module.training_step((x, y), 0).backward()
    with torch.no_grad():
        method.personalize(module, [(x, y)])
    assert torch.equal(backbone.head.bias, before)
    assert backbone.head.bias.grad is None


def test_a_batch_too_small_to_split_is_used_for_all_parts(tmp_path):
    """A batch of three samples is used three times."""
    run = experiment(tmp_path, PerFedAvg(order="hessian_free"), batch_size=3, rounds=1, model=NormMLP)
    run.load()
    assert run.worker.run(task_of_round(run, 1, 0)).failure is None
