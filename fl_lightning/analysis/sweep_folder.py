"""The folder of a sweep: its description and its database."""

from __future__ import annotations

import shlex
import warnings
from pathlib import Path
from typing import Literal

import optuna
import yaml
from optuna.storages import RDBStorage

from fl_lightning.analysis.baselines import option_values
from fl_lightning.analysis.sweep_file import UNRELATED_KEYS, Sweep
from fl_lightning.core.config import flatten, read_config
from fl_lightning.core.config_files import config_path
from fl_lightning.core.errors import ConfigError, one_line
from fl_lightning.core.files import write_atomically

TRIALS = "trials"
DATABASE = "study.db"
SWEEP = "sweep.yaml"
ATTRIBUTES = ("number", "folder")
"""Attributes that the database stores of each trial: its number in the sweep, and the name of its folder."""

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
    before = read_config(path) if path.exists() else now
    if begun and before != now:
        stored, new = flatten(before), flatten(now)
        keys = sorted(key for key in stored.keys() | new.keys() if stored.get(key) != new.get(key))
        changes = "; ".join(f"{key} ({stored.get(key)} -> {new.get(key)})" for key in keys)
        raise ConfigError(f"{folder} holds another sweep: {changes}. Undo the change, or give another --out")
    if before != now:
        database.unlink(missing_ok=True)
    write_atomically(path, text)


# --- Database ---


def storage_at(path: Path) -> RDBStorage:
    """Return Optuna's storage in a SQLite file. The file is created if it does not exist."""
    return RDBStorage(f"sqlite:///{path.absolute()}")


def open_database(path: Path, sweep: Sweep) -> tuple[RDBStorage, optuna.Study]:
    """Open or create the database of a sweep, and check that all of its trials can be read.

    Raises:
        ConfigError: The file is damaged.
    """
    direction: Literal["maximize", "minimize"] = "maximize" if sweep.maximize else "minimize"
    try:
        storage = storage_at(path)
        study = optuna.create_study(storage=storage, study_name="sweep", direction=direction, load_if_exists=True)
        if not study.metric_names:  # the dashboard shows it
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                study.set_metric_names([sweep.metric])
        for trial in study.get_trials(deepcopy=False):
            if lost := [*({*ATTRIBUTES} - trial.user_attrs.keys()), *(sweep.parameters.keys() - trial.params)]:
                raise ValueError(f"trial {trial.number} has no {lost[0]}")
    except Exception as error:  # SQLite, SQLAlchemy, JSON and Optuna raise different errors for damaged content
        fix = "Restore it from a backup, or choose another folder with --out."
        raise ConfigError(f"{path}: damaged ({one_line(root_cause(error))}). {fix}") from error
    return storage, study


def root_cause(error: BaseException) -> BaseException:
    """Return the innermost cause of an error."""
    while error.__cause__:
        error = error.__cause__
    return error
