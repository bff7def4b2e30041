"""Run folders as data. Opening one reads files and runs none of the code that it names; it needs no torch."""

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
from fl_lightning.evaluation.metrics import Row, read_columns, read_rows, summarize

if TYPE_CHECKING:
    import pandas as pd

Paths = str | Path | Iterable[str | Path]
"""A run's folder, or a folder of such at any depth; or several of them."""

Where = Mapping[str, Any] | Sequence[str]
"""Settings that runs must have: a mapping, or words such as `algorithm.tau=0.08`; of a list, either value will do."""

Figures = dict[str, float | int | None]
"""What a run came to, by name."""


class DamagedRun(FLError):
    """A folder that is no run, or one that cannot be read."""


@dataclass(frozen=True, eq=False, repr=False)
class Run:
    """A run: what `fit` gives, and what a run's folder is when it is opened to be read.

    Args:
        run_dir: The folder it lies in.
        config: Its resolved config; empty where the run was started from Python without one.
        rounds: Its metrics by round, in order, as far as they were on disk.
        final: Its figures in `final/summary.json`; None if it has not come to its end.
    """

    run_dir: Path
    config: dict[str, Any]
    rounds: list[Row]
    final: Figures | None = None

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The config with dotted keys, as on the command line; classes too: their names, or paths if they are yours."""
        return flatten(self.config, name=_short)

    @property
    def finished(self) -> bool:
        """Whether it came to its end."""
        return self.final is not None

    @cached_property
    def summary(self) -> Figures:
        """Its figures, as in `final/summary.json`; of a run that has not ended, those of the rounds that it has."""
        if self.final is not None:
            return self.final
        targets = self.settings.get("evaluation.target_accuracies")
        numbers = [each for each in targets if isinstance(each, float | int)] if isinstance(targets, list) else []
        return summarize(self.rounds, numbers)

    @cached_property
    def history(self) -> pd.DataFrame:
        """Its metrics as a table, a row a round with the round's number for its index; NaN where a round has none."""
        import pandas as pd

        rounds = pd.DataFrame(self.rounds, columns=None if self.rounds else ["round"])
        return rounds.astype({"round": "int64"}).set_index("round")

    def __repr__(self) -> str:
        """Where it lies, how far it came and its accuracies, in a few lines, as a notebook shows them."""
        rounds = f"{len(self.rounds)} round{'s' if len(self.rounds) != 1 else ''}"
        lines = [f"run {self.run_dir}: {rounds}{'' if self.finished else ', not ended'}"]
        for name in (key.removesuffix("_best_round") for key in self.summary if key.endswith("_best_round")):
            last, best, round = (self.summary.get(f"{name}_{what}") for what in ("last", "best", "best_round"))
            if last is not None and best is not None:  # of a file that somebody edited, one may be missing
                lines.append(f"  {name}: {last:.4f}, at best {best:.4f} in round {round}")
        return "\n".join(lines)

    def key(self, name: str) -> str:
        """A setting's whole key, given that or its end: `alpha` for `scenario.partition.alpha`.

        Raises:
            ConfigError: Several keys end so; the message names them.
        """
        found = _meant(name, self.settings)
        if len(found) > 1:
            raise ConfigError(f"{name}: {self.run_dir} has {' and '.join(found)}; give the whole key")
        return found[0] if found else name

    def setting(self, name: str) -> Any:
        """A setting by its key or the end of one; None where the run has no such key."""
        return self.settings.get(self.key(name))


class Tables(NamedTuple):
    """Runs as tables; `run`, the folder's path, says in each which run a row is of.

    Attributes:
        runs: A row a run: `run`, `finished`, its settings by their whole keys, lists as JSON, and the figures of its
            summary, of which `rounds` is how many it has.
        rounds: A row a run and round: `run`, `round` and the round's metrics.
        clients: A row a run, round and client that has a value: `run`, `round`, `client` and the client's metrics.
    """

    runs: pd.DataFrame
    rounds: pd.DataFrame
    clients: pd.DataFrame


def load(paths: Paths, where: Where = ()) -> Tables:
    """The runs among these folders and below them as tables; what cannot be read is left out with a warning.

    Args:
        paths: Run folders, or folders of such.
        where: Settings they must have, by key or the end of one: `{"algorithm": "FedSKC"}` or `["alpha=0.1"]`.

    Raises:
        ConfigError: No run is left, or a path is no folder.
    """
    import pandas as pd  # it takes a second to import, and whoever only wants runs opened need not wait

    runs = open_runs(paths, where)
    names: list[dict[str, Any]] = [{"run": str(run.run_dir)} for run in runs]
    rounds = pd.DataFrame([own | row | own for own, run in zip(names, runs, strict=True) for row in run.rounds])
    clients = [_clients(run) for run in runs]
    found = [table for table in clients if len(table)] or clients[:1]
    return Tables(pd.DataFrame([_row(run) for run in runs]), rounds, pd.concat(found, ignore_index=True))


def open_run_folder(folder: str | Path) -> Run:
    """A run, read from its folder.

    Raises:
        DamagedRun: It is none, or its config or metrics cannot be read; the message says which and why.
    """
    folder = Path(folder)
    if not (folder / "metrics.csv").exists():
        raise DamagedRun(f"{folder}: no run: it holds no metrics.csv")
    config = read_config(folder)
    rounds = _read(folder, "metrics.csv", lambda path: whole_rounds(read_rows(path)), [])
    if not rounds:
        raise DamagedRun(f"{folder}: no round has ended yet")
    final = read_final(folder)
    if final and (final["rounds"] or 0) > len(rounds):
        raise DamagedRun(f"{folder}: it had {final['rounds']} rounds, metrics.csv has {len(rounds)}")
    return Run(folder, config, rounds, final if final and final["rounds"] == len(rounds) else None)  # else it went on


def read_config(folder: Path) -> dict[str, Any]:
    """A run's resolved config; empty where it has none.

    Raises:
        DamagedRun: It cannot be read, or is no config.
    """
    return _read(folder, "config.yaml", _config, {})


def read_final(folder: Path) -> Figures | None:
    """A run's figures in `final/summary.json`; None where it has none.

    Raises:
        DamagedRun: They cannot be read.
    """
    return _read(folder, "final/summary.json", _figures, None)


def whole_rounds(rows: Iterable[Row]) -> list[Row]:
    """The rounds of a run's metrics, less lines that a kill cut short.

    Raises:
        ValueError: They are not rounds 1 to n, each once and in order.
    """
    rounds: list[Row] = []
    for row in filter(None, rows):
        if row.get("round") != len(rounds) + 1:
            raise ValueError(f"round {len(rounds) + 1} is missing, or out of its place")
        rounds.append(row)
    return rounds


def find(paths: Paths) -> list[Path]:
    """The run folders among these paths and below them, each once; in the order of the paths, below each by name.

    A folder is taken for a run's if it holds a `metrics.csv` or a `config.yaml`. Links to folders are not followed
    but for the paths themselves.

    Raises:
        ConfigError: A path is no folder.
    """
    found: dict[Path, Path] = {}
    for path in _listed(paths):
        if not path.is_dir():
            raise ConfigError(f"{path}: no such folder")
        for folder in _below(path):
            found.setdefault(folder.resolve(), folder)
    return list(found.values())


def open_runs(paths: Paths, where: Where = ()) -> list[Run]:
    """The runs among these folders and below them; what cannot be read is left out with a warning.

    Args:
        paths: Run folders, or folders of such.
        where: Settings they must have, by key or the end of one: `{"algorithm": "FedSKC"}` or `["alpha=0.1"]`.

    Raises:
        ConfigError: No run is left, a path is no folder, or no run has a setting that `where` names.
    """
    paths, wanted = _listed(paths), conditions(where)
    empty = [path for path in paths if not find(path)]
    runs = []
    for folder in find(paths):
        try:
            runs.append(open_run_folder(folder))
        except DamagedRun as error:
            warnings.warn(f"{error}; left out", stacklevel=2)
    if not runs:
        raise ConfigError(f"{', '.join(map(str, paths))}: no run there")
    for path in empty:
        warnings.warn(f"{path}: no run there; left out", stacklevel=2)
    keys = {known_key(key, runs, "where"): value for key, value in wanted.items()}
    chosen = [run for run in runs if all(is_setting(run.settings.get(key), value) for key, value in keys.items())]
    if not chosen:
        told = " and ".join(f"{key}={value}" for key, value in wanted.items())
        raise ConfigError(f"{', '.join(map(str, paths))}: none of {len(runs)} runs has {told}")
    return chosen


def known_key(name: str, runs: Iterable[Run], option: str) -> str:
    """The whole key of a setting that some of these runs have, given that or its end.

    Args:
        name: The key, or its end.
        runs: The runs.
        option: What asks for it, for the message.

    Raises:
        ConfigError: None has it, or the end fits several keys.
    """
    keys = {key for run in runs for key in run.settings}
    found = sorted(_meant(name, keys))
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(f"{option}: {name} may be {' or '.join(found)}; give the whole key")
    near = get_close_matches(name, {*keys, *(key.rpartition(".")[2] for key in keys)}, 1)
    raise ConfigError(f"{option}: no run has a setting {name!r}" + (f"; did you mean {near[0]}?" if near else ""))


def conditions(where: Where) -> dict[str, Any]:
    """What `where` says, as a mapping; the values of words are read as YAML.

    Raises:
        ConfigError: A word is not of the form KEY=VALUE, or a key comes twice.
    """
    if isinstance(where, Mapping):
        return dict(where)
    wanted: dict[str, Any] = {}
    for word in where:
        key, sign, text = word.partition("=")
        if not sign or not key:
            raise ConfigError(f"where: {word!r} is not of the form KEY=VALUE")
        if key in wanted:
            raise ConfigError(f"where: {key} is given twice; {key}=[{wanted[key]}, {text}] takes runs with either")
        wanted[key] = _value(text)
    return wanted


# --- Files that anybody may have put there ---


def _read(folder: Path, name: str, how: Any, missing: Any) -> Any:
    """What one of a run's files holds.

    Raises:
        DamagedRun: It is there and cannot be read.
    """
    path = folder / name
    try:
        return how(path)
    except FileNotFoundError:
        return missing
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or one_line(error)
        raise DamagedRun(f"{folder}: {name} cannot be read: {reason}") from error


def _config(path: Path) -> dict[str, Any]:
    config = load_yaml(read_file(path))
    if not isinstance(config, dict):
        raise ValueError("it holds no mapping of settings")
    return update_config(config)


def _figures(path: Path) -> Figures:
    figures = json.loads(read_file(path).decode())
    if not isinstance(figures, dict) or not isinstance(figures.get("rounds"), int):
        raise ValueError("it holds no figures of a run")
    if wrong := [name for name, value in figures.items() if not isinstance(value, float | int | None)]:
        raise ValueError(f"{wrong[0]} is no number")
    return figures


def _clients(run: Run) -> pd.DataFrame:
    """A run's `clients.csv`; empty where there is none, and with a warning where it cannot be read."""
    import pandas as pd

    columns: dict[str, Any] = {"round": [], "client": []}
    try:
        columns = _read(run.run_dir, "clients.csv", _client_columns, columns)
    except DamagedRun as error:
        warnings.warn(f"{error}; its clients are left out", stacklevel=3)
    own = {"run": str(run.run_dir)}
    return pd.DataFrame(own | columns | own).astype({"run": "str", "round": "int64", "client": "int64"})


def _client_columns(path: Path) -> dict[str, np.ndarray]:
    columns = {name: np.array(column) for name, column in read_columns(path).items()}
    if list(columns)[:2] != ["round", "client"]:
        raise ValueError("it does not begin with round and client")
    for name in ("round", "client"):
        ids = columns[name]
        if not ((ids >= 0) & (ids < 2**53) & (ids == np.floor(ids))).all():
            raise ValueError(f"a {name} is no whole number")
    return columns


# --- Settings ---


def _meant(name: str, keys: Collection[str]) -> list[str]:
    """The keys that a name may stand for: itself, or those that end so."""
    return [name] if name in keys else [key for key in keys if key.endswith(f".{name}")]


def _row(run: Run) -> dict[str, Any]:
    own = {"run": str(run.run_dir), "finished": run.finished}
    settings = {
        key: json.dumps(value, default=str, skipkeys=True) if isinstance(value, list | dict) else value
        for key, value in run.settings.items()
    }
    return own | settings | own | run.summary


def _short(path: Any) -> str:
    """A class as it is named on the command line: shipped ones and torch's by their names, others by their paths."""
    package, _, rest = str(path).partition(".")
    return rest.rpartition(".")[2] if rest and package in ("fl_lightning", "torch", "lightning") else str(path)


def _value(text: str) -> Any:
    try:
        value = load_yaml(text)
        return float(value) if isinstance(value, str) else value  # YAML does not take 1e-3 for a number
    except ValueError:
        return value
    except yaml.YAMLError as error:
        raise ConfigError(f"where: {text!r} is no value: {one_line(error)}") from error


def is_setting(setting: Any, wanted: Any) -> bool:
    """Whether a setting is what is wanted or, given a list, one of it."""
    if isinstance(wanted, list | tuple | set) and not isinstance(setting, list):
        return any(is_setting(setting, each) for each in wanted)
    wanted = _short(wanted) if isinstance(wanted, str) else wanted
    return bool(setting == wanted) and isinstance(setting, bool) == isinstance(wanted, bool)


def _listed(paths: Paths) -> list[Path]:
    return [Path(paths)] if isinstance(paths, str | Path) else [Path(path) for path in paths]


def _below(folder: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder, onerror=_tell):
        if "metrics.csv" in names:
            folders.clear()  # a run holds no runs
        if "metrics.csv" in names or "config.yaml" in names:
            yield Path(place)
        folders.sort()


def _tell(error: OSError) -> None:
    warnings.warn(f"{error.filename}: {error.strerror}; left out", stacklevel=2)
