"""Lightning's `Trainer` for client fits: silent, fast to build, without files."""

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

FOR_ALL: dict[str, Any] = {
    "max_epochs": 1,
    "max_steps": -1,
    "limit_train_batches": 1.0,
    "gradient_clip_val": None,
    "gradient_clip_algorithm": None,
}
"""Trainer options that a shared fit handles per client."""


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


def obstacle_to_shared_fit(trainer: L.Trainer) -> tuple[str, str] | None:
    """Return the trainer option that prevents training several clients in one `Trainer.fit`, as `(option, reason)`.

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


@dataclass(frozen=True)
class LocalWork:
    """The number of training steps of a client in a fit, per epoch and in total.

    Args:
        per_epoch: Steps in each epoch except possibly the last.
        steps: Steps in total.
    """

    per_epoch: int
    steps: int

    @classmethod
    def under(cls, trainer: L.Trainer, batches: int) -> LocalWork:
        """Return a client's number of steps under a trainer's limits, given its number of batches per epoch."""
        limit, epochs, steps = trainer.limit_train_batches, trainer.max_epochs, trainer.max_steps
        batches = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
        per_epoch = math.ceil(batches / trainer.accumulate_grad_batches)
        bounds = (steps, per_epoch * (-1 if epochs is None else epochs))
        return cls(per_epoch, min(bound for bound in bounds if bound >= 0))

    @property
    def epochs(self) -> int:
        """Number of epochs in the fit; the last one may be incomplete."""
        return math.ceil(self.steps / self.per_epoch)

    def steps_in(self, epoch: int) -> int:
        """Return the number of steps in an epoch; epochs are counted from 0."""
        return max(0, min(self.per_epoch, self.steps - epoch * self.per_epoch))


class ClientTrainerView:
    """Stand-in for the `trainer` of one client's module, when several clients are trained in one `Trainer.fit`.

    Progress and options such as `max_epochs` are those of the client. The rest is the real trainer's.

    Args:
        trainer: The trainer that fits several clients.
        alone: A trainer with the client's own options.
        work: The number of steps of the client.
    """

    def __init__(self, trainer: L.Trainer, alone: L.Trainer, work: LocalWork) -> None:
        self.trainer, self.alone = trainer, alone
        self.current_epoch = self.global_step = 0
        self.should_stop = False
        self.num_training_batches, self.estimated_stepping_batches = work.per_epoch, work.steps

    def __getattr__(self, name: str) -> Any:
        return getattr(self.alone if name in FOR_ALL else self.trainer, name)


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
    """Context that suppresses Lightning's messages about short fits, and caches lookups that are repeated in every fit.

    Other warnings are shown once each. Lightning reads the files of every installed package to find plugins, and opens
    NVIDIA's library to count GPUs.

    Args:
        shown: Texts of warnings that are not shown again. New ones are added. By default those of this context.
    """
    shown = set() if shown is None else shown
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    replaced: list[tuple[dict[str, Any], str, Any]] = [
        (vars(registry), "entry_points", _entry_points),
        (vars(torch.cuda), "device_count", _device_count),
        *((vars(logger), "handlers", [_WARN]) for logger in loggers),  # setLevel would empty the caches of all loggers
        *((vars(logger), "propagate", False) for logger in loggers),
    ]
    before = [(names, name, names[name]) for names, name, _ in replaced]
    for names, name, value in replaced:
        names[name] = value
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=CHATTER)
            show = warnings.showwarning

            def show_once(message: Warning | str, *args: Any, **options: Any) -> None:
                if (text := str(message)) not in shown:
                    show(message, *args, **options)  # first: it is this function again if fits are nested
                    shown.add(text)

            warnings.showwarning = show_once
            yield
    finally:
        for names, name, value in before:
            names[name] = value


class _Warn(logging.Handler):
    """A handler that turns Lightning's log records of level warning and above into warnings, and drops the others."""

    def emit(self, record: logging.LogRecord) -> None:
        warnings.warn(record.getMessage(), stacklevel=2)


_WARN = _Warn(logging.WARNING)
_entry_points = functools.cache(entry_points)
_device_count = functools.cache(torch.cuda.device_count)
