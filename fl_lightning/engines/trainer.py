"""Lightning's `Trainer` as a client's fit needs it: quiet, quick to make, and with work to do."""

from __future__ import annotations

import functools
import inspect
import logging
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities import registry
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision

from fl_lightning.errors import ConfigError

QUIET = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")

FOR_EACH = (
    *("accelerator", "devices", "precision", "deterministic", "benchmark", "detect_anomaly"),
    *("max_epochs", "max_steps", "limit_train_batches", "gradient_clip_val", "gradient_clip_algorithm"),
    *("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "default_root_dir"),
    *("limit_val_batches", "limit_test_batches", "limit_predict_batches", "num_sanity_val_steps", "inference_mode"),
    *("check_val_every_n_epoch", "log_every_n_steps"),
)
"""Trainer options that one fit of several clients keeps for each of them, or that mean nothing in a client's fit."""

FOR_ALL: dict[str, Any] = {
    "max_epochs": 1,
    "max_steps": -1,
    "limit_train_batches": 1.0,
    "gradient_clip_val": None,
    "gradient_clip_algorithm": None,
}
"""Of a trainer that fits several clients, what it leaves to each of them."""


def quiet_trainer(options: dict[str, Any]) -> L.Trainer:
    """A trainer for one fit on one device: one epoch unless told otherwise, no logger, no validation.

    Args:
        options: Keyword arguments of `Trainer`.
    """
    options = {"devices": 1, "limit_val_batches": 0, **options}
    if options.get("max_epochs") is None:
        options["max_epochs"] = 1 if options.get("max_steps", -1) == -1 else -1
    with lightning_at_ease():
        return L.Trainer(**options | dict.fromkeys(QUIET, False))


def check_local_work(trainer: L.Trainer) -> None:
    """Refuse a trainer whose fit would take no step, never end, or start processes of its own.

    Raises:
        ConfigError: Names the key.
    """
    if trainer.world_size > 1:
        raise ConfigError("trainer.devices: a client's fit runs on one device; give 1, or [n] for the n-th")
    for name in ("max_epochs", "max_steps", "limit_train_batches", "accumulate_grad_batches"):
        if getattr(trainer, name) == 0:
            raise ConfigError(f"trainer.{name}: 0 leaves a client nothing to do; give 1 or more")
    if trainer.max_epochs == trainer.max_steps == -1:
        raise ConfigError("trainer.max_epochs: -1 without trainer.max_steps never ends; give one of them")


def not_for_each(options: dict[str, Any], trainer: L.Trainer) -> tuple[str, str] | None:
    """What about a trainer could not be kept for each of several clients in one fit, and why; None if nothing.

    Args:
        options: Keyword arguments of `Trainer`.
        trainer: The trainer they make.
    """
    defaults = inspect.signature(L.Trainer.__init__).parameters
    for name, value in options.items():
        if name not in FOR_EACH and value is not None and value != defaults[name].default:
            return f"trainer.{name}", "it is for one fit, and all clients are in one"
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


@contextmanager
def lightning_at_ease() -> Iterator[None]:
    """Make a trainer, or fit with one, without the messages and searches that are meant for one long fit."""
    with lightning_silenced(), _looked_up_once():
        yield


@contextmanager
def lightning_silenced() -> Iterator[None]:
    """Keep Lightning's per-fit messages ("GPU available", "stopped: max_epochs reached", ...) off the screen."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    before = [(logger.handlers, logger.propagate) for logger in loggers]
    for logger in loggers:  # not setLevel: that empties the caches of every logger there is
        logger.handlers, logger.propagate = [logging.NullHandler()], False
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"lightning\.")
            warnings.filterwarnings("ignore", message=".*treespec, LeafSpec.*")  # Lightning's, laid at torch's door
            warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")  # torch.compile's own look
            yield
    finally:
        for logger, (handlers, propagate) in zip(loggers, before, strict=True):
            logger.handlers, logger.propagate = handlers, propagate


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
