"""Dataset class for any map-style PyTorch dataset, or those of each client, read at the start or on demand."""

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
from torch.utils.data import DataLoader, Subset
from torch.utils.data import Dataset as MapStyle

from fl_lightning import HOMES
from fl_lightning.core.errors import ConfigError, one_line
from fl_lightning.core.inputs import Inputs, describe_inputs
from fl_lightning.core.names import join_names
from fl_lightning.core.objectives import describe_tensor
from fl_lightning.core.trusted_imports import find_object
from fl_lightning.data.datasets import KEY, Dataset, count_outputs, naming_class, untrained_classes
from fl_lightning.data.lazy import LazySamples, Samples
from fl_lightning.data.loaded_data import LoadedData
from fl_lightning.data.transforms import Normalize

Source = Callable[[], MapStyle] | MapStyle
"""A map-style dataset, or a function that makes it."""


class TorchDataset(Dataset):
    """Any map-style PyTorch `Dataset` of pairs (x, y): a training set and a test set, or those of each client.

    By default, each item is read once, when the run starts. A random transform therefore draws once, and equally for
    every seed. With `lazy`, an item is read whenever a batch needs it, and a random transform draws each time. Pillow
    images become `uint8`, which is scaled to 0-1. Tensors and arrays of `uint8` or floating point are used as they are.
    If x is a dict or tuple, a sample has several inputs. Integer labels are classes, floating-point labels are numbers
    to predict, and several integers per sample are multi-label targets of 0 and 1.

    Args:
        train: The training set: in a config its class path and arguments, in Python the dataset or a function that
            makes it.
        test: The test set, in the same form.
        clients: In place of `train` and `test`: the training and the test set of each client, for the partition
            `ByClient`. The global test set has the test samples of all clients.
        lazy: Read the samples when batches need them, for data that do not fit into memory. Only the labels are read at
            the start, from the dataset's `targets` if it has them. A sample has one input.
    """

    def __init__(
        self,
        train: Source | None = None,
        test: Source | None = None,
        clients: Sequence[tuple[Source, Source]] | None = None,
        lazy: bool = False,
    ) -> None:
        self.train, self.test, self.clients, self.lazy = train, test, clients, lazy
        if clients is None:
            for key, given in (("train", train), ("test", test)):
                if given is None:
                    raise ConfigError(f"{KEY}.{key}: it is missing. Give both train and test, or clients")
        elif train is not None or test is not None:
            raise ConfigError(f"{KEY}.clients: it takes the place of train and test. Leave these out")
        elif not clients or not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in clients):
            raise ConfigError(f"{KEY}.clients: it is no list of pairs. Give (training set, test set) for each client")

    def load(self) -> LoadedData:
        """Load all items of the training and test datasets into memory, or with `lazy` only their labels."""
        if self.clients is None:
            train, test = [open_items("train", self.train)], [open_items("test", self.test)]
            owners: dict[str, Any] = {}
        else:
            places = [f"clients[{client}][{{}}]" for client in range(len(self.clients))]
            train, test = (
                [open_items(place.format(part), pair[part]) for place, pair in zip(places, self.clients, strict=True)]
                for part in (0, 1)
            )
            owners = {
                name: np.repeat(np.arange(len(parts)), [len(items) for items in parts])
                for name, parts in (("client_train", train), ("client_test", test))
            }
        names = common_names([*train, *test])
        (x_train, y_train), (x_test, y_test) = (self._read(parts) for parts in (train, test))
        outputs = count_outputs(y_train, y_test)
        names = names if names is not None and len(names) == outputs else None
        return LoadedData(x_train, y_train, x_test, y_test, outputs, Normalize(), class_names=names, **owners)

    def _read(self, parts: Sequence[Items]) -> tuple[Samples, Tensor]:
        """Return the inputs and labels of several datasets, one after the other."""
        with isolate_rng():
            if self.lazy:
                return LazySamples(parts), concatenate("y", parts, [items.labels() for items in parts])
            inputs, labels = zip(*(items.read_all() for items in parts), strict=True)
        return concatenate("x", parts, inputs), concatenate("y", parts, labels)

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


class Items:
    """The items of a map-style dataset, which are checked and converted to tensors when they are read.

    Args:
        who: Beginning of error messages: the config key and the class.
        data: The dataset.
    """

    def __init__(self, who: str, data: Any) -> None:
        self.who, self.data = who, data
        self.key = who.partition(": ")[0]

    def __len__(self) -> int:
        return len(self.data)

    @property
    def names(self) -> list[str] | None:
        """The dataset's `classes`, as torchvision's datasets have them, or None."""
        names = getattr(self.data, "classes", None)
        if isinstance(names, list | tuple) and all(isinstance(name, str) for name in names):
            return list(names)
        return None

    def item(self, i: int) -> tuple[Tensor | Inputs, Tensor]:
        """Read an item, and return its input and its label."""
        if not isinstance(item := self.data[i], tuple | list) or len(item) != 2:
            what = f"item {i} is {describe(item)}. It needs to be a pair of an input and a label"
            raise ConfigError(f"{self.who}: {what}")
        return as_inputs(self.who, f"x of item {i}", item[0]), as_tensor(self.who, f"y of item {i}", item[1])

    def read(self, item: int) -> Tensor:
        """Read an item on demand, and return its input.

        Raises:
            ConfigError: It has several inputs.
        """
        with naming_class(f"{self.key}: item {item}"):
            x, _ = self.item(item)
        if isinstance(x, Inputs):
            raise ConfigError(f"{KEY}.lazy: item {item} has several inputs, which are read at the start. Leave it out")
        return x

    def read_all(self) -> tuple[Tensor | Inputs, Tensor]:
        """Read all items, and return all inputs and all labels. Random numbers have a fixed seed."""
        with naming_class(self.key):
            torch.manual_seed(0)
            np.random.seed(0)
            random.seed(0)
            inputs, labels = zip(*(self.item(i) for i in range(len(self))), strict=True)
            return stack_inputs(self.who, inputs), stack(self.who, "y", labels)

    def labels(self) -> Tensor:
        """Return all labels: the dataset's `targets` if these are the labels of items, or those of each item."""
        with naming_class(self.key):
            targets = known_targets(self.data)
            if targets is None or len(targets) != len(self):
                return stack(self.who, "y", [self.item(i)[1] for i in range(len(self))])
            labels = [as_tensor(self.who, f"target {i}", target) for i, target in enumerate(targets)]
            for i in (0, len(self) - 1):
                if not torch.equal(labels[i], label := self.item(i)[1]):
                    what = f"targets[{i}] is {labels[i].tolist()}, but item {i} has the label {label.tolist()}"
                    raise ConfigError(f"{self.who}: {what}. Give them the same labels, or remove targets")
            return stack(self.who, "y", labels)


def known_targets(data: Any) -> Sequence[Any] | None:
    """Return the labels that a dataset lists in `targets`, as torchvision's do, also of a `Subset`; None if unknown."""
    if isinstance(data, Subset):
        targets = known_targets(data.dataset)
        return None if targets is None else [targets[i] for i in data.indices]
    if getattr(data, "target_transform", None) is not None:
        return None
    targets = getattr(data, "targets", None)
    return targets if isinstance(targets, list | tuple | Tensor | np.ndarray) else None


def open_items(key: str, given: Any) -> Items:
    """Return the items of a map-style dataset, which is made if a function is given.

    Args:
        key: The argument, for error messages.
        given: The dataset or the function.

    Raises:
        ConfigError: It is no map-style dataset, or has no items.
    """
    if isinstance(given, DataLoader):
        fix = "Give its dataset. Batches have batch_size samples, in an order that depends on the seed"
        raise ConfigError(f"{KEY}.{key}: it is a DataLoader. {fix}")
    with isolate_rng(), naming_class(f"{KEY}.{key}"):
        data = given if isinstance(given, MapStyle) else given()
    who = f"{KEY}.{key}: {type(data).__name__}"
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        raise ConfigError(f"{who} is not a map-style dataset. It needs __len__ and __getitem__")
    if not len(data):
        raise ConfigError(f"{who} has no items")
    return Items(who, data)


def common_names(parts: Sequence[Items]) -> list[str] | None:
    """Return the class names of several datasets, or None if none has names.

    Raises:
        ConfigError: They differ.
    """
    known = [(items.who, items.names) for items in parts if items.names is not None]
    for who, names in known[1:]:
        if names != known[0][1]:
            shown = one_line(f"{join_names(names or ())} instead of {join_names(known[0][1] or ())}")
            key = who.partition(":")[0]
            raise ConfigError(f"{key}: its classes are unlike those of others: {shown}. Give all the same classes")
    return known[0][1] if known else None


def concatenate(what: str, parts: Sequence[Items], values: Sequence[Any]) -> Any:
    """Concatenate the inputs or labels of several datasets, after checking that shapes and dtypes are equal."""
    first = values[0]
    if len(values) == 1:
        return first
    for items, value in zip(parts, values, strict=True):
        if describe_inputs(value) != describe_inputs(first):
            differ = f"{what} is {describe_inputs(value)}, but {describe_inputs(first)} in the first dataset"
            raise ConfigError(f"{items.who}: {differ}. All need the same shape and dtype")
    return torch.cat(list(values))


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
