"""The folder of a sweep: its description and its database."""

from __future__ import annotations

import math
import re
import shlex
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import optuna
import yaml
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState, create_trial

from fl_lightning.analysis.baselines import option_values
from fl_lightning.analysis.study.sweep_file import UNRELATED_KEYS, Sweep
from fl_lightning.core.config import flatten, parse_config, read_config
from fl_lightning.core.config_files import config_path
from fl_lightning.core.databases import check_database
from fl_lightning.core.errors import ConfigError, FLError, one_line, reason_of
from fl_lightning.core.files import read_file, write_atomically

TRIALS = "trials"
DATABASE = "study.db"
SWEEP = "sweep.yaml"
ATTRIBUTES = ("number", "folder")
"""Attributes that the database stores of each trial: its number in the sweep, and the name of its folder."""
FOLDER = re.compile(r"[0-9]{4,9}-[0-9a-f]{6}")
"""Matches the names of the folders of trials."""
JOURNALS = tuple(f"{DATABASE}-{name}" for name in ("journal", "wal", "shm"))
SWEEP_FILES = (DATABASE, *JOURNALS, SWEEP, TRIALS, "trials.csv", "best.yaml")
"""Files and folders of a sweep."""

# --- Description ---


def describe_sweep(folder: Path, sweep: Sweep, seed: int) -> None:
    """Write a sweep's description to its folder; if trials have begun there, check that it equals the stored one.

    Before the first trial has begun the description may change, so a mistake in the file can be corrected.

    Args:
        folder: The sweep's folder.
        sweep: The sweep.
        seed: Seed of randomly drawn parameters.

    Raises:
        ConfigError: The folder holds another sweep (the message names the differences), or a file of it is lost.
    """
    words = [*sweep.words, *sweep.words_after]
    configs = {name: read_config(Path(config_path(name))) for name in option_values(words, "config")}
    related = {key: value for key, value in sweep.content.items() if key not in {*UNRELATED_KEYS, "run_cap", "command"}}
    now = {"command": shlex.join(["fit", *words]), **related, "seed": seed, "configs": configs}
    text, path, database = yaml.safe_dump(now, sort_keys=False), folder / SWEEP, folder / DATABASE
    if (folder / "points").exists():  # the folder of the trials in an older form, whose database has other keys
        raise ConfigError(f"{folder} holds another sweep, of a form that cannot be continued. Give another --out")
    begun = any((folder / TRIALS).rglob("config.yaml"))
    for file in (path, database):
        if begun and not file.exists():
            fix = "Put it back, or choose another folder with --out."
            raise ConfigError(f"{folder}: {file.name} not found, but {TRIALS} of a sweep. {fix}")
    now = yaml.safe_load(text)
    before = _read_description(path) if path.exists() else now
    if begun and before != now:
        stored, new = flatten(before), flatten(now)
        keys = sorted(key for key in stored.keys() | new.keys() if stored.get(key) != new.get(key))
        changes = "; ".join(f"{key} ({stored.get(key)} -> {new.get(key)})" for key in keys)
        raise ConfigError(f"{folder} holds another sweep: {changes}. Undo the change, or give another --out")
    if before != now:
        database.unlink(missing_ok=True)
    write_atomically(path, text)


def _read_description(path: Path) -> dict[str, Any]:
    try:
        return parse_config(read_file(path), str(path))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {reason_of(error)}") from error


# --- Database ---


class StudyNotWritten(FLError):
    """Error: the database of a sweep cannot be read or written at the moment."""

    exit_code = 1


OPERATIONAL = (
    "access permission denied",
    "attempt to write a readonly database",
    "database is locked",
    "database or disk is full",
    "database table is locked",
    "disk I/O error",
    "out of memory",
    "unable to open database file",
)
"""Beginnings of SQLite's messages about errors that are not in the database itself."""


def database_error(path: Path, error: Exception) -> FLError:
    """Return the error to raise if the database of a sweep cannot be used: it is damaged, or its disk is full."""
    reason = one_line(root_cause(error))
    if isinstance(root_cause(error), OSError) or reason.startswith(OPERATIONAL):
        return StudyNotWritten(f"{path}: {reason}. Fix this, then run the same command to continue.")
    return ConfigError(f"{path}: damaged ({reason}). Restore it from a backup, or choose another folder with --out.")


def storage_at(path: Path) -> RDBStorage:
    """Return Optuna's storage in a SQLite file. The file is created if it does not exist."""
    return RDBStorage(f"sqlite:///{path.absolute()}")


def open_database(path: Path, sweep: Sweep) -> tuple[RDBStorage, optuna.Study]:
    """Open or create the database of a sweep, and check that all of its trials are trials of this sweep.

    Raises:
        ConfigError: The file is damaged.
        StudyNotWritten: The file cannot be read or written, for example because the disk is full.
    """
    direction: Literal["maximize", "minimize"] = "maximize" if sweep.maximize else "minimize"
    try:
        check_database(path)
        storage = storage_at(path)
        study = optuna.create_study(storage=storage, study_name="sweep", direction=direction, load_if_exists=True)
        if not study.metric_names:  # the dashboard shows it
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                study.set_metric_names([sweep.metric])
        _check_trials(study.get_trials(deepcopy=False), sweep)
    except Exception as error:  # SQLite, SQLAlchemy, JSON and Optuna raise different errors for damaged content
        raise database_error(path, error) from error
    return storage, study


def _check_trials(trials: Sequence[FrozenTrial], sweep: Sweep) -> None:
    """Raise a `ValueError` if the trials in a database are not trials of this sweep."""
    distributions = {key: parameter.distribution for key, parameter in sweep.parameters.items()}
    for trial in trials:
        attributes = trial.user_attrs
        if lost := [*({*ATTRIBUTES} - attributes.keys()), *(sweep.parameters.keys() - trial.params)]:
            raise ValueError(f"trial {trial.number} has no {lost[0]}")
        create_trial(state=TrialState.RUNNING, params=trial.params, distributions=distributions)  # checks the values
        folder, values, reason = attributes["folder"], attributes.get("values", []), attributes.get("reason", "")
        if not isinstance(folder, str) or not FOLDER.fullmatch(folder):
            raise ValueError(f"trial {trial.number}: {folder!r} is not the name of a trial's folder")
        if not isinstance(reason, str) or not isinstance(values, list) or not all(map(_is_finite, values)):
            raise ValueError(f"trial {trial.number} has no valid result")
    numbers = [trial.user_attrs["number"] for trial in trials]
    if list(dict.fromkeys(numbers)) != list(range(len({*numbers}))):
        raise ValueError(f"its trials have the numbers {numbers}")


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def root_cause(error: BaseException) -> BaseException:
    """Return the innermost cause of an error."""
    while error.__cause__:
        error = error.__cause__
    return error
