"""Options of the local training on each client."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch.optim import Optimizer

from fl_lightning.client.dp_sgd import DPSGD
from fl_lightning.client.local_work import Interval
from fl_lightning.client.mixing import Mixing
from fl_lightning.core.errors import ConfigError, check_instance, check_number, check_positive
from fl_lightning.core.objectives import ClassWeights
from fl_lightning.data.loaders import BatchSampler

NUMBER = re.compile(r"\s*[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?\s*", re.IGNORECASE)
"""Matches a number written as text."""


@dataclass(frozen=True)
class LocalTraining:
    """Options of the clients' local training. In config files and on the command line these are top-level keys.

    Args:
        batch_size: Number of samples in a training batch.
        batch_sampler: How training samples are drawn: `shuffle` takes each once in an epoch. `balanced` draws each of
            the client's classes equally often, with replacement; an epoch has as many samples.
        class_weights: Weight of each class in the training loss: a list, or `balanced`, which is inversely proportional
            to the client's own number of samples of the class. For several 0/1 labels, the weight of the positives.
        optimizer: Builds the optimizer of each client's fit. By default it is that of the model, if the model is a
            LightningModule, or SGD.
        optimizer_state: State of a client's optimizer at the start of a round: `fresh`, or `kept` from the client's
            last round (momentum, step counts, ...), with this round's learning rate. By default the algorithm decides;
            most start `fresh`.
        lr_scheduler: Builds a learning-rate scheduler within one client's fit, such as `WarmupCosine`, whose length is
            that of the fit. It starts again in each round, unless `lr_scheduler_rounds` is set.
        lr_scheduler_interval: Whether `lr_scheduler` is stepped once per `epoch` or once per optimizer `step`.
        lr_scheduler_rounds: Number of rounds that `lr_scheduler` spans, such as all rounds of the run. A client with
            `n` steps a round starts round `r` after `(r - 1) n` steps of the schedule, also if it did not take part in
            all rounds before. The length of `WarmupCosine` is then that of as many fits of the client.
        lr_factors: Factors on the learning rate by pattern of parameter names, such as
            `{"head.*": 10.0, "encoder.0.*": 0.1}`. The first pattern that matches counts; other parameters have the
            factor 1.
        mixup: α of MixUp, above 0: each training sample is mixed with another one of its batch, by a share from
            Beta(α, α), and so are their losses. The paper takes 0.1 to 0.4 for ImageNet.
        cutmix: α of CutMix, above 0: a rectangle of each training image is that of another one. The paper takes 1. If
            `mixup` is set, too, each batch draws one of them.
        dp_sgd: Make the training differentially private for each record of a client, by DP-SGD: clipped gradients of
            single samples, Gaussian noise and Poisson batches, such as `{clip: 1.0, noise: 1.0}`.
        trainer: Keyword arguments of Lightning's `Trainer` for each client's fit: `accelerator`, `precision`,
            `max_epochs` or `max_steps` (the local work, one epoch by default), `gradient_clip_val`, ...
        compile: Compile the network, once for all clients and rounds. This pays off if a step takes long.
        channels_last: Store images in channels-last memory format. By default on CUDA GPUs in half or mixed precision,
            if the network has convolutions, which are then usually faster.
        client_callbacks: Lightning callbacks, copied for each client's fit: `LearningRateMonitor`, `EarlyStopping` on
            `train_loss`, or your own. Values that they log become part of the round's metrics; `client/<name>` is the
            mean over the round's clients.

    Raises:
        ConfigError: `batch_size` is not a positive whole number, or another option is out of range.
    """

    batch_size: int = 64
    batch_sampler: BatchSampler = "shuffle"
    class_weights: ClassWeights | None = None
    optimizer: OptimizerCallable | None = None
    optimizer_state: Literal["fresh", "kept"] | None = None
    lr_scheduler: LRSchedulerCallable | None = None
    lr_scheduler_interval: Interval = "epoch"
    lr_scheduler_rounds: int = 1
    lr_factors: dict[str, float] | None = None
    mixup: float | None = None
    cutmix: float | None = None
    dp_sgd: DPSGD | None = None
    trainer: dict[str, Any] = field(default_factory=dict)
    compile: bool = False
    channels_last: bool | None = None
    client_callbacks: list[Callback] | None = None

    @property
    def mixing(self) -> Mixing | None:
        """How the samples of training batches are mixed, or None."""
        return None if self.mixup is None and self.cutmix is None else Mixing(self.mixup, self.cutmix)

    def __post_init__(self) -> None:
        check_positive(batch_size=self.batch_size, lr_scheduler_rounds=self.lr_scheduler_rounds)
        if isinstance(self.optimizer, Optimizer):
            fix = f"Give its class, or partial({type(self.optimizer).__name__}, lr=0.1)"
            raise ConfigError(f"optimizer: got an object, but each client's fit builds its own. {fix}")
        if self.optimizer is not None:
            check_instance("optimizer", self.optimizer, Callable, "Give a class, or partial(torch.optim.SGD, lr=0.1)")
        for name, value in getattr(self.optimizer, "keywords", {}).items():
            if isinstance(value, str) and NUMBER.fullmatch(value):
                raise ConfigError(f"optimizer.{name}: {value!r} is text, not a number. Write it without quotes")
        check_instance("trainer", self.trainer, Mapping, "Give the arguments of a Trainer, such as {'max_epochs': 5}")
        if self.batch_sampler not in get_args(BatchSampler):
            raise ConfigError(f"batch_sampler: {self.batch_sampler!r} not found. Use shuffle or balanced.")
        if self.lr_scheduler_interval not in get_args(Interval):
            raise ConfigError(f"lr_scheduler_interval: {self.lr_scheduler_interval!r} not found. Use epoch or step.")
        for pattern, factor in (self.lr_factors or {}).items():
            fix = "to freeze parameters, set their requires_grad to False in the model"
            check_number(f"lr_factors.{pattern}", factor, "(0, inf)", fix)
        for key in ("mixup", "cutmix"):
            check_number(key, getattr(self, key), "(0, inf)", "leave it out to mix nothing")
        if isinstance(self.class_weights, str):
            if self.class_weights != "balanced":
                raise ConfigError(f"class_weights: {self.class_weights!r} not found. Use balanced or a list.")
            return
        if self.class_weights is not None:
            check_instance("class_weights", self.class_weights, list | tuple, "Give balanced or a list of numbers")
        for weight in self.class_weights or ():
            check_number("class_weights", weight, "(0, inf)", "to ignore a class, give it a small weight")
