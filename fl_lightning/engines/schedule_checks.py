"""Checks of the learning-rate schedule and of the learning-rate factors before round 1."""

from __future__ import annotations

import warnings
from collections.abc import Sequence, Set
from itertools import islice
from typing import Any, cast

import lightning as L
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, LRScheduler, OneCycleLR, PolynomialLR

from fl_lightning.client.fit import ClientTrainerView
from fl_lightning.client.local_training import LocalTraining
from fl_lightning.client.local_work import Interval, LocalWork
from fl_lightning.client.loss_term import FitContext
from fl_lightning.client.module import ClientModule
from fl_lightning.client.optimizers import LOOK_AHEAD, learning_rates, matching_pattern
from fl_lightning.client.schedules import ScheduleStarts, WarmupCosine
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


def check_rounds_of_schedule(training: LocalTraining, rounds: int, scaled: bool) -> None:
    """Check the number of rounds that `lr_scheduler` spans.

    Args:
        training: The options of local training.
        rounds: The run's number of rounds.
        scaled: Whether there is a `round_lr_scheduler`.

    Raises:
        ConfigError: A schedule over several rounds ends before the run, does not exist, or is not the only one.
    """
    spanned = training.lr_scheduler_rounds
    if spanned == 1:
        return
    if training.lr_scheduler is None:
        raise ConfigError(f"lr_scheduler_rounds: {spanned}, but no lr_scheduler is set. Set one, or leave it out.")
    if scaled:
        what = "lr_scheduler spans several rounds already"
        raise ConfigError(f"round_lr_scheduler: {what}. Leave it out, or leave out lr_scheduler_rounds.")
    if spanned < rounds:
        fix = "Set it to the number of rounds, or to 1 for a schedule that starts again in each round"
        raise ConfigError(f"lr_scheduler_rounds: {spanned} is below rounds, {rounds}. {fix}.")


def check_schedule(
    module: ClientModule, trainer: L.Trainer, works: Sequence[LocalWork], scaled: bool, rounds: int
) -> None:
    """Raise an error if a learning-rate schedule ends before a fit does, or yields invalid learning rates.

    Warn if the fits of clients are shorter or longer than the schedule is made for.

    Args:
        module: A client module, which is not used afterwards.
        trainer: The trainer of a fit.
        works: The number of steps of the client with the fewest samples, and of that with the most.
        scaled: Whether `round_lr_scheduler` scales the learning rates. If so, those of the schedule must be relative.
        rounds: Number of rounds that the schedule spans.
    """
    if not module.scheduler_factory:
        return
    interval = module.lr_scheduler_interval
    longest = max(works, key=lambda work: work.length(interval))
    module.trainer = cast(L.Trainer, ClientTrainerView(trainer, trainer, longest))
    lengths = [rounds * work.length(interval) for work in works]
    rates: list[list[float]] = []
    for scale in (1.0, 0.5) if scaled else (1.0,):
        module.context = FitContext(lr_scale=scale, schedule_starts=ScheduleStarts(rounds))
        optimizer = module.optimizer_for(module.backbone.parameters())
        schedule = learning_rates("lr_scheduler", optimizer, module.schedule_for)
        counted = min(max(lengths) + 1, LOOK_AHEAD)  # one more for the step after the last
        rates.append([*islice(schedule, counted)])
    built = module.scheduler_factory(optimizer)
    if scaled and any(abs(rate - 2 * half) > max(rates[0]) / 100 for rate, half in zip(*rates, strict=True)):
        what = f"{type(built).__name__} sets learning rates that round_lr_scheduler does not scale"
        raise ConfigError(f"lr_scheduler: {what}. Leave one of them out.")
    if rounds > 1 and not isinstance(built, LRScheduler):
        what = f"{type(built).__name__} is no LRScheduler of torch, so it cannot continue in another round"
        raise ConfigError(f"lr_scheduler_rounds: {what}. Leave it out.")
    if isinstance(built, OneCycleLR) and built.total_steps < max(lengths):  # it ends after the steps tried above
        what = f"total_steps of OneCycleLR is {built.total_steps}, and a client takes {max(lengths)} {interval}s"
        raise ConfigError(f"lr_scheduler: {what}. Correct it, or use WarmupCosine.")
    warn_of_schedule_length(built, interval, lengths, rounds)


def warn_of_schedule_length(schedule: Any, interval: Interval, lengths: Sequence[int], rounds: int) -> None:
    """Warn if a schedule has a length of its own, and fits end before it, or see its learning rate rise again after it.

    Args:
        schedule: The scheduler.
        interval: What it counts.
        lengths: The number of epochs or steps of the clients with the fewest and the most samples, in all rounds that
            it spans.
        rounds: The number of these rounds.
    """
    kind = type(schedule)
    if kind not in LENGTHS or (made_for := getattr(schedule, LENGTHS[kind])) is None:
        return
    rises = kind is CosineAnnealingLR and made_for < max(lengths) - 1
    if made_for <= min(lengths) and not rises:
        return
    fits = " to ".join(str(length) for length in sorted(set(lengths)))
    of = "a client's fit has" if rounds == 1 else f"{rounds} fits of a client have"
    what = f"{LENGTHS[kind]} of {kind.__name__} is {made_for}, but {of} {fits} {interval}(s)"
    fix = "Correct it or lr_scheduler_interval, or use WarmupCosine, which has the length of each client's fits."
    warnings.warn(f"lr_scheduler: {what}. {fix}", stacklevel=2)
