"""Lightning callbacks in clients' fits: each fit gets copies, and the metrics that they log are collected."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import lightning as L
import yaml
from lightning.pytorch.callbacks import Callback, EarlyStopping, Timer
from lightning.pytorch.callbacks.timer import Interval
from lightning.pytorch.loggers import Logger

from fl_lightning.client.module import ClientModule
from fl_lightning.core.errors import ConfigError, blame, one_line
from fl_lightning.core.round_progress import report_steps
from fl_lightning.core.spelling import suggest

INSTEAD = {
    "Checkpoint": "the run is checkpointed, not a client's fit; use Checkpointing under callbacks",
    "OnExceptionCheckpoint": "finished rounds are checkpointed, also if the run ends with an error; leave it out",
    "ProgressBar": "the run has a progress bar, a client's fit has none; use RoundProgress under callbacks",
    "ModelSummary": "in Python, ModelSummary(open_run(RUN).client_module(0)) has one",
    "BasePredictionWriter": "a client's fit predicts nothing; in Python, open_run(RUN).client_module(0) is its model",
    "BatchSizeFinder": "a run has one batch_size for all clients; set that",
    "LearningRateFinder": "a run has one optimizer.lr for all clients; try some with fl-lightning sweep",
    "GradientAccumulationScheduler": "methods depend on the number of steps; use trainer.accumulate_grad_batches",
    "BackboneFinetuning": "a client's backbone is its whole network; use FedRep or FedBABU, which train parts of it",
    "StochasticWeightAveraging": "it averages weights at the start of epochs, and the fit's last weights are left out; "
    "use EMAWeightAveraging, which averages over steps",
    "SpikeDetection": "it writes files outside of the run; use on_client_failure drop if a loss is NaN or Inf",
}
"""Lightning callbacks that, with their subclasses, do not work in a client's fit, and what to use instead."""


yaml.SafeDumper.add_representer(Interval, lambda dumper, value: dumper.represent_str(value.value))  # Timer's default


def refused(kind: type) -> str | None:
    """Return why a callback class does not work in a client's fit, and what to use instead; None if it works."""
    lightnings = [each.__name__ for each in kind.__mro__ if each.__module__.startswith("lightning.")]
    return next((INSTEAD[name] for name in lightnings if name in INSTEAD), None)


def check_client_callbacks(given: Sequence[Callback]) -> None:
    """Raise an error for callbacks that do not work in a client's fit or cannot be copied."""
    for callback in given:
        name = f"client_callbacks: {type(callback).__name__}"
        if fix := refused(type(callback)):
            raise ConfigError(f"{name} does not work in a client's fit: {fix}")
        try:
            copy.deepcopy(callback)
        except Exception as error:  # __deepcopy__ may raise anything
            raise ConfigError(f"{name} cannot be copied, and each fit has a copy: {one_line(error)}") from error


def set_up_callbacks(given: Sequence[Callback], trainer: L.Trainer, module: ClientModule) -> None:
    """Set up copies of the client callbacks, so that errors in a `setup` hook are raised before round 1.

    Args:
        given: The callbacks.
        trainer: A trainer that is never fitted.
        module: A client's module that is not used afterwards, because a callback may change it.
    """
    losses = ["loss", *module.loss_names]
    logs_only_losses = type(module) is ClientModule and not module.trains_itself
    known = logs_only_losses and all(type(one) in (EarlyStopping, Timer) for one in given)
    metrics = [f"train_{name}" for name in losses if known]  # other modules and callbacks may log more
    for callback in copy.deepcopy(list(given)):
        key = f"client_callbacks: {type(callback).__name__}"
        if isinstance(callback, EarlyStopping):
            _check_early_stopping(key, callback, metrics)
        with blame(key):
            callback.setup(trainer, module, "fit")


def _check_early_stopping(key: str, callback: EarlyStopping, metrics: Sequence[str]) -> None:
    """Raise an error if an `EarlyStopping` needs validation, or monitors a metric that a client's fit does not log.

    Args:
        key: The start of the message.
        callback: The callback.
        metrics: Names of all metrics that the fit logs; empty if they are not known.
    """
    unmeasured = "a client's fit has no validation"
    if callback.monitor.startswith(("val_", "test_")):
        fix = "monitor train_loss, or stop the run by EarlyStopping under callbacks"
        raise ConfigError(f"{key}.monitor: {callback.monitor}: {unmeasured}; {fix}")
    if metrics and callback.monitor not in metrics:
        raise ConfigError(f"{key}.monitor: metric {callback.monitor!r} not found. {suggest(None, metrics)}")
    if callback._check_on_train_epoch_end is False:
        raise ConfigError(f"{key}.check_on_train_epoch_end: {unmeasured}, after which it would look; leave it out")


def callback_options(given: Sequence[Callback]) -> dict[str, Any]:
    """Return `Trainer` arguments for a client's fit: copies of the callbacks, and a logger that keeps their metrics."""
    if not given:
        return {}
    return {"callbacks": copy.deepcopy(list(given)), "logger": MetricRecorder(), "log_every_n_steps": 1}


class StepReports(Callback):
    """Reports each training step of a client's own `Trainer.fit`, as the local loop does.

    Args:
        steps: Number of training steps of the fit.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        """Report a training step."""
        report_steps(min(trainer.global_step, self.steps), self.steps)


class MetricRecorder(Logger):
    """A Lightning logger that only keeps the last value of each metric in memory, in `metrics`."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics: dict[str, Any] = {}

    @property
    def name(self) -> None:
        """The logger's name: None, because it writes no files."""

    @property
    def version(self) -> None:
        """The logger's version: None, because it writes no files."""

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing, because the run's own loggers record the config."""

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Store metrics by name. Later values replace earlier ones."""
        self.metrics |= metrics


def logged_metrics(trainer: L.Trainer, losses: Mapping[str, float]) -> dict[str, float]:
    """Return the last value of each metric that callbacks and the module logged in a client's fit, by name.

    Values logged by `log` with `on_epoch=True` are averaged over the last epoch. Values that callbacks sent to the
    fit's logger are included.

    Args:
        trainer: The trainer of the finished fit.
        losses: The losses of the fit, which the run records by itself.
    """
    found: dict[str, float] = {}
    for recorder in trainer.loggers:
        if isinstance(recorder, MetricRecorder):
            for name, value in {**recorder.metrics, **trainer.callback_metrics}.items():
                if name != "epoch" and name.removeprefix("train_") not in losses:
                    with suppress(TypeError, ValueError, RuntimeError):  # text, or a tensor of several numbers
                        found[name] = float(value)
    return found
