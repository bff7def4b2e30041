"""Image and text datasets of the Hugging Face `datasets` library, from a folder or from the Hub."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core.errors import ConfigError, one_line, require_extra
from fl_lightning.core.inputs import Inputs
from fl_lightning.core.names import join_names
from fl_lightning.core.trusted_imports import require_trust
from fl_lightning.data.columns import client_ids, column_error, find_column, refuse_missing, token_ids
from fl_lightning.data.custom_data import CustomDataset, Samples, existing_path, split_of
from fl_lightning.data.datasets import KEY
from fl_lightning.data.files import BadFile, naming_file
from fl_lightning.data.image_files import EncodedImage, ImageOptions
from fl_lightning.data.images import Augment
from fl_lightning.data.labels import Labels, read_labels, refuse_untrained_classes
from fl_lightning.data.text import check_lengths
from fl_lightning.data.transforms import Normalize

if TYPE_CHECKING:
    import pandas as pd


class HuggingFace(CustomDataset):
    """Image or text dataset of the Hugging Face `datasets` library.

    Reads a folder that `save_to_disk` wrote, or a dataset of the Hugging Face Hub. Columns that no option names are
    found by their type: the image column, or else the text column, and the column of `ClassLabel`. If there are
    several, the one named `image`, `text`, `label` or `labels` is used. A dataset's own code is never executed. Needs
    `pip install 'fl-lightning[huggingface]'`.

    Args:
        path: Folder that `save_to_disk` wrote; or, with `download`, the name of a dataset on the Hugging Face Hub.
        image: The image column.
        text: The text column.
        label: The label column, or a list of several.
        client: Column of the client that each sample belongs to, for the partition `ByClient`.
        train: Name of the training split.
        test: Name of the test split; by default `test` or else `validation`, or else a share of the training split.
        test_share: That share: of each class, or of each client's samples.
        regression: Whether labels are numbers to predict; by default floating-point labels are.
        size: Height and width to resize images to, or one number for both; not needed if all have one size.
        channels: 1 converts images to grey, 3 to colour; by default grey if all of them are grey.
        mean: Mean of each channel, of pixels in [0, 1]; by default that of the training images.
        std: Standard deviation of each channel; by default that of the training images.
        augment: Random crop and flip of training batches of images: `none`, `per_sample` or `per_batch`; or a transform
            of single images, such as `torchvision.transforms.v2.RandAugment`.
        length: Tokens per text; longer texts are truncated, shorter ones padded. A text without a word is one unknown
            token.
        vocab_size: Number of token ids, including padding and unknown.
        subset: Name of the subset (configuration) of a Hub dataset that has several.
        download: Fetch the dataset from the Hub, or use the library's own cache.
        tokenizer: Of texts: `words`, `bytes`, or the folder of a Hugging Face tokenizer, as of `TextTable`.

    Raises:
        ConfigError: An option is out of range, or two options exclude each other.
    """

    def __init__(
        self,
        path: str,
        image: str | None = None,
        text: str | None = None,
        label: str | list[str] | None = None,
        client: str | None = None,
        train: str = "train",
        test: str | None = None,
        test_share: float = 0.2,
        regression: bool | None = None,
        size: int | tuple[int, int] | None = None,
        channels: Literal[1, 3] | None = None,
        mean: list[float] | None = None,
        std: list[float] | None = None,
        augment: Augment = "none",
        length: int = 200,
        vocab_size: int = 10_000,
        subset: str | None = None,
        download: bool = False,
        tokenizer: str | None = None,
    ) -> None:
        super().__init__(test_share)
        check_lengths(length, vocab_size)
        if image is not None and text is not None:
            raise ConfigError(
                f"{KEY}.text: {text!r} is given beside image, but a network takes images or texts. Name one of them"
            )
        self.path, self.subset, self.download = path, subset, download
        self.image, self.text, self.client = image, text, client
        self.label = [label] if isinstance(label, str) else label
        self.train, self.test = train, test
        self.regression, self.length, self.vocab_size, self.tokenizer = regression, length, vocab_size, tokenizer
        self.options = ImageOptions(size, channels, mean, std, augment)

    def _samples(self) -> Samples:
        splits = self._splits()
        features = next(iter(splits.values())).features
        image, text, label = self._columns(features)
        columns = [*label, *(name for name in (text, self.client) if name is not None)]
        frame = self._frame(splits, features, columns)
        labels = self._labels(frame, features, label)
        client = None if self.client is None else client_ids(frame[self.client])
        train, *test = (len(split) for split in splits.values())
        mask = np.arange(len(frame)) >= train if test else None
        if mask is not None and len(label) == 1 and labels.classes is not None and labels.y.ndim == 1:
            column = frame[label[0]]
            if isinstance(features[label[0]], _library().ClassLabel):
                column = column.map(dict(enumerate(labels.classes)))
            refuse_untrained_classes(column, labels, mask)
        return Samples(frame[text] if image is None else (splits, image), labels, client, mask)

    def _inputs(self, source: Any, order: np.ndarray, fitted: np.ndarray) -> tuple[Tensor | Inputs, dict[str, Any]]:
        if not isinstance(source, tuple):  # a column of texts
            ids = token_ids(source.iloc[order], fitted, self.length, self.vocab_size, self.tokenizer)
            return ids, {"prepare": Normalize()}
        try:
            x = self.options.read(_EncodedImages(source[0], source[1], order))
        except BadFile as error:
            raise ConfigError(f"{KEY}.image: {error}. Replace it, or leave the row out") from error
        return x, self.options.transforms(x, fitted)

    # --- Splits ---

    def _splits(self) -> dict[str, Any]:
        """Load the dataset, and return its training split and, if present, its test split, by name."""
        splits = self._load_saved() if os.path.lexists(self.path) else self._load_from_hub()
        options = (("train", self.train), ("test", self.test))
        if not isinstance(splits, dict):
            for key, name in options:
                if name not in ("train", None):
                    raise ConfigError(f"{KEY}.{key}: {one_line(self.path)} has no splits (got {name!r}). Leave it out")
            splits = {"train": splits}
        for key, name in options:
            if name is not None and name not in splits:
                raise ConfigError(f"{KEY}.{key}: split {name!r} not found. Splits: {', '.join(splits)}")
        others = [name for name in splits if name != self.train]
        by_kind = (name for kind in ("test", "val") for name in others if split_of(name) == kind)
        test = self.test or next(by_kind, None)
        if test == self.train:
            raise ConfigError(f"{KEY}.test: {test!r} is the training split. Name another one, or leave it out")
        chosen = [self.train, *([test] if test else [])]
        if empty := [name for name in chosen if not len(splits[name])]:
            raise ConfigError(
                f"{KEY}.path: the split {empty[0]!r} of {one_line(self.path)} has no samples. Name another split"
            )
        return {name: splits[name].with_format(None) for name in chosen}

    def _load_saved(self) -> Any:
        library, folder = _library(), existing_path(self.path, folder=True)
        try:
            with naming_file(folder, "folder of save_to_disk"):
                return library.load_from_disk(str(folder))
        except BadFile as error:
            message = str(error).rstrip(".")
            raise ConfigError(f"{KEY}.path: {message}. Save the dataset again with save_to_disk") from error

    def _load_from_hub(self) -> Any:
        if not self.download:
            raise ConfigError(
                f"{KEY}.path: {one_line(self.path)}: no such folder. If it is a dataset on the Hugging Face Hub, set "
                "scenario.dataset.download true"
            )
        require_trust(f"{KEY}.download", self.download)
        library = _library()
        try:
            return library.load_dataset(self.path, self.subset)
        except Exception as error:  # of requests, of the hub's, of arrow's, ...
            raise ConfigError(f"{KEY}.path: {one_line(self.path)} cannot be fetched: {one_line(error)}") from error

    # --- Columns ---

    def _columns(self, features: Any) -> tuple[str | None, str | None, list[str]]:
        """Return the names of the image column, the text column (one of these two is None) and the label columns."""
        library, names = _library(), list(features)
        options = {"image": [self.image], "text": [self.text], "label": self.label or (), "client": [self.client]}
        for key, columns in options.items():
            for name in columns:
                if name is not None:
                    find_column(name, names, key)
        label = self.label or [_label_column(features)]
        free = [name for name in names if name not in (*label, self.client)]
        if wrong := [name for name in label if isinstance(features[name], library.Image)]:
            raise ConfigError(
                f"{KEY}.label: column {wrong[0]!r} holds images. Name the column of labels (of {', '.join(names)})"
            )
        images = [name for name in free if isinstance(features[name], library.Image)]
        if self.image is not None and self.image not in images:
            raise ConfigError(
                f"{KEY}.image: column {self.image!r} is {one_line(repr(features[self.image]))[:60]}, not Image"
            )
        if self.image is not None or (self.text is None and images):
            return self.image or _only_column("image", images), None, label
        texts = [name for name in free if getattr(features[name], "dtype", None) in ("string", "large_string")]
        if not (self.text or texts):
            raise ConfigError(
                f"{KEY}.path: {one_line(self.path)} has neither an image nor a text column. For other data, save it "
                "with to_parquet() and use Table"
            )
        return None, self.text or _only_column("text", texts), label

    def _frame(self, splits: dict[str, Any], features: Any, columns: list[str]) -> pd.DataFrame:
        """Return some columns of all splits as one data frame, indexed by split name and row number."""
        import pandas as pd

        frames = {}
        for name, split in splits.items():
            for column in columns:
                if column not in split.column_names:
                    raise ConfigError(f"{KEY}.test: the split {name!r} has no column {column!r}")
                if (own := _class_names(split.features[column])) != (names := _class_names(features[column])):
                    differ = one_line(f"{join_names(own)} instead of {join_names(names)}")
                    raise ConfigError(f"{KEY}.test: the split {name!r} has other classes: {differ}. Save both alike")
            try:
                with naming_file(Path(self.path), "dataset"):
                    chosen = split.select_columns(columns)
                    chosen.data.validate(full=True)  # damaged text would fail later, or crash the process
                    frames[name] = chosen.to_pandas()
            except BadFile as error:
                raise ConfigError(f"{KEY}.path: {error}. Save or fetch the dataset again") from error
            frames[name].index = pd.RangeIndex(1, len(split) + 1)
        return pd.concat(frames)

    def _labels(self, frame: pd.DataFrame, features: Any, label: list[str]) -> Labels:
        classes = features[label[0]]
        if len(label) > 1 or not _holds_classes(classes):
            return read_labels([frame[name] for name in label], self.regression)
        column = frame[label[0]]
        refuse_missing(column, "label")
        if isinstance(classes, _library().ClassLabel):
            y = torch.from_numpy(np.array(column, np.int64))
            if (y < 0).any():  # how the Hub marks withheld labels
                fix = "Name a split that has labels in scenario.dataset.test"
                row = int((y < 0).int().argmax())
                raise column_error(column, "label", f", which is not a class. {fix}", row)
            return Labels(y, classes.num_classes, classes.names)
        classes = classes.feature
        y = torch.zeros(len(column), classes.num_classes, dtype=torch.uint8)
        for row, present in enumerate(column):
            y[row, torch.as_tensor(np.array(present, np.int64))] = 1
        return Labels(y, classes.num_classes, classes.names)


class _EncodedImages(Sequence[EncodedImage]):
    """Encoded images of a Hugging Face dataset's splits, in the given order. Each image is read when it is accessed."""

    def __init__(self, splits: dict[str, Any], column: str, order: np.ndarray) -> None:
        image = _library().Image(decode=False)
        self.parts = {name: split.select_columns([column]).cast_column(column, image) for name, split in splits.items()}
        self.column, self.order = column, order

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        row = int(self.order[at])
        for name, part in self.parts.items():
            if row < len(part):
                return _encoded_image(f"row {row + 1} of {name}", part[row][self.column])
            row -= len(part)
        raise IndexError(at)


def _encoded_image(name: str, encoded: dict[str, Any] | None) -> EncodedImage:
    if encoded is None:
        raise BadFile(Path(name), "contains no image")
    if encoded["bytes"] is not None:
        return EncodedImage(name, encoded["bytes"])
    return EncodedImage(encoded["path"], Path(encoded["path"]))  # a URL is not fetched: it is no file


def _library() -> Any:
    with require_extra("huggingface", f"{KEY}: HuggingFace needs the package datasets"):
        import datasets
    return datasets


def _class_names(feature: Any) -> Sequence[str]:
    """Return the names of the classes of a column of `ClassLabel`, or of lists of them; none for other columns."""
    return getattr(getattr(feature, "feature", feature), "names", None) or ()


def _holds_classes(feature: Any) -> bool:
    """Return whether a column's type is `ClassLabel` or a list of `ClassLabel`."""
    kind = _library().ClassLabel
    return isinstance(feature, kind) or isinstance(getattr(feature, "feature", None), kind)


def _label_column(features: Any) -> str:
    """Return the name of the default label column: `label`, `labels`, or else the only `ClassLabel` column."""
    for name in ("label", "labels"):
        if name in features:
            return name
    columns = [name for name in features if _holds_classes(features[name])]
    if not columns:
        raise ConfigError(f"{KEY}.label: no column of ClassLabel found. Name it, of {', '.join(features)}")
    return _only_column("label", columns)


def _only_column(key: str, columns: list[str]) -> str:
    """Return the default column for an option: the column with the option's name, or else the only column."""
    if key in columns:
        return key
    if len(columns) > 1:
        raise ConfigError(f"{KEY}.{key}: several columns are possible. Name one of {', '.join(columns)}")
    return columns[0]
