"""The base class of datasets, and functions that their loading shares."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core.arguments import ArgumentsMixin
from fl_lightning.core.errors import ConfigError, FLError, one_line
from fl_lightning.core.objectives import IGNORED, Objective
from fl_lightning.data.checks import check, warn_of_likely_classes
from fl_lightning.data.loaded_data import LoadedData

KEY = "scenario.dataset"
"""The config key with which error messages about the data begin."""


class Dataset(ArgumentsMixin, ABC):
    """Base class of datasets: the `scenario.dataset` of a config.

    Attributes:
        objective: The learning task; inferred from the labels if None.
        has_statistics: Whether `load` computes statistics, such as a mean or a vocabulary, of the `fitted_rows`.
        fitted: The training samples that these statistics are computed from, ascending; by default all.
        draws_test_set: Whether `load` has drawn the test samples at random, since the data have none.
        known_classes: Names of all classes, in order, if the data may lack some of them; otherwise None.
    """

    objective: Objective | None = None
    has_statistics: bool = False
    fitted: np.ndarray | None = None
    draws_test_set: bool = False
    known_classes: Sequence[str] | None = None

    def fitted_rows(self, train: int) -> np.ndarray:
        """Return the indices of the training samples from which statistics of the inputs are computed, such as means.

        By default, these are all training samples.

        Args:
            train: The number of training samples.
        """
        return np.arange(train) if self.fitted is None else self.fitted

    @abstractmethod
    def load(self) -> LoadedData:
        """Read the training and test data and return them as `LoadedData`.

        Raises:
            ConfigError: Files are missing or damaged; the message says which files go where.
        """

    def checked(self, objective: Objective | None = None, trains: bool = True) -> LoadedData:
        """Load the data, check the shapes, dtypes and values of the tensors, and return the data.

        Args:
            objective: The learning task; the dataset's own, or inferred from the labels, if None.
            trains: Whether the training samples are used. If not, their labels are not compared with the test labels.

        Raises:
            ConfigError: The data cannot be loaded, or do not match `LoadedData`.
        """
        with naming_class(self.error_prefix):
            data = self.load()
            if self.known_classes is not None:
                data = with_classes(data, self.known_classes)
        try:
            check(data, objective or self.objective)
        except ValueError as error:
            raise ConfigError(f"{self.error_prefix}: {error}") from error
        if trains:
            self.check_test_classes(data)
            if objective is None and self.objective is None:
                warn_of_likely_classes(self.error_prefix, data)
        return data

    def check_test_classes(self, data: LoadedData) -> None:
        """Raise a `ConfigError` if test samples have a class that no training sample has.

        The base class accepts such classes, because some datasets have them on purpose.
        """

    @property
    def error_prefix(self) -> str:
        """Return the beginning of error messages about the data: the config key and the class."""
        return f"{KEY}: {type(self).__name__}"


def with_classes(data: LoadedData, classes: Sequence[str]) -> LoadedData:
    """Return loaded data whose classes are those of a list, in its order. The data may lack some of them.

    Raises:
        ConfigError: The labels are not classes, or the data have a class that is not in the list.
    """
    y = data.y_train
    if data.schema is not None or y.is_floating_point() or y.ndim > 1:
        why = "the classes of a table are in its schema.json" if data.schema else "the labels are not classes"
        raise ConfigError(f"classes: {why}. Leave it out")
    names = data.class_names
    if names is None and data.num_classes > len(classes):
        raise ConfigError(f"classes: the data have {data.num_classes} classes, the list {len(classes)}. List them all")
    y_test = data.y_test
    if names is not None:
        refuse_unknown_classes(names, classes)
        index = torch.tensor([classes.index(name) for name in names])
        # labels below 0 are refused later
        y, y_test = (torch.where(labels < 0, labels, index[labels]) for labels in (y, y_test))
    return replace(data, y_train=y, y_test=y_test, num_classes=len(classes), class_names=list(classes))


def refuse_unknown_classes(names: Iterable[str], classes: Sequence[str]) -> None:
    """Raise a `ConfigError` if the data have a class that is not in the list of all classes."""
    if unknown := [name for name in names if name not in classes]:
        raise ConfigError(f"classes: the data have the class {one_line(repr(unknown[0]))}, which is not listed. Add it")


@contextmanager
def naming_class(who: str) -> Iterator[None]:
    """Context manager: convert unexpected exceptions to a `ConfigError` that names the failing class, `who`."""
    try:
        yield
    except FLError:
        raise
    except Exception as error:
        raise ConfigError(f"{who}: {type(error).__name__}: {one_line(error)}. Use --debug for the traceback") from error


def count_outputs(*labels: Tensor) -> int:
    """Return the number of outputs that a network needs for these labels: of classes or of label columns."""
    y = labels[0]
    if y.is_floating_point() or y.ndim == 2:
        return 1 if y.ndim == 1 else y.shape[1]
    if y.ndim == 3:
        labels = tuple(mask[mask != IGNORED] for mask in labels)
    return max((int(y.max()) for y in labels if len(y)), default=-1) + 1


def untrained_classes(data: LoadedData) -> list[int]:
    """Return the classes of test samples that no training sample has; none if the labels are not classes."""
    if data.y_train.is_floating_point() or data.y_train.ndim > 1:
        return []
    return sorted(set(data.y_test.unique().tolist()) - set(data.y_train.unique().tolist()))
