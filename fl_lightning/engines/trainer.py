"""Lightning's `Trainer` as a client's fit needs it: quiet, quick to make, and with work to do."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities import registry

from fl_lightning.errors import ConfigError

QUIET = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")


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
