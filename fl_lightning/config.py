"""Config files: found by path or by name, read safely, and looked at key by key."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.errors import ConfigError, one_line

FREE_KEYS = {
    "engine",
    "checkpoint_every",
    "keep_checkpoints",
    "client_store",
    "logger",
    "log_clients",
    "callbacks",
    "run_dir",
    "scenario.dataset.data_dir",
    "scenario.dataset.download",
    "trainer.accelerator",
    "trainer.devices",
}
"""Keys that say where, how fast and what to watch, not what is computed; with all keys below them."""


def with_config_paths(words: Sequence[str]) -> list[str]:
    """The command line with each `--config` a path: a file as named from here, else a shipped config of that name."""
    found = list(words)
    for i, word in enumerate(words):
        if word in ("-c", "--config") and i + 1 < len(words):
            found[i + 1] = config_path(words[i + 1])
        elif word.startswith("--config="):
            found[i] = f"--config={config_path(word.removeprefix('--config='))}"
    return found


def config_path(name: str) -> str:
    """A config file by path, or by the bare name of a shipped one.

    Raises:
        ConfigError: There is none, or it is no YAML mapping.
    """
    path = Path(name)
    if not path.is_file():
        path = Path(str(files("fl_lightning.configs") / name))
        if os.sep in name or not path.is_file():
            hint = "`fl-lightning list configs` names those"
            raise ConfigError(f"--config: {name} is neither a file here nor a shipped config; {hint}")
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: {getattr(error, 'problem', '')}" if mark else one_line(error)
        raise ConfigError(f"--config: {name} is no readable YAML: {line}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"--config: {name} needs lines `key: value`, it holds {type(content).__name__}")
    return str(path)


def config_file(run_dir: Path) -> str:
    """A run's `config.yaml`; a folder without one is no run."""
    path = run_dir / "config.yaml"
    if not path.is_file():
        raise ConfigError(f"{run_dir} is no run: it holds no config.yaml")
    return config_path(str(path))


def flatten(config: Any, prefix: str = "", name: Callable[[Any], Any] = lambda path: path) -> dict[str, Any]:
    """Nested dicts as one, with dotted keys; `init_args` and `class_path` are left out of the keys.

    Args:
        config: The nested dict.
        prefix: What the keys begin with.
        name: What to make of the paths of classes.
    """
    if not isinstance(config, dict):
        return {prefix: config}
    flat: dict[str, Any] = {}
    for part, value in config.items():
        if part == "class_path":
            flat[prefix] = name(value)
        else:
            flat |= flatten(value, prefix if part == "init_args" else f"{prefix}.{part}".lstrip("."), name)
    return flat


def below(key: str, others: Iterable[str]) -> bool:
    """Whether a dotted key lies below one of others: `algorithm.tau` below `algorithm`."""
    return any(key.startswith(f"{other}.") for other in others)
