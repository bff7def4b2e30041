"""Schema of a table: the feature columns that a network was trained on, and the encoding as network inputs."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core.errors import ConfigError, one_line

if TYPE_CHECKING:
    import pandas as pd

LONGEST_LIST = 8
"""Maximum number of feature columns that `TableSchema.summary` names. Of the others, it gives only the number."""


@dataclass(frozen=True)
class Column:
    """Description of one feature column of a table: name, dtype, and the categories or the scale.

    Args:
        name: The column's name.
        dtype: The dtype of the training data, for example `float64` or `object`.
        categories: The values of a category column, in the order of their indices; None for a column of numbers.
        mean: Subtracted from a number, or from a category's code.
        scale: The divisor of the difference.
    """

    name: str
    dtype: str
    categories: list[Any] | None = None
    mean: float = 0.0
    scale: float = 1.0

    def values(self, column: pd.Series) -> np.ndarray:
        """Return a table column as numbers, `(n,)`. Categories become their indices; an unknown category becomes -1.

        Raises:
            ConfigError: Values are missing, or are not finite numbers where the schema has numbers.
        """
        import pandas as pd

        if missing := int(column.isna().sum()):
            where = f"{missing} of {len(column)} values are missing, first in row {int(column.isna().argmax()) + 1}"
            raise ConfigError(f"{self.name}: {where}. Fill them in, or leave these rows out")
        is_text = any(isinstance(category, str) for category in self.categories or ())
        if not is_text and not is_numeric(column):
            raise ConfigError(f"{self.name}: expected numbers, got {column.dtype}. Convert the column to {self.dtype}")
        if self.categories is None:
            if overflows := int((~finite_in_float32(column)).sum()):
                raise ConfigError(
                    f"{self.name}: {overflows} values are not finite in float32. Correct them, or leave these rows out"
                )
            return column.to_numpy(np.float64)
        values = pd.Series(column.to_numpy(str if is_text else object)).astype(object)
        return pd.Index(self.categories, dtype=object).get_indexer(values).astype(np.float64)

    def encode(self, values: Tensor, one_hot: bool) -> Tensor:
        """Convert a column of numbers or category indices to network inputs, by scaling or one-hot encoding.

        `values` are those of the method `values`, as `(n, 1)`. Categories with `one_hot` become `(n, categories)`,
        other columns `(n, 1)`.
        """
        if self.categories is not None and one_hot:
            # `type_as`, since a trace keeps the device that is given to `arange`.
            return (values == torch.arange(len(self.categories)).type_as(values)).float()
        codes = values if self.categories is None else values + 1
        mean, scale = (torch.tensor(each, dtype=torch.float64).type_as(values) for each in (self.mean, self.scale))
        return ((codes - mean) / scale).float()


@dataclass(frozen=True)
class TableSchema:
    """The columns of a table and their encoding, to convert rows to network inputs and network outputs to labels.

    A run on a `Table` writes it to `schema.json`. ONNX and TorchScript exports contain it, and apply `encode`.

    Args:
        columns: The feature columns, in order.
        encoding: How categories are encoded, `one_hot` or `codes`.
        label: The label columns.
        classes: The label of each class, in the order of the network's outputs; None without classes.
        client: The client column, if there is one.

    Example:
        >>> import pandas as pd
        >>> schema = TableSchema([Column("age", "int64", mean=40.0, scale=10.0), Column("town", "object", ["A", "B"])])
        >>> rows = schema.rows(pd.DataFrame({"town": ["B", "C"], "age": [50, 30]}))
        >>> rows.tolist()
        [[50.0, 1.0], [30.0, -1.0]]
        >>> schema.encode(rows).tolist()
        [[1.0, 0.0, 1.0], [-1.0, 0.0, 0.0]]
    """

    columns: list[Column]
    encoding: Literal["one_hot", "codes"] = "one_hot"
    label: list[str] | None = None
    classes: list[Any] | None = None
    client: str | None = None

    def rows(self, frame: pd.DataFrame) -> Tensor:
        """Return a table's features as numbers, `(n, columns)` in `float64`. Categories become indices.

        Args:
            frame: A table that has the schema's columns, in any order. Other columns are ignored.

        Raises:
            ConfigError: A column is missing, has missing values, or holds text, Inf or numbers too large for `float32`
                where the schema has numbers.
        """
        if missing := [column.name for column in self.columns if column.name not in frame.columns]:
            raise ConfigError(f"{one_line(missing[0])}: column not found. The schema has {self._names()}")
        return torch.from_numpy(np.stack([column.values(frame[column.name]) for column in self.columns], axis=1))

    def encode(self, rows: Tensor) -> Tensor:
        """Convert rows of numbers and category indices to the network's inputs, `(n, width)` in `float32`.

        The method `rows` returns such rows.
        """
        one_hot = self.encoding == "one_hot"
        return torch.cat([column.encode(rows[:, i : i + 1], one_hot) for i, column in enumerate(self.columns)], dim=1)

    def examples(self, n: int) -> Tensor:
        """Return `n` artificial rows of numbers and category indices, `(n, columns)`, as example inputs of `encode`.

        Numbers are near the mean. Categories are known in some rows and unknown in others.
        """
        rows = [
            [
                i % (len(column.categories) + 1) - 1 if column.categories else column.mean + (i - n // 2) * column.scale
                for column in self.columns
            ]
            for i in range(n)
        ]
        return torch.tensor(rows, dtype=torch.float64)

    def summary(self) -> str:
        """Return one line that names the feature, label and client columns."""
        client = f"; client: {self.client}" if self.client else ""
        return one_line(f"features: {self._names()}; label: {', '.join(self.label or ())}{client}")

    def _names(self) -> str:
        names = [column.name for column in self.columns]
        more = len(names) - LONGEST_LIST
        return ", ".join(names[:LONGEST_LIST]) + (f" and {more} more" if more > 0 else "")

    def to_json(self) -> str:
        """Return the schema as JSON text, which `from_json` reads."""
        return json.dumps(asdict(self), indent=1, default=str) + "\n"

    @property
    def digest(self) -> str:
        """The first 16 hexadecimal digits of the SHA-256 digest of the schema's JSON text."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    @classmethod
    def from_json(cls, text: str) -> TableSchema:
        """Build a schema from JSON text that `to_json` has returned.

        Raises:
            ConfigError: The text is not the JSON of a schema.
        """
        try:
            fields = json.loads(text)
            return cls(**fields | {"columns": [Column(**column) for column in fields["columns"]]})
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"schema: not the JSON of a table's schema ({one_line(error)})") from error


def finite_in_float32(column: pd.Series) -> np.ndarray:
    """Return a boolean mask of a table column's rows: True where the number is finite in `float32`."""
    with np.errstate(over="ignore"):
        return np.isfinite(column.to_numpy(np.float64).astype(np.float32))


def is_numeric(column: pd.Series) -> bool:
    """Return whether a table column has a dtype of numbers or booleans."""
    return column.dtype.kind in "iufb"
