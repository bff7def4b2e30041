"""Find run folders, and choose runs by their settings."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.core.config import split_setting
from fl_lightning.core.errors import ConfigError, one_line
from fl_lightning.core.strict_yaml import load_yaml
from fl_lightning.runs.reader import DamagedRun, Run, class_name, matching_keys, open_run_folder

Paths = str | Path | Iterable[str | Path]
"""A run folder, a folder that holds run folders at any depth, or several of these."""

Where = Mapping[str, Any] | Sequence[str]
"""Settings that runs must have: a mapping, or words such as `algorithm.tau=0.08`. A list means any of its values."""


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


def _path_list(paths: Paths) -> list[Path]:
    paths = [paths] if isinstance(paths, str | Path) else [*paths]
    if "" in paths:
        raise ConfigError("runs: the name of a folder is empty. Name it, or write . for the working folder")
    return [Path(path) for path in paths]


def _find_run_folders(folder: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder, onerror=_warn_unreadable):
        if "metrics.csv" in names:
            folders.clear()  # runs are not nested
        if "metrics.csv" in names or "config.yaml" in names:
            yield Path(place)
        folders.sort()


def _warn_unreadable(error: OSError) -> None:
    warnings.warn(f"{error.filename}: {error.strerror}; left out", stacklevel=2)


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
    """Return the full key of a setting that some of these runs have, such as `scenario.partition.alpha` for `alpha`.

    Args:
        name: The key or its end.
        runs: The runs.
        option: The option that contains the name, for the message.

    Raises:
        ConfigError: No run has the setting, or the end fits several keys.
    """
    keys = {key for run in runs for key in run.settings}
    matching = sorted(matching_keys(name, keys))
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise ConfigError(f"{option}: {name} may be {' or '.join(matching)}. Give the whole key.")
    near = get_close_matches(name, {*keys, *(key.rpartition(".")[2] for key in keys)}, 1)
    raise ConfigError(f"{option}: no run has a setting {name!r}" + (f". Did you mean {near[0]}?" if near else ""))


def conditions(where: Where) -> dict[str, Any]:
    """Convert conditions on settings, such as the words `alpha=0.1`, to a mapping from key to value.

    Raises:
        ConfigError: A word is not of the form KEY=VALUE, or a key occurs twice.
    """
    if isinstance(where, Mapping):
        return dict(where)
    wanted: dict[str, Any] = {}
    for word in where:
        key, text = split_setting("where", word)
        if key in wanted:
            raise ConfigError(f"where: {key} is given twice. Use {key}=[{wanted[key]},{text}] for runs with either.")
        wanted[key] = _parse_value(text)
    return wanted


def _parse_value(text: str) -> Any:
    try:
        value = load_yaml(text)
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"where: {text!r} is not valid YAML: {one_line(error)}") from error
    if isinstance(value, str):
        with suppress(ValueError):
            return float(value)  # YAML does not parse 1e-3 as a number
    return value


def has_value(setting: Any, wanted: Any) -> bool:
    """Return whether a setting equals the wanted value or, if a list is wanted, one of the list's values."""
    if isinstance(wanted, list | tuple | set) and not isinstance(setting, list):
        return any(has_value(setting, each) for each in wanted)
    wanted = class_name(wanted) if isinstance(wanted, str) else wanted
    return bool(setting == wanted) and isinstance(setting, bool) == isinstance(wanted, bool)
