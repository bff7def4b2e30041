"""Check the columns of a table, and convert client ids and texts.

The functions raise a `ConfigError` that names the option, the column and the row.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any
from unicodedata import category, normalize

import numpy as np
from torch import Tensor

from fl_lightning.core.errors import ConfigError, one_line
from fl_lightning.core.inputs import Inputs
from fl_lightning.data.datasets import KEY
from fl_lightning.data.number_text import is_number, written_numbers
from fl_lightning.data.schema import finite_in_float32, is_numeric
from fl_lightning.data.text import PADDING, UNKNOWN, encode_texts
from fl_lightning.data.tokenizers import encode_whole

if TYPE_CHECKING:
    import pandas as pd

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


def warn_of_similar_names(names: Iterable[Any], key: str, what: str) -> None:
    """Warn if names, such as those of classes, differ only in case, spaces, invisible signs or signs at their ends.

    Args:
        names: The names. Others than texts are ignored.
        key: The option that they belong to.
        what: What they name, in the plural.
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        if isinstance(name, str):
            visible = "".join(each for each in normalize("NFKC", name) if category(each) != "Cf")
            spaced = re.sub(r"(?<=\w)[\s_-]+(?=\w)", " ", visible.casefold())
            groups.setdefault(spaced.strip(" .,;:'\""), []).append(name)
    if similar := [group for group in groups.values() if len(group) > 1]:
        shown = one_line("; ".join(" and ".join(map(repr, group)) for group in similar[:FEW]))
        fix = "If they are the same, write them in one way"
        warnings.warn(f"{KEY}.{key}: {what} differ only in their writing: {shown}. {fix}", stacklevel=2)


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
