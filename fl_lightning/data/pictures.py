"""Your own pictures: looked at first, then decoded to one size, into memory or into a file that is mapped."""

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
from typing import Literal, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from fl_lightning.core.errors import ConfigError, check_number, check_positive, one_line
from fl_lightning.core.files import replacing
from fl_lightning.core.gate import check_writable
from fl_lightning.data.datasets import Dataset, LoadedData
from fl_lightning.data.images import Augment
from fl_lightning.data.own import KEY, check_share, divided, held_out, placed
from fl_lightning.data.reading import BadFile, files_in, is_intact, is_there, opened, read_mapped, told_of
from fl_lightning.data.transforms import CropFlip, Normalize

FORMATS = ("JPEG", "PNG", "GIF", "BMP", "PPM", "TIFF", "WEBP")
"""What is opened; of Pillow's other readers one starts a program (EPS)."""

GREY = ("1", "L", "LA")
COLOUR = ("RGB", "RGBA", "RGBX", "P", "PA", "CMYK", "YCbCr")
ORIENTATION = 0x0112
"""The tag of a JPEG that says how the camera was held; from 5 on, on its side."""

AT_A_TIME = 1024
"""Pictures decoded ahead of what is kept."""
PIECE = 1 << 24
"""Bytes of pictures whose mean is worked out at a time."""


class Picture(NamedTuple):
    """An encoded picture.

    Attributes:
        name: What to call it: a file's path, or a row.
        source: The file, or its bytes.
    """

    name: str
    source: Path | bytes


class Look(NamedTuple):
    """What a picture's header says."""

    width: int
    height: int
    grey: bool


class Form(NamedTuple):
    """What pictures are made into."""

    channels: int
    height: int
    width: int


class PictureOptions:
    """What becomes of one's own pictures, wherever they come from.

    Args:
        size: Height and width, or one number for both.
        channels: 1 for grey, 3 for colour.
        mean: Mean of a channel of pixels in [0, 1].
        std: Their standard deviation.
        augment: Random crop and flip of training batches.

    Raises:
        ConfigError: A number is out of range.
    """

    def __init__(
        self,
        size: int | tuple[int, int] | None,
        channels: Literal[1, 3] | None,
        mean: list[float] | None,
        std: list[float] | None,
        augment: Augment,
    ) -> None:
        self.size = (size, size) if isinstance(size, int) else size
        for side in self.size or ():
            check_positive(f"{KEY}.", size=side)
        if (mean is None) != (std is None):
            raise ConfigError(f"{KEY}.{'mean' if std is None else 'std'}: give both mean and std, or neither")
        for name, values, within in (("mean", mean, "(-inf, inf)"), ("std", std, "(0, inf)")):
            for value in values or ():
                check_number(f"{KEY}.{name}", value, within)
        self.channels, self.mean, self.std, self.augment = channels, mean, std, augment

    def form(self, pictures: Sequence[Picture]) -> Form:
        """What all of some pictures are made into; their headers are read.

        Raises:
            BadFile: One is none.
            ConfigError: They differ in size, and no size is given.
        """
        with ThreadPoolExecutor() as pool:
            looks = [one for some in portions(pictures) for one in pool.map(look, some)]
        channels = self.channels or (1 if all(one.grey for one in looks) else 3)
        if self.size:
            return Form(channels, *self.size)
        first = looks[0]
        for i, one in enumerate(looks):
            if (one.width, one.height) != (first.width, first.height):
                raise ConfigError(
                    f"{KEY}.size: the pictures differ in size: {first.width}x{first.height} is that of "
                    f"{one_line(pictures[0].name)}, {one.width}x{one.height} that of {one_line(pictures[i].name)}; set "
                    "scenario.dataset.size, 64 say, and all are resized to 64x64"
                )
        return Form(channels, first.height, first.width)

    def read(self, pictures: Sequence[Picture]) -> Tensor:
        """Pictures in memory, `(n, channels, height, width)`, `uint8`.

        Raises:
            BadFile: One is none.
            ConfigError: They differ in size, and no size is given, or are too many for the memory.
        """
        form = self.form(pictures)
        refuse_more_than_memory(len(pictures), form)
        x = np.empty((len(pictures), *form), np.uint8)
        for i, image in enumerate(decoded(pictures, form)):
            x[i] = image
        return torch.from_numpy(x)

    def prepare(self, x_train: Tensor) -> Normalize:
        """The normalisation: by the given numbers, or those of the training pictures.

        Raises:
            ConfigError: There are not as many numbers as channels.
        """
        if self.mean is None or self.std is None:
            return Normalize(*statistics(x_train))
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) != x_train.shape[1]:
                raise ConfigError(
                    f"{KEY}.{name}: {len(values)} number(s), and the pictures have {x_train.shape[1]} channel(s)"
                )
        return Normalize(self.mean, self.std)

    def loaded(self, x: Tensor, y: Tensor, train: int, outputs: int, client: np.ndarray | None = None) -> LoadedData:
        """The dataset of pictures that are decoded, those to train on first."""
        augment = None if self.augment == "none" else CropFlip(per_sample=self.augment == "per_sample")
        return divided(x, y, train, outputs, self.prepare(x[:train]), augment, client)


class ImageFolder(Dataset):
    """Your own pictures: `train` and `test`, in each a folder a class; or class folders, of which a share is held out.

    The classes are the folders' names by the alphabet. `val` is taken where there is no `test`. A picture is shown
    upright, as its camera noted. Pixels are shifted and scaled to mean 0 and standard deviation 1 of the training
    pictures, channel by channel.

    Args:
        path: The folder.
        size: Height and width that all pictures are resized to, or one number for both; not needed where all are of
            one size.
        channels: 1 makes them grey, 3 coloured; by default grey if all of them are.
        test_share: Share of each class to test on where there is no folder for that.
        cache: Folder for the decoded pictures. They are then not held in memory but mapped from a file, and the next
            run finds them there.
        mean: Mean of each channel, of pixels in [0, 1], instead of the training pictures'.
        std: Standard deviation of each channel, likewise.
        augment: Random crop (4 pixels of padding) and horizontal flip of training batches: `none`, drawn
            `per_sample`, or one draw `per_batch`.

    Raises:
        ConfigError: A number is out of range.
    """

    def __init__(
        self,
        path: str,
        size: int | tuple[int, int] | None = None,
        channels: Literal[1, 3] | None = None,
        test_share: float = 0.2,
        cache: str | None = None,
        mean: list[float] | None = None,
        std: list[float] | None = None,
        augment: Augment = "none",
    ) -> None:
        check_share(test_share)
        self.path, self.test_share, self.cache = path, test_share, cache
        self.options = PictureOptions(size, channels, mean, std, augment)

    def load(self) -> LoadedData:
        """Find the pictures, and decode them or take them from the cache."""
        root = placed(self.path, folder=True)
        try:
            files, y, train, outputs = self._files(root)
            pictures = [Picture(str(path), path) for path in files]
            x = self._mapped(root, pictures) if self.cache else self.options.read(pictures)
        except BadFile as error:
            raise ConfigError(f"{KEY}.path: {error}; mend it, or take it away") from error
        return self.options.loaded(x, y, train, outputs)

    def _files(self, root: Path) -> tuple[list[Path], Tensor, int, int]:
        """All pictures, those to train on first; their classes; how many are to train on; the number of classes."""
        if not (root / "train").is_dir() or not folders(root / "train"):
            classes = self._classes(root)
            files, y = labelled(root, classes)
            test = held_out(y, self.test_share)
            order = np.argsort(test, kind="stable")
            return [files[i] for i in order], y[order], len(order) - int(test.sum()), len(classes)
        second = next((root / name for name in ("test", "val") if (root / name).is_dir()), None)
        if second is None:
            raise ConfigError(
                f"{KEY}.path: {one_line(self.path)} holds train and no test; add it, or give "
                f"{one_line(str(root / 'train'))}, of which a share is held out"
            )
        classes = self._classes(root / "train")
        if odd := sorted(set(folders(second)) - set(classes)):
            raise ConfigError(f"{KEY}.path: {one_line(str(second / odd[0]))}: train has no class of that name")
        train, y_train = labelled(root / "train", classes)
        test_files, y_test = labelled(second, classes)
        if not test_files:
            raise ConfigError(
                f"{KEY}.path: {one_line(str(second))}: holds no class folders. Add one a class, or give "
                f"{one_line(str(root / 'train'))}, of which a share is held out"
            )
        return train + test_files, torch.cat([y_train, y_test]), len(train), len(classes)

    def _classes(self, folder: Path) -> list[str]:
        if len(classes := folders(folder)) < 2:
            raise ConfigError(
                f"{KEY}.path: {one_line(str(folder))}: holds {len(classes)} folder(s); it needs one a class"
            )
        return classes

    def _mapped(self, root: Path, pictures: Sequence[Picture]) -> Tensor:
        """Return the decoded images mapped from the cache file, which is written first if it is missing or damaged."""
        assert self.cache
        place = Path(self.cache) / f"pictures-{self._known_by(root, pictures)}.npy"
        check_writable(f"{KEY}.cache", place)
        try:
            found = is_there(place)
            intact = found and is_intact(place)
        except BadFile as error:
            raise ConfigError(f"{KEY}.cache: {error}") from error
        if found and not intact:
            what = "is damaged, or of an older version (its checksum does not match). It is built again"
            warnings.warn(f"{KEY}.cache: {one_line(str(place))} {what}", stacklevel=2)
        if not intact:
            self._write(place, pictures)
        try:
            return torch.from_numpy(read_mapped(place))
        except BadFile as error:
            raise ConfigError(f"{KEY}.cache: {error}. Leave the cache out to hold the images in memory") from error

    def _write(self, place: Path, pictures: Sequence[Picture]) -> None:
        """Write the decoded images as an `.npy` file, with the checksum behind them that `is_intact` verifies."""
        form = self.options.form(pictures)
        header, digest = BytesIO(), hashlib.sha256(place.name.encode())
        shape = (len(pictures), *form)
        np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": shape})
        images = (image.tobytes() for image in decoded(pictures, form))
        try:
            with replacing(place) as file:
                for part in chain([header.getvalue()], images):
                    file.write(part)
                    digest.update(part)
                file.write(digest.digest())
        except OSError as error:
            raise ConfigError(f"{KEY}.cache: {one_line(error)}") from error

    def _known_by(self, root: Path, pictures: Sequence[Picture]) -> str:
        """What tells one set of decoded pictures from another, before any of them is opened."""
        files = [(str(path.relative_to(root)), path.stat()) for path in map(Path, (one.name for one in pictures))]
        known = [[name, about.st_size, about.st_mtime_ns] for name, about in files]
        return hashlib.sha256(json.dumps([known, self.options.size, self.options.channels]).encode()).hexdigest()[:16]


def folders(folder: Path) -> list[str]:
    """Names of the folders in a folder, by the alphabet, without hidden ones.

    Raises:
        BadFile: It cannot be read.
    """
    with told_of(folder, "folder"), os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def labelled(folder: Path, classes: Sequence[str]) -> tuple[list[Path], Tensor]:
    """The files of the classes that a folder has, and the class of each.

    Raises:
        BadFile: A class has none, or something else than files.
    """
    held = set(folders(folder))
    files = [files_in(folder / name) if name in held else [] for name in classes]
    labels = [label for label, own in enumerate(files) for _ in own]
    return [path for own in files for path in own], torch.tensor(labels, dtype=torch.int64)


# --- One picture -----------------------------------------------------------------------------------------------------


@contextmanager
def _opened(picture: Picture) -> Iterator[Image.Image]:
    place, source = Path(picture.name), picture.source
    within = opened(source, "picture") if isinstance(source, Path) else nullcontext(BytesIO(source))
    with told_of(place, "picture"), within as file:
        try:
            image = Image.open(file, formats=FORMATS)
        except UnidentifiedImageError as error:
            raise BadFile(place, f"is no readable picture ({', '.join(FORMATS)})") from error
        with image:
            if image.mode not in GREY + COLOUR:
                raise BadFile(place, f"is a picture of mode {image.mode}; it needs 8 bits a channel")
            yield image


def _lies(image: Image.Image) -> bool:
    """Whether a picture has to be turned before it is upright."""
    return image.format in ("JPEG", "MPO") and image.getexif().get(ORIENTATION, 1) != 1


def look(picture: Picture) -> Look:
    """What a picture's header says, of the picture upright.

    Raises:
        BadFile: It is none.
    """
    with _opened(picture) as image:
        turned = _lies(image) and image.getexif()[ORIENTATION] >= 5
        width, height = image.size[::-1] if turned else image.size
        return Look(width, height, image.mode in GREY)


def decode(picture: Picture, form: Form) -> np.ndarray:
    """A picture as `(channels, height, width)`, `uint8`, resized if it is of another size.

    Raises:
        BadFile: It is none.
    """
    with _opened(picture) as image:
        upright = ImageOps.exif_transpose(image) if _lies(image) else image
        if upright.mode in ("P", "PA"):
            upright = upright.convert("RGBA")  # which knows what is transparent in a palette
        plain = upright.convert("L" if form.channels == 1 else "RGB")
        if plain.size != (form.width, form.height):
            plain = plain.resize((form.width, form.height), Image.Resampling.BILINEAR)
        pixels = np.asarray(plain)
    return pixels[None] if form.channels == 1 else pixels.transpose(2, 0, 1)


def decoded(pictures: Sequence[Picture], form: Form) -> Iterator[np.ndarray]:
    """Pictures one after another, `(channels, height, width)` each, some decoded ahead.

    Raises:
        BadFile: One is none.
    """
    with ThreadPoolExecutor() as pool:  # decoding leaves Python's lock
        for some in portions(pictures):
            yield from pool.map(lambda picture: decode(picture, form), some)


def portions(pictures: Sequence[Picture]) -> Iterator[Sequence[Picture]]:
    """Pictures, as many at a time as may be in memory undecoded."""
    return (pictures[start : start + AT_A_TIME] for start in range(0, len(pictures), AT_A_TIME))


# --- All of them -----------------------------------------------------------------------------------------------------


def refuse_more_than_memory(n: int, form: Form) -> None:
    """Refuse to decode what the machine cannot hold, which would be killed on its way.

    Raises:
        ConfigError: Says how much it is.
    """
    need, there = n * prod(form), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if need > there:
        raise ConfigError(
            f"{KEY}.size: {n:,} pictures of {form.width}x{form.height} take {need / 2**30:,.1f} GiB, and this machine "
            f"has {there / 2**30:,.1f}; set a smaller one, or scenario.dataset.cache (of ImageFolder)"
        )


def statistics(x: Tensor) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each channel of pixels in [0, 1]; whole sums, so that no order of them matters.

    Args:
        x: Pictures, `(n, channels, height, width)`, `uint8`.

    Returns:
        One number a channel each; a standard deviation is 1 where all pixels are alike.
    """
    total = torch.zeros(2, x.shape[1], dtype=torch.int64)
    for piece in x.split(max(1, PIECE // max(1, x[:1].nbytes))):
        pixels = piece.to(torch.int32)
        total += torch.stack([one.sum(dim=(0, 2, 3), dtype=torch.int64) for one in (pixels, pixels.square())])
    mean, square = (total.double() / (x.numel() / x.shape[1])).tolist()
    std = [math.sqrt(max(b - a * a, 0)) for a, b in zip(mean, square, strict=True)]
    return [value / 255 for value in mean], [value / 255 or 1.0 for value in std]
