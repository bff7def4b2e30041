"""Load a run's dataset on another machine, from that machine's own files, and compare it with the run's."""

from __future__ import annotations

import copy
import os
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fl_lightning.core.errors import ConfigError
from fl_lightning.data import FederatedData, Scenario
from fl_lightning.engines.serialization import SharedPosition

PARTS = ("x_train", "y_train", "x_test", "y_test")
"""The parts of a `LoadedData` that a machine reads from its own files."""


@dataclass(frozen=True)
class DataSource:
    """The options with which any machine that has the files can load a run's dataset.

    Args:
        scenario: The scenario.
        seed: The run's seed.
        test_set: The argument of `Scenario.build`.
    """

    scenario: Scenario
    seed: int
    test_set: bool = False

    def check(self) -> None:
        """Check that the dataset is read from files.

        Raises:
            ConfigError: It has neither `data_dir` nor `path`.
        """
        dataset = self.scenario.dataset
        if not any(isinstance(getattr(dataset, key, None), str) for key in ("data_dir", "path")):
            what = f"{type(dataset).__name__} is not read from files"
            raise ConfigError(f"engine.data_dir: {what}. Leave it out: the dataset is sent to the machines.")

    def load(self, data_dir: str) -> FederatedData:
        """Load the dataset from a folder of this machine, and split it among the clients.

        Args:
            data_dir: The folder that contains the dataset's file or folder. Environment variables are expanded.

        Raises:
            ConfigError: The dataset cannot be read.
        """
        folder = os.path.expanduser(os.path.expandvars(data_dir))
        moved = {key: in_folder(getattr(self.scenario, key), folder) for key in ("dataset", "partition")}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the main process has shown them
            return replace(self.scenario, **moved).build(self.seed, self.test_set)


def in_folder(reader: Any, folder: str) -> Any:
    """Return a copy of a dataset or partition that reads its files from another folder.

    Args:
        reader: The dataset or partition. `data_dir` is the folder itself; of `path` and `test_path`, the last component
            is kept.
        folder: The folder.
    """
    moved = copy.copy(reader)
    if isinstance(getattr(moved, "data_dir", None), str):
        moved.data_dir = folder
    for key in ("path", "test_path"):
        if isinstance(path := getattr(moved, key, None), str):
            setattr(moved, key, str(Path(folder, Path(path).name)))
    return moved


class DatasetParts:
    """The parts of a dataset that a serialized experiment (`Worker`) leaves out.

    Args:
        data: The run's data.

    Attributes:
        values: The parts in the order of `PARTS`.
        positions: The position of each part, by its `id`.
        digests: SHA-256 digest of each part, as `FederatedData.digest` returns it.
    """

    def __init__(self, data: FederatedData) -> None:
        self.values = [getattr(data.data, part) for part in PARTS]
        self.positions = {id(value): SharedPosition(0, number) for number, value in enumerate(self.values)}
        digests = data.digest()
        self.digests = [digests[part] for part in PARTS]


def matching_parts(source: DataSource, data_dir: str, digests: list[str]) -> list[Any]:
    """Load a dataset, and return the parts that have these digests, in the order of `PARTS`; None for other parts.

    Args:
        source: The options of the dataset.
        data_dir: The folder that contains the dataset's file or folder.
        digests: The digests in the order of `PARTS`.

    Raises:
        ConfigError: The dataset cannot be read.
    """
    data = source.load(data_dir)
    found = data.digest()
    return [
        getattr(data.data, part) if found[part] == digest else None for part, digest in zip(PARTS, digests, strict=True)
    ]
