"""Functions for the callbacks of a run: add the default ones, check config keys, save, restore and reset states."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch.callbacks import Callback

from fl_lightning.callbacks.base import RoundCallback
from fl_lightning.callbacks.checkpointing import Checkpointing
from fl_lightning.callbacks.communication import CommunicationMeter
from fl_lightning.callbacks.monitor import Monitor
from fl_lightning.callbacks.progress import RoundProgress
from fl_lightning.callbacks.record_privacy import RecordPrivacy
from fl_lightning.core.errors import ConfigError, check_instance
from fl_lightning.engines.client_callbacks import refused


def with_defaults(callbacks: Sequence[RoundCallback], private: bool = False) -> list[RoundCallback]:
    """Return a run's callbacks in call order, including the default callbacks that the user has not listed.

    Callbacks that watch metrics come after those that may add metrics. Checkpointing comes last, since it saves the
    states of the others.

    Args:
        callbacks: The callbacks of a run.
        private: Whether the clients train with `dp_sgd`, whose privacy is then measured.

    Raises:
        ConfigError: One of the defaults occurs twice.
    """
    defaults: list[RoundCallback] = [CommunicationMeter(), RoundProgress(), Checkpointing()]
    defaults += [RecordPrivacy()] * private
    for kind in map(type, defaults):
        if sum(isinstance(callback, kind) for callback in callbacks) > 1:
            raise ConfigError(f"callbacks: {kind.__name__} is listed twice. List it once.")
    missing = [one for one in defaults if not any(isinstance(callback, type(one)) for callback in callbacks)]
    return sorted([*callbacks, *missing], key=lambda one: isinstance(one, Monitor) + isinstance(one, Checkpointing))


def refuse_misplaced(callbacks: Sequence[object], client_callbacks: Sequence[object]) -> None:
    """Raise an error if an object is not a callback, or is listed under the wrong config key.

    Args:
        callbacks: Callbacks of the run.
        client_callbacks: Lightning callbacks of each client's fit.

    Raises:
        ConfigError: A callback is listed under the wrong key. The message names the callback and the right key.
    """
    kinds = {"callbacks": (callbacks, RoundCallback), "client_callbacks": (client_callbacks, Callback)}
    for key, (given, kind) in kinds.items():
        check_instance(key, given, list | tuple, "Give a list, such as [EarlyStopping()]")
        for one in given:
            if not isinstance(one, kind):
                reason = describe_misplaced(type(one)) or f"{type(one).__name__} is not a callback"
                raise ConfigError(f"{key}: {reason}")


def describe_misplaced(kind: type) -> str | None:
    """Return the error message for a callback class listed under the wrong config key; None for other classes."""
    if issubclass(kind, RoundCallback):
        return f"{kind.__name__} watches the run, not a client's fit. List it under callbacks."
    if issubclass(kind, Callback):
        fix = refused(kind) or "it watches a fit, not the run. List it under client_callbacks."
        return f"{kind.__name__} is Lightning's: {fix}"
    return None


def by_name(callbacks: Sequence[RoundCallback]) -> dict[str, RoundCallback]:
    """Return the callbacks by class name; a second callback of the same class is named `<name>-2`."""
    seen: Counter[str] = Counter()
    named = {}
    for callback in callbacks:
        name = type(callback).__name__
        seen[name] += 1
        named[name if seen[name] == 1 else f"{name}-{seen[name]}"] = callback
    return named


def states(callbacks: Sequence[RoundCallback]) -> dict[str, dict[str, Any]]:
    """Return copies of the callbacks' states by name, for a checkpoint."""
    return {name: copy.deepcopy(callback.state_dict()) for name, callback in by_name(callbacks).items()}


def restore(callbacks: Sequence[RoundCallback], saved: Mapping[str, dict[str, Any]]) -> None:
    """Restore the callbacks' states from a checkpoint. Callbacks without a saved state stay as they are."""
    for name, callback in by_name(callbacks).items():
        if name in saved:
            callback.load_state_dict(saved[name])


def keep_initial_states(callbacks: Sequence[RoundCallback]) -> None:
    """Store on each callback its state before its first run, for `reset`."""
    for callback in callbacks:
        if callback.initial_state is None:
            callback.initial_state = copy.deepcopy(callback.state_dict())


def reset(callbacks: Sequence[RoundCallback]) -> None:
    """Set callbacks back to their state before their first run, because an object can be used in several runs."""
    for callback in callbacks:
        if callback.initial_state is not None:
            callback.load_state_dict(copy.deepcopy(callback.initial_state))
