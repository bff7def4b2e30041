from collections import Counter
from math import sqrt

import pytest
import torch
import torchvision
from torch import Tensor
from torch.nn import functional as F

from fl_lightning.data.transforms import CropFlip, Normalize


def images(batch: int, channels: int = 3, height: int = 6, width: int = 6) -> Tensor:
    return torch.rand(batch, channels, height, width, generator=torch.Generator().manual_seed(0)) + 0.5


def test_uint8_is_scaled_to_0_to_1() -> None:
    pixels = torch.arange(256, dtype=torch.uint8).view(2, 2, 8, 8)
    assert torch.equal(Normalize()(pixels).flatten(), torch.arange(256) / 255)
    assert pixels.flatten().tolist() == list(range(256))


def test_floating_point_inputs_of_any_shape_are_not_changed() -> None:
    x = torch.randn(4, 7)
    assert torch.equal(Normalize()(x), x)


@pytest.mark.parametrize("channels", [1, 3])
def test_channels_are_normalized_as_by_torchvision(channels: int) -> None:
    x = images(4, channels)
    before = x.clone()
    mean, std = [0.1, 0.2, 0.3][:channels], [0.5, 0.25, 2.0][:channels]
    expected = torchvision.transforms.functional.normalize(x, mean, std)
    assert torch.equal(Normalize(mean, std)(x), expected)
    assert torch.equal(x, before)


@pytest.mark.parametrize(("options", "expected"), [({"mean": [0.5]}, 0.5), ({"std": [0.5]}, 2.0)])
def test_mean_or_std_can_be_given_alone(options: dict, expected: float) -> None:
    assert torch.equal(Normalize(**options)(torch.ones(2, 1, 3, 3)), torch.full((2, 1, 3, 3), expected))
    pixels = torch.full((2, 1, 3, 3), 255, dtype=torch.uint8)
    assert torch.equal(Normalize(**options)(pixels), torch.full((2, 1, 3, 3), expected))


def draws_of(x: Tensor, augmented: Tensor, padding: int) -> list[tuple[int, int, bool]]:
    """Return each image's crop and flip, found by trying all of them."""
    padded = F.pad(x, [padding] * 4)
    height, width = x.shape[2:]
    found = []
    for image, source in zip(augmented, padded, strict=True):
        matches = [
            (top, left, flip)
            for top in range(2 * padding + 1)
            for left in range(2 * padding + 1)
            for flip in (False, True)
            for crop in [source[:, top : top + height, left : left + width]]
            if torch.equal(image, crop.flip(2) if flip else crop)
        ]
        assert len(matches) == 1
        found += matches
    return found


@pytest.mark.parametrize("shape", [(1, 5, 7), (3, 6, 6), (2, 8, 5)])
@pytest.mark.parametrize("per_sample", [True, False])
def test_every_image_becomes_a_crop_of_its_padded_self_flipped_or_not(shape: tuple[int, ...], per_sample: bool) -> None:
    x = images(8, *shape)
    before = x.clone()
    torch.manual_seed(0)
    augmented = CropFlip(padding=2, per_sample=per_sample)(x)
    assert augmented.shape == x.shape
    assert len(draws_of(x, augmented, padding=2)) == 8
    assert torch.equal(x, before)


def test_per_sample_draws_for_each_image() -> None:
    x = images(600, 1)
    torch.manual_seed(0)
    tops, lefts, flips = zip(*draws_of(x, CropFlip(padding=1)(x), padding=1), strict=True)
    for draws, values in ((tops, range(3)), (lefts, range(3)), (flips, (False, True))):
        expected = 600 / len(values)
        for value in values:
            assert abs(draws.count(value) - expected) < 4 * sqrt(expected * (1 - 1 / len(values)))
    assert len(Counter(zip(tops, lefts, flips, strict=True))) == 18


def test_per_batch_draws_once_for_each_batch() -> None:
    x, augment = images(6, 1), CropFlip(padding=4, per_sample=False)
    torch.manual_seed(0)
    batches = [draws_of(x, augment(x), padding=4) for _ in range(40)]
    assert all(len(set(draws)) == 1 for draws in batches)
    tops, lefts, flips = zip(*(draws[0] for draws in batches), strict=True)
    assert set(tops) == set(lefts) == set(range(9))
    assert set(flips) == {False, True}


def test_crops_follow_torchs_global_seed() -> None:
    x = images(16)
    torch.manual_seed(3)
    first, second = CropFlip()(x), CropFlip()(x)
    torch.manual_seed(3)
    assert torch.equal(CropFlip()(x), first)
    assert not torch.equal(first, second)
