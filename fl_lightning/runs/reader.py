"""Read one run folder as a `Run`, without importing torch or executing code from the run."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from fl_lightning.core.config import flatten
from fl_lightning.core.errors import ConfigError, FLError, reason_of
from fl_lightning.core.files import path_below, read_file
from fl_lightning.core.strict_yaml import load_yaml
from fl_lightning.evaluation.summary import Row, main_metrics, summarize
from fl_lightning.runs.csv_reader import read_columns, read_rows

if TYPE_CHECKING:
    import pandas as pd

    from fl_lightning.runs.curves import XAxis
    from fl_lightning.runs.paper_figure import PaperFigure

Figures = dict[str, float | int | None]
"""Summary figures of a run by name."""


MOST_FIGURE = 10**300
"""Largest whole number in a summary; a larger one is no float."""


class DamagedRun(FLError):
    """A folder is not a run folder, or one of its files cannot be read."""


@dataclass(frozen=True, eq=False, repr=False)
class Run:
    """The config and metrics of a run, returned by `fit` or read from its folder.

    Args:
        run_dir: The run folder.
        config: The resolved config; empty if the run was started from Python without a config.
        rounds: The metrics, a row per round.
        final: The figures in `final/summary.json`; None if the run has not finished.
        is_dry_run: Whether this was a dry run, whose folder is gone.
    """

    run_dir: Path
    config: dict[str, Any]
    rounds: list[Row]
    final: Figures | None = None
    is_dry_run: bool = False

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The config as a flat dict with dotted keys, such as `scenario.partition.alpha`.

        A class of this package, torch or Lightning is given by its name, any other class by its import path.
        """
        return flatten(self.config, name=class_name)

    @property
    def finished(self) -> bool:
        """Whether the run has finished."""
        return self.final is not None

    @cached_property
    def summary(self) -> Figures:
        """Summary of the run as a dict, with values such as the best accuracy, as in `final/summary.json`.

        For a run that has not finished, the values are computed from the rounds so far.
        """
        if self.final is not None:
            return self.final
        targets = self.settings.get("evaluation.target_accuracies")
        numbers = [each for each in targets if isinstance(each, float | int)] if isinstance(targets, list) else []
        return summarize(self.rounds, numbers)

    @cached_property
    def history(self) -> pd.DataFrame:
        """Metrics as a DataFrame with a row per round, indexed by the round; NaN if a round has no value."""
        import pandas as pd

        rounds = pd.DataFrame(self.rounds, columns=None if self.rounds else ["round"])
        return rounds.astype({"round": "int64"}).set_index("round")

    def plot(
        self,
        *metrics: str,
        x: XAxis = "round",
        percent: bool = False,
        width: float | str = "column",
        font: str = "sans",
        font_size: float = 8,
    ) -> PaperFigure:
        """Return a Matplotlib figure of metrics by round, bytes or seconds. `savefig` writes it with embedded fonts.

        Args:
            metrics: Columns of `metrics.csv`. By default the accuracy of the global model and the mean of the clients',
                or another metric of the models in place of the accuracy.
            x: `round`, or the `bytes` (up and down) or `seconds` until the end of a round.
            percent: Multiply the metrics by 100.
            width: The width of a venue's column or text, such as `neurips` or `ieee-column`, or a number of inches.
            font: `sans`, `serif`, or the name of an installed font.
            font_size: Size of axis labels in points; ticks and legends are one point smaller.

        Raises:
            ConfigError: The run has no such metric or x axis, a metric is no fraction, or an option is unknown.
        """
        from fl_lightning.runs.axis_labels import evaluated_split
        from fl_lightning.runs.figure_style import figure_style
        from fl_lightning.runs.paper_figure import plot_run  # imports matplotlib

        chosen = metrics or main_metrics(self.rounds) or ["global/acc"]
        names = [known_metric(name, [self], "metrics") for name in chosen]
        style, split = figure_style(font, font_size), evaluated_split(self.settings)
        return plot_run(self.rounds, names, x, percent, width, style, split)

    def __repr__(self) -> str:
        """Return the run folder, the number of rounds and the last and best metrics as text for notebooks."""
        rounds = f"{len(self.rounds)} round{'s' if len(self.rounds) != 1 else ''}"
        if self.is_dry_run:
            return f"dry run passed: {rounds} of few clients and samples"
        lines = [f"run {self.run_dir}: {rounds}{'' if self.finished else ', not ended'}"]
        for name in (key.removesuffix("_best_round") for key in self.summary if key.endswith("_best_round")):
            last, best, round = (self.summary.get(f"{name}_{what}") for what in ("last", "best", "best_round"))
            if last is not None and best is not None:  # one may be missing in an edited file
                lines.append(f"  {name}: {last:.4f}, at best {best:.4f} in round {round}")
        return "\n".join(lines)

    def key(self, name: str) -> str:
        """Return the full key of a setting, given the end of the key: `scenario.partition.alpha` for `alpha`.

        Raises:
            ConfigError: Several keys have this end; the message names them.
        """
        keys = matching_keys(name, self.settings)
        if len(keys) > 1:
            raise ConfigError(f"{name}: {self.run_dir} has {' and '.join(keys)}. Give the whole key.")
        return keys[0] if keys else name

    def setting(self, name: str) -> Any:
        """Return a setting by its key or the end of its key; None if the run has no such key."""
        return self.settings.get(self.key(name))


def matching_keys(name: str, keys: Collection[str]) -> list[str]:
    """Return the keys that a name may abbreviate: the key of this name, or else all keys that end with the name."""
    return [name] if name in keys else [key for key in keys if key.endswith(f".{name}")]


def class_name(path: Any) -> str:
    """Return the name of a class of this package, torch or Lightning; any other class's import path, unchanged."""
    package, _, rest = str(path).partition(".")
    return rest.rpartition(".")[2] if rest and package in ("fl_lightning", "torch", "lightning") else str(path)


def known_metric(name: str, runs: Iterable[Run], option: str) -> str:
    """Check that at least one of these runs has a metric, and return the metric's name unchanged.

    Raises:
        ConfigError: No run has the metric; the message names the option and the available metrics.
    """
    names = {name for run in runs for row in run.rounds for name in row} - {"round"}
    if name not in names:
        raise ConfigError(f"{option}: no run has {name!r}. Available: {', '.join(sorted(names))}.")
    return name


def open_run_folder(folder: str | Path) -> Run:
    """Read the config and metrics of a run from its folder.

    Raises:
        DamagedRun: The folder is not a run, or a file cannot be read; the message says which and why.
    """
    folder = Path(folder)
    config = read_config(folder)
    rounds = _read(folder, "metrics.csv", lambda path: complete_rounds(read_rows(path)), None)
    if rounds is None:
        raise DamagedRun(f"{folder}: not a run, or its first round has not ended: metrics.csv not found")
    if not rounds:
        raise DamagedRun(f"{folder}: no round has finished yet")
    final = read_final(folder)
    if final and (final["rounds"] or 0) > len(rounds):
        raise DamagedRun(f"{folder}: it had {final['rounds']} rounds, metrics.csv has {len(rounds)}")
    finished = final and final["rounds"] == len(rounds)  # otherwise it was resumed with more rounds
    return Run(folder, config, rounds, final if finished else None)


def read_config(folder: Path) -> dict[str, Any]:
    """Read a run's resolved config from `config.yaml`; empty if the file does not exist.

    Raises:
        DamagedRun: The file cannot be read or is not a config.
    """
    return _read(folder, "config.yaml", _parse_config, {})


def read_final(folder: Path) -> Figures | None:
    """Return a run's summary, as stored in `final/summary.json`; None if the file does not exist.

    Raises:
        DamagedRun: The file cannot be read.
    """
    return _read(folder, "final/summary.json", _parse_summary, None)


def read_clients(folder: Path) -> dict[str, np.ndarray]:
    """Read the columns of a run's `clients.csv`: `round`, `client` and metrics; empty if the file does not exist.

    Raises:
        DamagedRun: The file cannot be read.
    """
    return _read(folder, "clients.csv", _client_columns, {})


def complete_rounds(rows: Iterable[Row]) -> list[Row]:
    """Return the non-empty rows of a metrics file, after checking that they are rounds 1 to n in order.

    An empty row stands for a line that a killed run left incomplete.

    Raises:
        ValueError: The rows are not rounds 1 to n in order.
    """
    rounds: list[Row] = []
    for row in filter(None, rows):
        if row.get("round") != len(rounds) + 1:
            raise ValueError(f"round {len(rounds) + 1} is missing or out of order")
        rounds.append(row)
    return rounds


def _read(folder: Path, name: str, how: Any, missing: Any) -> Any:
    """Read one file of a run with the function `how`; return `missing` if the file does not exist."""
    try:
        return how(path_below(folder, name))
    except FileNotFoundError:
        return missing
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise DamagedRun(f"{folder}: {name} cannot be read: {reason_of(error)}") from error


def _parse_config(path: Path) -> dict[str, Any]:
    config = load_yaml(read_file(path))
    if not isinstance(config, dict):
        raise ValueError("it is not a mapping of settings")
    return config


def _parse_summary(path: Path) -> Figures:
    figures = json.loads(read_file(path).decode())
    if not isinstance(figures, dict) or not isinstance(figures.get("rounds"), int):
        raise ValueError("it is not the summary of a run")
    for name, value in figures.items():
        if not isinstance(value, float | int | None) or (isinstance(value, int) and abs(value) > MOST_FIGURE):
            raise ValueError(f"{name} is not a number")
    return figures


def _client_columns(path: Path) -> dict[str, np.ndarray]:
    columns = {name: np.array(column) for name, column in read_columns(path).items()}
    if list(columns)[:2] != ["round", "client"]:
        raise ValueError("it does not begin with round and client")
    for name in ("round", "client"):
        ids = columns[name]
        if not ((ids >= 0) & (ids < 2**53) & (ids == np.floor(ids))).all():
            raise ValueError(f"a {name} is not a whole number")
    return columns
