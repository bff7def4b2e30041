"""Read config files, check their class paths, and flatten configs to dotted keys."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from fl_lightning.core.errors import ConfigError
from fl_lightning.core.strict_yaml import parse_yaml, read_yaml

FREE_KEYS = {
    "engine",
    "client_store",
    "logger",
    "log_clients",
    "max_logged_clients",
    "callbacks",
    "run_dir",
    "scenario.dataset.data_dir",
    "scenario.dataset.download",
    "trainer.accelerator",
    "trainer.devices",
}
"""Keys, with all keys below them, that do not change what a round computes: where to compute, how fast, what to log."""


def read_config(path: Path, what: str | None = None) -> dict[str, Any]:
    """Return the content of a config file as nested dicts. Refuse invalid YAML and duplicate keys.

    Args:
        path: The file.
        what: Name of the file in messages; its path by default.

    Raises:
        ConfigError: The file is no valid YAML, or no mapping.
    """
    return _checked(read_yaml(path, what), what or str(path))


def parse_config(text: bytes, what: str) -> dict[str, Any]:
    """Parse the text of a config file to nested dicts. Refuse invalid YAML and duplicate keys.

    Args:
        text: The bytes of the file.
        what: Name of the file in messages.

    Raises:
        ConfigError: The text is no valid YAML, or no mapping.
    """
    return _checked(parse_yaml(text, what), what)


def _checked(content: Any, what: str) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise ConfigError(f"{what} needs lines `key: value`, it holds {type(content).__name__}")
    check_class_paths(content)
    return content


def check_class_paths(content: Any, key: str = "") -> None:
    """Refuse a config with a `class_path` that is not text, or `init_args` that are not a mapping.

    Raises:
        ConfigError: Names the key.
    """
    if isinstance(content, list):
        for part in content:
            check_class_paths(part, key)
    if not isinstance(content, dict):
        return
    path, options = content.get("class_path", "-"), content.get("init_args", {})
    if not isinstance(path, str) or not path.strip():
        raise ConfigError(f"{key}: class_path needs the name of a class or the path of one, it holds {path!r}")
    if "class_path" in content and (beside := content.keys() - {"class_path", "init_args", "dict_kwargs"}):
        wrong = ", ".join(sorted(map(str, beside)))
        raise ConfigError(f"{key}: the arguments of a class_path belong under init_args, not beside it: {wrong}")
    if not isinstance(options, dict):
        raise ConfigError(f"{key}: init_args needs lines `key: value`, it holds {options!r}")
    for part, value in content.items():
        check_class_paths(value, key if part == "init_args" else f"{key}.{part}".lstrip("."))


def flatten(config: Any, prefix: str = "", name: Callable[[Any], Any] = lambda path: path) -> dict[str, Any]:
    """Flatten a nested config to dotted keys, such as `algorithm` for a class and `algorithm.tau` for its argument.

    Args:
        config: The nested dict.
        prefix: Prefix of all keys.
        name: Function that is applied to each class path.
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


def is_below(key: str, others: Iterable[str]) -> bool:
    """Return whether a dotted key is below one of `others`, as `algorithm.tau` is below `algorithm`."""
    return any(key.startswith(f"{other}.") for other in others)


def split_setting(option: str, word: str) -> tuple[str, str]:
    """Return the key and the value of a word KEY=VALUE of an option.

    Raises:
        ConfigError: The word has another form.
    """
    key, sign, value = word.partition("=")
    if not sign or not key:
        raise ConfigError(f"{option}: {word!r} is not of the form KEY=VALUE")
    return key, value
