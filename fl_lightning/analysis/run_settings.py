"""Settings of runs: those that affect results, those in which runs differ, and their values as text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from fl_lightning.core.config import FREE_KEYS, is_below
from fl_lightning.runs.reader import Run

UNCOMPARED = FREE_KEYS - {"callbacks"} | {"seed", "evaluation.target_accuracies"}
"""Settings that are ignored when runs are grouped."""


def compared_settings(run: Run) -> dict[str, str]:
    """Return the settings of a run that affect results. They are text, so that NaN is equal to NaN."""
    return {key: repr(value) for key, value in compared_values(run).items()}


def compared_values(run: Run) -> dict[str, Any]:
    """Return the settings of a run that affect its results, by key.

    Of the callbacks, only those that may stop the run are included.
    """
    values = {key: value for key, value in run.settings.items() if not is_uncompared(key)}
    callbacks = values.pop("callbacks", None)
    stopping = [each for each in callbacks if _may_stop(each)] if isinstance(callbacks, list) else []
    return values | ({"callbacks": stopping} if stopping else {})


def _may_stop(callback: Any) -> bool:
    """Return whether a callback in a config may stop a run: it is `EarlyStopping` or a user's own class."""
    path = str(callback.get("class_path") if isinstance(callback, dict) else callback)
    return path.endswith(".EarlyStopping") or not path.startswith("fl_lightning.")


def is_uncompared(key: str) -> bool:
    """Return whether a setting is ignored when runs are grouped."""
    return key in UNCOMPARED or is_below(key, UNCOMPARED)


def varied_settings(texts: Mapping[Run, dict[str, str]]) -> dict[str, set[Any]]:
    """Return the settings in which runs differ. An option of a class is compared only between runs with this class.

    A nested setting is compared only among runs with the same class above it: `tau` is returned only if two FedSKC
    runs differ in it, not because a FedAvg run has no `tau`.

    Returns:
        For each key, the values of the keys above it (such as the class) with which it differs. Keys of the algorithm
        come first.
    """
    varied = {}
    for key in dict.fromkeys(key for each in texts.values() for key in each):
        seen: dict[Any, set[str | None]] = defaultdict(set)
        for each in texts.values():
            seen[parent_values(key, each)].add(each.get(key, "None"))  # an older version has fewer keys
        if contexts := {context for context, values in seen.items() if len(values) > 1}:
            varied[key] = contexts
    return dict(sorted(varied.items(), key=lambda item: item[0].partition(".")[0] != "algorithm"))


def parent_values(key: str, texts: dict[str, str]) -> tuple[str | None, ...]:
    """Return the values of all settings above a nested setting: for `algorithm.mu`, the class of `algorithm`."""
    parts = key.split(".")
    return tuple(texts.get(".".join(parts[:i])) for i in range(1, len(parts)))


# --- Text ---


def format_setting(value: Any) -> str:
    """Return the value of a setting as text: as in YAML, or the class name followed by the arguments."""
    if isinstance(value, dict) and "class_path" in value:
        arguments = (f"{name}={format_setting(each)}" for name, each in (value.get("init_args") or {}).items())
        return " ".join([str(value["class_path"]).rpartition(".")[2], *arguments])
    if isinstance(value, list):
        return f"[{', '.join(map(format_setting, value))}]"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def sort_key(value: Any) -> tuple[int, float, str]:
    """Return the key by which values of a setting are sorted: missing values first, then numbers, then text."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return 1, float(value), ""
    return 0 if value is None else 2, 0.0, format_setting(value)
