"""Attacks on data: what attackers change in their training samples."""

from __future__ import annotations

from dataclasses import field, replace
from typing import Literal

import torch
from torch import Tensor

from fl_lightning.attacks.base import DataAttack, check_class
from fl_lightning.core.arguments import choice, number
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.seeding import Stream, generator
from fl_lightning.data.lazy import Samples
from fl_lightning.data.loaded_data import LoadedData

Trigger = Literal["pixel", "blend"]


class LabelFlip(DataAttack):
    """Attackers train on wrong labels: class `y` becomes `C - 1 - y`, or one class another (Fang et al. 2020, USENIX).

    With `source` and `target`, the success rate is the share of the source class's test samples that are classified as
    the target.

    Args:
        source: The class whose samples get the label `target`. By default, all labels are flipped to `C - 1 - y`.
        target: The new label of the class `source`.
        share: Share of an attacker's training samples (with `source`: of this class) that are changed.

    Raises:
        ConfigError: Only one of `source` and `target` is given, or both are equal.
    """

    source: int | None = None
    target: int | None = None

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        if (self.source is None) != (self.target is None):
            raise ConfigError("adversary.source: source and target belong together. Give both, or none of them.")
        if self.source is not None and self.source == self.target:
            raise ConfigError(f"adversary.target: it is the source ({self.target}). Give another class.")

    def check_data(self, data: LoadedData) -> None:
        """Check that the classes exist."""
        check_class("source", self.source, data.num_classes)
        check_class("target", self.target, data.num_classes)

    def candidates(self, y: Tensor) -> Tensor:
        """Return the samples of the class `source`; without it, all samples."""
        return super().candidates(y) if self.source is None else y == self.source

    def change(self, data: LoadedData, rows: Tensor) -> LoadedData:
        """Return the data with new labels of some training samples."""
        y = data.y_train.clone()
        y[rows] = data.num_classes - 1 - y[rows] if self.target is None else self.target
        return replace(data, y_train=y)

    def wanted_predictions(self, data: LoadedData) -> tuple[Samples, Tensor] | None:
        """Return the test samples of the class `source`, with the label `target`."""
        if self.source is None or self.target is None:
            return None
        return _labelled(data.x_test, data.y_test == self.source, self.target)


class Backdoor(DataAttack):
    """Attackers add a trigger to a share of their images and label these as one class.

    A model that learns this classifies images with the trigger as the target. The success rate is the share of the test
    samples of other classes for which it does.

    Args:
        target: The class of images with the trigger.
        trigger: `pixel`: a square in the lower right corner has the largest value (Gu et al. 2017, BadNets); or
            `blend`: a fixed random image is mixed in (Chen et al. 2017, Targeted Backdoor Attacks).
        size: Side of the square of `pixel`, in pixels.
        alpha: Weight of the random image of `blend`, in (0, 1].
        share: Share of an attacker's training samples that get the trigger.

    Raises:
        ConfigError: An option is out of range.
    """

    target: int = number(0, "[0, inf)")
    trigger: Trigger = choice("pixel", Trigger)
    size: int = number(3, "[1, inf)")
    alpha: float = number(0.2, "(0, 1]")
    share: float = number(0.5, "(0, 1]")
    pattern: Tensor = field(default=torch.empty(0), init=False)

    def check_data(self, data: LoadedData) -> None:
        """Check that the data are images in memory, larger than the trigger, and that the target class exists."""
        check_class("target", self.target, data.num_classes)
        x = data.x_train
        if not isinstance(x, Tensor) or x.ndim != 4 or x.dtype not in (torch.uint8, torch.float32):
            what = "the samples are not images in one tensor (n, channels, height, width)"
            raise ConfigError(f"adversary: Backdoor changes images, but {what}. Use LabelFlip, or set lazy false.")
        if self.trigger == "pixel" and self.size > min(x.shape[-2:]):
            shape = " x ".join(map(str, x.shape[-2:]))
            raise ConfigError(f"adversary.size: {self.size} is larger than the images ({shape} pixels). Decrease it.")

    def change(self, data: LoadedData, rows: Tensor) -> LoadedData:
        """Return the data with the trigger in some training images, which are labelled as the target."""
        assert isinstance(data.x_train, Tensor)
        self.pattern = self._pattern(data.x_train)
        x, y = data.x_train.clone(), data.y_train.clone()
        x[rows], y[rows] = self.triggered(x[rows]), self.target
        return replace(data, x_train=x, y_train=y)

    def _pattern(self, x: Tensor) -> Tensor:
        """Return the image of the trigger in the range of the training images, `(channels, height, width)` float64."""
        low, high = (0, 255) if x.dtype == torch.uint8 else map(float, x.aminmax())
        shape = tuple(x.shape[1:])
        if self.trigger == "pixel":
            return torch.full(shape, high, dtype=torch.float64)
        noise = torch.from_numpy(generator(self.seed, Stream.ATTACKS, 0).random(shape))
        return low + (high - low) * noise

    def triggered(self, x: Tensor) -> Tensor:
        """Return stored images with the trigger, `(n, channels, height, width)`."""
        if self.trigger == "pixel":
            changed = x.clone()
            changed[..., -self.size :, -self.size :] = self.pattern[..., -self.size :, -self.size :].to(x.dtype)
            return changed
        mixed = (1 - self.alpha) * x.double() + self.alpha * self.pattern
        return mixed.round().to(x.dtype) if x.dtype == torch.uint8 else mixed.to(x.dtype)

    def wanted_predictions(self, data: LoadedData) -> tuple[Samples, Tensor] | None:
        """Return the test images of other classes with the trigger, with the target as label."""
        found = _labelled(data.x_test, data.y_test != self.target, self.target)
        return found and (self.triggered(found[0]), found[1])  # type: ignore[arg-type]


def _labelled(x: Samples, mask: Tensor, label: int) -> tuple[Samples, Tensor] | None:
    """Return the samples of a mask, all with one label; None if the mask has none."""
    rows = mask.nonzero().flatten()
    return (x[rows], torch.full((len(rows),), label)) if len(rows) else None
