"""Lightning's `Trainer` as a client's fit needs it: quiet, quick to make, and with work to do."""

from __future__ import annotations

import functools
import gc
import inspect
import logging
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities import registry
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision

from fl_lightning.engines.client_callbacks import fresh

DEFAULTS = {name: p.default for name, p in inspect.signature(L.Trainer).parameters.items()}
"""Lightning's own. All are stated: what is not, it would look for in environment variables."""

CHATTER = "|".join(
    [
        "GPU available but not used",  # the config says so
        "TPU available but not used",
        ".*AMP with fp16 is not supported on CPU",  # it is refused
        r"`precision=.+` is supported for historical reasons",
        ".*does not have many workers",  # they would cost 50 ms a fit
        "You defined a `validation_step` but have no `val_dataloader`",  # clients are measured otherwise
        r"Found \d+ module\(s\) in eval mode",  # `train` was called: what is still in eval mode is meant to be
        ".*treespec, LeafSpec",  # a deprecation of torch's that Lightning has not followed yet
        "The .grad attribute of a Tensor",  # torch.compile's own look
    ]
)
"""Warnings that each of a thousand short fits would give, and that tell nobody anything."""

QUIET = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")

FOR_ALL: dict[str, Any] = {
    "max_epochs": 1,
    "max_steps": -1,
    "limit_train_batches": 1.0,
    "gradient_clip_val": None,
    "gradient_clip_algorithm": None,
}
"""Of a trainer that fits several clients, what it leaves to each of them."""


def quiet_trainer(
    options: dict[str, Any], heard: set[str] | None = None, callbacks: Sequence[Callback] = ()
) -> L.Trainer:
    """A trainer for one fit on one device: one epoch unless told otherwise, no validation, nothing on screen or disk.

    Args:
        options: Keyword arguments of `Trainer`.
        heard: What was warned of already, which is not shown again; it is added to.
        callbacks: Lightning's callbacks, of which it gets copies.
    """
    options = DEFAULTS | {"devices": 1, "limit_val_batches": 0} | options
    if options["max_epochs"] is None:
        options["max_epochs"] = 1 if options["max_steps"] == -1 else -1
    with lightning_at_ease(heard):
        trainer = L.Trainer(**options | dict.fromkeys(QUIET, False) | fresh(callbacks))
    # the rest takes module and optimizer off the GPU, where there is more to do, and gives its cached memory back
    trainer.strategy.teardown = trainer.precision_plugin.teardown  # type: ignore[method-assign]
    return trainer


def not_for_each(trainer: L.Trainer) -> tuple[str, str] | None:
    """What about a client's trainer could not be kept for each of several in one fit, and why; None if nothing."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        return f"the callback {type(callback).__name__}", "it is for one fit, and all clients are in one"
    if trainer.accumulate_grad_batches != 1:
        return "trainer.accumulate_grad_batches", "it is for one fit, and all clients are in one"
    if isinstance(trainer.limit_train_batches, float) and trainer.limit_train_batches != 1:
        return "trainer.limit_train_batches", "a share is rounded for each client; give a number of batches"
    plugin = trainer.precision_plugin
    known = type(plugin) in (Precision, MixedPrecision, HalfPrecision, DoublePrecision)
    if not known or plugin.precision == "16-mixed":
        return f"trainer.precision {plugin.precision}", "gradients are scaled for all clients alike"
    return None


@dataclass(frozen=True)
class LocalWork:
    """How much a client trains in a fit.

    Args:
        per_epoch: Steps in each epoch but the last.
        steps: Steps in all.
    """

    per_epoch: int
    steps: int

    @classmethod
    def under(cls, trainer: L.Trainer, batches: int) -> LocalWork:
        """What a trainer would do with so many batches an epoch."""
        limit, epochs, steps = trainer.limit_train_batches, trainer.max_epochs, trainer.max_steps
        per_epoch = min(batches, limit) if isinstance(limit, int) else batches
        bounds = (steps, per_epoch * (-1 if epochs is None else epochs))
        return cls(per_epoch, min(bound for bound in bounds if bound >= 0))

    @property
    def epochs(self) -> int:
        """Epochs that are begun."""
        return math.ceil(self.steps / self.per_epoch)

    def steps_in(self, epoch: int) -> int:
        """Steps in an epoch, counted from 0."""
        return max(0, min(self.per_epoch, self.steps - epoch * self.per_epoch))


class Leg:
    """The trainer as a client's module sees it in a fit of several: that fit's, but for what is the client's own.

    Args:
        trainer: The trainer that fits several clients.
        alone: A trainer with the client's own options.
        work: How much the client trains.
    """

    def __init__(self, trainer: L.Trainer, alone: L.Trainer, work: LocalWork) -> None:
        self.trainer, self.alone = trainer, alone
        self.current_epoch = self.global_step = 0
        self.should_stop = False
        self.num_training_batches, self.estimated_stepping_batches = work.per_epoch, work.steps

    def __getattr__(self, name: str) -> Any:
        return getattr(self.alone if name in FOR_ALL else self.trainer, name)


@contextmanager
def cheap_collections() -> Iterator[None]:
    """Have garbage be looked for among what is made inside alone: each used trainer is a cycle, and asks for a look."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def lightning_at_ease(heard: set[str] | None = None) -> Iterator[None]:
    """Make a trainer, or fit with one, without the messages and searches that are meant for one long fit.

    Args:
        heard: What was warned of already, which is not shown again; it is added to.
    """
    with lightning_silenced(heard), _looked_up_once():
        yield


@contextmanager
def lightning_silenced(heard: set[str] | None = None) -> Iterator[None]:
    """Keep what Lightning tells of every fit off the screen; other warnings are shown, each text once.

    Args:
        heard: The texts that were shown already; it is added to. By default those of this context.
    """
    heard = set() if heard is None else heard
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    before = [(logger.handlers, logger.propagate) for logger in loggers]
    for logger in loggers:  # not setLevel: that empties the caches of every logger there is
        logger.handlers, logger.propagate = [_WARN], False
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=CHATTER)
            show = warnings.showwarning

            def show_once(message: Warning | str, *args: Any, **options: Any) -> None:
                if (text := str(message)) not in heard:
                    heard.add(text)
                    show(message, *args, **options)

            warnings.showwarning = show_once
            yield
    finally:
        for logger, (handlers, propagate) in zip(loggers, before, strict=True):
            logger.handlers, logger.propagate = handlers, propagate


class _Warn(logging.Handler):
    """Warns of what Lightning logs as a warning, or worse; the rest is for one long fit."""

    def emit(self, record: logging.LogRecord) -> None:
        warnings.warn(record.getMessage(), stacklevel=2)


_WARN = _Warn(logging.WARNING)


@contextmanager
def _looked_up_once() -> Iterator[None]:
    """Let Lightning find out once a process, not in each fit, what does not change: plugins installed and GPUs there.

    It reads the files of every installed package for callbacks, and opens NVIDIA's library to count GPUs.
    """
    places = [(vars(registry), "entry_points", _entry_points), (vars(torch.cuda), "device_count", _device_count)]
    before = [(names, name, names.get(name)) for names, name, _ in places]
    for names, name, remembered in places:
        names[name] = remembered
    try:
        yield
    finally:
        for names, name, value in before:
            names[name] = value


_entry_points = functools.cache(entry_points)
_device_count = functools.cache(torch.cuda.device_count)
