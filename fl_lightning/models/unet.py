"""The U-Net, a network for segmentation."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fl_lightning.core.errors import check_positive
from fl_lightning.models.base import Backbone
from fl_lightning.models.layers import Norm, image_shape, with_norm


class UNet(Backbone):
    """U-Net: convolutions that halve the image `depth` times, and as many that double it, with skip connections.

    Each level has two 3x3 convolutions with padding, normalization and ReLU. The number of channels doubles with each
    level. The features are a map, `(B, width, height, width)`, and the head is a 1x1 convolution.

    Source: Ronneberger, Fischer, Brox: "U-Net: Convolutional Networks for Biomedical Image Segmentation", MICCAI 2015,
    with padding and normalization, which later work uses.

    Args:
        in_shape: `(channels, height, width)`, height and width multiples of `2 ** depth`.
        num_classes: Number of classes, `C`.
        width: Number of channels of the first level. The paper has 64.
        depth: Number of times that the image is halved. The paper has 4.
        norm: Normalization after each convolution: BatchNorm (`batch`) or GroupNorm (`group`).

    Raises:
        ValueError: The input is not an image, or its size is no multiple of `2 ** depth`.
    """

    def __init__(
        self, in_shape: tuple[int, ...], num_classes: int, width: int = 16, depth: int = 3, norm: Norm = "batch"
    ) -> None:
        check_positive("model.", width=width, depth=depth)
        factor = 2**depth
        channels, *size = image_shape(in_shape, smallest=factor)
        if any(side % factor for side in size):
            raise ValueError(
                f"model: UNet with depth {depth} needs images whose height and width are multiples of {factor}, the "
                f"dataset has {tuple(size)}; set scenario.dataset.size, or a smaller model.depth"
            )
        encoder = with_norm(UNetEncoder(channels, width, depth), norm)
        super().__init__(encoder, nn.Conv2d(width, num_classes, 1), width)


class UNetEncoder(nn.Module):
    """All layers of a U-Net before the classification layer. They map images to feature maps of the same size.

    Args:
        channels: Number of channels of an image.
        width: Number of channels of the first level and of the feature maps.
        depth: Number of times that the image is halved.
    """

    def __init__(self, channels: int, width: int, depth: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.down = nn.ModuleList(
            double_convolution(before, after) for before, after in zip([channels, *widths], widths, strict=False)
        )
        self.pool = nn.MaxPool2d(2)
        pairs = list(zip(widths[::-1], widths[-2::-1], strict=False))
        self.grow = nn.ModuleList(nn.ConvTranspose2d(before, after, 2, stride=2) for before, after in pairs)
        self.up = nn.ModuleList(double_convolution(before, after) for before, after in pairs)

    def forward(self, x: Tensor) -> Tensor:
        """Return the feature maps `(B, width, height, width)` of a batch of images."""
        x = self.down[0](x)
        skipped = [x]
        for level in self.down[1:]:
            x = level(self.pool(x))
            skipped.append(x)
        for grow, up, skip in zip(self.grow, self.up, skipped[-2::-1], strict=True):
            x = up(torch.cat([skip, grow(x)], dim=1))
        return x


def double_convolution(before: int, after: int) -> nn.Sequential:
    """Return two 3x3 convolutions with padding, each followed by BatchNorm and ReLU."""
    layers: list[nn.Module] = []
    for channels in (before, after):
        layers += [nn.Conv2d(channels, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers)
