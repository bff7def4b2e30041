"""What all of one's own data have in common: labels of any kind, who samples come from, and what is held out."""

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
from fl_lightning.data.partitions import by_class
from fl_lightning.data.reading import BadFile, is_there
from fl_lightning.data.scenario import stratified_sample
from fl_lightning.data.schema import finite_in_float32
from fl_lightning.data.text import PADDING, ids_of
from fl_lightning.data.transforms import BatchTransform

if TYPE_CHECKING:
    import pandas as pd

KEY = "scenario.dataset"
FEW = 20
"""So many different whole numbers may be classes, however few samples there are."""


def check_share(share: float) -> None:
    """Refuse a `test_share` that is none.

    Raises:
        ConfigError: It is outside (0, 1).
    """
    check_number(f"{KEY}.test_share", share, "(0, 1)")


def placed(path: str, folder: bool = False, key: str = "path", mend: str = "") -> Path:
    """A file, or a folder, of the user's that is where a key says.

    Raises:
        ConfigError: It is not there, or is something else.
    """
    try:
        if is_there(Path(path), folder):
            return Path(path)
    except BadFile as error:
        raise ConfigError(f"{KEY}.{key}: {error}") from error
    raise ConfigError(f"{KEY}.{key}: {one_line(path)}: no such {'folder' if folder else 'file'}{mend}")


def column_named(name: str, columns: Sequence[str], key: str) -> str:
    """A column's name, if there is such a column.

    Raises:
        ConfigError: There is none; the nearest name is told, or those there are.
    """
    if name in columns:
        return name
    near = get_close_matches(name, columns, 1)
    some = f"{', '.join(columns[:FEW])}{', ...' if len(columns) > FEW else ''}"
    mend = f"did you mean {near[0]!r}?" if near else f"there are {some}"
    raise ConfigError(f"{KEY}.{key}: there is no column {one_line(repr(name))}; {one_line(mend)}")


def spot(column: pd.Series, position: int) -> str:
    """Which row of which file is at a position of a column; its index holds both, rows count from 1."""
    file, row = column.index[position]
    return f"row {row} of {one_line(str(file))}"


def refuse_missing(column: pd.Series, key: str, mend: str = "fill it in, or leave its row out") -> None:
    """Refuse a column with missing values.

    Raises:
        ConfigError: Names the column, how many it misses and where the first one is.
    """
    missing = column.isna().to_numpy()
    if missing.any():
        raise ConfigError(
            f"{KEY}.{key}: column {column.name!r} has no value in {missing.sum():,} of {len(column):,} rows, first in "
            f"{spot(column, int(missing.argmax()))}; {mend}"
        )


def refuse_nul(column: pd.Series, key: str) -> None:
    """Refuse a column of labels, clients or categories where a text has a NUL character.

    It is a damaged byte, and numpy drops it from a text's end, so that two texts become one.

    Raises:
        ConfigError: Names the column and the first such row.
    """
    for row, value in enumerate(column.to_numpy(object)):
        if isinstance(value, str) and "\0" in value:
            raise ConfigError(
                f"{KEY}.{key}: column {column.name!r} holds {one_line(repr(value))} in {spot(column, row)}, with a NUL "
                "character. Remove the character, or leave the row out"
            )


def refuse_not_finite(column: pd.Series, key: str) -> None:
    """Refuse a column of numbers that are not all finite in `float32`, which is what the network takes.

    Raises:
        ConfigError: Names the column and the first such row.
    """
    finite = finite_in_float32(column)
    if not finite.all():
        row = int((~finite).argmax())
        raise ConfigError(
            f"{KEY}.{key}: column {column.name!r} holds {column.iloc[row]} in {spot(column, row)}, which is not finite "
            "in float32. Correct the number, or leave its row out"
        )


def targets(columns: Sequence[pd.Series], regression: bool | None) -> tuple[Tensor, int]:
    """Labels as `LoadedData` wants them.

    Args:
        columns: The label's column, or several: of 0 and 1 for labels that a sample may have several of, else of
            numbers.
        regression: Whether labels are numbers to be predicted; if that is not said, fractions are.

    Returns:
        `(n,)` classes (`int64`), `(n, L)` of 0 and 1 (`uint8`), or `(n,)` or `(n, T)` numbers (`float32`); and the
        number of the network's outputs.

    Raises:
        ConfigError: A column misses values, or they are not what they need to be.
    """
    for column in columns:
        refuse_missing(column, "label")
        refuse_nul(column, "label")
    is_said = regression is not None
    if not is_said:
        regression = any(column.dtype.kind == "f" for column in columns)
    if regression:
        values = torch.from_numpy(np.stack([_numbers(column) for column in columns], axis=1))
        return values if len(columns) > 1 else values[:, 0].clone(), len(columns)
    if len(columns) > 1:
        return torch.from_numpy(np.stack([_flags(column) for column in columns], axis=1)), len(columns)
    if not is_said:
        _refuse_many_classes(columns[0])
    return _classes(columns[0])


def _numbers(column: pd.Series) -> np.ndarray:
    if column.dtype.kind not in "iufb":
        raise ConfigError(f"{KEY}.label: column {column.name!r} holds no numbers, which regression needs")
    refuse_not_finite(column, "label")
    return column.to_numpy(np.float64).astype(np.float32)


def _flags(column: pd.Series) -> np.ndarray:
    if not (known := column.isin([0, 1])).all():
        raise ConfigError(
            f"{KEY}.label: column {column.name!r} holds {one_line(repr(column[~known].tolist()[0]))}; several label "
            "columns need to hold 0 and 1, or numbers with scenario.dataset.regression true"
        )
    return column.to_numpy().astype(np.uint8)


def _classes(column: pd.Series) -> tuple[Tensor, int]:
    """Classes by the order of their values: numbers by size, text by the alphabet."""
    try:
        values, codes = np.unique(column.to_numpy(object), return_inverse=True)
    except TypeError as error:
        raise ConfigError(f"{KEY}.label: column {column.name!r} holds text and numbers, or neither") from error
    if len(values) == 1:
        raise ConfigError(f"{KEY}.label: column {column.name!r} holds one class only, {one_line(repr(values[0]))}")
    return torch.from_numpy(codes.astype(np.int64)), len(values)


def _refuse_many_classes(column: pd.Series) -> None:
    different = column.nunique()
    if column.dtype.kind in "iu" and different > max(FEW, len(column) // 2):
        raise ConfigError(
            f"{KEY}.regression: column {column.name!r} holds {different:,} different whole numbers in {len(column):,} "
            "rows: say true if they are numbers to be predicted, false if they are classes"
        )


def client_ids(column: pd.Series) -> np.ndarray:
    """Who each sample comes from, as `LoadedData` wants it: whole numbers or text.

    Raises:
        ConfigError: A value is missing or is neither.
    """
    refuse_missing(column, "client")
    if column.dtype.kind in "iu":
        return column.to_numpy()
    values = column.to_numpy(object)
    if not all(isinstance(value, str) for value in values):
        raise ConfigError(f"{KEY}.client: column {column.name!r} is {column.dtype}; ids are whole numbers or text")
    refuse_nul(column, "client")
    return values.astype(np.str_)


def token_ids(column: pd.Series, train: int, length: int, vocab_size: int) -> Tensor:
    """Return the word ids of a column of texts, as `ids_of` does.

    Raises:
        ConfigError: The column holds something else, misses some texts, or has texts without a word.
    """
    refuse_missing(column, "text")
    texts = column.to_numpy(object)
    for row, text in enumerate(texts):
        if not isinstance(text, str):
            raise ConfigError(
                f"{KEY}.text: column {column.name!r} holds {one_line(repr(text))} in {spot(column, row)}, no text"
            )
    ids = ids_of(list(texts), train, length, vocab_size)
    empty = (ids[:, 0] == PADDING).numpy()
    if empty.any():
        raise ConfigError(
            f"{KEY}.text: column {column.name!r} has no word of a-z and 0-9 in {empty.sum():,} of {len(column):,} "
            f"rows, first in {spot(column, int(empty.argmax()))}. Write a text there, or leave the row out"
        )
    return ids


def held_out(y: Tensor, share: float, client: np.ndarray | None = None) -> np.ndarray:
    """Which samples to test on where the data do not say: a share of each class, or of each client's samples.

    They are drawn by a seed of their own, which is not the run's: runs of all seeds are tested on the same samples.

    Args:
        y: Labels of all samples.
        share: The share, in (0, 1).
        client: Who each sample comes from. Then it is a share of each client's, who keeps one at least to train on.

    Returns:
        Boolean mask `(n,)`.

    Raises:
        ConfigError: That leaves no sample to test on.
    """
    strata = objective_of(y).strata(y).numpy()
    rng = np.random.default_rng(0)
    if client is None:
        mask = stratified_sample(strata, share, rng)
    else:
        mask = np.zeros(len(y), dtype=bool)
        for own in by_class(np.unique(client, return_inverse=True)[1]):
            mask[own] = stratified_sample(strata[own], share, rng)
    if not mask.any():
        of = "" if client is None else " of each client's"
        raise ConfigError(f"{KEY}.test_share: {share} of {len(y):,} samples{of} is none to test on; raise it")
    return mask


def divided(
    x: Tensor,
    y: Tensor,
    train: int,
    outputs: int,
    prepare: BatchTransform,
    augment: BatchTransform | None = None,
    client: np.ndarray | None = None,
) -> LoadedData:
    """A dataset from one table of samples, the training samples first; nothing is copied.

    Args:
        x: Inputs of all samples.
        y: Their labels.
        train: How many of them are to train on.
        outputs: Number of the network's outputs.
        prepare: Turns a batch as stored into what the network takes.
        augment: Random change of a prepared training batch.
        client: Who each sample comes from.
    """
    return LoadedData(
        x[:train],
        y[:train],
        x[train:],
        y[train:],
        outputs,
        prepare,
        augment,
        client_train=None if client is None else client[:train],
        client_test=None if client is None else client[train:],
    )
