"""FedUV's two terms against brute force, and its identities (baselines: A9)."""

from statistics import median_low

import pytest
import torch
from commands import rows, tiny
from experiments import UNEQUAL, descend, experiment, in_float64
from hypothesis import given
from hypothesis import strategies as st
from loops import assert_equals_loop, rounds_by_hand
from torch.nn import functional as F

from fl_lightning.algorithms import ClassifierVariance, FedUV, HypersphericalUniformity
from fl_lightning.algorithms.global_model.feduv import uniformity_loss, variance_loss
from fl_lightning.client.loss_term import Step
from fl_lightning.client.module import ClientModule
from fl_lightning.models import MLP

pytestmark = pytest.mark.numeric


def features(samples, width=5, zeros=0.4):
    """Return features as after a ReLU, with some rows of zeros and some equal rows."""
    made = F.relu(torch.randn(samples, width)) * (torch.rand(samples, 1) > zeros)
    return torch.cat([made, made[: samples // 3]])


def uniformity_by_hand(z, detach=False):
    """Return the loss, computed pair by pair with `torch.median`."""
    pairs = [(z[a] - z[b]).square().sum() for a in range(len(z)) for b in range(a + 1, len(z))]
    distances = torch.stack(pairs)
    sigma = distances[distances > 0].median()
    return torch.exp(-distances / (sigma.detach() if detach else sigma)).mean()


@pytest.mark.thorough
@in_float64
def test_a_run_equals_a_loop_by_hand(tmp_path):
    lam, mu = 1.5, 0.7
    run = experiment(tmp_path, FedUV(lam=lam, mu=mu), **UNEQUAL)

    def train(local, client, batches):
        for x, y in batches:
            z = local.encoder(x)
            logits = local.head(z)
            spread = sum((0.1**0.5 - p.std()).clamp(min=0) for p in logits.softmax(dim=1).T) / 10
            descend(local, F.cross_entropy(logits, y) + lam * spread + mu * uniformity_by_hand(z), 0.2)

    expected, _ = rounds_by_hand(run, train)
    run.fit()
    assert_equals_loop(run, run.state["model"], expected)


# --- V ---


@given(st.integers(2, 30))
def test_gamma_is_the_deviation_of_a_column_of_the_identity(classes):
    assert torch.eye(classes, dtype=torch.float64).std(dim=0).mean().item() == pytest.approx(classes**-0.5)
    balanced = torch.eye(classes, dtype=torch.float64).repeat(3, 1)
    assert (balanced.std(dim=0) < classes**-0.5).all()  # unbiased: a larger balanced batch varies a little less
    assert variance_loss(torch.eye(classes, dtype=torch.float64)).item() == pytest.approx(0, abs=1e-12)
    assert variance_loss(torch.full((4, classes), 1 / classes)).item() == pytest.approx(classes**-0.5)


def test_variance_loss_equals_a_loop_over_classes():
    p = (4 * torch.randn(9, 4)).softmax(dim=1)
    total = 0.0
    for c in range(4):
        mean = sum(p[b, c].item() for b in range(9)) / 9
        std = (sum((p[b, c].item() - mean) ** 2 for b in range(9)) / 8) ** 0.5
        total += max(0.0, 0.5 - std)
    assert variance_loss(p).item() == pytest.approx(total / 4, rel=1e-5, abs=1e-6)


def test_the_hinge_applies_to_each_class_separately():
    p = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    assert p.std(dim=0)[0].item() == pytest.approx(2**-0.5)  # more than 1/√3; the third class does not vary
    assert variance_loss(p).item() == pytest.approx(3**-0.5 / 3)


# --- U ---


@pytest.mark.parametrize("samples", [2, 3, 4, 5, 9, 16])
@pytest.mark.parametrize("detach", [False, True])
def test_uniformity_loss_and_its_gradient_equal_a_loop_over_pairs(samples, detach):
    z = torch.cat([torch.randn(2, 5), features(samples)]).double().requires_grad_()
    own, by_hand = uniformity_loss(z, detach), uniformity_by_hand(z, detach)
    torch.testing.assert_close(own, by_hand)
    one, other = (torch.autograd.grad(value, z)[0] for value in (own, by_hand))
    torch.testing.assert_close(one, other)


def test_sigma_is_the_lower_median_of_the_positive_distances():
    z = torch.tensor([[0.0], [0.0], [1.0], [3.0]])
    distances = [0.0, 1.0, 9.0, 1.0, 9.0, 4.0]
    sigma = median_low([d for d in distances if d])
    assert sigma == 4.0
    expected = sum(torch.exp(torch.tensor(-d / sigma)) for d in distances) / 6
    torch.testing.assert_close(uniformity_loss(z), expected)
    even = torch.tensor([[0.0], [0.0], [1.0]])  # 0, 1, 1
    torch.testing.assert_close(uniformity_loss(even), (1 + 2 * torch.exp(torch.tensor(-1.0))) / 3)
    four = torch.tensor([[0.0], [1.0], [1.0], [3.0]])  # 1, 1, 9, 0, 4, 4: of five, the third
    torch.testing.assert_close(
        uniformity_loss(four), sum(torch.exp(torch.tensor(-d / 4)) for d in (1.0, 1.0, 9.0, 0.0, 4.0, 4.0)) / 6
    )


@pytest.mark.parametrize("z", [torch.randn(1, 4), torch.ones(3, 4), torch.zeros(2, 4)])
def test_a_batch_of_one_and_equal_features_give_zero_and_no_gradient(z):
    z = z.clone().requires_grad_()
    step = Step(z, torch.zeros(len(z), dtype=torch.long), z)
    for term in (HypersphericalUniformity(), HypersphericalUniformity(normalize_z=True)):
        loss = term(step)
        assert not loss.detach().any()
        if loss.requires_grad:
            loss.backward()
            assert not z.grad.any()
    variance = ClassifierVariance()(step)
    assert variance.isfinite()
    assert len(z) > 1 or not variance.detach().any()


def test_equal_features_of_one_stacked_client_do_not_affect_other_clients():
    """One of three stacked clients has equal features: its term is zero, and the others' terms do not change."""
    z = torch.randn(3, 6, 4)
    z[1] = 2.0
    z = z.requires_grad_()
    losses = torch.vmap(uniformity_loss)(z)
    losses.sum().backward()
    assert not losses[1].detach().any()
    assert not z.grad[1].any()
    for i in (0, 2):
        own = z[i].detach().requires_grad_()
        by_hand = uniformity_by_hand(own)
        torch.testing.assert_close(losses[i], by_hand)
        torch.testing.assert_close(z.grad[i], torch.autograd.grad(by_hand, own)[0])


def test_features_are_normalised_only_with_the_option():
    z = 3 * torch.rand(5, 4)
    step = Step(torch.zeros(5, 2), torch.zeros(5, dtype=torch.long), z)
    torch.testing.assert_close(HypersphericalUniformity(0.7)(step), 0.7 * uniformity_by_hand(z))
    torch.testing.assert_close(
        HypersphericalUniformity(0.7, normalize_z=True)(step), 0.7 * uniformity_by_hand(z / z.norm(dim=1)[:, None])
    )
    for detach in (False, True):
        given = z.clone().requires_grad_()
        HypersphericalUniformity(1.0, detach_sigma=detach)(Step(step.logits, step.targets, given)).backward()
        own = z.clone().requires_grad_()
        torch.testing.assert_close(given.grad, torch.autograd.grad(uniformity_by_hand(own, detach), own)[0])


def test_half_precision_is_computed_in_float32():
    z = torch.rand(6, 300)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = HypersphericalUniformity(1.0)(Step(torch.zeros(6, 2), torch.zeros(6), z))
    torch.testing.assert_close(loss, uniformity_by_hand(z))


# --- The method ---


def test_both_losses_are_added_under_their_names():
    method = FedUV(lam=1.5, mu=0.3)
    module = ClientModule(MLP(in_shape=(4,), num_classes=3), list(method.loss_terms))
    module.on_fit_start()
    step = module.step((torch.randn(7, 4), torch.arange(7) % 3))
    losses = module.losses(step)
    assert list(losses) == ["ce", "classifier_variance", "hyperspherical_uniformity"]
    torch.testing.assert_close(losses["classifier_variance"], 1.5 * variance_loss(step.logits.softmax(dim=1)))
    torch.testing.assert_close(losses["hyperspherical_uniformity"], 0.3 * uniformity_by_hand(step.features))


UV_AND_DW = """# FedUV+DW of FedDW's Table IV.
rounds: 2
batch_size: 16
scenario: {dataset: Digits, partition: {class_path: Dirichlet, init_args: {alpha: 0.5, min_samples: 20}}, clients: 4}
model: {class_path: MLP, init_args: {hidden: [8]}}
algorithm:
  class_path: FedDW
  init_args:
    mu: 10.0
    loss_terms:
      - {class_path: ClassifierVariance, init_args: {lam: 2.5}}
      - {class_path: HypersphericalUniformity, init_args: {mu: 0.5}}
optimizer: {class_path: SGD, init_args: {lr: 0.5}}
trainer: {max_epochs: 1, accelerator: cpu}
logger: null
"""


@pytest.mark.thorough
def test_feduv_plus_dw_runs_from_a_config(tmp_path):
    tiny(tmp_path / "both", text=UV_AND_DW)
    row = rows(tmp_path / "both")[-1]
    parts = [float(row[f"client/train_{name}"]) for name in ("dw", "classifier_variance", "hyperspherical_uniformity")]
    assert min(parts) > 0
    cross_entropy = float(row["client/train_loss"]) - sum(parts)
    assert 0 < cross_entropy < float(row["client/train_loss"])
    tiny(tmp_path / "off", "--algorithm.loss_terms", "[]", text=UV_AND_DW)
    alone = rows(tmp_path / "off")[-1]
    assert float(alone["client/train_dw"]) > 0
    assert alone["global/loss"] != row["global/loss"]
