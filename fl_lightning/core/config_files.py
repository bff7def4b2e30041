"""Find config files by path or by name: the user's, those of run folders and those of this package."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from fl_lightning.core.config import read_config
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.files import read_file
from fl_lightning.core.public_names import public_classes
from fl_lightning.core.spelling import nearest

DIGITS = "digits_fedavg.yaml"
"""The config of FedAvg on the digits dataset. The configs of other algorithms replace the name FedAvg in it."""


class CommandLine(NamedTuple):
    """A command line, and its config files, which are read once.

    Attributes:
        words: The words after the command.
        configs: The path and the content of each config file of an experiment, in their order.
    """

    words: Sequence[str] = ()
    configs: Sequence[tuple[Path, dict[str, Any]]] = ()


def read_configs(words: Sequence[str]) -> CommandLine:
    """Read the config files of an experiment's command line, and replace each `--config=NAME` by `--config=PATH`.

    `NAME` is the name of a config in this package, or a path.

    Raises:
        ConfigError: A file does not exist, or is no YAML mapping.
    """
    start = "--config="
    words = [f"{start}{config_path(word.removeprefix(start))}" if word.startswith(start) else word for word in words]
    paths = [Path(word.removeprefix(start)) for word in words if word.startswith(start)]
    return CommandLine(words, [(path, read_config(path, f"--config: {path}")) for path in paths])


def config_path(name: str) -> str:
    """Return the path of a config file, given its path or the name of a config in this package.

    The name may leave out `.yaml`.

    Raises:
        ConfigError: The file does not exist.
    """
    path = named_file(name, "configs")
    if path is None:
        if is_run(name):
            raise ConfigError(f"--config: {name} is the folder of a run. Did you mean --resume {name}?")
        near = nearest_file(name, "configs")
        fix = f"Did you mean {near}?" if near else "See `fl-lightning list configs`."
        raise ConfigError(f"--config: {name} is neither a file here nor a shipped config. {fix}")
    return str(path)


def read_run_config(run_dir: Path) -> bytes:
    """Return the content of a run's `config.yaml`.

    Raises:
        ConfigError: The folder does not exist, is no run, or cannot be read.
    """
    try:
        return read_file(run_dir / "config.yaml")
    except (FileNotFoundError, NotADirectoryError) as error:
        missing = " is no run: config.yaml not found" if os.path.lexists(run_dir) else ": folder not found"
        raise ConfigError(f"{run_dir}{missing}") from error
    except OSError as error:
        fix = ". Check its permissions" if isinstance(error, PermissionError) else ""
        raise ConfigError(f"{run_dir}: config.yaml cannot be read: {error.strerror}{fix}") from error


def is_run(path: str) -> bool:
    """Return whether a path is a run's folder: one with a `config.yaml`."""
    return os.path.isfile(os.path.join(path, "config.yaml"))


def named_file(name: str, kind: str) -> Path | None:
    """Return the path of a YAML file, given its path or the name of a file in this package; None if not found.

    Args:
        name: The path or the name; `.yaml` may be left out.
        kind: The folder of this package's files: `configs`, `sweeps` or `papers`.
    """
    folder = Path(str(files(f"fl_lightning.{kind}")))
    names = [name, f"{name}.yaml"] if name and not name.endswith(os.sep) else []
    paths = [Path(one) for one in names] + [folder / one for one in names if os.sep not in one]
    found = next((path for path in paths if os.path.isfile(path)), None)  # Path.is_file raises errors for long names
    derived = [one for one in names if kind == "configs" and one in derived_configs()]
    return found or (_derived_file(derived[0]) if derived else None)


def nearest_file(name: str, kind: str) -> str | None:
    """Return the YAML file with the name most similar to `name`; None if no name is similar.

    Searches the folder of the path `name`, then the files of this package.

    Args:
        name: A path, or the name of a file.
        kind: The folder of this package's files: `configs`, `sweeps` or `papers`.
    """
    folder, last = os.path.split(name)
    with suppress(OSError):
        near = nearest(last, (one for one in os.listdir(folder or ".") if one.endswith((".yaml", ".yml"))))
        if near:
            return os.path.join(folder, near)
    return nearest(last, shipped(kind))


def shipped(kind: str) -> list[str]:
    """Return the names of this package's YAML files of one kind: `configs`, `sweeps` or `papers`."""
    return sorted([*_files(kind), *(derived_configs() if kind == "configs" else ())])


def shipped_text(name: str, kind: str) -> str:
    """Return the content of a YAML file of this package.

    A config without a file of its own is derived from `digits_fedavg.yaml`, see `derived_configs`.

    Args:
        name: The file's name.
        kind: The folder: `configs`, `sweeps` or `papers`.
    """
    algorithm = derived_configs().get(name) if kind == "configs" else None
    text = files(f"fl_lightning.{kind}").joinpath(DIGITS if algorithm else name).read_text(encoding="utf-8")
    if algorithm is None:
        return text
    content = text.partition("\n")[2].replace("FedAvg", algorithm)
    return f"# No file of its own: {DIGITS} with --algorithm {algorithm}.\n{content}"


@cache
def derived_configs() -> dict[str, str]:
    """Return the configs that are derived from `digits_fedavg.yaml`, as a dict from file name to algorithm.

    Methods for models with adapters have none, because the model of that file has no adapters.
    """
    in_files = {name.removeprefix("digits_").removesuffix(".yaml").replace("_", "") for name in _files("configs")}
    found = public_classes("Algorithm").items()
    algorithms = [name for name, module in found if name != "Algorithm" and not module.startswith("adapters.")]
    return {f"digits_{name.lower()}.yaml": name for name in algorithms if name.lower() not in in_files}


def _files(kind: str) -> list[str]:
    return [path.name for path in files(f"fl_lightning.{kind}").iterdir() if path.name.endswith(".yaml")]


@cache
def _derived_file(name: str) -> Path:
    path = Path(_derived_folder().name, name)
    path.write_text(shipped_text(name, "configs"), encoding="utf-8")
    return path


@cache
def _derived_folder() -> tempfile.TemporaryDirectory[str]:
    from fl_lightning.core.temporary_folders import temporary_files  # imports multiprocessing

    with temporary_files():
        return tempfile.TemporaryDirectory(prefix="configs-")
