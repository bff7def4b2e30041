"""FedRCL's losses against brute force, its levels, and its identities (baselines: A8)."""

from math import exp, log, log1p

import pytest
import torch
from experiments import UNEQUAL, descend, experiment, in_float64
from loops import assert_equals_loop, rounds_by_hand
from torch.nn import functional as F

from fl_lightning.algorithms import FedRCL, RelaxedContrastive
from fl_lightning.algorithms.global_model.fedrcl import contrastive_loss, level_taps, relaxation_loss, similarities
from fl_lightning.client.loss_term import LossTerm, Step
from fl_lightning.client.module import ClientModule
from fl_lightning.core.errors import ConfigError
from fl_lightning.models import CNN, MLP, FastText, ResNet8, ResNet18
from fl_lightning.models.base import tapped

pytestmark = pytest.mark.numeric

TAU, LAM = 0.05, 0.7


def scl_by_hand(s, y, tau=TAU):
    total = 0.0
    for i in range(len(y)):
        positive = min(float(s[i, j]) for j in range(len(y)) if y[j] == y[i])
        negatives = sorted((float(s[i, k]) for k in range(len(y)) if y[k] != y[i]), reverse=True)[:2]
        total += -positive / tau + log(exp(positive / tau) + sum(exp(n / tau) for n in negatives))
    return total / len(y)


def pen_by_hand(s, y, tau=TAU, threshold=LAM):
    total = 0.0
    for i in range(len(y)):
        partners = [float(s[i, j]) for j in range(len(y)) if j != i and y[j] == y[i]]
        q = min(partners) if partners and min(partners) >= threshold else -1.0
        total += log(1 + exp((q - 1) / tau))
    return total / len(y)


def batch(classes, samples=12, width=6, spread=0.3):
    """Return features in clusters by class, so that some pairs are above the threshold and some below."""
    y = torch.randint(0, classes, (samples,))
    centres = torch.randn(classes, width, dtype=torch.float64)
    return centres[y] + spread * torch.randn(samples, width, dtype=torch.float64), y


@pytest.mark.thorough
@in_float64
def test_a_run_equals_a_loop_by_hand(tmp_path):
    w_s, w_p, tau, threshold = 0.7, 0.4, 0.3, 0.6
    run = experiment(tmp_path, FedRCL(w_s=w_s, w_p=w_p, tau=tau, threshold=threshold), **UNEQUAL)

    def losses(s, y):
        for i in range(len(y)):
            same = [j for j in range(len(y)) if y[j] == y[i]]
            positive = s[i, same].min() / tau
            negatives = s[i, [j for j in range(len(y)) if j not in same]].sort(descending=True).values[:2] / tau
            yield w_s * (torch.cat([positive[None], negatives]).logsumexp(dim=0) - positive)
            partners = s[i, [j for j in same if j != i]]
            if len(partners) and partners.min() >= threshold:
                yield w_p * torch.log1p(((partners.min() - 1) / tau).exp())

    def train(local, client, batches):
        for x, y in batches:
            z = F.linear(x.flatten(1), local.encoder[1].weight, local.encoder[1].bias)  # before its ReLU
            unit = z / z.square().sum(dim=1, keepdim=True).sqrt()
            contrast = sum(losses(unit @ unit.T, y)) / len(y)
            descend(local, F.cross_entropy(local(x), y) + contrast, 0.2)

    expected, _ = rounds_by_hand(run, train, weighting="uniform")
    run.fit()
    assert_equals_loop(run, run.state["model"], expected)


# --- The two losses ---


def test_a_similarity_at_the_threshold_is_penalised():
    s = torch.tensor([[1.0, 0.5], [0.5, 1.0]], dtype=torch.float64)
    penalty = relaxation_loss(s, torch.tensor([0, 0]), tau=0.2, threshold=0.5).item()
    assert penalty == pytest.approx(log1p(exp((0.5 - 1) / 0.2)))


@pytest.mark.parametrize("classes", [1, 2, 4, 30])
@pytest.mark.parametrize("tau", [0.05, 0.5])
def test_the_losses_equal_loops_over_pairs(classes, tau):
    z, y = batch(classes)
    s = similarities(z)
    for i in range(len(y)):
        for j in range(len(y)):
            assert float(s[i, j]) == pytest.approx(float(z[i] @ z[j] / z[i].norm() / z[j].norm()), abs=1e-9)
    assert contrastive_loss(s, y, tau).item() == pytest.approx(scl_by_hand(s, y, tau), rel=1e-9, abs=1e-12)
    for threshold in (-1.0, 0.5, 0.95, 2.0):
        expected = pen_by_hand(s, y, tau, threshold)
        assert relaxation_loss(s, y, tau, threshold).item() == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_a_batch_of_one_class_or_one_sample_has_no_contrastive_loss():
    for z, y in (batch(1), batch(3, samples=1)):
        z.requires_grad_()
        loss = contrastive_loss(similarities(z), y, TAU)
        assert loss.item() == pytest.approx(0, abs=1e-12)
        loss.backward()
        assert not z.grad.any()


def test_feature_maps_are_averaged_over_positions():
    maps = torch.randn(5, 3, 2, 4)
    torch.testing.assert_close(similarities(maps), similarities(maps.mean(dim=(2, 3))))


# --- The levels, and what a step shows of them ---


def test_levels_of_residual_networks_are_the_stem_and_the_stages():
    stages = [f"encoder.layer{i}.1.relu" for i in (1, 2, 3, 4)]
    assert level_taps(ResNet18((3, 8, 8), 10)) == ("encoder.relu", *stages)
    blocks = tuple(f"encoder.{i}.relu" for i in (3, 4, 5))
    assert level_taps(ResNet8((3, 8, 8), 10)) == ("encoder.2", *blocks)


def test_the_levels_of_plain_networks_are_their_hidden_layers():
    assert level_taps(MLP((4,), 3, hidden=(5, 6, 7))) == ("encoder.2", "encoder.4", "encoder.6")
    many = level_taps(MLP((4,), 3, hidden=(5,) * 5))
    assert many == ("encoder.2", "encoder.4", "encoder.6", "encoder.8", "encoder.10")  # encoder.10 is not in encoder.1
    assert level_taps(CNN((1, 8, 8), 3)) == ("encoder.1", "encoder.4", "encoder.8")


def test_levels_can_be_named():
    net = ResNet18((3, 8, 8), 10)
    assert level_taps(net, ["encoder.layer2", "encoder.conv1"]) == ("encoder.layer2.1.relu", "encoder.conv1")
    with pytest.raises(ConfigError, match=r"^algorithm.levels: .*'layer2'.*encoder"):
        level_taps(net, ["layer2"])
    with pytest.raises(ConfigError, match=r"^algorithm.levels: .* ReLU"):
        level_taps(FastText((5,), 3))


def test_features_of_a_residual_stage_are_taken_before_its_last_relu():
    net = ResNet8((3, 8, 8), 10, norm="group")
    x, y = torch.randn(4, 3, 8, 8), torch.arange(4)
    term = RelaxedContrastive()
    module = ClientModule(net, [term])
    module.on_fit_start()
    step = module.step((x, y))
    hidden = net.encoder[1](net.encoder[0](x))
    maps = [hidden]
    for number in (3, 4, 5):
        block, entering = net.encoder[number], F.relu(hidden)
        inner = block.bn2(block.conv2(F.relu(block.bn1(block.conv1(entering)))))
        hidden = inner + (block.downsample(entering) if block.downsample else entering)
        maps.append(hidden)
    names = ["encoder.2", "encoder.3.relu", "encoder.4.relu", "encoder.5.relu"]
    assert list(step.taps) == names
    for name, expected in zip(names, maps, strict=True):
        torch.testing.assert_close(step.taps[name], expected)
        assert (expected < 0).any()
    similar = [similarities(expected) for expected in maps]
    values = [contrastive_loss(s, y, TAU) + relaxation_loss(s, y, TAU, LAM) for s in similar]
    torch.testing.assert_close(term(step), sum(values) / 4)


class TapsTwoLayers(LossTerm):
    taps = ("encoder.2", "head")

    def forward(self, step):
        return step.taps["head"].square().mean() + step.taps["encoder.2"].mean()


def test_only_active_terms_tap_layers_and_hooks_are_removed():
    net = MLP((4,), 3, hidden=(5,))
    term = TapsTwoLayers()
    module = ClientModule(net, [term])
    x = torch.randn(6, 4)
    step = module.step((x, torch.zeros(6, dtype=torch.long)))
    assert step.taps.keys() == {"encoder.2", "head"}
    torch.testing.assert_close(step.taps["encoder.2"], net.encoder[1](net.encoder[0](x)))
    torch.testing.assert_close(step.taps["head"], step.features)
    term(step).backward()
    assert net.encoder[1].weight.grad is not None
    term.active = False
    assert module.step((x, torch.zeros(6, dtype=torch.long))).taps == {}
    term.active = True
    with pytest.raises(RuntimeError), tapped(net, term.taps) as taps:
        net(torch.randn(6, 5))
    net(x)
    assert taps == {}


@pytest.mark.thorough
def test_taps_of_a_compiled_network_are_refused():
    net = MLP((4,), 3)
    net.encoder.compile()
    with tapped(net, []):
        pass
    with (
        pytest.raises(ConfigError, match=r"^compile: .*'encoder.2'"),
        tapped(net, ["encoder.2"]),
    ):
        pass


# --- The term and the method ---


@pytest.mark.parametrize(("w_s", "w_p"), [(1.0, 1.0), (2.0, 0.0), (0.0, 3.0)])
def test_the_term_is_the_weighted_mean_over_levels(w_s, w_p):
    net = MLP((4,), 3, hidden=(5, 6))
    term = RelaxedContrastive(w_s, w_p, tau=0.2, threshold=0.5)
    module = ClientModule(net, [term])
    module.on_fit_start()
    x, y = torch.randn(8, 4), torch.arange(8) % 3
    losses = module.losses(module.step((x, y)))
    first = net.encoder[1](x)
    second = net.encoder[3](F.relu(first))
    levels = [similarities(z.detach()) for z in (first, second)]
    expected = sum(w_s * scl_by_hand(s, y, 0.2) + w_p * pen_by_hand(s, y, 0.2, 0.5) for s in levels) / 2
    assert losses["relaxed_contrastive"].item() == pytest.approx(expected, rel=1e-4)


def test_half_precision_is_computed_in_float32():
    z, y = torch.randn(8, 64), torch.arange(8) % 3
    term = RelaxedContrastive()
    term.taps = ("level",)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = term(Step(torch.zeros(8, 3), y, taps={"level": z.bfloat16()}))
    s = similarities(z.bfloat16().float())
    assert loss.item() == pytest.approx(scl_by_hand(s, y) + pen_by_hand(s, y), rel=1e-4)
