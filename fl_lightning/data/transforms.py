"""Transforms of batches on their device: normalization, random crop and flip, and any transform of single images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fl_lightning.core.inputs import Inputs

BatchTransform = Callable[[Any], Any]
"""A function that returns a changed batch of inputs, a tensor or `Inputs`."""


class Normalize:
    """Scale `uint8` to 0-1, then compute `(x - mean) / std` by channel. Floating-point batches are not scaled.

    Args:
        mean: One number per channel; empty for no shift.
        std: One number per channel; empty for no scaling.
    """

    def __init__(self, mean: Sequence[float] = (), std: Sequence[float] = ()) -> None:
        self.mean = torch.tensor(mean or [0.0]).view(-1, 1, 1)
        self.std = torch.tensor(std or [1.0]).view(-1, 1, 1)
        self.changes = bool(mean or std)

    def __call__(self, x: Any) -> Any:
        """Normalize a batch of images, `(B, channels, height, width)`.

        If mean and std are not set, inputs of any shape and `Inputs` are accepted.

        Raises:
            ValueError: Several inputs cannot have one mean and standard deviation.
        """
        if isinstance(x, Inputs):
            if self.changes:
                raise ValueError("mean and std are those of one tensor of images")
            return x.map(self)
        if x.dtype == torch.uint8:
            x = x.float().div_(255)
        if not self.changes:
            return x
        if self.mean.device != x.device:
            self.mean, self.std = self.mean.to(x.device), self.std.to(x.device)
        return (x - self.mean) / self.std


class CropFlip:
    """Random crop after zero padding, and horizontal flip with probability ½, for image batches.

    Args:
        padding: Pixels added on each side before the crop.
        per_sample: Draw for each image, else once for the whole batch (as FedSKC's published code does).
    """

    def __init__(self, padding: int = 4, per_sample: bool = True) -> None:
        self.padding, self.per_sample = padding, per_sample

    def __call__(self, x: Tensor) -> Tensor:
        """Crop and flip a batch `(B, channels, height, width)` at random, with the global generator of its device."""
        batch, _, height, width = x.shape
        draws = batch if self.per_sample else 1
        top, left = torch.randint(0, 2 * self.padding + 1, (2, draws), device=x.device)
        flip = torch.rand(draws, device=x.device) < 0.5
        rows = top[:, None] + torch.arange(height, device=x.device)
        columns = left[:, None] + torch.arange(width, device=x.device)
        columns = torch.where(flip[:, None], columns.flip(1), columns)
        padded = torch.nn.functional.pad(x, [self.padding] * 4)
        sample = torch.arange(batch, device=x.device)[:, None, None]
        # Advanced indices around a slice put their axes first: (B, height, width, channels).
        return padded[sample, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


class PerImage:
    """Apply a random transform, such as torchvision's `v2.RandAugment`, to each image of a batch.

    It is applied to the images as they are stored, before they are normalized, because such transforms need `uint8`.

    Args:
        transform: Takes and returns an image `(channels, height, width)`. It draws from the global random generators.
    """

    def __init__(self, transform: Callable[[Tensor], Tensor]) -> None:
        self.transform = transform

    def __call__(self, x: Tensor) -> Tensor:
        """Transform each image of a batch `(B, channels, height, width)`.

        Raises:
            ValueError: An image changes its shape, for which the network is not made.
        """
        images = torch.stack([self.transform(image) for image in x])
        if images.shape != x.shape:
            name, shapes = type(self.transform).__name__, f"{tuple(x.shape[1:])} into {tuple(images.shape[1:])}"
            raise ValueError(f"{name} turns images of shape {shapes}. Set its size to that of the images")
        return images
