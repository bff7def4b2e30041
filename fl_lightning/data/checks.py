"""Checks of a loaded dataset: shapes, dtypes and values of its tensors, its transforms, client ids and class names."""

from __future__ import annotations

import os
import warnings
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from fl_lightning.core.errors import check_instance, one_line
from fl_lightning.core.inputs import Inputs
from fl_lightning.core.objectives import Objective, Segmentation, describe_tensor, objective_of
from fl_lightning.data.lazy import LazySamples, Samples, first_samples
from fl_lightning.data.loaded_data import LoadedData

MOST_CLASSES = 10_000_000
"""Maximum number of classes: with more, a network's last layer would fill the memory."""

MOST_WHOLE_NUMBERS = 20
"""Maximum number of different whole numbers in floating point that may be meant as classes."""


def check(data: LoadedData, objective: Objective | None = None) -> None:
    """Check the shapes, dtypes and values of a loaded dataset. Reads all labels, and all inputs that are not `uint8`.

    Raises:
        ValueError: Describes the first problem.
    """
    _check_fields(data)
    train, test = _named_tensors("x_train", data.x_train), _named_tensors("x_test", data.x_test)
    if not (train and test):
        raise ValueError("a sample has no input")
    for name, values in {**train, **test, "y_train": data.y_train, "y_test": data.y_test}.items():
        _check_tensor(name, values)
    objective = objective or objective_of(data.y_train)
    for split, inputs in (("train", train), ("test", test)):
        _check_split(data, split, inputs, objective)
    _check_alike(train, test)
    _check_transforms(data)
    if isinstance(objective, Segmentation):
        _check_masks(data, objective.ignore_index)
    if not objective.fewest <= data.num_classes <= MOST_CLASSES:
        raise ValueError(f"num_classes is {data.num_classes}, not between {objective.fewest} and {MOST_CLASSES:,}")
    _check_clients(data)
    _check_class_names(data)


def _check_fields(data: LoadedData) -> None:
    """Check that the number of classes is an integer, and that `prepare` can be called."""
    if not isinstance(data, LoadedData):
        raise ValueError(f"load() returned {type(data).__name__}, not LoadedData")
    if not isinstance(data.num_classes, int | np.integer) or isinstance(data.num_classes, bool):
        raise ValueError(f"num_classes is {one_line(repr(data.num_classes))}, not an integer")
    if not callable(data.prepare):
        raise ValueError(f"prepare is of type {type(data.prepare).__name__}, which cannot be called")


def _check_tensor(name: str, values: Any) -> None:
    """Check that inputs or labels are a dense tensor on the CPU."""
    if not isinstance(values, Tensor):
        fix = ". Give several inputs as Inputs({...})" if isinstance(values, dict | tuple) else ""
        raise ValueError(f"{name} is of type {type(values).__name__}, not a torch.Tensor{fix}")
    if values.layout != torch.strided or values.device.type != "cpu":
        raise ValueError(f"{name} is {values.layout} on {values.device}; it needs to be dense, on the CPU")


def _check_split(data: LoadedData, split: str, inputs: dict[str, Tensor], objective: Objective) -> None:
    """Check the labels and the inputs of the `train` or the `test` split."""
    x, y = getattr(data, f"x_{split}"), getattr(data, f"y_{split}")
    try:
        objective.check(y, data.num_classes)
    except ValueError as error:
        raise ValueError(f"y_{split} {error}") from error
    for name, values in inputs.items():
        _check_inputs(name, values, alone=not isinstance(data.x_train, Inputs))
        rows = len(x) if isinstance(x, LazySamples) else len(values)
        if rows != len(y) or not rows:
            sizes = f"{name} has {rows} rows and y_{split} {len(y)}"
            raise ValueError(f"{sizes}. They need equally many, and at least one")


def _check_masks(data: LoadedData, ignored: int) -> None:
    """Check that the training masks have two classes: masks of 0 and 255 would only have the class 0."""
    values: set[int] = set()
    for mask in data.y_train:
        values.update(mask.unique().tolist())
        if len(values - {ignored}) > 1:
            return
    if ignored in values or data.num_classes < 2:
        what = f"y_train holds only {' and '.join(map(str, sorted(values)))}"
        raise ValueError(f"{what}, and {ignored} marks pixels that are not used. Number at least two classes from 0")


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


def warn_of_likely_classes(who: str, data: LoadedData) -> None:
    """Warn if labels are probably classes in another form.

    Such forms are few whole numbers in floating point, one-hot rows, and classes that are numbered from 1.

    Args:
        who: Beginning of the message: the config key and the class.
        data: The data with the labels.
    """
    y = data.y_train
    if y.is_floating_point():
        values = y.unique()
        if len(values) <= MOST_WHOLE_NUMBERS and (values % 1 == 0).all():
            what = f"{len(values)} different whole numbers in floating point, so they are numbers to predict"
            fix = "Convert classes and 0/1 labels to integers; for numbers, set scenario.objective Regression"
            warnings.warn(f"{who}: the labels are {what}. {fix}", stacklevel=2)
    elif y.ndim == 2 and y.shape[1] > 1 and bool(((y != 0).sum(dim=1) == 1).all() and (y.amax(dim=1) == 1).all()):
        what = "each sample has exactly one of several 0/1 labels, which are trained as independent labels"
        fix = "Convert classes with argmax(1); for independent labels, set scenario.objective MultiLabel"
        warnings.warn(f"{who}: {what}. {fix}", stacklevel=2)
    elif y.ndim == 1 and data.class_names is None and len(y) and (y.min(), y.max()) == (1, data.num_classes - 1):
        what = f"the labels are 1 to {data.num_classes - 1}, so no sample has class 0, which counts as a class"
        warnings.warn(f"{who}: {what}. Subtract 1, if the classes are numbered from 1", stacklevel=2)


def path_text(key: str, path: object) -> str:
    """Return a path that is given as text or as a `Path` as text.

    Raises:
        ConfigError: It is neither, such as the data themselves. Names the key.
    """
    check_instance(key, path, str | os.PathLike, "Save the data, such as with to_csv, and give the path of the file")
    assert isinstance(path, str | os.PathLike)
    return os.fspath(path)
