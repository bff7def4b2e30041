"""Image files of custom datasets: decoding to one size, normalization, and a cache of the decoded images."""

from __future__ import annotations

import hashlib
import json
import math
import os
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from io import BytesIO
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from fl_lightning.core.errors import ConfigError, check_number, check_positive, one_line
from fl_lightning.core.files import replace_atomically
from fl_lightning.core.trusted_imports import check_writable
from fl_lightning.data.datasets import KEY
from fl_lightning.data.files import BadFile, check_exists, has_valid_checksum, naming_file, open_file, read_mapped
from fl_lightning.data.images import Augment, make_augment
from fl_lightning.data.lazy import LazySamples
from fl_lightning.data.transforms import Normalize

FORMATS = ("JPEG", "PNG", "GIF", "BMP", "PPM", "TIFF", "WEBP")
"""Image formats that are opened. EPS is not one of them, because Pillow would start a program to read it."""

GREY = ("1", "L", "LA")
COLOUR = ("RGB", "RGBA", "RGBX", "P", "PA", "CMYK", "YCbCr")
ORIENTATION = 0x0112
"""EXIF tag of the camera's orientation; values from 5 on swap width and height."""

CHUNK_IMAGES = 1024
"""Number of images whose encoded bytes are in memory at a time."""
CHUNK_BYTES = 1 << 24
"""Bytes of images whose statistics are computed at a time."""


class EncodedImage(NamedTuple):
    """An image before decoding: its name for error messages (a path or a row), and its file or bytes."""

    name: str
    source: Path | bytes


class ImageShape(NamedTuple):
    """Shape `(channels, height, width)` of a decoded image."""

    channels: int
    height: int
    width: int


class ImageOptions:
    """Options for the images of custom datasets: size, colour, normalization, augmentation and cache.

    `ImageFolder` describes the options.
    """

    def __init__(
        self,
        size: int | tuple[int, int] | None,
        channels: Literal[1, 3] | None,
        mean: list[float] | None,
        std: list[float] | None,
        augment: Augment,
        cache: str | None = None,
    ) -> None:
        self.size = (size, size) if isinstance(size, int) else size
        for side in self.size or ():
            check_positive(f"{KEY}.", size=side)
        if (mean is None) != (std is None):
            raise ConfigError(f"{KEY}.{'mean' if std is None else 'std'}: give both mean and std, or neither")
        for name, values, within in (("mean", mean, "(-inf, inf)"), ("std", std, "(0, inf)")):
            for value in values or ():
                check_number(f"{KEY}.{name}", value, within)
        self.channels, self.mean, self.std, self.augment, self.cache = channels, mean, std, augment, cache

    def shape(self, images: Sequence[EncodedImage]) -> ImageShape:
        """Return the shape `(C, H, W)` that each image has after decoding, from the options and the files' headers."""
        with ThreadPoolExecutor() as pool:
            shapes = [shape for chunk in chunks(images) for shape in pool.map(read_shape, chunk)]
        channels, first = self.channels or max(shape.channels for shape in shapes), shapes[0]
        if self.size:
            return ImageShape(channels, *self.size)
        for image, shape in zip(images, shapes, strict=True):
            if shape[1:] != first[1:]:
                one, other = (
                    f"{one_line(i.name)} is {s.width}x{s.height}" for i, s in ((images[0], first), (image, shape))
                )
                fix = "Set scenario.dataset.size, for example 64, to resize all to 64x64"
                raise ConfigError(f"{KEY}.size: the images differ in size: {one}, {other}. {fix}")
        return ImageShape(channels, first.height, first.width)

    def read(self, images: Sequence[EncodedImage]) -> Tensor:
        """Decode images into one tensor, `(n, channels, height, width)`, `uint8`, in memory or mapped from a cache."""
        if self.cache:
            return self._map_cache(Path(self.cache), images)
        shape = self.shape(images)
        check_memory(len(images), shape)
        x = np.empty((len(images), *shape), np.uint8)
        for i, image in enumerate(decode_all(images, shape)):
            x[i] = image
        return torch.from_numpy(x)

    def on_demand(self, images: Sequence[EncodedImage]) -> LazySamples:
        """Return images that are decoded when they are needed, `(n, channels, height, width)`, `uint8`.

        Only the files' headers are read now.
        """
        return LazySamples([ImageReader(images, self.shape(images))], draws=False)

    def _map_cache(self, folder: Path, images: Sequence[EncodedImage]) -> Tensor:
        """Return decoded images, memory-mapped from a cache file. If the file is missing or damaged, write it first."""
        path = folder / f"pictures-{self._fingerprint(images)}.npy"  # the name in earlier versions
        check_writable(f"{KEY}.cache", path)
        try:
            exists = check_exists(path)
            valid = exists and has_valid_checksum(path)
        except BadFile as error:
            raise ConfigError(f"{KEY}.cache: {error}") from error
        if exists and not valid:
            what = "is damaged, or of an older version (its checksum does not match). It is built again"
            warnings.warn(f"{KEY}.cache: {one_line(str(path))} {what}", stacklevel=2)
        if not valid:
            self._write_cache(path, images)
        try:
            return torch.from_numpy(read_mapped(path))
        except BadFile as error:
            raise ConfigError(f"{KEY}.cache: {error}. Leave the cache out to hold the images in memory") from error

    def _write_cache(self, path: Path, images: Sequence[EncodedImage]) -> None:
        """Write the decoded images as an `.npy` file, followed by the checksum that `has_valid_checksum` verifies."""
        shape = self.shape(images)
        header, digest = BytesIO(), hashlib.sha256(path.name.encode())
        described = {"descr": "|u1", "fortran_order": False, "shape": (len(images), *shape)}
        np.lib.format.write_array_header_1_0(header, described)
        decoded = (image.tobytes() for image in decode_all(images, shape))
        try:
            with replace_atomically(path) as file:
                for part in chain([header.getvalue()], decoded):
                    file.write(part)
                    digest.update(part)
                file.write(digest.digest())
        except OSError as error:
            raise ConfigError(f"{KEY}.cache: {one_line(error)}") from error

    def _fingerprint(self, images: Sequence[EncodedImage]) -> str:
        """Return a digest of the options and of the image files' names, sizes and modification times.

        It is part of the file name of the cache.
        """
        known = []
        root = os.path.commonpath([os.path.abspath(image.name) for image in images])
        for path in (Path(image.name) for image in images):
            with naming_file(path, "image"):
                status = path.stat()
            known.append([os.path.relpath(path, root), status.st_size, status.st_mtime_ns])
        return hashlib.sha256(json.dumps([known, self.size, self.channels]).encode()).hexdigest()[:16]

    def transforms(self, x: Tensor | LazySamples, fitted: np.ndarray) -> dict[str, Any]:
        """Return functions for normalization and augmentation, as a dict with the keys `prepare` and `augment`.

        The keys are fields of `LoadedData`.

        Args:
            x: The images.
            fitted: The indices of those whose mean and standard deviation are used by default.
        """
        for name, values in (("mean", self.mean), ("std", self.std)):
            if values is not None and len(values) != x.shape[1]:
                what = f"{len(values)} number(s), and the images have {x.shape[1]} channel(s)"
                raise ConfigError(f"{KEY}.{name}: {what}")
        mean, std = self.mean, self.std
        if mean is None or std is None:
            mean, std = channel_statistics(x, torch.from_numpy(fitted))
        return {"prepare": Normalize(mean, std), "augment": make_augment(self.augment)}


class ImageReader:
    """Decodes image files one at a time, for `LazySamples`.

    Args:
        images: The images.
        shape: The shape of each after decoding.
    """

    who = KEY

    def __init__(self, images: Sequence[EncodedImage], shape: ImageShape) -> None:
        self.images, self.shape = images, shape

    def __len__(self) -> int:
        return len(self.images)

    def read(self, item: int) -> Tensor:
        """Decode an image.

        Raises:
            ConfigError: Its file is missing or damaged.
        """
        with naming_path():
            return torch.from_numpy(decode(self.images[item], self.shape).copy())


# --- Decoding ---


@contextmanager
def naming_path() -> Iterator[None]:
    """Context in which errors about an image's file name the dataset's `path`."""
    try:
        yield
    except BadFile as error:
        raise ConfigError(f"{KEY}.path: {error}. Replace or remove it") from error


@contextmanager
def _open_image(image: EncodedImage) -> Iterator[Image.Image]:
    path, source = Path(image.name), image.source
    context = open_file(source, "image") if isinstance(source, Path) else nullcontext(BytesIO(source))
    with naming_file(path, "image"), context as file:
        try:
            opened = Image.open(file, formats=FORMATS)
        except UnidentifiedImageError as error:
            raise BadFile(path, f"not a readable image ({', '.join(FORMATS)})") from error
        with opened:
            if opened.mode not in GREY + COLOUR:
                raise BadFile(path, f"an image of mode {opened.mode}; it needs 8 bits per channel")
            yield opened


def _needs_rotation(image: Image.Image) -> bool:
    return image.format in ("JPEG", "MPO") and image.getexif().get(ORIENTATION, 1) != 1


def read_shape(image: EncodedImage) -> ImageShape:
    """Return the shape of an image after rotation by its EXIF orientation, without decoding the pixels."""
    with _open_image(image) as opened:
        swapped = _needs_rotation(opened) and opened.getexif()[ORIENTATION] >= 5
        width, height = opened.size[::-1] if swapped else opened.size
        return ImageShape(1 if opened.mode in GREY else 3, height, width)


def decode(image: EncodedImage, shape: ImageShape) -> np.ndarray:
    """Decode an image to an array of the given shape `(channels, height, width)`, `uint8`, resized if necessary."""
    with _open_image(image) as opened:
        upright = ImageOps.exif_transpose(opened) if _needs_rotation(opened) else opened
        if upright.mode in ("P", "PA"):
            upright = upright.convert("RGBA")  # keeps a palette's transparency
        converted = upright.convert("L" if shape.channels == 1 else "RGB")
        if converted.size != (shape.width, shape.height):
            converted = converted.resize((shape.width, shape.height), Image.Resampling.BILINEAR)
        pixels = np.asarray(converted)
    return pixels[None] if shape.channels == 1 else pixels.transpose(2, 0, 1)


def decode_all(images: Sequence[EncodedImage], shape: ImageShape) -> Iterator[np.ndarray]:
    """Decode images in several threads, and yield them in order as arrays `(channels, height, width)`."""
    with ThreadPoolExecutor() as pool:  # decoding releases Python's lock
        for chunk in chunks(images):
            yield from pool.map(lambda image: decode(image, shape), chunk)


def chunks(images: Sequence[EncodedImage]) -> Iterator[Sequence[EncodedImage]]:
    """Split encoded images into chunks of `CHUNK_IMAGES`, so that only one chunk's bytes are in memory at a time."""
    return (images[start : start + CHUNK_IMAGES] for start in range(0, len(images), CHUNK_IMAGES))


def check_memory(n: int, shape: ImageShape) -> None:
    """Raise a `ConfigError` if n decoded images of this shape do not fit into the machine's memory."""
    need, available = n * prod(shape), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if need > available:
        raise ConfigError(
            f"{KEY}.size: {n:,} images of {shape.width}x{shape.height} need {need / 2**30:,.1f} GiB, and this machine "
            f"has {available / 2**30:,.1f}. Set a smaller size, or the cache of ImageFolder or ImageTable"
        )


def channel_statistics(x: Tensor | LazySamples, rows: Tensor) -> tuple[list[float], list[float]]:
    """Return each channel's mean and standard deviation over the images at `rows`, with pixels scaled to [0, 1].

    A standard deviation of 0 is replaced by 1. The sums are integers, so that the order of summation changes no bit of
    the result.
    """
    total = torch.zeros(2, x.shape[1], dtype=torch.int64)
    for piece in rows.split(max(1, CHUNK_BYTES // max(1, x[:1].nbytes))):
        pixels = x.index_select(0, piece).to(torch.int32)
        total += torch.stack([values.sum(dim=(0, 2, 3), dtype=torch.int64) for values in (pixels, pixels.square())])
    mean, square = (total.double() / (len(rows) * prod(x.shape[2:]))).tolist()
    std = [math.sqrt(max(b - a * a, 0)) for a, b in zip(mean, square, strict=True)]
    return [value / 255 for value in mean], [value / 255 or 1.0 for value in std]
