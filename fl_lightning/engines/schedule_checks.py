"""Checks of the learning-rate schedule and of the learning-rate factors before round 1."""

from __future__ import annotations

import warnings
from collections.abc import Sequence, Set
from itertools import islice
from typing import Any, cast

import lightning as L
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, OneCycleLR, PolynomialLR

from fl_lightning.client.fit import ClientTrainerView
from fl_lightning.client.local_work import Interval, LocalWork
from fl_lightning.client.loss_term import FitContext
from fl_lightning.client.module import ClientModule
from fl_lightning.client.optimizers import LOOK_AHEAD, learning_rates, matching_pattern
from fl_lightning.client.schedules import WarmupCosine
from fl_lightning.core.errors import ConfigError

LENGTHS: dict[type, str] = {
    **dict.fromkeys((ConstantLR, LinearLR, PolynomialLR), "total_iters"),
    CosineAnnealingLR: "T_max",
    OneCycleLR: "total_steps",
    WarmupCosine: "steps",
}
"""The option of a scheduler that is its length in steps."""


def check_lr_factors(module: ClientModule, frozen: Set[str]) -> None:
    """Raise an error if a pattern of `lr_factors` is the first to match for no trainable parameter of the network.

    Args:
        module: A client module.
        frozen: Names of the parameters that the model freezes.
    """
    names = [name for name, _ in module.backbone.named_parameters() if name not in frozen]
    used = {matching_pattern(name, module.lr_factors) for name in names}
    if unused := next((pattern for pattern in module.lr_factors if pattern not in used), None):
        what = f"{unused!r} matches no trainable parameter that an earlier pattern does not match"
        shown = f"{names[0]} ... {names[-1]}"
        raise ConfigError(f"lr_factors: {what}. The network has the parameters {shown}. Correct the pattern.")


def check_schedule(module: ClientModule, trainer: L.Trainer, works: Sequence[LocalWork], scaled: bool) -> None:
    """Raise an error if a learning-rate schedule ends before a fit does, or yields invalid learning rates.

    Warn if the fits of clients are shorter or longer than the schedule is made for.

    Args:
        module: A client module, which is not used afterwards.
        trainer: The trainer of a fit.
        works: The number of steps of the client with the fewest samples, and of that with the most.
        scaled: Whether `round_lr_scheduler` scales the learning rates. If so, those of the schedule must be relative.
    """
    if not module.scheduler_factory:
        return
    interval = module.lr_scheduler_interval
    longest = max(works, key=lambda work: work.length(interval))
    module.trainer = cast(L.Trainer, ClientTrainerView(trainer, trainer, longest))
    rates: list[list[float]] = []
    for scale in (1.0, 0.5) if scaled else (1.0,):
        module.context = FitContext(lr_scale=scale)
        optimizer = module.optimizer_for(module.backbone.parameters())
        schedule = learning_rates("lr_scheduler", optimizer, module.schedule_for)
        counted = min(longest.length(interval) + 1, LOOK_AHEAD)  # one more for the step after the last
        rates.append([*islice(schedule, counted)])
    built = module.scheduler_factory(optimizer)
    if scaled and any(abs(rate - 2 * half) > max(rates[0]) / 100 for rate, half in zip(*rates, strict=True)):
        what = f"{type(built).__name__} sets learning rates that round_lr_scheduler does not scale"
        raise ConfigError(f"lr_scheduler: {what}. Leave one of them out.")
    warn_of_schedule_length(built, interval, [work.length(interval) for work in works])


def warn_of_schedule_length(schedule: Any, interval: Interval, lengths: Sequence[int]) -> None:
    """Warn if a schedule has a length of its own, and fits end before it, or see its learning rate rise again after it.

    Args:
        schedule: The scheduler.
        interval: What it counts.
        lengths: The number of epochs or steps in the shortest and in the longest fit.
    """
    kind = type(schedule)
    if kind not in LENGTHS or (made_for := getattr(schedule, LENGTHS[kind])) is None:
        return
    rises = kind is CosineAnnealingLR and made_for < max(lengths) - 1
    if made_for <= min(lengths) and not rises:
        return
    fits = " to ".join(str(length) for length in sorted(set(lengths)))
    what = f"{LENGTHS[kind]} of {kind.__name__} is {made_for}, but a client's fit has {fits} {interval}(s)"
    fix = "Correct it or lr_scheduler_interval, or use WarmupCosine, which has the length of each fit."
    warnings.warn(f"lr_scheduler: {what}. {fix}", stacklevel=2)
