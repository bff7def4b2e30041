"""Helpers for custom data: labels of any kind, clients, texts, and the share that is held out for testing."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core.errors import ConfigError, check_number, one_line
from fl_lightning.core.objectives import objective_of
from fl_lightning.data.datasets import LoadedData
from fl_lightning.data.files import BadFile, check_exists
from fl_lightning.data.partitions import indices_by_class
from fl_lightning.data.scenario import stratified_sample
from fl_lightning.data.schema import finite_in_float32
from fl_lightning.data.text import PADDING, UNKNOWN, encode_texts
from fl_lightning.data.transforms import BatchTransform

if TYPE_CHECKING:
    import pandas as pd

KEY = "scenario.dataset"
FEW = 20
"""Up to so many different integers are classes, however few samples there are. Also columns named in a message."""


def check_share(share: float) -> None:
    """Check `test_share`.

    Raises:
        ConfigError: It is outside (0, 1).
    """
    check_number(f"{KEY}.test_share", share, "(0, 1)")


def existing_path(path: str, folder: bool = False, key: str = "path") -> Path:
    """Return the path of an existing file, or of an existing folder.

    Raises:
        ConfigError: It does not exist, or is something else. Names the option `key`.
    """
    try:
        if check_exists(Path(path), folder):
            return Path(path)
    except BadFile as error:
        raise ConfigError(f"{KEY}.{key}: {error}") from error
    raise ConfigError(f"{KEY}.{key}: {one_line(path)}: no such {'folder' if folder else 'file'}")


def find_column(name: str, columns: Sequence[str], key: str) -> str:
    """Return a column's name if it is among `columns`.

    Raises:
        ConfigError: It is not. Suggests the nearest name, or lists the columns.
    """
    if name in columns:
        return name
    nearest = get_close_matches(name, columns, 1)
    some = f"{', '.join(columns[:FEW])}{', ...' if len(columns) > FEW else ''}"
    hint = f"Did you mean {nearest[0]!r}?" if nearest else f"Columns: {some}"
    raise ConfigError(f"{KEY}.{key}: column {one_line(repr(name))} not found. {one_line(hint)}")


def row_location(column: pd.Series, position: int) -> str:
    """Return "row 7 of data.csv" for a position in a column. Its index holds the file and the row, from 1."""
    file, row = column.index[position]
    return f"row {row} of {one_line(str(file))}"


def refuse_missing(column: pd.Series, key: str, fix: str = "Fill it in, or remove the row") -> None:
    """Refuse a column with missing values.

    Raises:
        ConfigError: Names the column, the number of missing values and the first row.
    """
    missing = column.isna().to_numpy()
    if missing.any():
        raise ConfigError(
            f"{KEY}.{key}: column {column.name!r} has no value in {missing.sum():,} of {len(column):,} rows, first in "
            f"{row_location(column, int(missing.argmax()))}. {fix}"
        )


def refuse_nul(column: pd.Series, key: str) -> None:
    """Refuse a column of texts with a NUL character: NumPy drops it at a text's end, so that two texts become one.

    Raises:
        ConfigError: Names the column and the first such row.
    """
    for row, text in enumerate(column):
        if isinstance(text, str) and "\0" in text:
            raise ConfigError(
                f"{KEY}.{key}: column {column.name!r} holds {one_line(repr(text))} in {row_location(column, row)}, "
                "which has a NUL character. Remove the character"
            )


def refuse_not_finite(column: pd.Series, key: str) -> None:
    """Refuse a column of numbers that are not all finite in `float32`, the network's input type.

    Raises:
        ConfigError: Names the column and the first such row.
    """
    finite = finite_in_float32(column)
    if not finite.all():
        row = int((~finite).argmax())
        raise ConfigError(
            f"{KEY}.{key}: column {column.name!r} holds {column.iloc[row]} in {row_location(column, row)}, which is "
            "not finite in float32. Correct the number, or remove the row"
        )


def read_labels(columns: Sequence[pd.Series], regression: bool | None) -> tuple[Tensor, int]:
    """Return labels in the form of `LoadedData`, and the number of the network's outputs.

    Args:
        columns: The label column; or several, of 0 and 1 for multi-label targets, or of numbers.
        regression: Whether labels are numbers to predict; if None, floating-point columns are.

    Returns:
        Classes `(n,)` (`int64`), multi-label targets `(n, L)` (`uint8`), or numbers `(n,)` or `(n, T)` (`float32`);
        and the number of outputs.

    Raises:
        ConfigError: A column has missing values, or values of another kind.
    """
    for column in columns:
        refuse_missing(column, "label")
    is_given = regression is not None
    if not is_given:
        regression = any(column.dtype.kind == "f" for column in columns)
    if regression:
        values = torch.from_numpy(np.stack([_numbers(column) for column in columns], axis=1))
        return values if len(columns) > 1 else values[:, 0].clone(), len(columns)
    if len(columns) > 1:
        return torch.from_numpy(np.stack([_flags(column) for column in columns], axis=1)), len(columns)
    if not is_given:
        _refuse_many_classes(columns[0])
    return _classes(columns[0])


def _numbers(column: pd.Series) -> np.ndarray:
    if column.dtype.kind not in "iufb":
        raise ConfigError(f"{KEY}.label: column {column.name!r} is not numeric, but regression needs numbers")
    refuse_not_finite(column, "label")
    return column.to_numpy(np.float64).astype(np.float32)


def _flags(column: pd.Series) -> np.ndarray:
    if not (known := column.isin([0, 1])).all():
        raise ConfigError(
            f"{KEY}.label: column {column.name!r} holds {one_line(repr(column[~known].tolist()[0]))}. Several label "
            "columns need to hold 0 and 1, or numbers with scenario.dataset.regression true"
        )
    return column.to_numpy().astype(np.uint8)


def _classes(column: pd.Series) -> tuple[Tensor, int]:
    """Return the class of each row and their number; classes are sorted by value."""
    try:
        values, codes = np.unique(column.to_numpy(object), return_inverse=True)
    except TypeError as error:
        raise ConfigError(f"{KEY}.label: column {column.name!r} mixes text and numbers. Use one of them") from error
    if len(values) == 1:
        raise ConfigError(f"{KEY}.label: column {column.name!r} has only one class, {one_line(repr(values[0]))}")
    return torch.from_numpy(codes.astype(np.int64)), len(values)


def _refuse_many_classes(column: pd.Series) -> None:
    different = column.nunique()
    if column.dtype.kind in "iu" and different > max(FEW, len(column) // 2):
        raise ConfigError(
            f"{KEY}.regression: column {column.name!r} holds {different:,} different integers in {len(column):,} "
            "rows. Set it to true if they are numbers to predict, to false if they are classes"
        )


def client_ids(column: pd.Series) -> np.ndarray:
    """Return the client of each sample as `LoadedData` needs it: integers or text.

    Raises:
        ConfigError: A value is missing, is neither an integer nor text, or has a NUL character.
    """
    refuse_missing(column, "client")
    if column.dtype.kind in "iu":
        return column.to_numpy()
    values = column.to_numpy(object)
    if not all(isinstance(value, str) for value in values):
        raise ConfigError(f"{KEY}.client: column {column.name!r} is {column.dtype}. Client ids are integers or text")
    refuse_nul(column, "client")
    return values.astype(np.str_)


def token_ids(column: pd.Series, train: int, length: int, vocab_size: int) -> Tensor:
    """Return the token ids of a column of texts, as `encode_texts` does.

    A text without a word, for example of emoji only, becomes one unknown token.

    Raises:
        ConfigError: The column misses a text, or holds something else.
    """
    refuse_missing(column, "text")
    texts = column.to_numpy(object)
    for row, text in enumerate(texts):
        if not isinstance(text, str):
            raise ConfigError(
                f"{KEY}.text: column {column.name!r} holds {one_line(repr(text))} in {row_location(column, row)}, "
                "which is not text"
            )
    ids = encode_texts(list(texts), train, length, vocab_size)
    ids[ids[:, 0] == PADDING, 0] = UNKNOWN
    return ids


def hold_out(y: Tensor, share: float, client: np.ndarray | None = None) -> np.ndarray:
    """Draw the samples to test on: a share of each class, or of each client's samples.

    The seed is fixed and not the run's, so that runs with different seeds are tested on the same samples.

    Args:
        y: Labels of all samples.
        share: The share, in (0, 1).
        client: The client of each sample. If given, each client keeps at least one training sample.

    Returns:
        Boolean mask `(n,)` of the test samples.

    Raises:
        ConfigError: The share is so small that no sample is left to test on.
    """
    strata = objective_of(y).strata(y).numpy()
    rng = np.random.default_rng(0)
    if client is None:
        mask = stratified_sample(strata, share, rng)
    else:
        mask = np.zeros(len(y), dtype=bool)
        for own in indices_by_class(np.unique(client, return_inverse=True)[1]):
            mask[own] = stratified_sample(strata[own], share, rng)
    if not mask.any():
        of = "" if client is None else " of each client's"
        raise ConfigError(f"{KEY}.test_share: {share} of {len(y):,} samples{of} is less than one. Raise it")
    return mask


def split_rows(
    x: Tensor,
    y: Tensor,
    train: int,
    outputs: int,
    prepare: BatchTransform,
    augment: BatchTransform | None = None,
    client: np.ndarray | None = None,
) -> LoadedData:
    """Split samples into a training and a test set without copying them. Training samples come first.

    Args:
        x: Inputs of all samples.
        y: Their labels.
        train: Number of training samples.
        outputs: Number of the network's outputs.
        prepare: Converts a batch to the network's input.
        augment: Random change of a prepared training batch.
        client: The client of each sample.
    """
    clients = (None, None) if client is None else (client[:train], client[train:])
    return LoadedData(
        x[:train],
        y[:train],
        x[train:],
        y[train:],
        outputs,
        prepare,
        augment,
        client_train=clients[0],
        client_test=clients[1],
    )
