"""Fingerprint of a run: its config, data, metrics and environment, written to each checkpoint and compared on resume.

A fingerprint detects a changed learning rate, a replaced dataset or an edited line of `metrics.csv`. It is not signed,
so it detects accidents, not attacks.
"""

from __future__ import annotations

import json
import platform
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch

import fl_lightning
from fl_lightning.core.config import FREE_KEYS, flatten, is_below, parse_config
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.files import read_file

MAY_CHANGE = FREE_KEYS | {
    "rounds",
    "evaluation.every",
    "evaluation.metrics",
    "evaluation.personal_on_global",
    "evaluation.target_accuracies",
}
"""Keys that may change when a run is resumed: they change neither what a round computes nor what a column means."""


@dataclass(frozen=True)
class Fingerprint:
    """A run's config and environment, and digests of its data and metrics, at the time of a checkpoint.

    Args:
        config: The resolved config with dotted keys. Empty for a run that was started from Python without a config.
        data: Digests of the dataset and the partition, by part.
        rows: Digests of the metrics up to the round, by file.
        made_with: Versions, number of threads and device.
        fixed: Digest of the model's fixed tensors, such as a pretrained network's; empty if it has none.
    """

    config: dict[str, Any] = field(default_factory=dict)
    data: dict[str, str] = field(default_factory=dict)
    rows: dict[str, str] = field(default_factory=dict)
    made_with: dict[str, str] = field(default_factory=dict)
    fixed: str = ""

    def check_config(self, config: Mapping[str, Any] | None) -> None:
        """Raise an error if a run is resumed with a config that would change its results.

        Raises:
            ConfigError: A key that affects results has changed; the message names each such key.
        """
        if not config or not self.config:
            return
        before, now = dict(self.config), settings(config)
        if self.made_with["fl-lightning"] != fl_lightning.__version__:  # another version may have other keys
            before, now = ({key: each[key] for key in before.keys() & now.keys()} for each in (before, now))
        changes = _changes(before, now)
        if refused := [
            text for key, text in changes.items() if key not in MAY_CHANGE and not is_below(key, MAY_CHANGE)
        ]:
            fix = "Set these back, or start a new run."
            raise ConfigError(f"the config differs from the run's: {', '.join(refused)}. {fix}")

    def check_data(self, data: Mapping[str, str]) -> None:
        """Raise an error if a run is resumed with a dataset or partition that has changed since it began.

        Raises:
            ConfigError: The data differ; the message names the parts that changed.
        """
        if parts := [part for part in self.data.keys() | data.keys() if self.data.get(part) != data.get(part)]:
            where = "scenario.dataset" if parts != ["partition"] else "scenario.partition"
            fix = "Restore the data, or start a new run."
            raise ConfigError(f"{where}: changed since the run began: {', '.join(sorted(parts))}. {fix}")

    def check_fixed(self, fixed: str) -> None:
        """Raise an error if a run is resumed with other fixed tensors, which no checkpoint contains.

        Raises:
            ConfigError: They differ.
        """
        if self.fixed != fixed:
            what = "the frozen part of the network changed since the run began"
            raise ConfigError(f"model: {what}. Restore the files that it is read from, or start a new run.")

    def warn_of_environment(self, now: Mapping[str, str]) -> None:
        """Warn if versions, device or threads have changed since the checkpoint, and say how results may change."""
        changed = [f"{name} {was} -> {now.get(name)}" for name, was in self.made_with.items() if now.get(name) != was]
        if changed:
            means = "the partition and random numbers stay the same, but sums may be rounded differently"
            if self.made_with["fl-lightning"] != now["fl-lightning"]:
                means = "the partition stays the same, but another version may compute other results (see CHANGELOG.md)"
            warnings.warn(f"the run is resumed with {', '.join(changed)}: {means}", stacklevel=2)

    def warn_of_edits(self, path: Path, now: Mapping[str, Any]) -> None:
        """Warn if a run is resumed with settings that were edited in its `config.yaml` after the checkpoint.

        Args:
            path: The path of `config.yaml`.
            now: The settings of the resumed run.
        """
        with suppress(ConfigError, OSError):  # settings do not come from a missing or unreadable file
            saved = settings(parse_config(read_file(path), str(path)))
            edited = {key: value for key, value in saved.items() if now.get(key) == value}
            if changed := _changes({**edited, **self.config}, {**self.config, **edited}):
                warnings.warn(f"{path} was edited: {', '.join(changed.values())}", stacklevel=2)


def settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with dotted keys, and with values converted to what JSON can store."""
    return json.loads(json.dumps(flatten(dict(config)), default=str))


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """Compare two configs. Return a dict from the key of each changed setting to a text with the old and new value."""
    changed = [key for key in sorted(before.keys() | now.keys()) if not _are_equal(before.get(key), now.get(key))]
    outermost = [key for key in changed if not is_below(key, changed)]
    return {key: f"{key} ({before.get(key)} -> {now.get(key)})" for key in outermost}


def _are_equal(one: Any, other: Any) -> bool:
    return json.dumps(one) == json.dumps(other)  # NaN equals NaN, and true differs from 1


def environment(device: torch.device) -> dict[str, str]:
    """Return the properties of the environment that affect results: versions, device and number of threads."""
    return {
        "fl-lightning": fl_lightning.__version__,
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "numpy": np.__version__,
        "machine": platform.machine(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": str(torch.get_num_threads()),
    }
