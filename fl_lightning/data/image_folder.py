"""Custom images in folders: one folder per class, or a pattern that finds class, client and split in each path."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core.errors import ConfigError, one_line
from fl_lightning.core.names import join_names
from fl_lightning.data.checks import path_text
from fl_lightning.data.custom_data import CustomDataset, Samples, existing_path, split_of
from fl_lightning.data.datasets import KEY, refuse_unknown_classes
from fl_lightning.data.files import files_in, is_left_behind, naming_file
from fl_lightning.data.image_files import EncodedImage, ImageOptions, naming_path
from fl_lightning.data.images import Augment
from fl_lightning.data.labels import Labels

if TYPE_CHECKING:
    import pandas as pd

FIELDS = ("class", "client", "split")
"""Fields of a pattern."""

SPLITS = ("train", "test", "val")
"""Values of the field `split`."""


class ImageFolder(CustomDataset):
    """Custom images in one folder per class, or in files whose paths a pattern maps to class, client and split.

    The class folders are below `train` and `test`, or directly below `path`. Without `train`, a share of each class is
    held out for testing. Classes are the folders' names in alphabetical order. `val` is the test set if there is no
    `test`. Images are rotated as their EXIF orientation says. Pixels are normalized to mean 0 and standard deviation 1
    of the training images, channel by channel.

    Args:
        path: The folder.
        size: Height and width to resize all images to, or one number for both; not needed if all have one size.
        channels: 1 converts all images to grey, 3 to colour; by default grey if all of them are grey.
        test_share: Share to test on if there is no test folder: of each class, or of each client's images.
        cache: Folder for a file of the decoded images. They are memory-mapped instead of held in memory, and later
            runs reuse the file.
        mean: Mean of each channel, of pixels in [0, 1]; by default that of the training images.
        std: Standard deviation of each channel; by default that of the training images.
        augment: Random crop (4 pixels of padding) and horizontal flip of training batches: `none`, drawn
            `per_sample`, or drawn once `per_batch`; or a transform of single images, such as
            `torchvision.transforms.v2.RandAugment`.
        pattern: Paths below the folder, with the fields `{class}` and, if there are any, `{client}` (such as a
            hospital, for the partition `ByClient`) and `{split}` (`train`, `test` or `val`), for example
            `{client}/{class}/*` or `{class}/{client}_*.png`. `*` is any text and `?` any character, but no slash. A
            field is as short as possible.
        lazy: Read and decode images when batches need them, for data that do not fit into memory. If `mean` and `std`
            are not given, the training images are also decoded once at the start.

    Raises:
        ConfigError: A number is out of range, or `lazy` and `cache` are both set.
    """

    label_key = client_key = "path"

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
        pattern: str | None = None,
        lazy: bool = False,
    ) -> None:
        super().__init__(test_share)
        if lazy and cache:
            raise ConfigError(f"{KEY}.lazy: true reads the image files, not a cache. Leave out lazy or cache")
        self.path, self.lazy = path_text(f"{KEY}.path", path), lazy
        self.pattern = None if pattern is None else PathPattern(pattern)
        self.options = ImageOptions(size, channels, mean, std, augment, cache)
        self.has_statistics = mean is None

    def _samples(self) -> Samples:
        if self.path.endswith((".csv", ".parquet")) and os.path.isfile(self.path):
            raise ConfigError(f"{KEY}.path: {one_line(self.path)}: is a file. Did you mean --{KEY} ImageTable?")
        root = existing_path(self.path, folder=True)
        with naming_path():
            if self.pattern:
                return self._matching_samples(self.pattern, root)
            splits = self._split_folders(root)
            if "train" not in splits:
                classes = self._classes(root)
                files, y = labelled_files(root, classes)
                return Samples(files, Labels(y, len(classes), classes))
            train_folder, second = splits["train"], splits.get("test", splits.get("val"))
            hint = f"or set it to {one_line(str(train_folder))} to hold out a share of it"
            if second is None:
                what = f"has a folder {train_folder.name} but no test"
                raise ConfigError(f"{KEY}.path: {one_line(self.path)}: {what}. Add it, {hint}")
            if unused := sorted(set(subfolders(root)) - {train_folder.name, second.name}):
                used = f"only those of {train_folder.name} and {second.name} are"
                what = f"{one_line(self.path)}: the images of {one_line(join_names(unused))} are not used; {used}"
                warnings.warn(f"{KEY}.path: {what}", stacklevel=2)
            prefix, classes = f"{KEY}.path: {one_line(str(second))}", self._classes(train_folder)
            if unknown := sorted(set(subfolders(second)) - set(classes)):
                what = f"{train_folder.name} has no class of that name"
                raise ConfigError(f"{prefix}/{one_line(unknown[0])}: {what}. Rename the folder, or remove it")
            (train, y_train), (test, y_test) = (labelled_files(folder, classes) for folder in (train_folder, second))
            if not test:
                raise ConfigError(f"{prefix}: has no class folders. Add one per class, {hint}")
            mask = np.arange(len(train) + len(test)) >= len(train)
            return Samples(train + test, Labels(torch.cat([y_train, y_test]), len(classes), classes), test=mask)

    def _split_folders(self, root: Path) -> dict[str, Path]:
        """Return the folders of the splits `train`, `test` and `val` by split; none if `root` has the class folders."""
        named = [(split, root / name) for name in subfolders(root) if (split := split_of(name))]
        if not any(subfolders(folder) for _, folder in named):
            return {}
        splits: dict[str, Path] = {}
        for split, folder in named:
            if split in splits:
                what = f"{one_line(self.path)}: has the folders {splits[split].name} and {folder.name}. Keep one"
                raise ConfigError(f"{KEY}.path: {what}")
            splits[split] = folder
        if "train" not in splits:
            found = one_line(next(iter(splits.values())).name)
            raise ConfigError(f"{KEY}.path: {one_line(self.path)}: has a folder {found} but no train. Add it")
        return splits

    def _matching_samples(self, pattern: PathPattern, root: Path) -> Samples:
        """Return the images that match the pattern, with the class, client and split in their paths."""
        frame, test = pattern.match_files(root), None
        if "split" in frame:
            frame, test = pattern.select_splits(frame)
        client = frame["client"].to_numpy(str) if "client" in frame else None
        return labelled_samples(frame["path"].tolist(), frame["class"].to_numpy(str), client, test, self)

    def _inputs(self, source: list[Path], order: np.ndarray, fitted: np.ndarray) -> tuple[Any, dict[str, Any]]:
        images = [EncodedImage(str(source[i]), source[i]) for i in order]
        with naming_path():
            x = self.options.on_demand(images) if self.lazy else self.options.read(images)
        return x, self.options.transforms(x, fitted)

    def _classes(self, folder: Path) -> list[str]:
        classes = subfolders(folder)
        if self.known_classes is not None:
            refuse_unknown_classes(classes, self.known_classes)
            return list(self.known_classes)
        if len(classes) < 2:
            what = f"has {len(classes)} folder(s). It needs one per class"
            inner = [name for name in classes if subfolders(folder / name)]
            fix = f". Did you mean {one_line(str(folder / inner[0]))}?" if inner else ""
            raise ConfigError(f"{KEY}.path: {one_line(str(folder))}: {what}{fix}")
        return classes


def labelled_samples(
    files: Sequence[Path],
    classes: Sequence[str] | np.ndarray,
    client: np.ndarray | None,
    test: np.ndarray | None,
    dataset: ImageFolder,
) -> Samples:
    """Return images with the labels of their classes, which are numbered in alphabetical order.

    Args:
        files: The images.
        classes: The class of each image.
        client: The client of each image; None if the data have no client ids.
        test: Boolean mask of the test images; None to hold out a share.
        dataset: The dataset, for its known classes and its pattern.

    Raises:
        ConfigError: There is only one class, or none.
    """
    values, y = np.unique(np.asarray(classes, dtype=str), return_inverse=True)
    if len(values) < 2 and not dataset.known_classes:
        what = f"finds only the class {one_line(values[0])}" if len(values) else "finds no image"
        fix = "Images need at least two classes"
        prefix = f"{KEY}.path: {one_line(dataset.path)}:"
        raise dataset.pattern.error(f"{what}. {fix}") if dataset.pattern else ConfigError(f"{prefix} {what}. {fix}")
    if client is not None:
        warn_of_missing_classes(client, values[y])
    return Samples(list(files), Labels(torch.from_numpy(y), len(values), values.tolist()), client, test)


class PathPattern:
    """Pattern of file paths with fields, such as `{client}/{class}/*`; `ImageFolder` describes it.

    Args:
        pattern: The pattern.

    Raises:
        ConfigError: A field is unknown or occurs twice, or `{class}` is missing.
    """

    def __init__(self, pattern: str) -> None:
        self.text = pattern
        fields = re.findall(r"{(.*?)}", pattern)
        if unknown := [name for name in fields if name not in FIELDS]:
            raise self.error(f"has an unknown field, {{{one_line(unknown[0])}}}. Use {{class}}, {{client}}, {{split}}")
        if twice := [name for name in fields if fields.count(name) > 1]:
            raise self.error(f"has {{{twice[0]}}} twice. Use it once, and * for any other text")
        if "class" not in fields:
            raise self.error("has no {class}. Put it where the paths have the class, as in '{client}/{class}/*'")
        regex = {"*": "[^/]*", "?": "[^/]", **{f"{{{name}}}": f"(?P<{name}>[^/]+?)" for name in fields}}
        parts = re.split(r"({\w+}|[*?])", pattern)
        self.regex = re.compile("".join(regex.get(part, re.escape(part)) for part in parts))

    def error(self, what: str) -> ConfigError:
        """Return a `ConfigError` about this path pattern. The message ends with the text `what`."""
        return ConfigError(f"{KEY}.pattern: {one_line(repr(self.text))} {what}")

    def match_files(self, root: Path) -> pd.DataFrame:
        """Return a table of the files below `root` that match the pattern: the column `path`, and one column per field.

        Raises:
            ConfigError: No file matches.
        """
        import pandas as pd

        names = list(paths_below(root, self.text.count("/")))
        matches = {name: match.groupdict() for name in names if (match := self.regex.fullmatch(name))}
        others = [name for name in names if name not in matches]
        if not matches:
            example = f"It contains, for example, {one_line(others[0])}" if others else "It contains no files"
            raise self.error(f"matches no file in {one_line(str(root))}. {example}")
        if others:
            what = f"leaves out {len(others):,} of {len(names):,} files, such as {one_line(others[0])}"
            warnings.warn(str(self.error(what)), stacklevel=2)
        return pd.DataFrame([{"path": root / name, **fields} for name, fields in matches.items()])

    def select_splits(self, frame: pd.DataFrame) -> tuple[pd.DataFrame, np.ndarray]:
        """Return the table rows of the training and test images, and a mask of the test rows.

        If no image has the split `test`, the images of the split `val` are the test images.

        Raises:
            ConfigError: A split is not one of these, there are no training or test images, or a class has only test
                images.
        """
        frame = frame.assign(split=[split_of(name) or name for name in frame["split"]])
        for path, split in zip(frame["path"], frame["split"], strict=True):
            if split not in SPLITS:
                fix = f"It needs to be {', '.join(SPLITS[:-1])} or {SPLITS[-1]}"
                raise self.error(f"finds the split {one_line(repr(split))} in {one_line(str(path))}. {fix}")
        present = set(frame["split"])
        second = "val" if "val" in present and "test" not in present else "test"
        if missing := [name for name in ("train", second) if name not in present]:
            raise self.error(f"finds no image of the split {missing[0]}. Add some, or use a pattern without {{split}}")
        if unused := int((~frame["split"].isin(["train", second])).sum()):
            warnings.warn(str(self.error(f"finds {unused:,} images of the split val that are not used")), stacklevel=2)
        frame = frame[frame["split"].isin(["train", second])]
        test = (frame["split"] == second).to_numpy()
        known = frame["class"].isin(frame["class"][~test])
        if not known.all():
            path = one_line(str(frame["path"][~known].iloc[0]))
            raise ConfigError(f"{KEY}.path: {path}: no training image has this class. Correct its path, or remove it")
        return frame, test


def paths_below(folder: Path, depth: int, prefix: str = "") -> Iterator[str]:
    """Yield the relative paths of the files in a folder and its subfolders, sorted by name, without hidden ones.

    Deeper than `depth`, subfolders are not entered; they are yielded with a slash at the end.
    """
    with naming_file(folder, "folder"), os.scandir(folder) as entries:
        visible = sorted((entry.name, entry.is_dir()) for entry in entries if not is_left_behind(entry.name))
    for name, is_folder in visible:
        if is_folder and depth:
            yield from paths_below(folder / name, depth - 1, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}" + "/" * is_folder


def warn_of_missing_classes(client: np.ndarray, classes: np.ndarray) -> None:
    """Warn if clients lack samples of a class. The warning names the first of these clients."""
    known = set(classes.tolist())
    missing = {name: known - set(classes[client == name].tolist()) for name in np.unique(client).tolist()}
    lacking = {name: sorted(absent) for name, absent in missing.items() if absent}
    if lacking:
        name, absent = next(iter(lacking.items()))
        more = f" ({len(lacking):,} of {len(missing):,} clients lack a class)" if len(lacking) > 1 else ""
        shown = one_line(", ".join(absent))
        warnings.warn(f"{KEY}.path: client {one_line(name)} has no image of class {shown}{more}", stacklevel=2)


def subfolders(folder: Path) -> list[str]:
    """Return the names of a folder's subfolders in alphabetical order, without hidden subfolders."""
    with naming_file(folder, "folder"), os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not is_left_behind(entry.name))


def labelled_files(folder: Path, classes: Sequence[str]) -> tuple[list[Path], Tensor]:
    """Return the image files in a folder's class subfolders, and each file's class. A class may have no subfolder."""
    present = set(subfolders(folder))
    files = [_class_files(folder / name) if name in present else [] for name in classes]
    labels = [label for label, paths in enumerate(files) for _ in paths]
    return [path for paths in files for path in paths], torch.tensor(labels, dtype=torch.int64)


def _nested_pattern(folder: Path, inner: str) -> str:
    """Return the pattern for a folder that was taken for a class but has folders, such as `inner`."""
    if split_of(inner):
        return "{client}/{split}/{class}/*" if subfolders(folder / inner) else "{class}/{split}/*"
    return "{split}/{client}/{class}/*" if split_of(folder.parent.name) else "{client}/{class}/*"


def _class_files(folder: Path) -> list[Path]:
    if inner := subfolders(folder):
        fix = f"If they are the classes of a client, set scenario.dataset.pattern '{_nested_pattern(folder, inner[0])}'"
        raise ConfigError(f"{KEY}.path: {one_line(str(folder))}: has folders, such as {one_line(inner[0])}. {fix}")
    return files_in(folder)
