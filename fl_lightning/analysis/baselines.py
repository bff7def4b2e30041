"""Baselines of a config: named sets of options that `--algorithm NAME` adds to the config's settings.

A config lists them under `baselines`: a mapping, the path of a YAML file that holds one (relative to the config's own
folder), or a list of mappings and paths, in which later ones add to earlier ones. Each baseline is a mapping from
options to values:

    baselines:
      MOON: {algorithm.mu: 1, model.head.projection: 256}
      MOON+DW: {algorithm: FedDW, algorithm.loss_terms: [{class_path: ModelContrast, init_args: {mu: 1}}]}

With it, `--algorithm MOON` means `--algorithm MOON --algorithm.mu 1 --model.head.projection 256`.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fl_lightning.core.config import flatten
from fl_lightning.core.config_files import CommandLine
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.strict_yaml import read_yaml

Baselines = dict[str, dict[str, Any]]

BASE_CLASS = "fl_lightning.algorithms.Algorithm"
"""The base class of all algorithms. Its options are those that most algorithms share."""

SHARED_OPTIONS = ("loss_terms", "aggregator", "buffers")
"""The options of the base class."""


def expand_baseline(line: CommandLine) -> CommandLine:
    """Replace `--algorithm=NAME` by the options of the baseline NAME, a named set of options in a config.

    Other options than those of the algorithm that were given before it, such as `--rounds`, keep their values.
    An algorithm other than the config's own starts from its own defaults. Otherwise an option that both have, such as
    `tau`, would keep the config's value. The options that most algorithms share (`loss_terms`, `aggregator`, `buffers`)
    keep the config's values if the algorithm has them.

    Args:
        line: The command line, with each option and its value as one word.
    """
    places = [place for place, word in enumerate(line.words) if word.startswith("--algorithm=")]
    if not line.configs or not places:
        return line
    *_, place = places
    name = line.words[place].partition("=")[2]
    baselines: Baselines = {}
    own_algorithm = None
    for path, content in line.configs:
        baselines = merge_baselines(baselines, content.get("baselines"), path)
        own_algorithm = content.get("algorithm", own_algorithm)
    given = {word.partition("=")[0] for word in line.words[:place]}
    options = {"algorithm": name} | {
        key: value
        for key, value in baselines.get(name, {}).items()
        if key.startswith("algorithm") or f"--{key}" not in given
    }
    expanded = setting_words(options)
    if isinstance(own_algorithm, dict):
        own_algorithm = own_algorithm["class_path"]
    if class_name(options["algorithm"]) != class_name(own_algorithm):
        expanded = [f"--algorithm={BASE_CLASS}", *expanded]
    return line._replace(words=[*line.words[:place], *expanded, *line.words[place + 1 :]])


def warn_of_dropped_options(configs: Sequence[Mapping[str, Any]], resolved: Mapping[str, Any]) -> None:
    """Warn of each option in the config files that the chosen algorithm does not have.

    Only the options that most algorithms share (`SHARED_OPTIONS`) are checked.

    Args:
        configs: The contents of the config files.
        resolved: The resolved config of the run.
    """
    stated = {key: value for content in configs for key, value in flatten(content).items()}
    used = flatten(resolved)
    for key in (f"algorithm.{option}" for option in SHARED_OPTIONS):
        if (value := stated.get(key)) and key not in used:
            parts = value if isinstance(value, list) else [value]
            names = ", ".join(class_name(part["class_path"] if isinstance(part, dict) else part) for part in parts)
            what = f"{class_name(used['algorithm'])} does not have this option"
            warnings.warn(f"{key}: {what}, so the config's value is dropped ({names})", stacklevel=2)


def class_name(path: object) -> str:
    """Return the name of a class without its module."""
    return str(path).rpartition(".")[2]


def option_values(words: Sequence[str], option: str) -> list[str]:
    """Return the value of each occurrence of an option on a command line: `--key value` or `--key=value`."""
    long, found = f"--{option}", []
    for i, word in enumerate(words):
        if word.startswith(f"{long}="):
            found.append(word.partition("=")[2])
        elif word in (long, "-c" if option == "config" else long) and i + 1 < len(words):
            found.append(words[i + 1])
    return found


def merge_baselines(baselines: Baselines, more: Any, config: Path) -> Baselines:
    """Add the baselines that a config defines to those of earlier configs. Options of the later config take precedence.

    Raises:
        ConfigError: The value is neither a mapping, nor a path, nor a list of them; or the file does not exist.
    """
    if isinstance(more, list):
        for part in more:
            baselines = merge_baselines(baselines, part, config)
        return baselines
    if isinstance(more, str):
        path = config.parent / more
        if not os.path.isfile(path):
            raise ConfigError(f"baselines: {path} does not exist. Give the path relative to the config's own folder")
        more = read_yaml(path, f"baselines: {path}")
    if more is None:
        return baselines
    if not isinstance(more, dict) or not all(isinstance(keys, dict) for keys in more.values()):
        raise ConfigError(
            f"baselines: {config.name} needs lines `NAME: {{key: value, ...}}`, or the path of a file with such lines"
        )
    return baselines | {name: baselines.get(name, {}) | keys for name, keys in more.items()}


def setting_words(settings: Mapping[str, Any]) -> list[str]:
    """Convert settings to command-line options `--KEY=VALUE`."""
    return [f"--{key}={to_word(value)}" for key, value in settings.items()]


def to_word(value: Any) -> str:
    """Return the value of an option as text for the command line: text as it is, other values as JSON."""
    return value if isinstance(value, str) else json.dumps(value)
