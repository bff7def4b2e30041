"""A config's rivals: what `--algorithm NAME` sets beside the algorithm, so that one config runs a whole table.

A config names them under `rivals`: a mapping, the path of a YAML file that holds one (from the config's own folder),
or a list of either, of which later ones add to earlier ones. Each rival is a mapping of what would stand on the command
line:

    rivals:
      MOON: {algorithm.mu: 1, model.head.projection: 256}
      MOON+DW: {algorithm: FedDW, algorithm.loss_terms: [{class_path: ModelContrast, init_args: {mu: 1}}]}

With it, `--algorithm MOON` means `--algorithm MOON --algorithm.mu 1 --model.head.projection 256`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fl_lightning.core.config import read_config, read_yaml
from fl_lightning.core.errors import ConfigError

Rivals = dict[str, dict[str, Any]]

ANY = "fl_lightning.algorithms.Algorithm"
"""What all algorithms are; it has the options that they share, and no others."""


def with_rival(words: Sequence[str]) -> list[str]:
    """A command line with the rival that `--algorithm` names spelled out.

    Another algorithm than the config's own starts from its own defaults: an option that both have by one name, such as
    `tau`, would otherwise keep the value that the config has for its own. What all algorithms take (`loss_terms`,
    `aggregator`, `buffers`) stays as the config has it.
    """
    configs = [value for _, value in given(words, "config")]
    algorithms = given(words, "algorithm")
    if not configs or not algorithms:
        return list(words)
    place, name = algorithms[-1]
    rivals: Rivals = {}
    stated = None
    for config in configs:
        content = read_config(Path(config))
        rivals = add(rivals, content.get("rivals"), Path(config))
        stated = content.get("algorithm", stated)
    options = {"algorithm": name} | rivals.get(name, {})
    spelled = [word for key, value in options.items() for word in (f"--{key}", text(value))]
    if bare(options["algorithm"]) != bare(stated["class_path"] if isinstance(stated, dict) else stated):
        spelled = ["--algorithm", ANY, *spelled]
    width = 1 if "=" in words[place] else 2
    return [*words[:place], *spelled, *words[place + width :]]


def bare(path: object) -> str:
    """A class's name without its module's."""
    return str(path).rpartition(".")[2]


def given(words: Sequence[str], option: str) -> list[tuple[int, str]]:
    """Where a command line gives an option, and its values."""
    long, found = f"--{option}", []
    for i, word in enumerate(words):
        if word.startswith(f"{long}="):
            found.append((i, word.partition("=")[2]))
        elif word in (long, "-c" if option == "config" else long) and i + 1 < len(words):
            found.append((i, words[i + 1]))
    return found


def add(rivals: Rivals, more: Any, config: Path) -> Rivals:
    """Rivals with those that a config's `rivals` names added, key by key.

    Raises:
        ConfigError: It is neither mapping, path nor a list of them, or a path leads to no such file.
    """
    if isinstance(more, list):
        for part in more:
            rivals = add(rivals, part, config)
        return rivals
    if isinstance(more, str):
        path = config.parent / more
        if not os.path.isfile(path):
            raise ConfigError(f"rivals: {path} does not exist; a path is taken from the config's own folder")
        more = read_yaml(path, f"rivals: {path}")
    if more is None:
        return rivals
    if not isinstance(more, dict) or not all(isinstance(keys, dict) for keys in more.values()):
        raise ConfigError(
            f"rivals: {config.name} needs lines `NAME: {{key: value, ...}}`, or the path of a file of such lines"
        )
    return rivals | {name: rivals.get(name, {}) | keys for name, keys in more.items()}


def text(value: Any) -> str:
    """A value as the command line takes it."""
    return value if isinstance(value, str) else json.dumps(value)
