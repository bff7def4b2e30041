"""Write each client's samples to a separate folder, for clients that run on separate machines."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from torch import Tensor

from fl_lightning.core.errors import ConfigError
from fl_lightning.core.objectives import Classification
from fl_lightning.data.federated_data import FederatedData, Shard
from fl_lightning.data.loaded_data import LoadedData


def write_client_folders(folder: Path, data: FederatedData) -> None:
    """Write a folder `client-<id>` for each client, and a folder `test` with the global test set.

    A client's folder has the arrays that `Arrays` reads, and `client.yaml`, the file of `fl-lightning node`. Inputs are
    stored as the network gets them, so a run on these folders computes the same as a run on the whole data.

    Args:
        folder: The folder. It is created.
        data: The data and their partition.

    Raises:
        ConfigError: The dataset has several inputs per sample, or its own batches.
        OSError: A file cannot be written.
    """
    loaded = data.data
    if not isinstance(loaded.x_train, Tensor) or loaded.evaluate is not None:
        raise ConfigError(
            "--export: only datasets in memory with one input per sample and ordinary batches can be exported"
        )
    if data.held_out:
        raise ConfigError("--export: clients that are held out have no machine. Leave out scenario.held_out_clients")
    if loaded.augment is not None:
        warnings.warn("--export: the augmentation of the dataset is not part of exported data", stacklevel=2)
    for client, shard in enumerate(data.shards):
        write_client(folder / f"client-{client}", client, loaded, shard, isinstance(data.objective, Classification))
    x, y = loaded.x_test, loaded.y_test
    _write_arrays(folder / "test", loaded, x[:1], y[:1], x, y)  # a dataset needs a training sample, even if unused


def write_client(folder: Path, client: int, data: LoadedData, shard: Shard, has_classes: bool) -> None:
    """Write a client's arrays and its `client.yaml`. A client without test samples is not tested (`local_test` 0)."""
    has_test = len(shard.test) > 0
    test = shard.test if has_test else shard.train[:1]  # a dataset needs a test sample, even if it is not used
    x, y = data.x_train, data.y_train
    _write_arrays(folder, data, x[shard.train], y[shard.train], x[test], y[test])
    arguments = {"path": ".", **({"num_classes": int(data.num_classes)} if has_classes else {})}
    site = {"client": client, "dataset": {"class_path": "Arrays", "init_args": arguments}}
    site |= {} if has_test else {"local_test": 0}
    (folder / "client.yaml").write_text(yaml.safe_dump(site, sort_keys=False), encoding="utf-8")


def _write_arrays(folder: Path, data: LoadedData, *parts: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, values in zip(("x_train", "y_train", "x_test", "y_test"), parts, strict=True):
        stored = data.prepare(values) if name.startswith("x") else values
        assert isinstance(stored, Tensor)
        np.save(folder / f"{name}.npy", stored.contiguous().numpy())
