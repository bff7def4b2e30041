"""Custom datasets in CSV or Parquet files: tables of features, of texts, and of paths of images."""

from __future__ import annotations

import json
import re
import shlex
import warnings
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from torch import Tensor

from fl_lightning.core.errors import ConfigError, one_line
from fl_lightning.core.inputs import Inputs
from fl_lightning.core.names import join_names
from fl_lightning.data.columns import (
    FEW,
    WRITTEN_NUMBERS,
    column_error,
    find_column,
    refuse_missing,
    refuse_not_finite,
    refuse_nul,
    refuse_written_numbers,
    row_location,
    token_ids,
    warn_of_similar_names,
)
from fl_lightning.data.custom_data import existing_path, read_schema
from fl_lightning.data.datasets import KEY
from fl_lightning.data.files import BadFile
from fl_lightning.data.image_files import EncodedImage, ImageOptions
from fl_lightning.data.images import Augment
from fl_lightning.data.labels import Labels, read_known_classes
from fl_lightning.data.schema import Column, TableSchema, is_numeric
from fl_lightning.data.table_files import FileTable
from fl_lightning.data.text import check_lengths
from fl_lightning.data.transforms import Normalize

if TYPE_CHECKING:
    import pandas as pd

MOST_CATEGORIES = 1_000
"""Maximum number of categories of a one-hot encoded column. One with more is probably a name, an id or a text."""

FEWEST_IDS = 100
"""Minimum number of rows of a table in which a column can count as ids. In smaller tables, values often differ."""

SIMILAR = "Write categories like those of the training rows: {}"
"""Fix if the test rows are given. `{}` stands for the training rows' categories."""

RARE = "Leave the column out of the features, or join its categories, such as {}, to fewer ones"
"""Fix if the test rows are drawn at random: most categories are those of a few rows."""

ID_NAME = re.compile(r"(^|[\W_])(?i:id|uuid|guid)$|[a-z]I[Dd]$")
"""Matches names of columns that usually hold ids, such as `id` and `patient_id`."""


class Table(FileTable):
    """Custom table in a CSV or Parquet file, with feature columns and one or more label columns.

    Text and integer labels are classes. Floating-point labels are numbers to predict. Several 0/1 columns make a
    multi-label target. Text columns are categorical features, and so are those that `categorical` names.

    Args:
        path: The file, with a header. `.parquet` files are read as Parquet, all others as text with `separator`.
        label: The label column, or a list of several.
        features: Columns to learn from; by default all named columns that no other option names.
        categorical: Columns of numbers that are categories.
        encoding: `one_hot` makes one column per category of the training rows, all 0 for an unknown category; `codes`
            makes one column that numbers the categories from 1, with 0 for an unknown one.
        standardize: Shift and scale numbers, and codes, to mean 0 and standard deviation 1 of the training rows.
        regression: Whether labels are numbers to predict; by default floating-point labels are.
        client: Column of the client that each row belongs to, for the partition `ByClient`.
        split: Column that holds `train` or `test`.
        test_path: A second file with the test rows.
        test_share: Share of the rows to test on if there is neither: of each class, or of each client's rows.
        separator: Character between the columns of a text file.
        exclude: Columns to leave out of the default `features`, such as ids.
        schema: A `schema.json` that a run on another table has written. Features and classes are encoded as there, so
            that tables in several places have one encoding.
        decimal: Character before the fraction of a number, `.` or `,`.
        thousands: Character between the groups of digits of a number, such as `,` in `1,234`; by default none.

    Raises:
        ConfigError: An option is out of range, or two options exclude each other.
    """

    def __init__(
        self,
        path: str,
        label: str | list[str],
        features: list[str] | None = None,
        categorical: list[str] | None = None,
        encoding: Literal["one_hot", "codes"] = "one_hot",
        standardize: bool = True,
        regression: bool | None = None,
        client: str | None = None,
        split: str | None = None,
        test_path: str | None = None,
        test_share: float = 0.2,
        separator: str = ",",
        exclude: list[str] | None = None,
        schema: str | None = None,
        decimal: Literal[".", ","] = ".",
        thousands: str | None = None,
    ) -> None:
        super().__init__(path, label, regression, client, split, test_path, test_share, separator, decimal, thousands)
        if schema is not None:
            given: dict[str, Any] = {"features": features, "categorical": categorical, "exclude": exclude}
            given |= {"encoding": encoding != "one_hot", "standardize": not standardize}
            if refused := [key for key, value in given.items() if value]:
                fix = f"Leave out {join_names(refused)}"
                raise ConfigError(f"{KEY}.schema: it defines the features and their encoding. {fix}")
        self.schema = schema
        self.features, self.exclude, self.categorical = features, exclude or (), set(categorical or ())
        self.encoding, self.standardize = encoding, standardize

    def _columns(self) -> dict[str, Sequence[str]]:
        return {**super()._columns(), "features": self.features or (), "exclude": self.exclude}

    def _used(self, columns: list[str]) -> list[str]:
        return [*super()._used(columns), *(self._features(columns) if self._known_schema is None else ())]

    def _inputs(self, source: Any, order: np.ndarray, fitted: np.ndarray) -> tuple[Tensor, dict[str, Any]]:
        frame, classes = source[0].iloc[order], source[1]
        if known := self._known_schema:
            for each in known.columns:
                find_column(each.name, list(frame.columns), "schema")
            rows = known.rows(frame)
            warn_of_unknown_categories(known, rows.numpy(), SIMILAR)
            return known.encode(rows), {"prepare": Normalize(), "schema": known}
        features = self._features(list(frame.columns))
        for name in self.categorical - set(features):
            column = find_column(name, list(frame.columns), "categorical")
            raise ConfigError(f"{KEY}.categorical: {column!r} is not a feature. Name a feature column")
        columns = [self._describe(frame[name], fitted) for name in features]
        ids = self._warn_of_ids(frame[features]) if self.features is None else []
        schema = TableSchema(columns, self.encoding, self.label, classes, self.client)
        rows = schema.rows(frame)
        fix = RARE if self.draws_test_set else SIMILAR
        warn_of_unknown_categories(schema, np.delete(rows.numpy(), fitted, axis=0), fix, ids)
        return schema.encode(rows), {"prepare": Normalize(), "schema": schema}

    @cached_property
    def _known_schema(self) -> TableSchema | None:
        """The schema in the file that the option `schema` names; None if the option is not set."""
        if self.schema is None:
            return None
        schema = read_schema(self.schema)
        if schema.label != self.label:
            held = ", ".join(schema.label or ())
            raise ConfigError(f"{KEY}.label: {', '.join(self.label)} is not the label of the schema. Set it to {held}")
        return schema

    def _text_columns(self) -> Collection[str]:
        if (known := self._known_schema) is None:
            return ()
        values = {column.name: column.categories for column in known.columns} | {self.label[0]: known.classes}
        return [name for name, each in values.items() if any(isinstance(value, str) for value in each or ())]

    def _read_labels(self, columns: Sequence[pd.Series]) -> Labels:
        if (known := self._known_schema) and known.classes:
            return read_known_classes(columns[0], known.classes)
        return super()._read_labels(columns)

    def _features(self, columns: list[str]) -> list[str]:
        used = set(chain(*self._columns().values()))
        # pandas writes its row numbers to a column without a name, and reads that as "Unnamed: 0".
        others = [name for name in columns if name not in used and not name.startswith("Unnamed: ")]
        features = others if self.features is None else self.features
        if not features:
            raise ConfigError(f"{KEY}.features: {one_line(self.path)} has no columns left to learn from. Name some")
        return features

    def _warn_of_ids(self, frame: pd.DataFrame) -> list[str]:
        """Warn about feature columns that look like ids, naming the option that excludes them. Return their names."""
        if ids := [name for name in frame.columns if name not in self.categorical and looks_like_id(frame[name])]:
            shown = one_line(", ".join(ids[:FEW])) + (", ..." if len(ids) > FEW else "")
            fix = one_line(shlex.quote(json.dumps([*self.exclude, *ids], ensure_ascii=False)))
            what = f"almost all values differ, as in a column of ids ({shown})"
            warnings.warn(f"{KEY}.features: {what}. To leave it out, add --{KEY}.exclude {fix}", stacklevel=2)
        return ids

    def _describe(self, column: pd.Series, fitted: np.ndarray) -> Column:
        """Return the description of a feature column, with categories or scale computed from the `fitted` rows."""
        refuse_missing(column, "features", "Fill it in, remove the row, or leave the column out of the features")
        described = Column(str(column.name), str(column.dtype))
        if column.name not in self.categorical and is_numeric(column):
            refuse_not_finite(column, "features")
            return self._standardize(described, column, fitted)
        if column.name not in self.categorical:
            check_categories(column)
        refuse_nul(column, "features")
        import pandas as pd

        known = pd.Series(column.to_numpy(object if is_numeric(column) else str)[fitted]).unique().tolist()
        described = replace(described, categories=sorted(known))
        warn_of_similar_names(known, "features", f"categories of column {column.name!r}")
        if self.encoding == "codes":
            return self._standardize(described, column, fitted)
        if len(known) > MOST_CATEGORIES:
            fix = "Name it in scenario.dataset.exclude, or set scenario.dataset.encoding codes"
            raise column_error(column, "features", f"holds {len(known):,} categories, too many for one_hot. {fix}")
        return described

    def _standardize(self, described: Column, column: pd.Series, fitted: np.ndarray) -> Column:
        if not self.standardize:
            return described
        values = described.values(column)
        codes = values[fitted] + (described.categories is not None)  # codes count from 1
        # Rounded, so that the order of summation changes no bit of the data.
        mean, scale = (float(f"{number:.12g}") for number in (codes.mean(), codes.std() if np.ptp(codes) else 1.0))
        return replace(described, mean=mean, scale=scale)


class TextTable(FileTable):
    """Custom texts in a CSV or Parquet file, with a text column and one or more label columns.

    The most frequent words of the training texts get token ids. A text without a word is one unknown token. With a
    `tokenizer`, the inputs are `input_ids` and `attention_mask`, for networks that take these.

    Args:
        path: The file, with a header. `.parquet` files are read as Parquet, all others as text with `separator`.
        text: The text column.
        label: The label column, or a list of several.
        length: Tokens per text; longer texts are truncated, shorter ones padded.
        vocab_size: Number of token ids, including padding and unknown. A Hugging Face tokenizer has its own.
        regression: Whether labels are numbers to predict; by default floating-point labels are.
        client: Column of the client that each row belongs to, for the partition `ByClient`.
        split: Column that holds `train` or `test`.
        test_path: A second file with the test rows.
        test_share: Share of the rows to test on if there is neither: of each class, or of each client's rows.
        separator: Character between the columns of a text file.
        decimal: Character before the fraction of a number, `.` or `,`.
        thousands: Character between the groups of digits of a number, such as `,` in `1,234`; by default none.
        tokenizer: `words`, `bytes`, or the folder of a Hugging Face tokenizer. By default, lower-case words without
            signs.

    Raises:
        ConfigError: An option is out of range, or two options exclude each other.
    """

    def __init__(
        self,
        path: str,
        text: str = "text",
        label: str | list[str] = "label",
        length: int = 200,
        vocab_size: int = 10_000,
        regression: bool | None = None,
        client: str | None = None,
        split: str | None = None,
        test_path: str | None = None,
        test_share: float = 0.2,
        separator: str = ",",
        decimal: Literal[".", ","] = ".",
        thousands: str | None = None,
        tokenizer: str | None = None,
    ) -> None:
        super().__init__(path, label, regression, client, split, test_path, test_share, separator, decimal, thousands)
        check_lengths(length, vocab_size)
        self.text, self.length, self.vocab_size, self.tokenizer = text, length, vocab_size, tokenizer

    def _columns(self) -> dict[str, Sequence[str]]:
        return {"text": [self.text], **super()._columns()}

    def _inputs(self, source: Any, order: np.ndarray, fitted: np.ndarray) -> tuple[Tensor | Inputs, dict[str, Any]]:
        column = source[0][self.text].iloc[order]
        return token_ids(column, fitted, self.length, self.vocab_size, self.tokenizer), {"prepare": Normalize()}


class ImageTable(FileTable):
    """Custom images listed in a CSV or Parquet file, with a column of paths and one or more label columns.

    Images are rotated as their EXIF orientation says. Pixels are normalized to mean 0 and standard deviation 1 of the
    training images, channel by channel.

    Args:
        path: The file, with a header. `.parquet` files are read as Parquet, all others as text with `separator`.
        image: The column of the images' paths.
        label: The label column, or a list of several.
        folder: Folder that the images' paths start from; by default the folder of the table's file.
        regression: Whether labels are numbers to predict; by default floating-point labels are.
        client: Column of the client that each image belongs to, for the partition `ByClient`.
        split: Column that holds `train` or `test`.
        test_path: A second file with the test rows.
        test_share: Share of the rows to test on if there is neither: of each class, or of each client's rows.
        separator: Character between the columns of a text file.
        size: Height and width to resize all images to, or one number for both; not needed if all have one size.
        channels: 1 converts all images to grey, 3 to colour; by default grey if all of them are grey.
        cache: Folder for a file of the decoded images. They are memory-mapped instead of held in memory, and later
            runs reuse the file.
        mean: Mean of each channel, of pixels in [0, 1]; by default that of the training images.
        std: Standard deviation of each channel; by default that of the training images.
        augment: Random crop (4 pixels of padding) and horizontal flip of training batches: `none`, drawn
            `per_sample`, or drawn once `per_batch`; or a transform of single images, such as
            `torchvision.transforms.v2.RandAugment`.
        decimal: Character before the fraction of a number, `.` or `,`.
        thousands: Character between the groups of digits of a number, such as `,` in `1,234`; by default none.

    Raises:
        ConfigError: An option is out of range, or two options exclude each other.
    """

    def __init__(
        self,
        path: str,
        image: str = "path",
        label: str | list[str] = "label",
        folder: str | None = None,
        regression: bool | None = None,
        client: str | None = None,
        split: str | None = None,
        test_path: str | None = None,
        test_share: float = 0.2,
        separator: str = ",",
        size: int | tuple[int, int] | None = None,
        channels: Literal[1, 3] | None = None,
        cache: str | None = None,
        mean: list[float] | None = None,
        std: list[float] | None = None,
        augment: Augment = "none",
        decimal: Literal[".", ","] = ".",
        thousands: str | None = None,
    ) -> None:
        super().__init__(path, label, regression, client, split, test_path, test_share, separator, decimal, thousands)
        self.image, self.folder = image, folder
        self.options = ImageOptions(size, channels, mean, std, augment, cache)

    def _columns(self) -> dict[str, Sequence[str]]:
        return {"image": [self.image], **super()._columns()}

    def _inputs(self, source: Any, order: np.ndarray, fitted: np.ndarray) -> tuple[Tensor, dict[str, Any]]:
        column = source[0][self.image].iloc[order]
        paths = self._paths(column)
        try:
            x = self.options.read([EncodedImage(str(path), path) for path in paths])
        except BadFile as error:
            fix = "Correct the path, replace the file, or remove the row"
            raise column_error(column, "image", f": {error}. {fix}", paths.index(error.path)) from error
        return x, self.options.transforms(x, fitted)

    def _paths(self, column: pd.Series) -> list[Path]:
        """Return the path of each row's image."""
        refuse_missing(column, "image")
        folder = None if self.folder is None else existing_path(self.folder, folder=True, key="folder")
        paths = []
        for row, (file, value) in enumerate(zip(column.index.get_level_values(0), column, strict=True)):
            if not isinstance(value, str):
                raise column_error(column, "image", ", which is not a path", row)
            paths.append((folder or Path(file).parent) / value)
        return paths


def looks_like_id(column: pd.Series) -> bool:
    """Return whether a column of integers or texts looks like an id of the rows, or of persons with a few rows each.

    That is so if all values differ or, in a column named like an id, more than half of them.
    """
    if len(column) < FEWEST_IDS or column.dtype.kind not in "iuOUT":
        return False
    share = column.nunique() / len(column)
    return share == 1 or (share > 0.5 and ID_NAME.search(str(column.name)) is not None)


def warn_of_unknown_categories(schema: TableSchema, rows: np.ndarray, fix: str, ignored: Collection[str] = ()) -> None:
    """Warn about columns in which most rows have an unknown category.

    Args:
        schema: The columns and their known categories.
        rows: The rows as numbers, as `TableSchema.rows` returns them.
        fix: How to fix it, with `{}` for the known categories.
        ignored: Names of columns that are not checked.
    """
    for column, values in zip(schema.columns, rows.T, strict=True):
        unknown = int((values < 0).sum())
        if column.categories and column.name not in ignored and 2 * unknown > len(values):
            known = one_line(join_names(column.categories))
            what = f"column {column.name!r}: {unknown:,} of {len(values):,} rows have a category that is not known"
            warnings.warn(f"{KEY}.features: {what}. {fix.format(known)}", stacklevel=2)


def check_categories(column: pd.Series) -> None:
    """Raise a `ConfigError` if a column has values that are probably no categories, such as numbers written as text."""
    import pandas as pd

    values = pd.Series(column.to_numpy(object))
    if (kind := pd.api.types.infer_dtype(values)) not in ("string", "mixed-integer", "boolean", "integer", "floating"):
        fix = "Convert it to numbers, or leave it out of the features"
        raise column_error(column, "features", f"holds neither numbers nor text ({kind}). {fix}")
    numbers = pd.to_numeric(values.astype(str), errors="coerce")
    fix = "or name the column in scenario.dataset.categorical"
    text = numbers.isna().to_numpy()
    if text.any() and not text.all():
        row = int(text.argmax())
        what = f"{row_location(column, row)}, {one_line(repr(values[row]))}. {WRITTEN_NUMBERS}, {fix}"
        raise column_error(column, "features", f"holds numbers and, in {what}")
    large = (numbers.abs() >= 2.0**64).to_numpy()  # read_csv returns these as text
    if large.any():
        row = int(large.argmax())
        what = f"{one_line(str(values[row]))[: FEW * 2]} in {row_location(column, row)}"
        raise column_error(
            column, "features", f"holds {what}, which is too large for a 64-bit integer. Make it smaller, {fix}"
        )
    refuse_written_numbers(column, "features", fix)
