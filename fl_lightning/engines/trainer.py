"""Lightning's `Trainer` for client fits: silent, fast to build, without files."""

from __future__ import annotations

import gc
import inspect
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision

from fl_lightning.engines.client_callbacks import callback_options

DEFAULTS = {name: p.default for name, p in inspect.signature(L.Trainer).parameters.items()}
"""Lightning's defaults. All are passed explicitly, because Lightning reads missing ones from environment variables."""

CHATTER = "|".join(
    [
        "GPU available but not used",  # as the config says
        "TPU available but not used",
        ".*AMP with fp16 is not supported on CPU",  # `check_trainer` refuses it
        r"`precision=.+` is supported for historical reasons",
        ".*does not have many workers",  # starting them takes 50 ms a fit
        "You defined a `validation_step` but have no `val_dataloader`",  # clients are evaluated outside of a fit
        r"Found \d+ module\(s\) in eval mode",  # `warn_of_eval_mode` names them before round 1
        ".*treespec, LeafSpec",  # Lightning still uses it
        "The .grad attribute of a Tensor",  # caused by torch.compile
    ]
)
"""Warnings that are meaningless for short fits and would be repeated in each."""

QUIET = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")


def quiet_trainer(
    options: dict[str, Any], shown: set[str] | None = None, callbacks: Sequence[Callback] = ()
) -> L.Trainer:
    """Build a trainer for one fit on one device: by default one epoch, no validation, no output, no files.

    Args:
        options: Keyword arguments of `Trainer`.
        shown: Texts of warnings that are not shown again. New ones are added.
        callbacks: Lightning callbacks. The trainer gets copies.
    """
    options = DEFAULTS | {"devices": 1, "limit_val_batches": 0} | options
    if options["max_epochs"] is None:
        options["max_epochs"] = 1 if options["max_steps"] == -1 else -1
    with quiet_lightning(shown):
        trainer = L.Trainer(**options | dict.fromkeys(QUIET, False) | callback_options(callbacks))
    # Lightning's own teardown would move module and optimizer off the GPU and free cached memory after each fit
    trainer.strategy.teardown = trainer.precision_plugin.teardown  # type: ignore[method-assign]
    return trainer


def obstacle_to_loop(trainer: L.Trainer) -> tuple[str, str] | None:
    """Return the trainer option that the local loop cannot apply to several clients in one fit, as `(option, reason)`.

    Without such an option, the result is None.
    """
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


@contextmanager
def inference(module: torch.nn.Module, trainer: L.Trainer) -> Iterator[None]:
    """Context with a module in eval mode on a trainer's device, in the trainer's precision and without gradients."""
    device = trainer.strategy.root_device
    if device.type != "cpu":  # modules are built on the CPU, and `to` takes time
        module.to(device)
    module.eval()
    with torch.no_grad(), trainer.precision_plugin.forward_context():
        yield


@contextmanager
def limited_garbage_collection() -> Iterator[None]:
    """Context in which garbage collection checks only objects that were created inside the context.

    Every used trainer is part of a reference cycle, which only garbage collection frees.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def quiet_lightning(shown: set[str] | None = None) -> Iterator[None]:
    """Context that suppresses Lightning's messages about short fits. Other warnings are shown once each.

    Args:
        shown: Texts of warnings that are not shown again. New ones are added. By default, none was shown before.
    """
    shown = set() if shown is None else shown
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    before = [(logger, logger.handlers, logger.propagate) for logger in loggers]
    for logger in loggers:  # setLevel would empty the caches of all loggers
        logger.handlers, logger.propagate = [_LOG_AS_WARNINGS], False
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=CHATTER)
            show_outside = warnings.showwarning

            def show_once(message: Warning | str, *args: Any, **options: Any) -> None:
                if (text := str(message)) not in shown:
                    show_outside(message, *args, **options)
                    shown.add(text)  # after: an outer context with the same `shown` would suppress the warning

            warnings.showwarning = show_once
            yield
    finally:
        for logger, handlers, propagate in before:
            logger.handlers, logger.propagate = handlers, propagate


class _Warn(logging.Handler):
    """A handler that turns Lightning's log records of level warning and above into warnings, and drops the others."""

    def emit(self, record: logging.LogRecord) -> None:
        warnings.warn(record.getMessage(), stacklevel=2)


_LOG_AS_WARNINGS = _Warn(logging.WARNING)
