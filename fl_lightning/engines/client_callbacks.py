"""Lightning callbacks in a client's fit: each fit gets copies, and what they log is collected."""

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

INSTEAD = {
    "Checkpoint": "the run is checkpointed, not a client's fit; use Checkpointing under callbacks",
    "OnExceptionCheckpoint": "what a run has finished is checkpointed however it ends; leave it out",
    "ProgressBar": "the run has a bar, a client's fit none; use RoundProgress under callbacks",
    "ModelSummary": "in Python, ModelSummary(open_run(RUN).client_module(0)) has one",
    "BasePredictionWriter": "a client's fit predicts nothing; in Python, open_run(RUN).client_module(0) is its model",
    "BatchSizeFinder": "a run has one batch_size for all clients; set that",
    "LearningRateFinder": "a run has one optimizer.lr for all clients; try some with fl-lightning sweep",
    "GradientAccumulationScheduler": "a method must know of it beforehand; use trainer.accumulate_grad_batches",
    "BackboneFinetuning": "a client's backbone is its whole network; use FedRep or FedBABU, which train parts of it",
    "StochasticWeightAveraging": "it averages what epochs begin with, and of a fit's last one nothing is left; "
    "use EMAWeightAveraging, which averages steps",
    "SpikeDetection": "it leaves files beside the run; use on_client_failure drop for clients whose loss is NaN or Inf",
}
"""Lightning callbacks that do not work in a client's fit, and what to use instead. Subclasses included."""


yaml.SafeDumper.add_representer(Interval, lambda dumper, value: dumper.represent_str(value.value))  # Timer's default


def refused(kind: type) -> str | None:
    """Return what to use instead of a callback in a client's fit, or None if the callback works there."""
    lightnings = [each.__name__ for each in kind.__mro__ if each.__module__.startswith("lightning.")]
    return next((INSTEAD[name] for name in lightnings if name in INSTEAD), None)


def check_client_callbacks(given: Sequence[Callback]) -> None:
    """Refuse callbacks that do not work in a client's fit or cannot be copied.

    Args:
        given: The callbacks, as they were given.

    Raises:
        ConfigError: Names the callback, and what to use in its place.
    """
    for callback in given:
        name = f"client_callbacks: {type(callback).__name__}"
        if mend := refused(type(callback)):
            raise ConfigError(f"{name} makes no sense in a client's fit: {mend}")
        try:
            copy.deepcopy(callback)
        except Exception as error:  # whatever an object's own copying raises
            raise ConfigError(f"{name} cannot be copied, and each fit has a copy: {one_line(error)}") from error


def set_up_callbacks(given: Sequence[Callback], trainer: L.Trainer, module: ClientModule) -> None:
    """Call the set-up of the callbacks, so that what they refuse is refused before round 1.

    Args:
        given: The callbacks, as they were given.
        trainer: A trainer that never fits.
        module: A client's module that nobody needs any more: a callback may change it.

    Raises:
        ConfigError: Names the callback.
    """
    losses = ["loss", *module.loss_names]
    known = type(module) is ClientModule and all(type(one) in (EarlyStopping, Timer) for one in given)
    metrics = [f"train_{name}" for name in losses if known]  # others may log what they like
    for callback in copy.deepcopy(list(given)):
        name = f"client_callbacks: {type(callback).__name__}"
        if isinstance(callback, EarlyStopping):
            _check_early_stopping(name, callback, metrics)
        with blame(name):
            callback.setup(trainer, module, "fit")


def _check_early_stopping(name: str, callback: EarlyStopping, metrics: Sequence[str]) -> None:
    unmeasured = "a client's fit has no validation"
    if callback.monitor.startswith(("val_", "test_")):
        mend = "monitor train_loss, or stop the run by EarlyStopping under callbacks"
        raise ConfigError(f"{name}.monitor: {callback.monitor}: {unmeasured}; {mend}")
    if metrics and callback.monitor not in metrics:
        raise ConfigError(f"{name}.monitor: there is no metric {callback.monitor!r}; there are {', '.join(metrics)}")
    if callback._check_on_train_epoch_end is False:
        raise ConfigError(f"{name}.check_on_train_epoch_end: {unmeasured}, after which it would look; leave it out")


def callback_options(given: Sequence[Callback]) -> dict[str, Any]:
    """Return Trainer arguments for a fit with callbacks: copies of them, and a logger that collects what they log.

    Args:
        given: The callbacks, as they were given; nothing that a fit leaves behind reaches them.
    """
    if not given:
        return {}
    return {"callbacks": copy.deepcopy(list(given)), "logger": MetricRecorder(), "log_every_n_steps": 1}


class MetricRecorder(Logger):
    """A logger that keeps the last value of each metric in memory.

    Attributes:
        shown: The values by name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.metrics: dict[str, Any] = {}

    @property
    def name(self) -> None:
        """None, because it writes no files."""

    @property
    def version(self) -> None:
        """None, because it writes no files."""

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the run's loggers have the config."""

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Store the values."""
        self.metrics |= metrics


def logged_metrics(trainer: L.Trainer, losses: Mapping[str, float]) -> dict[str, float]:
    """Return what callbacks logged in a fit, by name: the last value of each metric.

    That is what `log` of the callbacks or of the client's module was given, a mean over the last epoch where it was
    told so (`on_epoch=True`), and what callbacks told the fit's logger.

    Args:
        trainer: The fit's trainer, which is done.
        losses: The fit's losses, as the run has them already.
    """
    found: dict[str, float] = {}
    for recorder in trainer.loggers:
        if isinstance(recorder, MetricRecorder):
            for name, value in {**recorder.metrics, **trainer.callback_metrics}.items():
                if name != "epoch" and name.removeprefix("train_") not in losses:
                    with suppress(TypeError, ValueError, RuntimeError):  # no number: text, or a tensor of several
                        found[name] = float(value)
    return found
