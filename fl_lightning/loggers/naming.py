"""What a run is called: after its config, what the command line changed of it, and its seed.

Runs of one *setting* differ in nothing but the seed, and in what only says where they run and who watches. Their names
differ in the seed, and they share a group:

    digits_fedskc-seed2                  digits_fedskc-5a1f09
    digits_fedskc-tau=0.1-seed2          digits_fedskc-tau=0.1-c41e77

The end of a group is a digest of the setting, so that two settings never share one, be they told apart on the command
line or in the file.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

LONGEST = 128
"""Characters of a name, as W&B takes it."""


def run_names(config: str, seed: int, setting: Mapping[str, Any], stated: Mapping[str, Any]) -> tuple[str, str]:
    """A run's name and its group's.

    Args:
        config: The config's name.
        seed: The run's seed.
        setting: The setting by dotted keys.
        stated: The setting as the config states it.
    """
    given = {key: value for key, value in setting.items() if value is not None}  # a key to come may default to null
    digest = hashlib.sha256(json.dumps(given, sort_keys=True).encode()).hexdigest()[:6]
    called = "-".join(filter(None, (config, changes(setting, stated))))
    name, group = (called[: LONGEST - len(end) - 1] + f"-{end}" for end in (f"seed{seed}", digest))
    return name, group


def changes(setting: Mapping[str, Any], stated: Mapping[str, Any]) -> str:
    """What differs from the setting that was stated: `tau=0.1,local_test=0.3`.

    Keys are cut down to their last parts where these tell them apart.
    """
    told = {key: value for key, value in setting.items() if stated.get(key) != value}
    endings = Counter(_ending(key) for key in told)
    named = {_ending(key) if endings[_ending(key)] == 1 else key: value for key, value in told.items()}
    return ",".join(f"{key}={_text(value)}" for key, value in named.items())


def _ending(key: str) -> str:
    return key.rpartition(".")[2]


def _text(value: Any) -> str:
    """A value in few characters: a class by its name, a list of them joined by `+`."""
    if isinstance(value, list):
        return "+".join(map(_text, value))
    if isinstance(value, dict) and "class_path" in value:
        return _text(value["class_path"])
    if isinstance(value, str):
        return _ending(value) if all(part.isidentifier() for part in value.split(".")) else value
    return f"{value:.12g}" if isinstance(value, float) else json.dumps(value)
