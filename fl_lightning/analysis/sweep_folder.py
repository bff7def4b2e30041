"""The folder of a sweep: its description, its database, and the conversion of folders of older versions."""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import optuna
import yaml
from optuna.distributions import CategoricalDistribution, distribution_to_json
from optuna.storages import RDBStorage

from fl_lightning.analysis.baselines import option_values
from fl_lightning.analysis.sweep_file import UNRELATED_KEYS, Sweep
from fl_lightning.core.config import flatten, read_config
from fl_lightning.core.config_files import config_path
from fl_lightning.core.errors import ConfigError, one_line
from fl_lightning.core.files import write_atomically
from fl_lightning.core.renamed import new_class, new_option, update_config, update_path, update_settings

TRIALS = "trials"
OLD_TRIALS = "points"
"""The folder of the trials in sweeps of older versions."""
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
    configs = {name: read_config(Path(config_path(name))) for _, name in option_values(words, "config")}
    related = {key: value for key, value in sweep.content.items() if key not in {*UNRELATED_KEYS, "run_cap", "command"}}
    now = {"command": shlex.join(["fit", *words]), **related, "seed": seed, "configs": configs}
    text, path, database = yaml.safe_dump(now, sort_keys=False), folder / SWEEP, folder / DATABASE
    old = (folder / OLD_TRIALS).is_dir()
    begun = any((folder / (OLD_TRIALS if old else TRIALS)).rglob("config.yaml"))
    for file in (path, database):
        if begun and not file.exists():
            fix = "Put it back, or choose another folder with --out."
            raise ConfigError(f"{folder}: {file.name} not found, but {TRIALS} of a sweep. {fix}")
    now = yaml.safe_load(text)
    recorded = read_config(path) if path.exists() else now
    before = update_description(recorded, now)
    if begun and before != now:
        stored, new = flatten(before), flatten(now)
        keys = sorted(key for key in stored.keys() | new.keys() if stored.get(key) != new.get(key))
        changes = "; ".join(f"{key} ({stored.get(key)} -> {new.get(key)})" for key in keys)
        raise ConfigError(f"{folder} holds another sweep: {changes}. Undo the change, or give another --out")
    if before != now:
        database.unlink(missing_ok=True)
    elif (renamed := {key: name for key in recorded["parameters"] if (name := new_option(key))}) or old:
        update_database(database, sweep, renamed)
    if old:
        (folder / OLD_TRIALS).rename(folder / TRIALS)
    write_atomically(path, text)


def update_database(path: Path, sweep: Sweep, renamed: Mapping[str, str]) -> None:
    """Update the database of a sweep that began with an older version, in which listed values were stored as text.

    Args:
        path: The database.
        sweep: The sweep.
        renamed: The present name of each renamed parameter, by its old name.
    """
    storage = storage_at(path)
    with storage.engine.begin() as connection:
        for old, new in renamed.items():
            connection.exec_driver_sql("UPDATE trial_params SET param_name = ? WHERE param_name = ?", (new, old))
        connection.exec_driver_sql("UPDATE trial_user_attributes SET key = 'number' WHERE key = 'point'")
        for key, parameter in sweep.parameters.items():
            if parameter.words:
                before = distribution_to_json(CategoricalDistribution(list(parameter.words.values())))
                values = (distribution_to_json(parameter.distribution), key, before)
                update = "UPDATE trial_params SET distribution_json = ? WHERE param_name = ? AND distribution_json = ?"
                connection.exec_driver_sql(update, values)
    storage.engine.dispose()


def update_description(recorded: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sweep's stored description with the present names of renamed options and classes.

    Args:
        recorded: The description in the sweep's folder.
        now: The present description. The baselines of its configs replace those recorded under their old name,
            `rivals`, because the shipped files with baselines moved, too.
    """
    configs = {name: update_config(config) for name, config in recorded["configs"].items()}
    for name, config in recorded["configs"].items():
        if "rivals" in config and name in now["configs"]:
            configs[name]["baselines"] = now["configs"][name].get("baselines")
    words = [_update_word(word) for word in shlex.split(recorded["command"])]
    parameters = update_settings(recorded["parameters"])
    return {**recorded, "command": shlex.join(words), "parameters": parameters, "configs": configs}


def _update_word(word: str) -> str:
    """Return one word of a command line, with a renamed option or class under its present name."""
    key, sign, value = word.partition("=") if word.startswith("--") else ("", "", word)
    new = new_option(key.removeprefix("--"))
    return (f"--{new}" if new else key) + sign + (new_class(value) or update_path(value))


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
