"""Read run folders as tables, without importing torch or executing code from the run."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import yaml

from fl_lightning.core.config import flatten, load_yaml
from fl_lightning.core.errors import ConfigError, FLError, one_line
from fl_lightning.core.files import read_file
from fl_lightning.core.renamed import update_config
from fl_lightning.evaluation.summary import Row, main_metrics, summarize
from fl_lightning.runs.csv_reader import CLIENT_NAME, read_columns, read_rows
from fl_lightning.runs.partition import read_names

if TYPE_CHECKING:
    import pandas as pd

    from fl_lightning.runs.curves import XAxis
    from fl_lightning.runs.paper_figure import PaperFigure

Paths = str | Path | Iterable[str | Path]
"""A run folder, a folder that holds run folders at any depth, or several of these."""

Where = Mapping[str, Any] | Sequence[str]
"""Settings that runs must have: a mapping, or words such as `algorithm.tau=0.08`. A list means any of its values."""

Figures = dict[str, float | int | None]
"""Summary figures of a run by name."""


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
        """The config with dotted keys, as on the command line. Your own classes are import paths, others are names."""
        return flatten(self.config, name=_class_name)

    @property
    def finished(self) -> bool:
        """Whether the run has finished."""
        return self.final is not None

    @cached_property
    def summary(self) -> Figures:
        """Summary figures such as the best accuracy, as in `final/summary.json`; of the rounds so far if unfinished."""
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
        self, *metrics: str, x: XAxis = "round", percent: bool = False, width: float | str = "column"
    ) -> PaperFigure:
        """Return a Matplotlib figure of metrics by round, bytes or seconds. `savefig` writes it with embedded fonts.

        Args:
            metrics: Columns of `metrics.csv`. By default the accuracy of the global model and the mean of the clients',
                or another metric of the models in place of the accuracy.
            x: `round`, or the `bytes` (up and down) or `seconds` until the end of a round.
            percent: Multiply the metrics by 100.
            width: `column` or `text` of a two-column paper, or a number of inches.

        Raises:
            ConfigError: The run has no such metric or x axis, a metric is no fraction, or the width is unknown.
        """
        from fl_lightning.runs.paper_figure import plot_run  # imports matplotlib

        chosen = metrics or main_metrics(self.rounds) or ["global/acc"]
        return plot_run(self.rounds, [known_metric(name, [self], "metrics") for name in chosen], x, percent, width)

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
        keys = _matching_keys(name, self.settings)
        if len(keys) > 1:
            raise ConfigError(f"{name}: {self.run_dir} has {' and '.join(keys)}. Give the whole key.")
        return keys[0] if keys else name

    def setting(self, name: str) -> Any:
        """Return a setting by its key or the end of its key; None if the run has no such key."""
        return self.settings.get(self.key(name))


class Tables(NamedTuple):
    """Several runs as tables of settings, rounds and clients. The column `run` of each is the path of the run folder.

    Attributes:
        runs: A row per run: `run`, `finished`, the settings by full key (lists as JSON) and the summary figures,
            including `rounds`, the number of rounds.
        rounds: A row per run and round: `run`, `round` and the round's metrics.
        clients: A row per run, round and client with a value: `run`, `round`, `client`, `name` if clients have names,
            and the client's metrics.
    """

    runs: pd.DataFrame
    rounds: pd.DataFrame
    clients: pd.DataFrame


def load(paths: Paths, where: Where = ()) -> Tables:
    """Read all runs in these folders as tables. A run that cannot be read is left out with a warning.

    Args:
        paths: Run folders, or folders of such.
        where: Settings they must have, by key or the end of one: `{"algorithm": "FedSKC"}` or `["alpha=0.1"]`.

    Raises:
        ConfigError: No run is left, or a path is not a folder.
    """
    import pandas as pd  # not at the top: importing it takes a second, and opening a run does not need it

    runs = open_runs(paths, where)
    names: list[dict[str, Any]] = [{"run": str(run.run_dir)} for run in runs]
    rounds = pd.DataFrame([name | row | name for name, run in zip(names, runs, strict=True) for row in run.rounds])
    clients = [_clients(run) for run in runs]
    tables = [table for table in clients if len(table)] or clients[:1]
    return Tables(pd.DataFrame([_run_row(run) for run in runs]), rounds, pd.concat(tables, ignore_index=True))


def open_run_folder(folder: str | Path) -> Run:
    """Read the config and metrics of a run from its folder.

    Raises:
        DamagedRun: The folder is not a run, or a file cannot be read; the message says which and why.
    """
    folder = Path(folder)
    if not (folder / "metrics.csv").exists():
        raise DamagedRun(f"{folder}: not a run, or its first round has not ended: metrics.csv not found")
    config = read_config(folder)
    rounds = _read(folder, "metrics.csv", lambda path: complete_rounds(read_rows(path)), [])
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
    """Read a run's summary figures from `final/summary.json`; None if the file does not exist.

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
    """Return the rows of a metrics file without empty ones, which stand for lines that a killed run left incomplete.

    Raises:
        ValueError: The rows are not rounds 1 to n in order.
    """
    rounds: list[Row] = []
    for row in filter(None, rows):
        if row.get("round") != len(rounds) + 1:
            raise ValueError(f"round {len(rounds) + 1} is missing or out of order")
        rounds.append(row)
    return rounds


def find(paths: Paths) -> list[Path]:
    """Return all run folders below these folders without duplicates, in the order of the paths and then by name.

    A run folder holds a `metrics.csv` or a `config.yaml`. Links to folders are not followed, except the paths
    themselves.

    Raises:
        ConfigError: A path is not a folder.
    """
    folders: dict[Path, Path] = {}
    for path in _path_list(paths):
        if not path.is_dir():
            raise ConfigError(f"{path}: folder not found")
        for folder in _find_run_folders(path):
            folders.setdefault(folder.resolve(), folder)
    return list(folders.values())


def open_runs(paths: Paths, where: Where = ()) -> list[Run]:
    """Read all runs in these folders. A run that cannot be read is left out with a warning.

    Args:
        paths: Run folders, or folders of such.
        where: Settings they must have, by key or the end of one: `{"algorithm": "FedSKC"}` or `["alpha=0.1"]`.

    Raises:
        ConfigError: No run is left, a path is not a folder, or no run has a setting that `where` names.
    """
    paths, wanted = _path_list(paths), conditions(where)
    empty = [path for path in paths if not find(path)]
    runs = []
    for folder in find(paths):
        try:
            runs.append(open_run_folder(folder))
        except DamagedRun as error:
            warnings.warn(f"{error}; left out", stacklevel=2)
    if not runs:
        raise ConfigError(f"{', '.join(map(str, paths))}: no run found")
    for path in empty:
        warnings.warn(f"{path}: no run found; left out", stacklevel=2)
    keys = {known_key(key, runs, "where"): value for key, value in wanted.items()}
    chosen = [run for run in runs if all(has_value(run.settings.get(key), value) for key, value in keys.items())]
    if not chosen:
        conditions_text = " and ".join(f"{key}={value}" for key, value in wanted.items())
        raise ConfigError(f"{', '.join(map(str, paths))}: none of {len(runs)} runs has {conditions_text}")
    return chosen


def known_key(name: str, runs: Iterable[Run], option: str) -> str:
    """Return the full key of a setting, given the key or its end, after checking that some of these runs have it.

    Args:
        name: The key or its end.
        runs: The runs.
        option: The option that contains the name, for the message.

    Raises:
        ConfigError: No run has the setting, or the end fits several keys.
    """
    keys = {key for run in runs for key in run.settings}
    matching = sorted(_matching_keys(name, keys))
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise ConfigError(f"{option}: {name} may be {' or '.join(matching)}. Give the whole key.")
    near = get_close_matches(name, {*keys, *(key.rpartition(".")[2] for key in keys)}, 1)
    raise ConfigError(f"{option}: no run has a setting {name!r}" + (f". Did you mean {near[0]}?" if near else ""))


def known_metric(name: str, runs: Iterable[Run], option: str) -> str:
    """Return the name of a metric, after checking that some of these runs have it.

    Raises:
        ConfigError: No run has the metric; the message names the option and the available metrics.
    """
    names = {name for run in runs for row in run.rounds for name in row} - {"round"}
    if name not in names:
        raise ConfigError(f"{option}: no run has {name!r}. Available: {', '.join(sorted(names))}.")
    return name


def conditions(where: Where) -> dict[str, Any]:
    """Convert conditions on settings, such as the words `alpha=0.1`, to a mapping from key to value.

    Raises:
        ConfigError: A word is not of the form KEY=VALUE, or a key occurs twice.
    """
    if isinstance(where, Mapping):
        return dict(where)
    wanted: dict[str, Any] = {}
    for word in where:
        key, sign, text = word.partition("=")
        if not sign or not key:
            raise ConfigError(f"where: {word!r} is not of the form KEY=VALUE")
        if key in wanted:
            raise ConfigError(f"where: {key} is given twice. Use {key}=[{wanted[key]}, {text}] for runs with either.")
        wanted[key] = _parse_value(text)
    return wanted


# --- Files ---


def _read(folder: Path, name: str, how: Any, missing: Any) -> Any:
    """Read one file of a run with the function `how`; return `missing` if the file does not exist."""
    path = folder / name
    try:
        return how(path)
    except FileNotFoundError:
        return missing
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or one_line(error)
        raise DamagedRun(f"{folder}: {name} cannot be read: {reason}") from error


def _parse_config(path: Path) -> dict[str, Any]:
    config = load_yaml(read_file(path))
    if not isinstance(config, dict):
        raise ValueError("it is not a mapping of settings")
    return update_config(config)


def _parse_summary(path: Path) -> Figures:
    figures = json.loads(read_file(path).decode())
    if not isinstance(figures, dict) or not isinstance(figures.get("rounds"), int):
        raise ValueError("it is not the summary of a run")
    if wrong := [name for name, value in figures.items() if not isinstance(value, float | int | None)]:
        raise ValueError(f"{wrong[0]} is not a number")
    return figures


def _clients(run: Run) -> pd.DataFrame:
    """Read a run's `clients.csv` as a table; empty if the file is missing or, with a warning, unreadable."""
    import pandas as pd

    columns: Mapping[str, Any] = {"round": [], "client": []}
    try:
        columns = read_clients(run.run_dir) or columns
    except DamagedRun as error:
        warnings.warn(f"{error}; its clients are left out", stacklevel=3)
    name = {"run": str(run.run_dir)}
    table = pd.DataFrame({**name, **columns, **name}).astype({"run": "str", "round": "int64", "client": "int64"})
    if len(table) and (names := read_names(run.run_dir).clients):
        table.insert(3, CLIENT_NAME, table["client"].map(dict(enumerate(names))))
    return table


def _client_columns(path: Path) -> dict[str, np.ndarray]:
    columns = {name: np.array(column) for name, column in read_columns(path).items()}
    if list(columns)[:2] != ["round", "client"]:
        raise ValueError("it does not begin with round and client")
    for name in ("round", "client"):
        ids = columns[name]
        if not ((ids >= 0) & (ids < 2**53) & (ids == np.floor(ids))).all():
            raise ValueError(f"a {name} is not a whole number")
    return columns


# --- Settings ---


def _matching_keys(name: str, keys: Collection[str]) -> list[str]:
    """Return the keys that a name may abbreviate: the key of this name, or else all keys that end with the name."""
    return [name] if name in keys else [key for key in keys if key.endswith(f".{name}")]


def _run_row(run: Run) -> dict[str, Any]:
    fixed = {"run": str(run.run_dir), "finished": run.finished}  # settings of these names do not replace them
    settings = {
        key: json.dumps(value, default=str, skipkeys=True) if isinstance(value, list | dict) else value
        for key, value in run.settings.items()
    }
    return fixed | settings | fixed | run.summary


def _class_name(path: Any) -> str:
    """Return the name of a class of this package, torch or Lightning; any other class's import path, unchanged."""
    package, _, rest = str(path).partition(".")
    return rest.rpartition(".")[2] if rest and package in ("fl_lightning", "torch", "lightning") else str(path)


def _parse_value(text: str) -> Any:
    try:
        value = load_yaml(text)
        return float(value) if isinstance(value, str) else value  # YAML does not parse 1e-3 as a number
    except ValueError:
        return value
    except yaml.YAMLError as error:
        raise ConfigError(f"where: {text!r} is not valid YAML: {one_line(error)}") from error


def has_value(setting: Any, wanted: Any) -> bool:
    """Return whether a setting equals the wanted value or, if a list is wanted, one of the list's values."""
    if isinstance(wanted, list | tuple | set) and not isinstance(setting, list):
        return any(has_value(setting, each) for each in wanted)
    wanted = _class_name(wanted) if isinstance(wanted, str) else wanted
    return bool(setting == wanted) and isinstance(setting, bool) == isinstance(wanted, bool)


def _path_list(paths: Paths) -> list[Path]:
    return [Path(paths)] if isinstance(paths, str | Path) else [Path(path) for path in paths]


def _find_run_folders(folder: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder, onerror=_warn_unreadable):
        if "metrics.csv" in names:
            folders.clear()  # runs are not nested
        if "metrics.csv" in names or "config.yaml" in names:
            yield Path(place)
        folders.sort()


def _warn_unreadable(error: OSError) -> None:
    warnings.warn(f"{error.filename}: {error.strerror}; left out", stacklevel=2)
