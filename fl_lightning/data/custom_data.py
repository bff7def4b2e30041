"""Base class of custom datasets, and functions that read their labels, client ids and texts and choose test samples.

The functions raise a `ConfigError` that names the option, the column and the row.
"""

from __future__ import annotations

import re
import warnings
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unicodedata import normalize

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core.errors import ConfigError, check_number, one_line
from fl_lightning.core.inputs import Inputs
from fl_lightning.core.names import join_names
from fl_lightning.core.objectives import Regression, objective_of
from fl_lightning.data.assignment import indices_by_class
from fl_lightning.data.datasets import Dataset, LoadedData
from fl_lightning.data.files import BadFile, check_exists
from fl_lightning.data.number_text import is_number, written_numbers
from fl_lightning.data.schema import TableSchema, finite_in_float32, is_numeric
from fl_lightning.data.subsampling import stratified_sample
from fl_lightning.data.text import PADDING, UNKNOWN, encode_texts
from fl_lightning.data.tokenizers import encode_whole

if TYPE_CHECKING:
    import pandas as pd

KEY = "scenario.dataset"
FEW = 20
"""Maximum number of different integers that always count as classes, and of columns that a message names."""

NO_HEADER = "If the first line is a sample, add a line with the names of the columns above it"
"""Hint for files in which names of columns are numbers."""

WRITTEN_NUMBERS = "Write plain numbers, such as 1234.5, set scenario.dataset.decimal and thousands as they are written"
"""Fix for numbers that are written as text."""

WRITTEN = {
    "numbers": WRITTEN_NUMBERS,
    "dates": "Convert them to numbers, such as days since the first date",
    "lists": "Write each element to a column of its own",
}
"""Fixes for what is written as text."""

SPLIT_NAMES = {
    "train": "train(?:ing)?|trn",
    "test": "test(?:ing)?|tst",
    "val": "val(?:id|idation)?|dev|eval(?:uation)?",
}
"""Patterns of the names that folders and columns use for the training, test and validation samples."""


def split_of(name: str) -> str | None:
    """Return the split that a name stands for: `train`, `test` or `val`; None for any other name.

    Example:
        >>> split_of("Training"), split_of("test_set"), split_of("validation"), split_of("testimony")
        ('train', 'test', 'val', None)
    """
    ending = r"(?:[\s_-]*(?:set|data|images|split))?"
    matching = (
        split for split, names in SPLIT_NAMES.items() if re.fullmatch(f"(?:{names}){ending}", name, re.IGNORECASE)
    )
    return next(matching, None)


def existing_path(path: str, folder: bool = False, key: str = "path") -> Path:
    """Check that a file (or, with `folder`, a folder) exists, and return its path."""
    kind = "folder" if folder else "file"
    if not path:
        raise ConfigError(f"{KEY}.{key}: is empty. Name the {kind}")
    try:
        if check_exists(Path(path), folder):
            return Path(path)
    except BadFile as error:
        raise ConfigError(f"{KEY}.{key}: {error}") from error
    hint = ". Write the whole path: ~ is not replaced" if path.startswith("~") else ""
    raise ConfigError(f"{KEY}.{key}: {one_line(path)}: no such {kind}{hint}")


def read_schema(path: str) -> TableSchema:
    """Read the schema of a table (columns and encoding) from the file that `scenario.dataset.schema` names.

    Raises:
        ConfigError: It cannot be read, or is no schema.
    """
    try:
        return TableSchema.from_json(existing_path(path, key="schema").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{KEY}.schema: {one_line(path)} cannot be read: {one_line(error)}") from error


def find_column(name: str, columns: Sequence[str], key: str) -> str:
    """Check that a table has a column of this name, and return the name. The error suggests a similar name."""
    if name in columns:
        return name
    nearest = get_close_matches(name, columns, 1)
    first = f"{', '.join(columns[:FEW])}{', ...' if len(columns) > FEW else ''}"
    hint = f"Did you mean {nearest[0]!r}?" if nearest else f"Columns: {first}"
    if not nearest and any(map(is_number, columns)):
        hint += f". {NO_HEADER}"
    raise ConfigError(f"{KEY}.{key}: column {one_line(repr(name))} not found. {one_line(hint)}")


def column_error(column: pd.Series, key: str, what: str, row: int | None = None) -> ConfigError:
    """Return the `ConfigError` for an invalid column of a table or, given `row`, for the invalid value in this row.

    `key` is the option that names the column, and the message ends with `what`. The column's index holds the file, or
    the split, and the number of each row.
    """
    name = f"{KEY}.{key}: column {column.name!r}"
    if row is None:
        return ConfigError(f"{name} {what}")
    value = column.iloc[row]
    shown = one_line(repr(value) if isinstance(value, str) else str(value))
    return ConfigError(f"{name} holds {shown} in {row_location(column, row)}{what}")


def row_location(column: pd.Series, row: int) -> str:
    """Describe the `row`-th value of a table column by row number and file, as "row 7 of data.csv"."""
    file, number = column.index[row]
    return f"row {number} of {one_line(str(file))}"


def refuse_missing(column: pd.Series, key: str, fix: str = "Fill it in, or remove the row") -> None:
    """Raise a `ConfigError` if a table column has missing values."""
    missing = column.isna().to_numpy()
    if missing.any():
        location = row_location(column, int(missing.argmax()))
        rows = f"{missing.sum():,} of {len(column):,} rows"
        if not is_numeric(column):
            fix += ". The words NA, None and null count as no value: to keep one, write another word, such as none"
        raise column_error(column, key, f"has no value in {rows}, first in {location}. {fix}")


def refuse_nul(column: pd.Series, key: str) -> None:
    """Raise a `ConfigError` if a text of a table column has a NUL character."""
    for row, text in enumerate(column):
        if isinstance(text, str) and "\0" in text:  # NumPy drops it at the end: two texts become one
            raise column_error(column, key, ", which has a NUL character. Remove the character", row)


def refuse_not_finite(column: pd.Series, key: str) -> None:
    """Raise a `ConfigError` if a table column has numbers that are NaN, Inf or too large for `float32`."""
    finite = finite_in_float32(column)
    if not finite.all():
        fix = ", which is not finite in float32. Correct the number, or remove the row"
        raise column_error(column, key, fix, int((~finite).argmax()))


class Labels(NamedTuple):
    """The labels of all samples of a custom dataset.

    Attributes:
        y: One label, or one row of labels, per sample.
        outputs: Number of the network's outputs.
        classes: The value of each class, or the name of each label of a multi-label target; None for regression.
    """

    y: Tensor
    outputs: int
    classes: Sequence[Any] | None


def refuse_written_numbers(column: pd.Series, key: str, otherwise: str) -> None:
    """Raise a `ConfigError` if most values of a table column are numbers, dates or lists that are written as text.

    Args:
        column: The column.
        key: The option that names it.
        otherwise: What to do if they are meant as categories or classes, for the message.
    """
    import pandas as pd

    texts = pd.Series(column.to_numpy(object)).astype(str)
    if found := written_numbers(texts):
        what, mask = found
        row = int(mask.argmax())
        where = f"{one_line(repr(texts[row]))} in {row_location(column, row)}"
        raise column_error(column, key, f"holds {what} written as text, such as {where}. {WRITTEN[what]}, {otherwise}")


def read_labels(columns: Sequence[pd.Series], regression: bool | None) -> Labels:
    """Convert a table's label columns to a tensor; return the tensor, the number of outputs and the classes.

    One column holds classes; several columns of 0 and 1 are multi-label targets. Labels are numbers to predict if
    `regression` is true, or if it is None and a column is floating-point with other values than 0 and 1.

    Args:
        columns: The label columns.
        regression: Whether labels are numbers to predict; None to decide by their values.
    """
    for column in columns:
        refuse_missing(column, "label")
        if regression is not False and not is_numeric(column):
            refuse_written_numbers(column, "label", "or set scenario.dataset.regression to false")
    is_given = regression is not None
    if not regression:
        columns = [_as_integers(column) if is_given or column.isin([0, 1]).all() else column for column in columns]
    if not is_given:
        regression = any(column.dtype.kind == "f" for column in columns)
        if regression and len(columns) == 1:
            _refuse_few_whole_numbers(columns[0])
    if regression:
        values = torch.from_numpy(np.stack([_numbers(column) for column in columns], axis=1))
        return Labels(values if len(columns) > 1 else values[:, 0].clone(), len(columns), None)
    if len(columns) > 1:
        flags = torch.from_numpy(np.stack([_flags(column) for column in columns], axis=1))
        return Labels(flags, len(columns), [str(column.name) for column in columns])
    if not is_given:
        _refuse_many_classes(columns[0])
    return _classes(columns[0])


def _numbers(column: pd.Series) -> np.ndarray:
    if column.dtype.kind not in "iufb":
        raise column_error(column, "label", "is not numeric, but regression needs numbers")
    refuse_not_finite(column, "label")
    return column.to_numpy(np.float64).astype(np.float32)


def _flags(column: pd.Series) -> np.ndarray:
    if not (is_flag := column.isin([0, 1])).all():
        value = one_line(repr(column[~is_flag].tolist()[0]))
        fix = "Several label columns need to hold 0 and 1, or numbers with scenario.dataset.regression true"
        raise column_error(column, "label", f"holds {value}. {fix}")
    return column.to_numpy().astype(np.uint8)


def _classes(column: pd.Series) -> Labels:
    """Return the class index of each row of a label column, with classes in sorted order."""
    try:
        values, codes = np.unique(column.to_numpy(object), return_inverse=True)
    except TypeError as error:
        raise column_error(column, "label", "mixes text and numbers. Use one of them") from error
    if len(values) == 1:
        raise column_error(column, "label", f"has only one class, {one_line(repr(values[0]))}")
    return Labels(torch.from_numpy(codes.astype(np.int64)), len(values), values.tolist())


def refuse_untrained_classes(column: pd.Series, labels: Labels, test: np.ndarray) -> None:
    """Raise a `ConfigError` if test samples have a class that no training sample has.

    Args:
        column: The label of each sample, as it is in the data.
        labels: The labels of all samples, which are classes.
        test: Boolean mask of the test samples.
    """
    y = labels.y.numpy()
    assert labels.classes is not None
    trained = np.unique(y[~test])
    untrained = test & ~np.isin(y, trained)
    if len(trained) and untrained.any():
        names = one_line(join_names(repr(labels.classes[label]) for label in trained.tolist()))
        what = (
            f", and no training sample has this label. Write it like the training labels ({names}), or remove the row"
        )
        raise column_error(column, "label", what, int(untrained.argmax()))


def warn_of_similar_names(names: Iterable[Any], key: str, what: str) -> None:
    """Warn if names, such as those of classes, differ only in case, in spaces or in punctuation at their ends.

    Args:
        names: The names. Others than texts are ignored.
        key: The option that they belong to.
        what: What they name, in the plural.
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        if isinstance(name, str):
            spaced = re.sub(r"(?<=\w)[\s_-]+(?=\w)", " ", normalize("NFKC", name).casefold())
            groups.setdefault(spaced.strip(" .,;:'\""), []).append(name)
    if similar := [group for group in groups.values() if len(group) > 1]:
        shown = one_line("; ".join(" and ".join(map(repr, group)) for group in similar[:FEW]))
        fix = "If they are the same, write them in one way"
        warnings.warn(f"{KEY}.{key}: {what} differ only in their writing: {shown}. {fix}", stacklevel=2)


def read_known_classes(column: pd.Series, classes: Sequence[Any], place: str = "a class of the schema") -> Labels:
    """Return the index of each row's label in the list `classes`. The error says that a label is not at this place."""
    import pandas as pd

    refuse_missing(column, "label")
    is_text = any(isinstance(each, str) for each in classes)
    values = column.to_numpy(str if is_text else object)
    codes = pd.Index(list(classes), dtype=object).get_indexer(pd.Series(values).astype(object))
    if (codes < 0).any():
        raise column_error(column, "label", f", which is not {place}", int(np.argmax(codes < 0)))
    return Labels(torch.from_numpy(codes.astype(np.int64)), len(classes), list(classes))


def _refuse_many_classes(column: pd.Series) -> None:
    count = column.nunique()
    if column.dtype.kind in "iu" and count > max(FEW, len(column) // 2):
        fix = "Set it to true if they are numbers to predict, to false if they are classes"
        what = f"holds {count:,} different integers in {len(column):,} rows. {fix}"
        raise column_error(column, "regression", what)


def _as_integers(column: pd.Series) -> pd.Series:
    """Return a column with its floating-point numbers converted to integers, if all of them are whole numbers."""
    return column.astype(np.int64) if column.dtype.kind == "f" and (column % 1 == 0).all() else column


def _refuse_few_whole_numbers(column: pd.Series) -> None:
    count = column.nunique()
    if count <= FEW and (column % 1 == 0).all():
        fix = "Set it to true if they are numbers to predict, to false if they are classes"
        raise column_error(column, "regression", f"holds {count:,} different whole numbers with a fraction of 0. {fix}")


def client_ids(column: pd.Series) -> np.ndarray:
    """Return the client id of each row, integer or text, from a table's client column."""
    refuse_missing(column, "client")
    if column.dtype.kind in "iu":
        return column.to_numpy()
    values = column.to_numpy(object)
    if not all(isinstance(value, str) for value in values):
        raise column_error(column, "client", f"is {column.dtype}. Client ids are integers or text")
    refuse_nul(column, "client")
    return values.astype(np.str_)


def token_ids(
    column: pd.Series, fitted: np.ndarray, length: int, vocab_size: int, tokenizer: str | None = None
) -> Tensor | Inputs:
    """Convert a table column of texts to token ids: with a tokenizer, also to a mask of the tokens.

    Without a tokenizer, words are lower-case, and a text without words, such as an emoji, is one unknown token. The
    vocabulary is that of the `fitted` rows.
    """
    refuse_missing(column, "text")
    texts = column.to_numpy(object)
    for row, text in enumerate(texts):
        if not isinstance(text, str):
            raise column_error(column, "text", ", which is not text", row)
    if tokenizer is not None:
        return encode_whole(list(texts), fitted, length, vocab_size, tokenizer)
    ids = encode_texts(list(texts), fitted, length, vocab_size)
    ids[ids[:, 0] == PADDING, 0] = UNKNOWN
    return ids


def hold_out(y: Tensor, share: float, client: np.ndarray | None = None) -> np.ndarray:
    """Draw test samples at random, stratified by class (and by client, if given); return a boolean mask `(n,)`.

    The seed is fixed and not the run's, so that runs with different seeds are tested on the same samples. Each client,
    if given, keeps at least one training sample.
    """
    strata = objective_of(y).strata(y).numpy()
    rng = np.random.default_rng(0)
    if client is None:
        mask = stratified_sample(strata, share, rng)
    else:
        mask = np.zeros(len(y), dtype=bool)
        for rows in indices_by_class(np.unique(client, return_inverse=True)[1]):
            mask[rows] = stratified_sample(strata[rows], share, rng)
    if not mask.any():
        of = "" if client is None else " of each client's"
        raise ConfigError(f"{KEY}.test_share: {share} of {len(y):,} samples{of} is less than one. Raise it")
    return mask


@dataclass
class Samples:
    """The labels and clients of all samples of a custom dataset, and a mask of the test samples.

    Attributes:
        source: The argument for `_inputs`, which reads the inputs later.
        labels: Labels of all samples.
        client: The client of each sample; None if the data have no client ids.
        test: Boolean mask of the test samples; None to hold out a share.
    """

    source: Any
    labels: Labels
    client: np.ndarray | None = None
    test: np.ndarray | None = None


class CustomDataset(Dataset):
    """Base class of custom datasets. If the data have no test set, a share of the samples is held out for testing.

    Args:
        test_share: Share to test on if the data have no test samples: of each class, or of each client's samples.

    Attributes:
        label_key: The option that the names of the classes come from.
        client_key: The option that the names of the clients come from.
    """

    has_statistics = True
    label_key, client_key = "label", "client"

    def __init__(self, test_share: float) -> None:
        check_number(f"{KEY}.test_share", test_share, "(0, 1)")
        self.test_share = test_share

    @abstractmethod
    def _samples(self) -> Samples:
        """Read the labels, clients and test mask of all samples, but not yet their inputs."""

    @abstractmethod
    def _inputs(self, source: Any, order: np.ndarray, fitted: np.ndarray) -> tuple[Tensor | Inputs, dict[str, Any]]:
        """Return the samples' inputs in the given order, and a dict of other arguments for `LoadedData`.

        Statistics are those of the rows `fitted`, in this order. If labels depend on them, the dict also has the
        `labels` in the given order, and the `outputs` of a network, in place of those of `_samples`.
        """

    def load(self) -> LoadedData:
        """Read the data, and split them into training and test tensors, which are views of the same memory."""
        samples = self._samples()
        (y, outputs, classes), client, test = samples.labels, samples.client, samples.test
        self.draws_test_set = test is None
        if test is None:
            test = hold_out(y, self.test_share, client)
        order = np.argsort(test, kind="stable")  # the training samples first
        train = len(order) - int(test.sum())
        warn_of_similar_names(classes or (), self.label_key, "classes")
        if client is not None:
            warn_of_similar_names(np.unique(client).tolist(), self.client_key, "clients")
        x, fields = self._inputs(samples.source, order, self.fitted_rows(train))
        y, outputs = fields.pop("labels", y[order]), fields.pop("outputs", outputs)
        if client is not None:
            fields |= {"client_train": client[order[:train]], "client_test": client[order[train:]]}
        if classes is not None:
            fields["class_names"] = [str(name) for name in classes]
        elif type(self).objective is None:
            self.objective = Regression()  # decided by the labels' reader
        return LoadedData(x[:train], y[:train], x[train:], y[train:], outputs, **fields)
