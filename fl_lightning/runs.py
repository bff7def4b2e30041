"""Run folders as data. Opening one reads files and runs none of the code that it names; it needs no torch."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.config import flatten
from fl_lightning.errors import ConfigError, FLError, one_line
from fl_lightning.metrics import Row, read_rows, summarize

Where = Mapping[str, Any] | Sequence[str]
"""Settings that runs must have: a mapping, or words such as `algorithm.tau=0.08`."""

MOST_SETTINGS = 10_000
"""No experiment has more; a config that unfolds to more was made to fill the memory of whoever reads it."""


class DamagedRun(FLError):
    """A folder that is no run, or one that cannot be read."""


@dataclass(frozen=True)
class Run:
    """A run's folder, opened to be read.

    Args:
        folder: Where it lies.
        config: Its resolved config; empty where the run was started from Python without one.
        rounds: Its metrics by round, in order, as far as they were on disk.
    """

    folder: Path
    config: dict[str, Any]
    rounds: list[Row]

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The config with dotted keys, as on the command line; classes by their bare names."""
        return flatten(self.config, name=lambda path: str(path).rpartition(".")[2])

    @cached_property
    def finished(self) -> bool:
        """Whether it came to its end."""
        return (self.folder / "final" / "summary.json").is_file()

    @cached_property
    def summary(self) -> dict[str, float | int | None]:
        """Its figures, as in `final/summary.json`; of a run that has not ended, those of the rounds that it has."""
        if self.finished:
            try:
                return dict(json.loads((self.folder / "final" / "summary.json").read_text()))
            except (OSError, TypeError, ValueError) as error:
                raise DamagedRun(f"{self.folder}: final/summary.json cannot be read: {one_line(error)}") from error
        return summarize(self.rounds, self.settings.get("evaluation.targets") or ())

    def key(self, name: str) -> str:
        """A setting's whole key, given that or its end: `alpha` for `scenario.partition.alpha`.

        Raises:
            ConfigError: Several keys end so; the message names them.
        """
        if name in self.settings:
            return name
        found = [key for key in self.settings if key.endswith(f".{name}")]
        if len(found) > 1:
            raise ConfigError(f"{name}: {self.folder} has {' and '.join(found)}; give the whole key")
        return found[0] if found else name

    def setting(self, name: str) -> Any:
        """A setting by its key or the end of one; None where the run has no such key."""
        return self.settings.get(self.key(name))


def open_run_folder(folder: str | Path) -> Run:
    """A run, read from its folder.

    Raises:
        DamagedRun: It is none, or its config or metrics cannot be read; the message says which and why.
    """
    folder = Path(folder)
    if not (folder / "metrics.csv").is_file():
        raise DamagedRun(f"{folder}: no run: it holds no metrics.csv")
    config = read_config(folder)
    try:
        rows = whole_rounds(folder, read_rows(folder / "metrics.csv"))
    except (OSError, ValueError) as error:
        raise DamagedRun(f"{folder}: metrics.csv cannot be read: {one_line(error)}") from error
    if not rows:
        raise DamagedRun(f"{folder}: no round has ended yet")
    return Run(folder, config, rows)


def read_config(folder: Path) -> dict[str, Any]:
    """A run's resolved config; empty where it has none.

    Raises:
        DamagedRun: It cannot be read, or is no config.
    """
    try:
        config = yaml.safe_load(_text(folder / "config.yaml")) if (folder / "config.yaml").exists() else {}
        if not isinstance(config, dict) or _size(config) > MOST_SETTINGS:
            raise ValueError("it holds no mapping of settings")
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise DamagedRun(f"{folder}: config.yaml cannot be read: {one_line(error)}") from error
    return config


def whole_rounds(folder: Path, rows: Iterable[Row]) -> list[Row]:
    """The rows of a run's metrics, less lines that a kill cut short.

    Raises:
        DamagedRun: They are not rounds 1 to n, each once.
    """
    rows = [row for row in rows if row]
    if [row.get("round") for row in rows] != list(range(1, len(rows) + 1)):
        raise DamagedRun(f"{folder}: metrics.csv does not hold rounds 1 to {len(rows)}, each once")
    return rows


def find(paths: Iterable[str | Path]) -> list[Path]:
    """The run folders among these paths and below them, each once; in the order of the paths, below each by name.

    Raises:
        ConfigError: A path is no folder.
    """
    found: dict[Path, None] = {}
    for path in map(Path, paths):
        if not path.is_dir():
            raise ConfigError(f"{path}: no such folder")
        found |= dict.fromkeys(_below(path))
    return list(found)


def open_runs(paths: Iterable[str | Path], where: Where = ()) -> list[Run]:
    """The runs among these folders and below them; what cannot be read is left out with a warning.

    Args:
        paths: Run folders, or folders of such.
        where: Settings they must have, by key or the end of one: `{"algorithm": "FedSKC"}` or `["alpha=0.1"]`.

    Raises:
        ConfigError: No run is left, or a path is no folder.
    """
    paths, wanted = list(paths), conditions(where)
    runs = []
    for folder in find(paths):
        try:
            runs.append(open_run_folder(folder))
        except DamagedRun as error:
            warnings.warn(f"{error}; left out", stacklevel=2)
    chosen = [run for run in runs if all(run.setting(key) == value for key, value in wanted.items())]
    if not chosen:
        places = ", ".join(map(str, paths))
        told = " and ".join(f"{key}={value}" for key, value in wanted.items())
        raise ConfigError(f"{places}: none of {len(runs)} runs has {told}" if runs else f"{places}: no run there")
    return chosen


def conditions(where: Where) -> dict[str, Any]:
    """What `where` says, as a mapping; the values of words are read as YAML.

    Raises:
        ConfigError: A word is not of the form KEY=VALUE.
    """
    if isinstance(where, Mapping):
        return dict(where)
    wanted = {}
    for word in where:
        key, sign, value = word.partition("=")
        if not sign or not key:
            raise ConfigError(f"where: {word!r} is not of the form KEY=VALUE")
        wanted[key] = yaml.safe_load(value)
    return wanted


def _below(folder: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        if "metrics.csv" in names:
            folders.clear()  # a run holds no runs
            yield Path(place)
        folders.sort()


def _text(path: Path) -> str:
    if path.stat().st_size > 2**20:
        raise ValueError("it is larger than a config can be")
    return path.read_text()


def _size(config: Any) -> int:
    """How many settings a config unfolds to, counted no further than is needed to see that it is no config."""
    count, left = 0, [config]
    while left and count <= MOST_SETTINGS:
        count += 1
        here = left.pop()
        left += here.values() if isinstance(here, dict) else here if isinstance(here, list) else ()
    return count
