"""FedSR's two terms and its Gaussian layer against loops, and its identity with FedAvg (Nguyen et al., 2022)."""

import math
from functools import partial

import pytest
import torch
from experiments import UNEQUAL, descend, experiment, finished, in_float64
from loops import assert_equals_loop, rounds_by_hand
from torch import nn
from torch.distributions import Independent, Normal, kl_divergence
from torch.nn import functional as F

from fl_lightning.algorithms import ConditionalInformation, FedSR, RepresentationNorm
from fl_lightning.algorithms.global_model.fedsr import (
    GaussianRepresentation,
    add_representation,
    gaussian_divergence,
    gaussian_of,
)
from fl_lightning.client.loss_term import Step
from fl_lightning.client.module import ClientModule
from fl_lightning.core.errors import ConfigError
from fl_lightning.models import MLP, FromModule, Head

pytestmark = pytest.mark.numeric


def divergence_by_hand(mean, std, other_mean, other_std):
    """Return the divergence of one sample, dimension by dimension."""
    total = 0.0
    for m, s, n, t in zip(mean.tolist(), std.tolist(), other_mean.tolist(), other_std.tolist(), strict=True):
        total += math.log(t / s) + (s**2 + (m - n) ** 2) / (2 * t**2) - 0.5
    return total


def test_the_divergence_of_gaussians_equals_a_loop_and_that_of_torch():
    mean, other_mean = torch.randn(2, 5, 3, dtype=torch.float64)
    std, other_std = torch.rand(2, 5, 3, dtype=torch.float64) + 0.1
    found = gaussian_divergence(mean, std, other_mean, other_std)
    loop = [divergence_by_hand(*rows) for rows in zip(mean, std, other_mean, other_std, strict=True)]
    assert found.tolist() == pytest.approx(loop, rel=1e-12)
    ours, theirs = (Independent(Normal(m, s), 1) for m, s in ((mean, std), (other_mean, other_std)))
    torch.testing.assert_close(found, kl_divergence(ours, theirs))
    torch.testing.assert_close(gaussian_divergence(mean, std, mean, std), torch.zeros(5, dtype=torch.float64))
    scaled = gaussian_divergence(3 * mean, 3 * std, 3 * other_mean, 3 * other_std)
    torch.testing.assert_close(found, scaled)  # so the authors' trained factor adds nothing


def test_cmi_is_the_mean_divergence_from_the_references_of_the_classes():
    backbone = MLP((4,), 3, hidden=(5,)).double()
    add_representation(backbone, 3)
    layer = backbone.head[0].double()
    with torch.no_grad():
        layer.reference_mean.normal_()
        layer.reference_raw.normal_()
    parameters, targets = torch.randn(6, 10, dtype=torch.float64), torch.tensor([0, 2, 1, 1, 0, 2])
    term = ConditionalInformation(0.3)
    loss = term(Step(torch.zeros(6, 3), targets, backbone=backbone, taps={"head.0.draw": parameters}))
    rows = []
    for row, target in zip(parameters, targets.tolist(), strict=True):
        std, own_std = F.softplus(row[5:]), F.softplus(layer.reference_raw[target])
        rows.append(divergence_by_hand(row[:5], std, layer.reference_mean[target], own_std))
    assert float(loss.detach()) == pytest.approx(0.3 * sum(rows) / 6, rel=1e-12)


@pytest.mark.parametrize("layer", [None, "head.1"])
def test_l2r_is_the_mean_norm_of_the_representations(layer):
    z = torch.randn(4, 3, dtype=torch.float64)
    expected = sum(math.sqrt(sum(value**2 for value in row)) for row in z.tolist()) / 4
    features, taps = (z, {}) if layer is None else (-7 * z, {layer: z})
    loss = RepresentationNorm(0.2, layer)(Step(torch.zeros(4, 2), torch.zeros(4), features, taps=taps))
    assert float(loss) == pytest.approx(0.2 * expected, rel=1e-12)


def test_the_gradient_of_the_norm_at_zero_is_zero():
    z = torch.zeros(2, 3, requires_grad=True)
    RepresentationNorm(1.0)(Step(torch.zeros(2, 2), torch.zeros(2), z)).backward()
    assert not z.grad.any()


def test_the_layer_draws_from_its_gaussian_in_training_and_returns_the_mean_in_evaluation():
    layer, features = GaussianRepresentation(3, 2), torch.randn(1, 3)
    mean, std = gaussian_of(layer.gaussian(features))
    assert torch.equal(std, F.softplus(layer.gaussian(features)[:, 3:]))
    drawn = layer(features.expand(20_000, 3)).detach()
    torch.testing.assert_close(drawn.mean(dim=0), mean[0].detach(), rtol=0, atol=0.03)
    torch.testing.assert_close(drawn.std(dim=0), std[0].detach(), rtol=0.03, atol=0)
    assert torch.equal(layer.eval()(features), mean)
    assert not layer.reference_mean.any()
    assert (layer.reference_raw == 1).all()


@in_float64
@pytest.mark.thorough
def test_a_run_equals_a_loop_by_hand(tmp_path, monkeypatch):
    """The random numbers are replaced by ones, because the loop has no client's random state."""
    monkeypatch.setattr(torch, "randn", torch.ones)
    l2r, cmi = 0.2, 0.05
    run = experiment(tmp_path, FedSR(l2r=l2r, cmi=cmi), **UNEQUAL)

    def train(local, client, batches):
        layer = local.head[0]
        for x, y in batches:
            mean, raw = layer.gaussian(local.encoder(x)).chunk(2, dim=1)
            std = F.softplus(raw)
            z = mean + std
            loss = F.cross_entropy(local.head[1](z), y) + l2r * sum(row.square().sum().sqrt() for row in z) / len(y)
            own = Independent(Normal(mean, std), 1)
            reference = Independent(Normal(layer.reference_mean[y], F.softplus(layer.reference_raw)[y]), 1)
            descend(local, loss + cmi * kl_divergence(own, reference).mean(), 0.2)

    expected, _ = rounds_by_hand(run, train)
    run.fit()
    assert_equals_loop(run, run.state["model"], expected)


def test_the_references_are_averaged_and_trained_and_the_columns_have_both_terms(tmp_path):
    run = finished(tmp_path, FedSR(cmi=0.1), **UNEQUAL, rounds=1)
    assert run.state["model"]["head.0.reference_mean"].any()
    losses = {f"client/train_{name}" for name in ("representation_norm", "conditional_information")}
    assert losses <= run.csv.rows[-1].keys()


def test_the_deterministic_form_is_the_norm_alone():
    module = FedSR(cmi=0.0, probabilistic=False).client_module(MLP((4,), 3))
    assert [term.name for term in module.terms()] == ["representation_norm"]
    assert isinstance(module.backbone.head, nn.Linear)


class Plain(nn.Module):
    """A user's network, whose last layer is `fc`."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.fc = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.fc(self.body(x).relu())


class Scaled(Plain):
    """A network that computes something after its last layer."""

    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    "model",
    [
        partial(MLP, head=Head(hidden=(7,), mapping=(5,))),
        partial(MLP, head=Head(classifier="cosine")),
        partial(FromModule, module=f"{__name__}.Plain", head="fc"),
    ],
)
def test_the_layer_comes_before_any_head(model):
    backbone = model(in_shape=(4,), num_classes=3)
    module = FedSR().client_module(backbone)
    layer = module.backbone.head[0]
    assert layer.reference_mean.shape == (3, backbone.feature_dim)
    step = module.step((torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])))
    assert step.logits.shape == (5, 3)
    assert step.taps["head.0.draw"].shape == (5, 2 * backbone.feature_dim)
    assert step.taps["head.1"].shape == (5, backbone.feature_dim)
    assert all(loss.isfinite() for loss in module.losses(step).values())


def test_options_and_models_that_do_not_fit_are_refused_by_their_key():
    with pytest.raises(ConfigError, match=r"^algorithm\.cmi: 0\.001 "):
        FedSR(probabilistic=False)
    with pytest.raises(ConfigError, match=r"^model\.head: "):
        FedSR().client_module(FromModule((4,), 3, module=f"{__name__}.Scaled", head="fc"))
    term = RepresentationNorm(layer="head.7")
    module = ClientModule(MLP((4,), 3), [term])
    with pytest.raises(ConfigError, match=r"^algorithm\.layer: 'head\.7' "):
        term.begin(module)
