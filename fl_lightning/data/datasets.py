"""Base classes of datasets, and the class of a loaded dataset: its tensors, and how batches are prepared."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from fl_lightning.core.arguments import ArgumentsMixin
from fl_lightning.core.errors import ConfigError, FLError, one_line
from fl_lightning.core.inputs import Inputs, Shapes
from fl_lightning.core.objectives import IGNORED, Objective, describe_tensor, objective_of
from fl_lightning.core.task import Score
from fl_lightning.data.lazy import LazySamples, Samples, first_samples
from fl_lightning.data.loaders import Batches
from fl_lightning.data.schema import TableSchema
from fl_lightning.data.transforms import BatchTransform, PerImage

MOST_CLASSES = 10_000_000
"""Maximum number of classes: with more, a network's last layer would fill the memory."""

MOST_WHOLE_NUMBERS = 20
"""Maximum number of different whole numbers in floating point that may be meant as classes."""


@dataclass
class LoadedData:
    """A loaded dataset: training and test tensors, and how their batches are prepared.

    Args:
        x_train: Training inputs `(n, ...)`; images are `(n, channels, height, width)`, `uint8` or `float32`, texts
            are token ids `(n, length)`, `int64`, padded with 0. For several inputs a sample, `Inputs`. Samples that are
            read when a batch needs them are `LazySamples`.
        y_train: Training labels: classes `(n,)`, `int64` in `[0, num_classes)`; multi-label targets `(n, L)`, integers
            0 and 1; classes of tokens `(n, length)`; or numbers to predict, `(n,)` or `(n, T)`, `float32`.
        x_test: Test inputs, of the same shapes and dtypes.
        y_test: Test labels.
        num_classes: Number of classes, `C`, at least 2; without classes the number of the network's outputs, `L` or
            `T`.
        prepare: Converts a stored batch to the network's input, on the batch's device.
        augment: Random change of a prepared training batch, on its device; None for none. A `PerImage` changes the
            batch before it is prepared.
        cut: Makes a client's training batches; takes the arguments of `Batches`.
        evaluate: Custom scoring of a shared module on the prepared batches of the global test set; None for the
            usual metrics.
        client_train: The client of each training sample, `(n,)` integers or text, for the partition `ByClient`; None
            if the data have no client ids.
        client_test: The client of each test sample. Requires `client_train`.
        schema: The columns of a table and their encoding; None for other data.
        class_names: Name of each class, or of each label of a multi-label target, in the order of the network's
            outputs; None if they have no names.
    """

    x_train: Samples
    y_train: Tensor
    x_test: Samples
    y_test: Tensor
    num_classes: int
    prepare: BatchTransform
    augment: BatchTransform | None = None
    cut: Callable[..., Batches] = Batches
    evaluate: Callable[..., Score] | None = None
    client_train: np.ndarray | None = None
    client_test: np.ndarray | None = None
    schema: TableSchema | None = None
    class_names: Sequence[str] | None = None

    def __post_init__(self) -> None:
        """Convert client ids from any sequence, such as a column of pandas, to arrays of integers or texts."""
        for name in ("client_train", "client_test"):
            if (ids := getattr(self, name)) is not None:
                setattr(self, name, as_client_ids(ids))

    @property
    def augments_stored(self) -> bool:
        """Whether `augment` takes batches as they are stored, and `prepare` what it returns."""
        return isinstance(self.augment, PerImage)

    @property
    def in_shape(self) -> tuple[int, ...] | Shapes:
        """Return the shape of a sample's input, such as `(3, 32, 32)`; a dict or tuple of shapes for several inputs."""
        return self.x_train.shapes if isinstance(self.x_train, Inputs) else tuple(self.x_train.shape[1:])


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
                warn_of_whole_numbers(self.error_prefix, data.y_train)
        return data

    def check_test_classes(self, data: LoadedData) -> None:
        """Raise a `ConfigError` if test samples have a class that no training sample has.

        The base class accepts such classes, because some datasets have them on purpose.
        """

    @property
    def error_prefix(self) -> str:
        """Return the beginning of error messages about the data: the config key and the class."""
        return f"scenario.dataset: {type(self).__name__}"


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


def as_client_ids(ids: Any) -> np.ndarray:
    """Convert client ids to an array. The dtype `object`, as pandas has it, is replaced by text or integers."""
    if not isinstance(ids, np.ndarray):
        ids = np.array(ids.tolist() if hasattr(ids, "tolist") else list(ids), dtype=object)
    if ids.dtype == object or ids.dtype.kind == "T":  # numpy's StringDType
        for kind, dtype in ((str, np.str_), (int | np.integer, np.int64)):
            if len(ids) and all(isinstance(each, kind) for each in ids.flat):
                return ids.astype(dtype)
    return ids


@contextmanager
def naming_class(who: str) -> Iterator[None]:
    """Context manager: convert unexpected exceptions to a `ConfigError` that names the failing class, `who`."""
    try:
        yield
    except FLError:
        raise
    except Exception as error:
        raise ConfigError(f"{who}: {type(error).__name__}: {one_line(error)}. Use --debug for the traceback") from error


def check(data: LoadedData, objective: Objective | None = None) -> None:
    """Check the shapes, dtypes and values of a loaded dataset. Reads all labels, and all inputs that are not `uint8`.

    Raises:
        ValueError: Describes the first problem.
    """
    if not isinstance(data, LoadedData):
        raise ValueError(f"load() returned {type(data).__name__}, not LoadedData")
    if not isinstance(data.num_classes, int | np.integer) or isinstance(data.num_classes, bool):
        raise ValueError(f"num_classes is {one_line(repr(data.num_classes))}, not an integer")
    if not callable(data.prepare):
        raise ValueError(f"prepare is of type {type(data.prepare).__name__}, which cannot be called")
    inputs = {split: _named_tensors(f"x_{split}", getattr(data, f"x_{split}")) for split in ("train", "test")}
    if not all(inputs.values()):
        raise ValueError("a sample has no input")
    labels = {"y_train": data.y_train, "y_test": data.y_test}
    for name, values in (inputs["train"] | inputs["test"] | labels).items():
        if not isinstance(values, Tensor):
            fix = ". Give several inputs as Inputs({...})" if isinstance(values, dict | tuple) else ""
            raise ValueError(f"{name} is of type {type(values).__name__}, not a torch.Tensor{fix}")
        if values.layout != torch.strided or values.device.type != "cpu":
            raise ValueError(f"{name} is {values.layout} on {values.device}; it needs to be dense, on the CPU")
    objective = objective or objective_of(data.y_train)
    for split in ("train", "test"):
        y = labels[f"y_{split}"]
        try:
            objective.check(y, data.num_classes)
        except ValueError as error:
            raise ValueError(f"y_{split} {error}") from error
        for name, x in inputs[split].items():
            _check_inputs(name, x, alone=not isinstance(data.x_train, Inputs))
            rows = len(given) if isinstance(given := getattr(data, f"x_{split}"), LazySamples) else len(x)
            if rows != len(y) or not rows:
                sizes = f"{name} has {rows} rows and y_{split} {len(y)}"
                raise ValueError(f"{sizes}. They need equally many, and at least one")
    _check_alike(*inputs.values())
    _check_transforms(data)
    if not objective.fewest <= data.num_classes <= MOST_CLASSES:
        raise ValueError(f"num_classes is {data.num_classes}, not between {objective.fewest} and {MOST_CLASSES:,}")
    _check_clients(data)
    _check_class_names(data)


def _check_clients(data: LoadedData) -> None:
    for name, y in (("client_train", data.y_train), ("client_test", data.y_test)):
        ids = getattr(data, name)
        if ids is None:
            continue
        if not isinstance(ids, np.ndarray):
            raise ValueError(f"{name} is of type {type(ids).__name__}, not a numpy array")
        if ids.ndim != 1 or ids.dtype.kind not in "iuU":
            raise ValueError(f"{name} needs one id per sample, integers or text, got {ids.dtype} of shape {ids.shape}")
        if len(ids) != len(y):
            raise ValueError(f"{name} has ids of {len(ids)} samples, but there are {len(y)}")
    if data.client_test is not None:
        if data.client_train is None:
            raise ValueError("client_test is given, but client_train is missing")
        kinds = {data.client_train.dtype.kind, data.client_test.dtype.kind}
        if "U" in kinds and len(kinds) > 1:
            raise ValueError("client_train and client_test need ids of one type, integers or text")


def _check_class_names(data: LoadedData) -> None:
    names = data.class_names
    if names is None:
        return
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"class_names is {one_line(repr(names))}; it needs a list of one text per class")
    if len(names) != data.num_classes:
        raise ValueError(f"class_names and num_classes differ: {len(names)} and {data.num_classes}")


def _named_tensors(name: str, x: Samples) -> dict[str, Tensor]:
    """Return the input tensors by name. Of samples that are read on demand, only the first ones are read."""
    if isinstance(x, LazySamples):
        x = first_samples(x, 2)
    return {f"{name}[{key!r}]": value for key, value in x.items()} if isinstance(x, Inputs) else {name: x}


def _check_alike(train: dict[str, Tensor], test: dict[str, Tensor]) -> None:
    """Check that training and test inputs have the same names, shapes and dtypes."""
    if [name.replace("train", "test", 1) for name in train] != [*test]:
        raise ValueError(f"the inputs are {', '.join(train)} and {', '.join(test)}. Both need the same, in one order")
    for (name, one), (other_name, other) in zip(train.items(), test.items(), strict=True):
        if one.shape[1:] != other.shape[1:]:
            shapes = f"{tuple(one.shape[1:])} and {tuple(other.shape[1:])}"
            raise ValueError(f"{name} and {other_name} hold inputs of different shapes, {shapes}")
        if one.dtype != other.dtype:
            fix = "need the same dtype: uint8 is scaled to 0-1, floating point is not"
            raise ValueError(f"{name} and {other_name} {fix}")


def _check_transforms(data: LoadedData) -> None:
    """Check that the data's `prepare` and `augment` take the inputs of a batch and return as many inputs."""
    kind: Any = Inputs if isinstance(data.x_train, Inputs) else Tensor
    batch = first_samples(data.x_train, 2)
    for name in ("augment", "prepare") if data.augments_stored else ("prepare", "augment"):
        if transform := getattr(data, name):
            fix = f"Give a function that takes a batch of inputs ({kind.__name__}) and returns it changed"
            if name == "augment":
                fix += (
                    ". To change the labels too, use mixup or cutmix, or a LightningModule with its own training_step"
                )
            try:
                with isolate_rng():
                    batch, size = transform(batch), len(batch)
            except Exception as error:
                raise ValueError(f"{name} failed on a batch of inputs ({one_line(error)}). {fix}") from error
            if not isinstance(batch, kind) or len(batch) != size:
                returned = f"{len(batch)} inputs" if isinstance(batch, kind) else type(batch).__name__
                raise ValueError(f"{name} returned {returned} for a batch of {size} inputs. {fix}")


def _check_inputs(name: str, x: Tensor, alone: bool) -> None:
    """Check the shape, dtype and values of an input tensor.

    Args:
        name: The input's name for error messages.
        x: The input of all samples.
        alone: Whether samples have only this input. Otherwise, more dtypes and shapes are valid.
    """
    if x.ndim < 1 + alone or 0 in x.shape[1:]:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; it needs one row per sample: (n, ...)")
    kinds = (torch.uint8, torch.float32) if alone else (torch.uint8, torch.float32, torch.int64, torch.bool)
    if x.dtype not in kinds and not (x.dtype == torch.int64 and x.ndim == 2):
        fix = "uint8 or float32, or int64 for token ids (n, length)" if alone else "uint8, float32, int64 or bool"
        raise ValueError(f"{name} is {describe_tensor(x)}; it needs {fix}")
    if x.dtype in (torch.uint8, torch.bool) or not len(x):
        return
    low, high = x.aminmax()  # a NaN makes both NaN
    if not (low.isfinite() and high.isfinite()):
        raise ValueError(f"{name} holds NaN or Inf, or numbers too large for float32")
    if x.dtype == torch.int64 and low < 0:
        raise ValueError(f"{name} holds {low}; token ids count from 0, which is padding")


def untrained_classes(data: LoadedData) -> list[int]:
    """Return the classes of test samples that no training sample has; none if the labels are not classes."""
    if data.y_train.is_floating_point() or data.y_train.ndim > 1:
        return []
    return sorted(set(data.y_test.unique().tolist()) - set(data.y_train.unique().tolist()))


def warn_of_whole_numbers(who: str, y: Tensor) -> None:
    """Warn if floating-point labels are few different whole numbers, which are probably classes or 0/1 labels.

    Args:
        who: Beginning of the message: the config key and the class.
        y: The training labels.
    """
    if not y.is_floating_point():
        return
    values = y.unique()
    if len(values) <= MOST_WHOLE_NUMBERS and (values % 1 == 0).all():
        what = f"the labels are {len(values)} different whole numbers in floating point, so they are numbers to predict"
        fix = "If they are classes or 0/1 labels, convert them to integers; if not, set scenario.objective Regression"
        warnings.warn(f"{who}: {what}. {fix}", stacklevel=2)


def count_outputs(*labels: Tensor) -> int:
    """Return the number of outputs that a network needs for these labels: of classes or of label columns."""
    y = labels[0]
    if y.is_floating_point() or y.ndim == 2:
        return 1 if y.ndim == 1 else y.shape[1]
    if y.ndim == 3:
        labels = tuple(mask[mask != IGNORED] for mask in labels)
    return max((int(y.max()) for y in labels if len(y)), default=-1) + 1
