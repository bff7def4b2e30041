"""Any map-style dataset of torch's, read once into memory."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset as MapStyle

from fl_lightning import HOMES
from fl_lightning.core.errors import ConfigError, one_line
from fl_lightning.core.gate import find_object
from fl_lightning.core.objectives import described
from fl_lightning.data.datasets import Dataset, LoadedData, own_code
from fl_lightning.data.own import KEY
from fl_lightning.data.transforms import Normalize


class TorchDataset(Dataset):
    """Any map-style torch `Dataset` of pairs (x, y): one to train on and one to test on, each by its class path.

    Each item is read once, when the run starts, so what a random transform draws is the same in every round, and the
    same for every seed. Pictures (of Pillow) become `uint8`, which is scaled to 0-1; tensors and arrays of `uint8` or
    floating-point numbers stay what they are. Whole numbers are classes, fractions are numbers to be predicted, and
    several whole numbers a sample are labels of 0 and 1, of which it may have several.

    Args:
        train: The training set, or what makes it: in a config a class path and its arguments.
        test: The test set, likewise.
    """

    def __init__(self, train: Callable[[], MapStyle] | MapStyle, test: Callable[[], MapStyle] | MapStyle) -> None:
        self.train, self.test = train, test

    def load(self) -> LoadedData:
        """Read every item of both."""
        (x_train, y_train), (x_test, y_test) = read("train", self.train), read("test", self.test)
        return LoadedData(x_train, y_train, x_test, y_test, outputs(y_train, y_test), Normalize())


def way_for(path: str) -> str | None:
    """What to give in the place of a dataset of torch's, which is no `Dataset` of ours; None for any other class."""
    found = find_object(path)
    if not inspect.isclass(found) or not issubclass(found, MapStyle):
        return None
    name = found.__name__
    ours = f"{name}, which reads the same; or " if HOMES.get(name) == "data" else ""
    return f"use {ours}TorchDataset, with scenario.dataset.train {path} and scenario.dataset.test"


def read(key: str, given: Callable[[], MapStyle] | MapStyle) -> tuple[Tensor, Tensor]:
    """Inputs and labels of all items of a dataset.

    Raises:
        ConfigError: It cannot be made, has no length, its items are no pairs, or they differ in shape or type.
    """
    with isolate_rng(), own_code(f"{KEY}.{key}"):
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        data = given if isinstance(given, MapStyle) else given()
        who = f"{KEY}.{key}: {type(data).__name__}"
        if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
            raise ConfigError(f"{who} is read item by item, by its number: it needs __len__ and __getitem__")
        items = [pair(who, i, data[i]) for i in range(len(data))]
    if not items:
        raise ConfigError(f"{who} has no items")
    x, y = (stacked(who, what, values) for what, values in zip(("x", "y"), zip(*items, strict=True), strict=True))
    return x, y


def pair(who: str, i: int, item: Any) -> tuple[Tensor, Tensor]:
    """An item's input and label as tensors.

    Raises:
        ConfigError: It is no pair, or one of the two is nothing that a tensor can be made of.
    """
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise ConfigError(f"{who}: item {i} is {told(item)}; it needs to be a pair, of an input and its label")
    x, y = item
    return tensor(who, f"x of item {i}", x), tensor(who, f"y of item {i}", y)


def tensor(who: str, what: str, value: Any) -> Tensor:
    """A picture, an array or a number as a tensor of a type that `LoadedData` takes, if it is none of other ones.

    Raises:
        ConfigError: It is something else.
    """
    if isinstance(value, Image.Image):
        pixels = torch.from_numpy(np.array(value if value.mode in ("L", "RGB") else value.convert("RGB")))
        return pixels.unsqueeze(0) if pixels.ndim == 2 else pixels.permute(2, 0, 1)
    if not isinstance(value, Tensor | np.ndarray | np.generic | int | float):
        mend = "; a transform can make a tensor of it" if what.startswith("x") else ""
        raise ConfigError(f"{who}: {what} is {told(value)}, no picture, tensor, array or number{mend}")
    made = torch.as_tensor(value).detach().cpu()
    if made.is_complex():
        raise ConfigError(f"{who}: {what} is {described(made)}. Return real numbers, for example its absolute values")
    if made.is_floating_point():
        return made.float()
    return made if made.dtype == torch.uint8 and what.startswith("x") else made.to(torch.int64)


def stacked(who: str, what: str, values: Sequence[Tensor]) -> Tensor:
    """The values of all items in one tensor.

    Raises:
        ConfigError: One is of another shape or type than the first.
    """
    first = values[0]
    for i, value in enumerate(values):
        if value.shape != first.shape or value.dtype != first.dtype:
            mend = "; a transform can resize them (torchvision.transforms.Resize)" if what == "x" else ""
            differ = f"{described(first)} in item 0 and {described(value)} in item {i}"
            raise ConfigError(f"{who}: {what} is {differ}; all need to be alike{mend}")
    return torch.stack(list(values))


def outputs(*labels: Tensor) -> int:
    """Number of the network's outputs: classes, or numbers a sample."""
    y = labels[0]
    if y.is_floating_point() or y.ndim > 1:
        return 1 if y.ndim == 1 else y.shape[1]
    return max(int(y.max()) for y in labels) + 1


def told(value: Any) -> str:
    """What an odd value is, in a few words."""
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return f"of type {one_line(type(value).__name__)}"
