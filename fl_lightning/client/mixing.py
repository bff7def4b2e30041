"""MixUp and CutMix: training on mixtures of two samples, with the same mixture of their losses."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from fl_lightning.client.hidden import Hidden


class Mixture(NamedTuple):
    """A batch of mixed inputs.

    Attributes:
        x: The inputs, `(B, ...)`. Input i is a mixture of the inputs i and i - 1 of the batch.
        share: λ, the share of input i.
    """

    x: Tensor
    share: float

    def partners(self, y: Tensor) -> Tensor:
        """Return the targets of the other samples in the mixtures, `(B, ...)`."""
        return y.roll(1, 0)


@dataclass(frozen=True)
class Mixing:
    """Mix the samples of each training batch by MixUp or CutMix. If both are set, each batch draws one of them.

    A sample is mixed with the one before it in the batch, which is in random order. Random numbers come from Python's
    generator, which has a seed of its own for each client and round, so no step waits for a GPU.

    Args:
        mixup: α of MixUp, or None. λ is drawn from Beta(α, α).
        cutmix: α of CutMix, or None.
    """

    mixup: float | None = None
    cutmix: float | None = None

    def __call__(self, x: Tensor) -> Mixture:
        """Mix a batch of inputs, `(B, ...)`; for CutMix images `(B, channels, height, width)`."""
        if self.cutmix is None or (self.mixup is not None and random.random() < 0.5):
            assert self.mixup is not None
            return mix_up(x, random.betavariate(self.mixup, self.mixup))
        share = random.betavariate(self.cutmix, self.cutmix)
        return cut_mix(x, share, random.random(), random.random())


def mix_up(x: Tensor, share: float) -> Mixture:
    """Mix each input with the one before it: `λ x_i + (1 - λ) x_j` (Zhang et al., "mixup", ICLR 2018, Eq. 1).

    Args:
        x: The inputs, `(B, ...)`.
        share: λ.
    """
    return Mixture(x.roll(1, 0).mul_(1 - share).add_(x, alpha=share), share)


def cut_mix(x: Tensor, share: float, vertical: float, horizontal: float) -> Mixture:
    """Replace a rectangle in each image by that of the image before it (Yun et al., "CutMix", ICCV 2019, Eq. 1 and 2).

    The rectangle has `sqrt(1 - λ)` of the height and of the width, and is cut off at the border. λ is then corrected to
    the share of the pixels that remain, as in the authors' code.

    Args:
        x: The images, `(B, channels, height, width)`.
        share: λ.
        vertical: The vertical position of the centre, in [0, 1).
        horizontal: The horizontal position of the centre, in [0, 1).
    """
    height, width = x.shape[-2:]
    side = math.sqrt(1 - share)
    top, bottom = bounds(height, side, vertical)
    left, right = bounds(width, side, horizontal)
    mixed = x.clone()
    mixed[..., top:bottom, left:right] = x.roll(1, 0)[..., top:bottom, left:right]
    return Mixture(mixed, 1 - (bottom - top) * (right - left) / (height * width))


def bounds(size: int, share: float, centre: float) -> tuple[int, int]:
    """Return the first pixel of a range and the one after its last, cut off at the border.

    Args:
        size: The number of pixels of the image in this direction.
        share: The share of them in the range before it is cut off.
        centre: The position of its centre, in [0, 1).
    """
    length, middle = int(size * share), int(size * centre)
    return max(0, middle - length // 2), min(size, middle + length // 2)


class HiddenTargets(Hidden):
    """In place of the targets of a mixed batch, for loss terms: any use of it raises an error.

    A term that compares samples by their targets would be silently wrong, because a mixed sample has two targets.
    """

    refusal = (
        "mixup: a loss term reads the target of each sample, and mixed samples have two. Leave mixup and cutmix out, "
        "or use another method"
    )
