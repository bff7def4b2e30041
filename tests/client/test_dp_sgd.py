"""DP-SGD: gradients of single samples, clipping, noise and Poisson batches, against loops and distributions."""

import copy
import math
import os
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.plugins.precision import Precision
from scipy import stats
from torch import nn
from torch.nn import functional as F

from fl_lightning import ClientModule, ConfigError, LossTerm
from fl_lightning.algorithms.global_model.fedprox import Proximal
from fl_lightning.client.dp_sgd import (
    DPSGD,
    PrivateGradients,
    SampleLosses,
    clipped_sum,
    gradients_of_one,
    noisy_mean,
    obstacle_to_vmap,
    reads_samples,
    sample_gradients,
)
from fl_lightning.client.fit import compute_gradients
from fl_lightning.client.local_work import LocalWork
from fl_lightning.client.private_random import PrivateRandom
from fl_lightning.client.weights import trainable_parameters
from fl_lightning.core.inputs import Inputs
from fl_lightning.core.objectives import CausalLM
from fl_lightning.data.loaders import PoissonBatches
from fl_lightning.models import MLP

CPU = torch.device("cpu")
OPTIONS = SimpleNamespace(precision_plugin=Precision(), gradient_clip_val=None)


class LSTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(6, 5, batch_first=True), nn.Linear(5, 4)

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        return self.head(self.layer(x).mean(dim=1))


def group_norm():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 4))


NETWORKS = {
    "MLP": (lambda: MLP(in_shape=(1, 6, 6), num_classes=4, hidden=(7,)), (1, 6, 6)),
    "GroupNorm": (group_norm, (1, 6, 6)),
    "LSTM": (LSTM, (3, 6)),
    "attention": (Attention, (3, 6)),
}


def client(network, *terms, dtype=torch.float32, in_fit=True):
    """Return a client's module in the middle of its fit."""
    module = ClientModule(network.to(dtype), terms).train()
    work = LocalWork(1, 1)
    module.trainer = SimpleNamespace(current_epoch=0, global_step=0, work=work, callback_metrics={}) if in_fit else None
    for term in module.terms():
        term.begin(module)
    return module


def samples(shape, count=5, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, *shape, generator=generator, dtype=dtype), torch.arange(count) % 4


def gradient_vector(module):
    return torch.cat([p.grad.flatten() for p in module.backbone.parameters()])


def step(module, batch, clip=1.0, noise=0.0, expected=None, vectorised=True, seed=0):
    """Take the gradients of one private step, and return them as a vector."""
    gradients = PrivateGradients(clip, noise, expected or len(batch[1]), PrivateRandom(CPU, seed), vectorised)
    optimizer = torch.optim.SGD(module.backbone.parameters(), lr=0.1)
    gradients(module, optimizer, batch, 0, OPTIONS)
    return gradient_vector(module)


# --- Gradients of single samples -------------------------------------------------------------------------------------


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_of_samples_are_those_of_a_loop(name, dtype):
    build, shape = NETWORKS[name]
    torch.manual_seed(0)
    module = client(build(), dtype=dtype)
    (x, y), parameters = samples(shape, dtype=dtype), trainable_parameters(module.backbone)
    vectorised = obstacle_to_vmap(module, (x, y), torch.enable_grad) is None
    assert vectorised == (name != "LSTM")
    losses = SampleLosses(module, [])
    if vectorised:
        found, values = sample_gradients(losses, parameters, x, y)
    else:
        parts = [gradients_of_one(losses, parameters, x[i : i + 1], y[i : i + 1]) for i in range(len(y))]
        found = {key: torch.cat([gradients[key] for gradients, _ in parts]) for key in parameters}
        values = {"ce": torch.cat([own["ce"] for _, own in parts])}
    tolerance = 1e-6 if dtype == torch.float32 else 1e-10
    for i in range(len(y)):
        loss = F.cross_entropy(module.backbone(x[i : i + 1]), y[i : i + 1])
        expected = torch.autograd.grad(loss, [*parameters.values()])
        torch.testing.assert_close(values["ce"][i], loss.detach(), rtol=tolerance, atol=tolerance)
        for key, gradient in zip(parameters, expected, strict=True):
            torch.testing.assert_close(found[key][i], gradient, rtol=tolerance, atol=tolerance)


def test_each_sample_has_a_dropout_mask_of_its_own():
    """All samples are alike, so their gradients differ by their masks alone."""
    module = client(nn.Sequential(nn.Flatten(), nn.Linear(36, 16), nn.Dropout(0.5), nn.Linear(16, 4)))
    x, y = torch.ones(8, 1, 6, 6), torch.zeros(8, dtype=torch.int64)
    gradients, _ = sample_gradients(SampleLosses(module, []), trainable_parameters(module.backbone), x, y)
    dropped = gradients["1.bias"] == 0
    assert len(dropped.unique(dim=0)) > 4
    assert 0.2 < float(dropped.double().mean()) < 0.8


def test_a_network_that_vmap_cannot_batch_is_detected():
    class Branches(nn.Linear):
        def forward(self, x):
            return super().forward(x if x.sum() > 0 else -x)

    module = client(Branches(3, 4))
    assert "data-dependent" in obstacle_to_vmap(module, samples((3,)), torch.enable_grad)
    assert obstacle_to_vmap(client(nn.Linear(3, 4)), samples((3,)), torch.enable_grad) is None


def test_several_inputs_are_batched_too():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 4)

        def forward(self, x):
            return self.layer(x.tensors["a"] + x.tensors["b"])

    module = client(Two(), dtype=torch.float64)
    x, y = samples((3,), dtype=torch.float64)
    found = step(module, (Inputs({"a": x, "b": 2 * x}), y), clip=math.inf)
    torch.testing.assert_close(found, step(module, (Inputs({"a": 3 * x, "b": 0 * x}), y), clip=math.inf))


def test_a_text_counts_as_one_sample_whatever_its_length():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(5, 5, dtype=torch.float64)

        def forward(self, x):
            return self.table(x)

    module = client(Words(), dtype=torch.float64)
    module.objective = CausalLM()
    x = torch.randint(5, (3, 6), generator=torch.Generator().manual_seed(0))
    y = x.clone()
    y[0, 2:] = y[1, 4:] = -100
    found = step(module, (x, y), clip=math.inf, expected=3)
    losses = [module.objective.loss(module.backbone(x[i : i + 1]), y[i : i + 1]) for i in range(3)]
    expected = torch.autograd.grad(sum(losses) / 3, [*module.backbone.parameters()])
    torch.testing.assert_close(found, expected[0].flatten())


# --- Clipping and noise ----------------------------------------------------------------------------------------------


def test_the_clipped_sum_is_that_of_a_loop_over_samples():
    generator = torch.Generator().manual_seed(0)
    sizes = torch.tensor([0.01, 1.0, 30.0, 0.0], dtype=torch.float64)
    shapes = {"w": (3, 2), "b": (2,), "s": ()}
    gradients = {
        name: torch.randn(4, *shape, generator=generator, dtype=torch.float64) * sizes.view(4, *[1] * len(shape))
        for name, shape in shapes.items()
    }
    found = clipped_sum(gradients, 1.5)
    expected = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
    for i in range(4):
        norm = math.sqrt(sum(float((value[i] ** 2).sum()) for value in gradients.values()))
        for name, value in gradients.items():
            expected[name] += value[i] * (1.0 if norm <= 1.5 else 1.5 / norm)
    for name in shapes:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-12, atol=1e-12)


def test_a_gradient_too_large_for_its_norm_counts_as_zero():
    gradients = {"w": torch.tensor([[1e30, 0.0], [0.3, 0.4]])}
    torch.testing.assert_close(clipped_sum(gradients, 1.0)["w"], torch.tensor([0.3, 0.4]))


@pytest.mark.parametrize("seed", [0, None], ids=["seeded", "from the system's entropy"])
def test_the_noise_is_normal_with_deviation_noise_times_clip_over_the_expected_batch_size(seed):
    total = torch.full((300, 400), 7.0)
    noise = noisy_mean(total, clip=2.0, noise=1.5, expected=10, random=PrivateRandom(CPU, seed)) - 0.7
    assert noise.shape == total.shape
    assert noise.dtype == total.dtype
    assert float(noise.std()) == pytest.approx(0.3, rel=0.01)
    assert stats.kstest(noise.double().flatten().numpy(), stats.norm(0, 0.3).cdf).pvalue > 1e-4


def test_a_seed_gives_the_same_noise_and_the_systems_entropy_does_not():
    like = torch.zeros(100)
    first, second = (PrivateRandom(CPU, 3).normal(like) for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(PrivateRandom(CPU).normal(like), PrivateRandom(CPU).normal(like))
    assert not torch.equal(PrivateRandom(CPU).uniform(9), PrivateRandom(CPU).uniform(9))


def test_noise_from_the_systems_entropy_is_finite_for_the_smallest_number(monkeypatch):
    monkeypatch.setattr(os, "urandom", bytes)
    assert bool(PrivateRandom(CPU).normal(torch.zeros(3, dtype=torch.float64)).isfinite().all())


def test_uniform_numbers_from_the_systems_entropy():
    drawn = PrivateRandom(CPU).uniform(100_000)
    assert drawn.dtype == torch.float64
    assert 0 <= float(drawn.min()) <= float(drawn.max()) < 1
    assert stats.kstest(drawn.numpy(), stats.uniform.cdf).pvalue > 1e-4


def test_without_noise_and_clipping_the_gradients_are_those_of_an_ordinary_step():
    module = client(MLP(in_shape=(4,), num_classes=4, hidden=(5,)), Proximal(0.3), dtype=torch.float64)
    with torch.no_grad():
        for p in module.backbone.parameters():
            p += 0.1
    batch = samples((4,), dtype=torch.float64)
    optimizer = torch.optim.SGD(module.backbone.parameters(), lr=0.1)
    loss = compute_gradients(module, optimizer, batch, 0, OPTIONS)
    expected = gradient_vector(module)
    for vectorised in (True, False):
        torch.testing.assert_close(step(module, batch, clip=math.inf, vectorised=vectorised), expected)
        module.loss_record.add({})
    found = PrivateGradients(math.inf, 0.0, 5, PrivateRandom(CPU, 0))(module, optimizer, batch, 0, OPTIONS)
    torch.testing.assert_close(found, loss.detach())


def test_the_sum_is_divided_by_the_expected_batch_size():
    module = client(nn.Linear(3, 4), dtype=torch.float64)
    batch = samples((3,), dtype=torch.float64)
    torch.testing.assert_close(step(module, batch, expected=10) * 2, step(module, batch, expected=5))
    first, second = module.loss_record.settle()  # of the losses, too
    assert 2 * first == pytest.approx(second)


def test_samples_in_several_chunks_give_the_same_sum(monkeypatch):
    module = client(nn.Linear(3, 4), dtype=torch.float64)
    batch = samples((3,), 11, dtype=torch.float64)
    whole = step(module, batch)
    monkeypatch.setattr("fl_lightning.client.dp_sgd.MAX_BYTES", 4 * 16 * 8)  # four samples at a time
    torch.testing.assert_close(step(module, batch), whole)


@pytest.mark.parametrize("vectorised", [True, False], ids=["vmap", "loop"])
def test_one_sample_changes_the_sum_by_at_most_the_clipping_norm(vectorised):
    module = client(nn.Linear(3, 4, bias=False), dtype=torch.float64)
    nn.init.zeros_(module.backbone.weight)  # so that opposite inputs have opposite gradients
    x, y = samples((3,), dtype=torch.float64)
    x[2] *= 1e4
    other = x.clone()
    other[2] *= -1
    sums = [step(module, (each, y), clip=0.5, expected=1, vectorised=vectorised) for each in (x, other)]
    without = step(module, (x[[0, 1, 3, 4]], y[[0, 1, 3, 4]]), clip=0.5, expected=1, vectorised=vectorised)
    assert float((sums[0] - without).norm()) == pytest.approx(0.5)
    assert float((sums[0] - sums[1]).norm()) == pytest.approx(1.0)


def test_terms_of_the_weights_are_neither_clipped_nor_noisy():
    torch.manual_seed(0)
    network = nn.Linear(3, 4)
    batch = samples((3,), dtype=torch.float64)
    sums = []
    for terms in ([], [Proximal(1e6)]):
        module = client(copy.deepcopy(network), *terms, dtype=torch.float64)
        start = torch.cat([p.detach().flatten().clone() for p in module.backbone.parameters()])
        with torch.no_grad():
            module.backbone.weight += 1
        sums.append(step(module, batch, noise=1.0))
    now = torch.cat([p.detach().flatten() for p in module.backbone.parameters()])
    torch.testing.assert_close(sums[1] - sums[0], 1e6 * (now - start), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("vectorised", [True, False])
def test_terms_of_samples_and_of_weights_are_added_once(vectorised):
    class LogitSize(LossTerm):
        def forward(self, step):
            return step.logits.square().mean()

    module = client(nn.Linear(3, 4), LogitSize(), Proximal(0.5), dtype=torch.float64)
    start = [p.detach().clone() for p in module.backbone.parameters()]
    with torch.no_grad():
        module.backbone.weight += 1
    x, y = samples((3,), dtype=torch.float64)
    found = step(module, (x, y), clip=math.inf, vectorised=vectorised)
    logits, own = module.backbone(x), [*module.backbone.parameters()]
    apart = sum((p - w).square().sum() for p, w in zip(own, start, strict=True))
    expected = torch.autograd.grad(F.cross_entropy(logits, y) + logits.square().mean() + 0.25 * apart, own)
    torch.testing.assert_close(found, torch.cat([each.flatten() for each in expected]))


def test_a_term_reads_samples_if_it_uses_any_tensor_of_the_step():
    class Reads(LossTerm):
        part: str = "logits"

        def forward(self, step):
            return getattr(step, self.part).sum()

    class Counts(LossTerm):
        def forward(self, step):
            return torch.tensor(float(len(step.targets)))

    module = client(MLP(in_shape=(4,), num_classes=4, hidden=(5,)), Proximal(0.1))
    assert not reads_samples(next(module.terms()), module)
    assert all(reads_samples(Reads(part=part), module) for part in ("logits", "targets", "features", "inputs"))
    assert reads_samples(Counts(), module)


def test_class_weights_weight_the_gradient_of_each_sample():
    weights = torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=torch.float64)
    module = client(nn.Linear(3, 4), dtype=torch.float64)
    module.context = module.context._replace(class_weights=weights)
    x, y = samples((3,), dtype=torch.float64)
    found = step(module, (x, y), clip=math.inf)
    losses = F.cross_entropy(module.backbone(x), y, reduction="none") * weights[y]
    expected = torch.autograd.grad(losses.mean(), [*module.backbone.parameters()])
    torch.testing.assert_close(found, torch.cat([each.flatten() for each in expected]))


def test_frozen_parameters_get_no_gradient():
    module = client(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 4)))
    module.backbone[0].requires_grad_(False)
    gradients = PrivateGradients(1.0, 1.0, 5, PrivateRandom(CPU, 0))
    gradients(module, torch.optim.SGD(module.backbone.parameters(), lr=0.1), samples((3,)), 0, OPTIONS)
    assert module.backbone[0].weight.grad is None
    assert module.backbone[1].weight.grad.any()


def test_an_empty_batch_is_a_step_of_noise():
    module = client(nn.Linear(3, 4), Proximal(0.1), dtype=torch.float64)
    x, y = samples((3,), dtype=torch.float64)
    found = step(module, (x[:0], y[:0]), clip=2.0, noise=1.0, expected=8)
    random = PrivateRandom(CPU, 0)
    expected = [2.0 * random.normal(p.detach()) / 8 for p in module.backbone.parameters()]
    torch.testing.assert_close(found, torch.cat([each.flatten() for each in expected]))
    assert module.train_losses() == {"loss": 0.0, "ce": 0.0, "proximal": 0.0}
    assert module.steps == 1


def test_an_optimizer_that_asks_twice_is_refused():
    module = client(nn.Linear(3, 4))
    gradients = PrivateGradients(1.0, 1.0, 5, PrivateRandom(CPU, 0))
    optimizer = torch.optim.LBFGS(module.backbone.parameters())
    with pytest.raises(ConfigError, match=r"^optimizer: LBFGS"):
        optimizer.step(lambda: gradients(module, optimizer, samples((3,)), 0, OPTIONS))


# --- Poisson batches -------------------------------------------------------------------------------------------------


def poisson(n, batch_size, seed=0):
    x = torch.arange(n).float()[:, None]
    return PoissonBatches(x, torch.arange(n), torch.arange(n), batch_size, PrivateRandom(CPU, seed).uniform, 0)


def test_each_sample_belongs_to_each_batch_with_the_same_probability():
    batches = poisson(20, 5)
    rounds = 500
    drawn = [y for _ in range(rounds) for _, y in batches]
    assert len(batches) == 4
    assert len(drawn) == 4 * rounds
    counts = torch.bincount(torch.cat(drawn), minlength=20)
    assert stats.chisquare(counts.numpy()).pvalue > 1e-4
    sizes = torch.tensor([len(y) for y in drawn])
    expected = stats.binom(20, 0.25)
    assert float(sizes.float().mean()) == pytest.approx(expected.mean(), rel=0.03)
    assert float(sizes.float().var()) == pytest.approx(expected.var(), rel=0.1)
    assert 0 < int((sizes == 0).sum()) < 20  # 0.3 % are empty
    both = [bool((y == 3).any() and (y == 4).any()) for y in drawn]
    assert sum(both) / len(both) == pytest.approx(1 / 16, rel=0.25)  # independently
    assert all(torch.equal(x[:, 0].long(), y) for x, y in batches)


@pytest.mark.parametrize(("n", "size", "steps", "rate"), [(10, 4, 3, 0.4), (8, 4, 2, 0.5), (3, 4, 1, 1.0)])
def test_the_number_of_steps_is_that_of_ordinary_batches(n, size, steps, rate):
    batches = poisson(n, size)
    assert (len(batches), batches.rate, batches.expected) == (steps, rate, min(n, size))
    if rate == 1:
        assert all(len(y) == n for _, y in batches)


def test_texts_keep_the_padding_of_the_dataset():
    mask = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]])
    x = Inputs({"input_ids": mask, "attention_mask": mask})
    batches = PoissonBatches(x, torch.arange(3), torch.arange(3), 2, PrivateRandom(CPU, 0).uniform, 0)
    assert {tuple(part.tensors["input_ids"].shape[1:]) for _ in range(9) for part, _ in batches} == {(4,)}


# --- Options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({}, "noise"),
        ({"noise": 1.0, "epsilon": 3.0}, "noise"),
        ({"noise": -1.0}, "noise"),
        ({"noise": math.nan}, "noise"),
        ({"noise": 1.0, "clip": 0.0}, "clip"),
        ({"noise": 1.0, "clip": math.inf}, "clip"),
        ({"epsilon": 0.0}, "epsilon"),
        ({"noise": 1.0, "delta": 0.0}, "delta"),
        ({"noise": 1.0, "delta": 1.0}, "delta"),
    ],
)
def test_bad_options_are_refused(options, key):
    with pytest.raises(ConfigError, match=f"^dp_sgd.{key}: "):
        DPSGD(**options)
