"""Dataset class that reads any map-style PyTorch dataset once into memory."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset as MapStyle

from fl_lightning import HOMES
from fl_lightning.core.errors import ConfigError, one_line
from fl_lightning.core.inputs import Inputs
from fl_lightning.core.names import join_names
from fl_lightning.core.objectives import describe_tensor
from fl_lightning.core.trusted_imports import find_object
from fl_lightning.data.custom_data import KEY
from fl_lightning.data.datasets import Dataset, LoadedData, count_outputs, naming_class, untrained_classes
from fl_lightning.data.transforms import Normalize


class TorchDataset(Dataset):
    """Any map-style PyTorch `Dataset` of pairs (x, y): a training set and a test set, given by class path.

    Each item is read once, when the run starts. A random transform therefore draws once, and equally for every seed.
    Pillow images become `uint8`, which is scaled to 0-1. Tensors and arrays of `uint8` or floating point are used as
    they are. If x is a dict or tuple, a sample has several inputs. Integer labels are classes, floating-point labels
    are numbers to predict, and several integers per sample are multi-label targets of 0 and 1.

    Args:
        train: The training set: in a config its class path and arguments, in Python the dataset or a function that
            makes it.
        test: The test set, in the same form.
    """

    def __init__(self, train: Callable[[], MapStyle] | MapStyle, test: Callable[[], MapStyle] | MapStyle) -> None:
        self.train, self.test = train, test

    def load(self) -> LoadedData:
        """Load all items of the training and test datasets into memory."""
        x_train, y_train, names = read_items("train", self.train)
        x_test, y_test, test_names = read_items("test", self.test)
        if None not in (names, test_names) and names != test_names:
            shown = one_line(f"{join_names(test_names or ())} instead of {join_names(names or ())}")
            raise ConfigError(f"{KEY}.test: its classes are unlike those of train: {shown}. Give both the same classes")
        outputs = count_outputs(y_train, y_test)
        names = names if names is not None and len(names) == outputs else None
        return LoadedData(x_train, y_train, x_test, y_test, outputs, Normalize(), class_names=names)

    def check_test_classes(self, data: LoadedData) -> None:
        """Raise a `ConfigError` if test samples have a class that no training sample has."""
        if classes := untrained_classes(data):
            label = data.class_names[classes[0]] if data.class_names else classes[0]
            fix = "Correct the labels, or leave these samples out"
            raise ConfigError(f"{KEY}.test: it has the class {label}, but train has no sample of it. {fix}")


def suggest_torch_dataset(path: str) -> str | None:
    """Return a hint for error messages: wrap this PyTorch dataset class in `TorchDataset`. None for other classes."""
    cls = find_object(path)
    if not inspect.isclass(cls) or not issubclass(cls, MapStyle):
        return None
    name = cls.__name__
    ours = f"{name}, which reads the same files, or " if HOMES.get(name) == "data" else ""
    return f"use {ours}TorchDataset, with scenario.dataset.train {path} and scenario.dataset.test"


def read_items(key: str, given: Callable[[], MapStyle] | MapStyle) -> tuple[Tensor | Inputs, Tensor, list[str] | None]:
    """Read all items of a PyTorch dataset, and return all inputs and all labels, and the class names.

    The names are the dataset's `classes`, as torchvision's datasets have them, or None.
    """
    with isolate_rng(), naming_class(f"{KEY}.{key}"):
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        data = given if isinstance(given, MapStyle) else given()
        who = f"{KEY}.{key}: {type(data).__name__}"
        if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
            raise ConfigError(f"{who} is not a map-style dataset. It needs __len__ and __getitem__")
        items = []
        for i in range(len(data)):
            if not isinstance(item := data[i], tuple | list) or len(item) != 2:
                what = f"item {i} is {describe(item)}. It needs to be a pair of an input and a label"
                raise ConfigError(f"{who}: {what}")
            items.append((as_inputs(who, f"x of item {i}", item[0]), as_tensor(who, f"y of item {i}", item[1])))
    if not items:
        raise ConfigError(f"{who} has no items")
    inputs, labels = zip(*items, strict=True)
    x, y = stack_inputs(who, inputs), stack(who, "y", labels)
    names = getattr(data, "classes", None)
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        return x, y, None
    return x, y, list(names)


def as_inputs(who: str, what: str, value: Any) -> Tensor | Inputs:
    """Convert the input of an item to a tensor or, if it is a dict or tuple, to several tensors (`Inputs`)."""
    kept = torch.uint8, torch.bool  # of several inputs, one is often a mask
    if isinstance(value, Mapping):
        return Inputs({str(name): as_tensor(who, f"{what}, {name!r},", part, kept) for name, part in value.items()})
    if isinstance(value, tuple | list):
        return Inputs(tuple(as_tensor(who, f"{what}, {i},", part, kept) for i, part in enumerate(value)))
    return as_tensor(who, what, value, kept[:1])


def as_tensor(who: str, what: str, value: Any, kept: tuple[torch.dtype, ...] = ()) -> Tensor:
    """Convert an input or label (an image, array or number) to a tensor of a dtype that `LoadedData` accepts.

    Args:
        who: Beginning of error messages: the key and the class.
        what: The value in error messages.
        value: The value.
        kept: Integer dtypes that are not converted to `int64`.
    """
    if isinstance(value, Image.Image):
        pixels = torch.from_numpy(np.array(value if value.mode in ("L", "RGB") else value.convert("RGB")))
        return pixels.unsqueeze(0) if pixels.ndim == 2 else pixels.permute(2, 0, 1)
    if not isinstance(value, Tensor | np.ndarray | np.generic | int | float):
        fix = ". A transform can convert it to a tensor" if what.startswith("x") else ""
        raise ConfigError(f"{who}: {what} is {describe(value)}, not an image, tensor, array or number{fix}")
    tensor = torch.as_tensor(value).detach().cpu()
    if tensor.is_complex():
        fix = "Return real numbers, for example its absolute values"
        raise ConfigError(f"{who}: {what} is {describe_tensor(tensor)}. {fix}")
    if tensor.is_floating_point():
        return tensor.float()
    return tensor if tensor.dtype in kept else tensor.to(torch.int64)


def stack_inputs(who: str, values: Sequence[Any]) -> Tensor | Inputs:
    """Stack the inputs of all items into one tensor or, if items have several inputs, into one tensor per input."""
    names = [list(dict(value.items())) if isinstance(value, Inputs) else None for value in values]
    if odd := next((i for i, own in enumerate(names) if own != names[0]), None):
        differ = f"{names[0] or 'one tensor'} in item 0 and {names[odd] or 'one tensor'} in item {odd}"
        raise ConfigError(f"{who}: the inputs are {differ}. All items need the same inputs, in the same order")
    if names[0] is None:
        return stack(who, "x", values)
    stacked = (stack(who, f"x[{name!r}]", [value.tensors[name] for value in values]) for name in names[0])
    return Inputs(values[0].like(stacked))


def stack(who: str, what: str, values: Sequence[Tensor]) -> Tensor:
    """Stack the inputs (or labels) of all items into one tensor, after checking that shapes and dtypes are equal."""
    first = values[0]
    for i, value in enumerate(values):
        if value.shape != first.shape or value.dtype != first.dtype:
            fix = ". A transform such as torchvision.transforms.Resize can resize them" if what == "x" else ""
            differ = f"{describe_tensor(first)} in item 0 and {describe_tensor(value)} in item {i}"
            raise ConfigError(f"{who}: {what} is {differ}. All need the same shape and dtype{fix}")
    return torch.stack(list(values))


def describe(value: Any) -> str:
    """Describe the type of a value for error messages, such as "a tuple of 3"."""
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return f"of type {one_line(type(value).__name__)}"
