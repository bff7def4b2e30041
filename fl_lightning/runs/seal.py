"""What a run was started from, and what it had come to: noted in each checkpoint, compared when that is taken up.

A seal has no key: it detects accidents, not attackers.

A folder's files are anybody's to edit. A config with another learning rate, a dataset that was replaced in between, a
line of `metrics.csv` that was changed would otherwise be taken for the run's own.
"""

from __future__ import annotations

import json
import platform
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch

import fl_lightning
from fl_lightning.core.config import FREE_KEYS, below, flatten, read_config
from fl_lightning.core.errors import CheckpointError, ConfigError
from fl_lightning.core.renamed import update_config, update_settings

MAY_CHANGE = FREE_KEYS | {"rounds", "evaluation"}
"""Keys that a resumed run may change: what is computed in a round stays the same."""


@dataclass(frozen=True)
class Seal:
    """One checkpoint's.

    Args:
        config: The resolved config with dotted keys; empty for a run that was started from Python without one.
        data: Digests of the dataset and of who holds what, by part.
        rows: Digests of the measurements up to the round, by file.
        made_with: Versions, threads and device.
    """

    config: dict[str, Any] = field(default_factory=dict)
    data: dict[str, str] = field(default_factory=dict)
    rows: dict[str, str] = field(default_factory=dict)
    made_with: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, noted: Mapping[str, Any]) -> Seal:
        """A seal as it was noted.

        Raises:
            CheckpointError: By an earlier version, which noted less.
        """
        try:
            return cls(**noted)
        except TypeError as error:
            raise CheckpointError(f"it is of another fl-lightning, this one cannot read it: {error}") from error

    def noted(self) -> dict[str, Any]:
        """As it goes into a manifest."""
        return asdict(self)

    def refuse_another_config(self, config: Mapping[str, Any] | None) -> None:
        """Let a run go on only as the experiment it is.

        Raises:
            ConfigError: A key that alters the maths has another value; the message names each.
        """
        if not config or not self.config:
            return
        before, now = update_settings(self.config), update_settings(settings(config))
        if self.made_with["fl-lightning"] != fl_lightning.__version__:  # which may have had other keys
            before, now = ({key: each[key] for key in before.keys() & now.keys()} for each in (before, now))
        changed = _changes(before, now)
        if told := [text for key, text in changed.items() if key not in MAY_CHANGE and not below(key, MAY_CHANGE)]:
            raise ConfigError(
                f"another experiment than the run's: {', '.join(told)}; leave them as they were, or start anew"
            )

    def refuse_other_data(self, data: Mapping[str, str]) -> None:
        """Let a run go on only with the data it began with.

        Raises:
            ConfigError: They differ; the message names the parts that do.
        """
        if told := [part for part in self.data.keys() | data.keys() if self.data.get(part) != data.get(part)]:
            where = "scenario.dataset" if told != ["partition"] else "scenario.partition"
            raise ConfigError(
                f"{where}: not what the run began with: {', '.join(sorted(told))} changed; put it back, or start anew"
            )

    def tell_of_another_machine(self, now: Mapping[str, str]) -> None:
        """Warn where the rest of a run is worked out in another way, and say what that means."""
        told = [f"{name} {was} -> {now.get(name)}" for name, was in self.made_with.items() if now.get(name) != was]
        if told:
            means = "split, random numbers and method stay the same, but sums may round in another way"
            if self.made_with["fl-lightning"] != now["fl-lightning"]:
                means = "the split is the same, but what another version computes may not be (see its changelog)"
            warnings.warn(f"the run goes on with {', '.join(told)}: {means}", stacklevel=2)

    def tell_of_edits(self, path: Path, now: Mapping[str, Any]) -> None:
        """Warn of what a run takes from its `config.yaml` that was not there when it went on last.

        Args:
            path: The file.
            now: The settings that the run goes on with.
        """
        with suppress(ConfigError):  # nothing was taken from a file that is not there or cannot be read
            saved, before = settings(update_config(read_config(path))), update_settings(self.config)
            edited = {key: value for key, value in saved.items() if update_settings(now).get(key) == value}
            if told := _changes({**edited, **before}, {**before, **edited}):
                warnings.warn(f"{path} was edited: {', '.join(told.values())}", stacklevel=2)


def settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config as a seal holds it: dotted keys, and values as JSON would give them back."""
    return json.loads(json.dumps(flatten(dict(config)), default=str))


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """The keys that have another value, each with both."""
    changed = [key for key in sorted(before.keys() | now.keys()) if not _same(before.get(key), now.get(key))]
    told = [key for key in changed if not below(key, changed)]
    return {key: f"{key} ({before.get(key)} -> {now.get(key)})" for key in told}


def _same(one: Any, other: Any) -> bool:
    return json.dumps(one) == json.dumps(other)  # NaN is NaN, and true is not 1


def made_with(device: torch.device) -> dict[str, str]:
    """What decides how numbers come out, beside the config."""
    return {
        "fl-lightning": fl_lightning.__version__,
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "numpy": np.__version__,
        "machine": platform.machine(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": str(torch.get_num_threads()),
    }
