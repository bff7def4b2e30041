"""Names of runs in loggers: the config's name, the changes made on the command line, and the seed.

Runs of one *setting* differ only in the seed, and in options that do not affect results. They share a group:

    digits_fedskc-seed2                  digits_fedskc-5a1f09
    digits_fedskc-tau=0.1-seed2          digits_fedskc-tau=0.1-c41e77

The end of a group is a digest of the setting, so different settings have different groups, also if they differ in the
config file only.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from fl_lightning.core.config import FREE_KEYS, flatten, is_below

LONGEST = 128
"""Largest number of characters in a name that W&B accepts."""


def run_names(config: str, seed: int, setting: Mapping[str, Any], stated: Mapping[str, Any]) -> tuple[str, str]:
    """Return the name of a run and the name of its group. Runs that differ only in the seed form a group.

    Args:
        config: The config's name.
        seed: The run's seed.
        setting: The setting by dotted keys.
        stated: The setting in the config file.
    """
    # without null values: a later version may have more keys, which are null by default
    values = {key: value for key, value in setting.items() if value is not None}
    digest = hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:6]
    start = "-".join(filter(None, (config, changes(setting, stated))))
    name, group = (start[: LONGEST - len(end) - 1] + f"-{end}" for end in (f"seed{seed}", digest))
    return name, group


def setting_of(config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that define an experiment, by dotted key. Seed and options such as `engine` are left out."""
    apart = FREE_KEYS | {"evaluation", "seed"}
    return {key: value for key, value in flatten(config).items() if key not in apart and not is_below(key, apart)}


def changes(setting: Mapping[str, Any], stated: Mapping[str, Any]) -> str:
    """Return the settings of a run that differ from its config file, as text such as `tau=0.1,local_test=0.3`.

    Keys are shortened to their last parts where these are unique.
    """
    changed = {key: value for key, value in setting.items() if stated.get(key) != value}
    endings = Counter(_last_part(key) for key in changed)
    named = {_last_part(key) if endings[_last_part(key)] == 1 else key: value for key, value in changed.items()}
    return ",".join(f"{key}={_text(value)}" for key, value in named.items())


def _last_part(key: str) -> str:
    return key.rpartition(".")[2]


def _text(value: Any) -> str:
    """Return a short text for the value of a setting, such as a class name or the elements of a list joined by `+`."""
    if isinstance(value, list):
        return "+".join(map(_text, value))
    if isinstance(value, dict) and "class_path" in value:
        return _text(value["class_path"])
    if isinstance(value, str):
        return _last_part(value) if all(part.isidentifier() for part in value.split(".")) else value
    return f"{value:.12g}" if isinstance(value, float) else json.dumps(value)
