"""Read the labels of custom datasets: classes, 0/1 labels, or numbers to predict.

The functions raise a `ConfigError` that names the option, the column and the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core.errors import one_line
from fl_lightning.core.names import join_names
from fl_lightning.data.columns import FEW, column_error, refuse_missing, refuse_not_finite, refuse_written_numbers
from fl_lightning.data.schema import is_numeric

if TYPE_CHECKING:
    import pandas as pd


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
