"""The base class of custom datasets, and the choice of their test samples."""

from __future__ import annotations

import re
from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from fl_lightning.core.errors import ConfigError, check_number, one_line
from fl_lightning.core.inputs import Inputs
from fl_lightning.core.objectives import Regression, objective_of
from fl_lightning.data.assignment import indices_by_class
from fl_lightning.data.columns import warn_of_similar_names
from fl_lightning.data.datasets import KEY, Dataset
from fl_lightning.data.files import BadFile, check_exists
from fl_lightning.data.labels import Labels
from fl_lightning.data.loaded_data import LoadedData
from fl_lightning.data.schema import TableSchema
from fl_lightning.data.subsampling import stratified_sample

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
    hint = f". Write the whole path: {path[0]} is not replaced" if path.startswith(("~", "$")) else ""
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
        fix = "Raise it" if len(y) > 1 else "One sample cannot be split: add samples"
        raise ConfigError(f"{KEY}.test_share: {share} of {len(y):,} samples{of} is less than one. {fix}")
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
