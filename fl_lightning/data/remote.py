"""Data that stay on the clients' machines: each client's description of them, and the placeholders on the server.

The server's methods only need the clients' numbers of samples, and the shapes of inputs and labels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core.errors import ConfigError, check_number
from fl_lightning.core.objectives import Objective, objective_of
from fl_lightning.data.custom_data import read_schema
from fl_lightning.data.datasets import Dataset
from fl_lightning.data.federated_data import FederatedData, PackedShards, Shard
from fl_lightning.data.loaded_data import LoadedData
from fl_lightning.data.transforms import Normalize

Labels = Literal["classes", "labels", "numbers"]
"""Kinds of labels: one class per sample, several 0/1 labels per sample, or numbers to predict."""

INPUTS = {"uint8": torch.uint8, "float32": torch.float32, "int64": torch.int64}
"""Dtypes of inputs."""

LONGEST_CLASS = 200
"""Maximum length of a class name that clients and server exchange."""

MOST_CLASSES_SHOWN = 6
"""Number of classes above which an error message has only the first that differs."""

OTHER_SCHEMA = "another schema. Give the server and all clients the same schema.json"
"""Says how the encodings of two tables differ, and what to do."""


@dataclass(frozen=True)
class DataDescription:
    """A client's description of its data for the server: numbers of samples, shapes, and a digest.

    Args:
        train: Number of training samples.
        test: Number of the client's own test samples.
        in_shape: Shape of one input.
        inputs: Dtype of the inputs.
        outputs: Number of classes, labels or numbers to predict.
        labels: The kind of labels.
        digest: SHA-256 digest of the client's samples, by which a change between rounds is noticed.
        schema: `TableSchema.digest` of the encoding of the client's table; empty for other data.
        classes: Names of the classes in the order of the network's outputs; empty if they have no names.
    """

    train: int
    test: int
    in_shape: list[int]
    inputs: str
    outputs: int
    labels: Labels
    digest: str
    schema: str = ""
    classes: list[str] = field(default_factory=list)

    @property
    def form(self) -> dict[str, Any]:
        """Return the fields of the description that must be equal for all clients, such as shape and dtype."""
        return {key: value for key, value in asdict(self).items() if key not in ("train", "test", "digest")}


class RemoteClients(Dataset):
    """Data of clients on their own machines, for `FlowerEngine`. The server only has descriptions of the data.

    Args:
        clients: Number of clients.
        described: The description of each client's data, by client id. The server asks for them before round 1; leave
            it out.
        test: A dataset on the server whose test samples are the global test set. By default there is none, and only the
            clients' models are evaluated.
        schema: The `schema.json` with which the clients' tables are encoded, so that the run has it for exports.

    Raises:
        ConfigError: `clients` is below 1, or the schema cannot be read.
    """

    def __init__(
        self,
        clients: int,
        described: list[DataDescription] | None = None,
        test: Dataset | None = None,
        schema: str | None = None,
    ) -> None:
        check_number("scenario.dataset.clients", clients, "[1, inf)")
        self.clients, self.test = clients, test
        self.schema = None if schema is None else read_schema(schema)
        self.described = described

    def load(self) -> LoadedData:
        """Return placeholders of the clients' samples, which take no memory, and the global test set, if any.

        Raises:
            ConfigError: The clients were not asked yet, or the global test set has another form than their data.
        """
        if self.described is None:
            fix = "Use fl-lightning fit with engine: FlowerEngine, without --fast"
            raise ConfigError(f"scenario.dataset: the data are on the clients' machines. {fix}")
        first, rows = self.described[0], sum(each.train + each.test for each in self.described)
        x = torch.zeros(1, dtype=INPUTS[first.inputs]).expand(rows, *first.in_shape)
        y = placeholder_labels(first.labels, rows, first.outputs)
        names = next((each.classes for each in self.described if each.classes), None)
        common: dict[str, Any] = {"class_names": names} if names else {}
        if self.schema:
            if first.schema not in ("", self.schema.digest):  # arrays are encoded already
                raise ConfigError(f"scenario.dataset.schema: the clients' tables have {OTHER_SCHEMA}")
            names = self.schema.classes and [str(name) for name in self.schema.classes]
            common = {"schema": self.schema, "class_names": names}
        if self.test is None:
            return LoadedData(x, y, x[:1], y[:1], first.outputs, Normalize(), **common)
        data = self.test.checked(trains=False)
        form = describe(data, Shard(torch.empty(0), torch.empty(0)), digest="").form
        if differences := describe_differences(form | {"schema": first.schema}, first.form):
            raise ConfigError(f"scenario.dataset.test: its samples are unlike the clients': {differences}")
        known = {name: getattr(data, name) for name in ("evaluate", "schema", "class_names")} | common
        return LoadedData(x, y, data.x_test, data.y_test, first.outputs, data.prepare, **known)

    def federated(self, objective: Objective | None) -> FederatedData:
        """Return a run's data on the server: placeholders of all clients' samples, and the global test set, if any."""
        data = self.checked(objective, trains=False)
        assert self.described
        parts: dict[str, list[np.ndarray]] = {"train": [], "test": []}
        start = 0
        for each in self.described:
            for part, samples in (("train", each.train), ("test", each.test)):
                parts[part].append(np.arange(start, start := start + samples))
        shards, has_test = PackedShards(parts["train"], parts["test"]), self.test is not None
        task = objective or objective_of(data.y_train)
        return RemoteData(data, shards, objective=task, described=self.described, has_test=has_test)


@dataclass
class RemoteData(FederatedData):
    """Placeholder on the server for data on the clients' machines: correct sample counts and shapes, no values.

    Args:
        described: The description of each client's data.
        has_test: Whether the global test set is real.
    """

    described: Sequence[DataDescription] = ()
    has_test: bool = False
    is_remote: ClassVar[bool] = True

    @property
    def has_global_test(self) -> bool:
        """Whether there is a global test set."""
        return self.has_test

    def class_counts(self, part: str = "train", held_out: bool = False) -> np.ndarray:
        """Count each client's `train` or `test` samples as one class, `(clients, 1)`, as the classes are not known."""
        return self.concatenate(part)[1].numpy()[:, None]

    def digest(self) -> dict[str, str]:
        """Return SHA-256 digests of the clients' data descriptions and of the global test set, if any.

        A description contains a digest of the client's data, so the result changes with the data.
        """
        described = hashlib.sha256(repr([asdict(each) for each in self.described]).encode()).hexdigest()
        test = {key: value for key, value in super().digest().items() if key in ("x_test", "y_test")}
        return {"clients": f"sha256:{described}"} | (test if self.has_test else {})


def describe(data: LoadedData, shard: Shard, digest: str) -> DataDescription:
    """Return the description of a client's data that the server gets."""
    assert isinstance(data.x_train, Tensor)
    y = data.y_train
    labels: Labels = "numbers" if y.is_floating_point() else "labels" if y.ndim > 1 else "classes"
    inputs = str(data.x_train.dtype).removeprefix("torch.")
    counts = len(shard.train), len(shard.test)
    schema, names = data.schema.digest if data.schema else "", list(data.class_names or [])
    classes = names if are_class_names(names, data.num_classes) else []
    shape = [*data.x_train.shape[1:]]
    return DataDescription(*counts, shape, inputs, data.num_classes, labels, digest, schema, classes)


def are_class_names(names: Sequence[Any], outputs: int) -> bool:
    """Return whether these are names of all classes: a different text for each, printable and not too long."""
    texts = [name for name in names if isinstance(name, str) and name.isprintable() and 0 < len(name) <= LONGEST_CLASS]
    return len(texts) == len(names) == len({*texts}) == outputs


def check_same_form(described: Sequence[DataDescription]) -> None:
    """Check that the data of all clients have the same form, such as shape, dtype and classes.

    Raises:
        ConfigError: Names two clients whose data differ, and the difference.
    """
    named = next((client for client, each in enumerate(described) if each.classes), 0)
    for client, each in enumerate(described):
        for other in (0, named):
            if differences := describe_differences(each.form, described[other].form):
                raise ConfigError(f"client {client}: its data are unlike those of client {other}: {differences}")


def describe_differences(form: dict[str, Any], other: dict[str, Any]) -> str:
    """Return a text that lists the differences between two clients' data, such as in shape; empty if there are none.

    Classes without names are not compared.
    """
    texts = []
    for key in form:
        if form[key] == other[key] or (key == "classes" and not (form[key] and other[key])):
            continue
        if key == "schema":
            texts.append(OTHER_SCHEMA)
        elif key == "classes":
            texts.append(describe_other_classes(form[key], other[key]))
        else:
            texts.append(f"{key} {form[key]} instead of {other[key]}")
    return ", ".join(texts)


def describe_other_classes(classes: Sequence[str], others: Sequence[str]) -> str:
    """Return a text with the names of two clients' classes, or of the first that differ, and how to make them equal."""
    if max(len(classes), len(others)) > MOST_CLASSES_SHOWN:
        # -1: one list only has more classes than the other, and the last ones are shown
        first = next((i for i, (one, other) in enumerate(zip(classes, others, strict=False)) if one != other), -1)
        classes, others = ([names[first]] for names in (classes, others))
    fix = "List the classes of all clients, in the same order, under classes in each client.yaml"
    return f"classes {', '.join(classes)} instead of {', '.join(others)}. {fix}"


def placeholder_labels(labels: Labels, rows: int, outputs: int) -> Tensor:
    """Return labels of `rows` samples, all zero, as an expanded tensor that takes almost no memory.

    Args:
        labels: The kind of labels.
        rows: Number of samples.
        outputs: Number of classes, labels or numbers to predict.
    """
    if labels == "classes":
        return torch.zeros(1, dtype=torch.int64).expand(rows)
    if labels == "labels":
        return torch.zeros(1, dtype=torch.uint8).expand(rows, outputs)
    return torch.zeros(1).expand(rows, *[outputs] * (outputs > 1))
