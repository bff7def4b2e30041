"""`LoadedData`: the tensors of a loaded dataset, and how its batches are prepared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from fl_lightning.core.inputs import Inputs, Shapes
from fl_lightning.core.task import Score
from fl_lightning.data.lazy import Samples
from fl_lightning.data.loaders import Batches
from fl_lightning.data.schema import TableSchema
from fl_lightning.data.transforms import BatchTransform, PerImage


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


def as_client_ids(ids: Any) -> np.ndarray:
    """Convert client ids to an array. The dtype `object`, as pandas has it, is replaced by text or integers."""
    if not isinstance(ids, np.ndarray):
        ids = np.array(ids.tolist() if hasattr(ids, "tolist") else list(ids), dtype=object)
    if ids.dtype == object or ids.dtype.kind == "T":  # numpy's StringDType
        for kind, dtype in ((str, np.str_), (int | np.integer, np.int64)):
            if len(ids) and all(isinstance(each, kind) for each in ids.flat):
                return ids.astype(dtype)
    return ids
