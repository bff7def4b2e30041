"""The objective of masks: its loss and metrics against loops over pixels."""

import math

import pytest
import torch
from torch.nn import functional as F

from fl_lightning.core.errors import ConfigError
from fl_lightning.core.objectives import IGNORED, Segmentation, objective_of
from fl_lightning.evaluation.evaluation import evaluate
from fl_lightning.evaluation.extra_metrics import measures_of

B, C, HEIGHT, WIDTH = 3, 4, 5, 6


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and masks. The second image has ignored pixels, the third only such pixels and one other."""
    outputs = torch.randn(B, C, HEIGHT, WIDTH, dtype=torch.float64)
    targets = torch.randint(0, C, (B, HEIGHT, WIDTH))
    targets[1, :2] = IGNORED
    targets[2].fill_(IGNORED)[0, 0] = 1
    return outputs, targets


def loss_of_image(outputs: torch.Tensor, mask: torch.Tensor, dice: float) -> float:
    """Compute the loss of one image pixel by pixel, and class by class."""
    pixels = [(i, j) for i in range(HEIGHT) for j in range(WIDTH) if mask[i, j] != IGNORED]
    probabilities = {}
    entropy = 0.0
    for i, j in pixels:
        exponentials = [math.exp(float(outputs[c, i, j])) for c in range(C)]
        probabilities[i, j] = [value / sum(exponentials) for value in exponentials]
        entropy -= math.log(probabilities[i, j][int(mask[i, j])])
    overlaps = []
    for c in range(C):
        overlap = sum(probabilities[place][c] for place in pixels if mask[place] == c)
        sizes = sum(probabilities[place][c] + float(mask[place] == c) for place in pixels)
        overlaps.append((2 * overlap + 1e-6) / (sizes + 1e-6))
    return entropy / len(pixels) + dice * (1 - sum(overlaps) / C)


@pytest.mark.parametrize("dice", [0.0, 0.7])
def test_the_loss_equals_a_loop_over_pixels(batch, dice):
    outputs, targets = batch
    expected = [loss_of_image(logits, mask, dice) for logits, mask in zip(outputs, targets, strict=True)]
    objective = Segmentation(dice)
    assert float(objective.loss(outputs, targets)) == pytest.approx(sum(expected) / B, rel=1e-12)
    assert float(objective.loss(outputs, targets, "sum")) == pytest.approx(sum(expected), rel=1e-12)
    assert float(objective.sums(outputs, targets.byte())["loss"]) == pytest.approx(sum(expected), rel=1e-12)


def test_without_ignored_pixels_the_loss_is_the_cross_entropy_of_torch():
    outputs, targets = torch.randn(B, C, HEIGHT, WIDTH), torch.randint(0, C, (B, HEIGHT, WIDTH))
    torch.testing.assert_close(Segmentation().loss(outputs, targets), F.cross_entropy(outputs, targets))


def test_a_perfect_prediction_has_no_dice_loss():
    targets = torch.randint(0, 2, (B, HEIGHT, WIDTH))  # the classes 2 and 3 are absent
    outputs = 1e4 * F.one_hot(targets, C).movedim(-1, 1).double()
    assert float(Segmentation(dice=1.0).loss(outputs, targets)) == pytest.approx(0.0, abs=1e-12)


def test_an_image_without_used_pixels_has_a_finite_loss_and_gradient():
    outputs = torch.randn(1, C, HEIGHT, WIDTH, requires_grad=True)
    loss = Segmentation(dice=1.0).loss(outputs, torch.full((1, HEIGHT, WIDTH), IGNORED))
    loss.backward()
    assert loss.item() == 0
    assert not outputs.grad.any()


def test_accuracy_counts_each_image_equally(batch):
    outputs, targets = batch
    shares = []
    for logits, mask in zip(outputs, targets, strict=True):
        used = mask != IGNORED
        shares.append(float((logits.argmax(0) == mask)[used].double().mean()))
    assert float(Segmentation().sums(outputs, targets)["acc"]) == pytest.approx(sum(shares))


def test_iou_and_dice_are_those_of_all_used_pixels(batch):
    outputs, targets = batch
    objective = Segmentation()
    batches = [(outputs[:1].float(), targets[:1].byte()), (outputs[1:].float(), targets[1:].byte())]
    score = evaluate(torch.nn.Identity(), batches, objective, measures_of(["JaccardIndex", "F1Score"], objective, C))
    used, predicted = targets != IGNORED, outputs.argmax(dim=1)
    ious, dices = [], []
    for c in range(C):
        one, other = (predicted == c) & used, (targets == c) & used
        overlap, union = int((one & other).sum()), int((one | other).sum())
        ious.append(overlap / union)
        dices.append(2 * overlap / (int(one.sum()) + int(other.sum())))
    assert score.values["jaccard_index"] == pytest.approx(sum(ious) / C)
    assert score.values["f1_score"] == pytest.approx(sum(dices) / C)


@pytest.mark.parametrize(
    "labels",
    [torch.zeros(2, dtype=torch.int64), torch.zeros(2, 4, 4), torch.full((2, 4, 4), C), torch.full((2, 4, 4), -1)],
)
def test_other_labels_are_refused(labels):
    with pytest.raises(ValueError, match=r"mask|out of range"):
        Segmentation().check(labels, C)


def test_masks_are_accepted_and_found_by_their_shape():
    labels = torch.tensor([[[0, C - 1], [IGNORED, 1]]], dtype=torch.uint8)
    Segmentation().check(labels, C)
    assert objective_of(labels) == Segmentation()
    assert Segmentation().output_shape(labels, C) == (C, 2, 2)


def test_a_negative_weight_is_refused():
    with pytest.raises(ConfigError, match=r"scenario\.objective\.dice"):
        Segmentation(dice=-1.0)


@pytest.mark.parametrize("dice", [0.0, 0.7])
def test_a_class_that_is_ignored_counts_as_pixels_without_a_label(dice):
    outputs, targets = torch.randn(4, 3, 5, 6, dtype=torch.float64), torch.randint(0, 3, (4, 5, 6))
    loss = Segmentation(dice, ignore_index=1).loss(outputs, targets)
    unlabelled = targets.masked_fill(targets == 1, 255)
    assert loss.item() == pytest.approx(Segmentation(dice).loss(outputs, unlabelled).item(), rel=1e-12)
