"""Custom images with masks for segmentation, in folders of images and masks, possibly one pair per site."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fl_lightning.core.errors import ConfigError, check_number, one_line
from fl_lightning.core.names import join_names
from fl_lightning.data.custom_data import CustomDataset, Samples, existing_path, split_of
from fl_lightning.data.datasets import KEY, count_outputs
from fl_lightning.data.files import BadFile, files_in, naming_file, open_file
from fl_lightning.data.image_files import FORMATS, EncodedImage, ImageOptions, naming_path, read_shape
from fl_lightning.data.image_folder import subfolders
from fl_lightning.data.labels import Labels
from fl_lightning.data.loaded_data import LoadedData


class MaskFolder(CustomDataset):
    """Custom images with a mask each, for segmentation: `images/NAME.png` and `masks/NAME.png`.

    If the two folders are in subfolders, such as `hospital_a/images`, the subfolders are the clients, for the partition
    `ByClient`; subfolders `train` and `test` (or `val`) are the two splits instead. A mask has the file name of its
    image, up to the ending. Its pixels are the class indices, from 0, as in a grey or palette PNG; 255 marks pixels
    that are not used. Images are normalized to mean 0 and standard deviation 1 of the training images, channel by
    channel.

    Args:
        path: The folder.
        size: Height and width to resize all images to, or one number for both; not needed if all have one size. Masks
            are resized to the nearest pixel.
        channels: 1 converts all images to grey, 3 to colour; by default grey if all of them are grey.
        test_share: Share of the images, or of each client's images, to test on.
        num_classes: Number of classes; by default one more than the largest class in the masks.
        images: Name of the folders of images.
        masks: Name of the folders of masks.
        cache: Folder for a file of the decoded images. They are memory-mapped instead of held in memory, and later
            runs reuse the file.
        mean: Mean of each channel, of pixels in [0, 1]; by default that of the training images.
        std: Standard deviation of each channel; by default that of the training images.

    Raises:
        ConfigError: A number is out of range.
    """

    label_key = client_key = "path"

    def __init__(
        self,
        path: str,
        size: int | tuple[int, int] | None = None,
        channels: Literal[1, 3] | None = None,
        test_share: float = 0.2,
        num_classes: int | None = None,
        images: str = "images",
        masks: str = "masks",
        cache: str | None = None,
        mean: list[float] | None = None,
        std: list[float] | None = None,
    ) -> None:
        super().__init__(test_share)
        check_number(f"{KEY}.num_classes", num_classes, "[2, 255]")
        self.path, self.num_classes, self.images, self.masks = path, num_classes, images, masks
        self.options = ImageOptions(size, channels, mean, std, "none", cache)

    def load(self) -> LoadedData:
        """Read the images and masks, and split them into training and test tensors, which are views of one memory."""
        data = super().load()
        (_, *images), masks = data.in_shape, list(data.y_train.shape[1:])
        if images != masks:
            what = f"images are {images[1]}x{images[0]} and masks {masks[1]}x{masks[0]}"
            raise ConfigError(f"{KEY}.size: {what}. Set it to resize both")
        return data

    def _samples(self) -> Samples:
        root = existing_path(self.path, folder=True)
        with naming_path():
            sites, splits = self._sites(root)
            pairs = [(pair, site) for site in sites for pair in self._pairs(root / site)]
            files = [image for (image, _), _ in pairs]
            y = torch.from_numpy(stack_masks([pair for pair, _ in pairs], self.options.size))
        outputs = self.num_classes or count_outputs(y)
        if self.num_classes is None:
            self._warn_of_gaps(y, outputs)
        site = np.array([site for _, site in pairs])
        client = None if splits or sites == [""] else site
        test = site == sites[1] if splits and len(sites) > 1 else None
        return Samples(files, Labels(y, outputs, [str(number) for number in range(outputs)]), client, test)

    def _sites(self, root: Path) -> tuple[list[str], bool]:
        """Return the folders with images and masks below `root`, and whether they are a training and a test set.

        A single folder that is `root` itself is the empty text.
        """
        folders, are_splits = subfolders(root), False
        used = sites = [name for name in folders if self.images in subfolders(root / name)]
        if self.images in folders:
            used, unused = [""], sites
        elif sites:
            splits = {split_of(name): name for name in sites}
            if are_splits := "train" in splits and None not in splits:
                used = [name for name in (splits["train"], splits.get("test", splits.get("val"))) if name]
            unused = [name for name in folders if name not in used]
        else:
            what = f"no folder {self.images} found in it or in its subfolders"
            raise ConfigError(f"{KEY}.path: {one_line(self.path)}: {what}. Set {KEY}.images to its name")
        if unused:
            what = f"{one_line(self.path)}: the images of {one_line(join_names(unused))} are not used"
            warnings.warn(
                f"{KEY}.path: {what}; only those of {one_line(join_names(used)) or 'images'} are", stacklevel=2
            )
        return used, are_splits

    def _pairs(self, folder: Path) -> list[tuple[Path, Path]]:
        """Return the image and the mask of each sample in a folder, sorted by name."""
        masks: dict[str, Path] = {}
        for path in files_in(existing_path(str(folder / self.masks), folder=True, key="masks")):
            if other := masks.get(path.stem):
                what = f"{one_line(str(path))}: has the name of {one_line(other.name)}"
                raise ConfigError(f"{KEY}.path: {what}, so the mask is not clear. Remove one of them")
            masks[path.stem] = path
        pairs = []
        for image in files_in(folder / self.images):
            if image.stem not in masks:
                what = f"has no mask {self.masks}/{one_line(image.stem)}.*"
                raise ConfigError(f"{KEY}.path: {one_line(str(image))}: {what}. Add it, or remove the image")
            pairs.append((image, masks[image.stem]))
        if alone := sorted(masks.keys() - {image.stem for image, _ in pairs}):
            what = f"{one_line(str(folder))}: no image of the mask {one_line(masks[alone[0]].name)} found"
            warnings.warn(f"{KEY}.path: {what} ({len(alone)} of {len(masks)} masks are not used)", stacklevel=2)
        return pairs

    def _warn_of_gaps(self, y: Tensor, outputs: int) -> None:
        """Warn if a class below the largest one has no pixel, as in grey masks of 0 and 128."""
        counts = np.sum([np.bincount(mask.ravel(), minlength=256) for mask in y.numpy()], axis=0)[:outputs]
        if len(absent := np.flatnonzero(counts == 0)):
            what = f"no pixel has class {absent[0]} ({len(absent)} of {outputs} classes have none)"
            warnings.warn(f"{KEY}.path: {what}. Number the classes from 0, or set num_classes", stacklevel=2)

    def _inputs(self, source: list[Path], order: np.ndarray, fitted: np.ndarray) -> tuple[Tensor, dict[str, Any]]:
        with naming_path():
            x = self.options.read([EncodedImage(str(source[i]), source[i]) for i in order])
        return x, self.options.transforms(x, fitted)


def stack_masks(pairs: list[tuple[Path, Path]], size: tuple[int, ...] | None) -> np.ndarray:
    """Read masks into one array of class indices, `(n, height, width)`, `uint8`.

    Args:
        pairs: The file of each image and that of its mask.
        size: `(height, width)` to resize masks to; by default all must have the size of the first.

    Raises:
        ConfigError: Masks differ in size, or a mask to be resized has the height of its image as its width.
    """
    first = read_mask(pairs[0][1])
    masks = np.empty((len(pairs), *(size or first.shape)), np.uint8)
    for row, (image, path) in enumerate(pairs):
        mask = read_mask(path)
        if size:
            check_orientation(image, path, mask.shape)
            mask = np.asarray(Image.fromarray(mask).resize((size[1], size[0]), Image.Resampling.NEAREST))
        elif mask.shape != first.shape:
            fix = "Set scenario.dataset.size to resize all"
            raise ConfigError(f"{KEY}.size: {one_line(str(path))} differs in size from {pairs[0][1].name}. {fix}")
        masks[row] = mask
    return masks


def check_orientation(image: Path, path: Path, mask: tuple[int, ...]) -> None:
    """Check that a mask, of this height and width, is not the turned one of a camera's image with EXIF orientation.

    Raises:
        ConfigError: It is.
    """
    _, height, width = read_shape(EncodedImage(str(image), image))
    if mask == (width, height) != (height, width):
        what = f"{one_line(str(path))} is {height}x{width} and its image, upright, {width}x{height}"
        raise ConfigError(f"{KEY}.path: {what}. Turn the mask, or save the image as it is without EXIF orientation")


def read_mask(path: Path) -> np.ndarray:
    """Read the class index of each pixel of a mask, `(height, width)`.

    Raises:
        BadFile: It is not an image of one 8-bit number per pixel.
    """
    with open_file(path, "mask") as file, naming_file(path, "mask"), Image.open(file, formats=FORMATS) as mask:
        if mask.mode not in ("L", "P", "1"):
            raise BadFile(
                path, f"a mask of mode {mask.mode}; it needs an 8-bit class index per pixel, as in a grey PNG"
            )
        return np.asarray(mask, np.uint8)
