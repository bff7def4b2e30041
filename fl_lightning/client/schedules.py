"""Learning-rate schedules whose length is that of the fit, and schedules that span several rounds."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from fl_lightning.core.errors import ConfigError, check_number


class WarmupCosine(LambdaLR):
    """Increase the learning rate linearly, then decrease it to `end` along half a cosine.

    With `T` steps and a warm-up of `W` steps, step `t` (from 0) has the factor `(t + 1) / (W + 1)` for `t < W`. From
    then on it is `end + (1 - end) (1 + cos(π (t - W) / (T - W))) / 2`. This is PyTorch's `LinearLR` followed by
    `CosineAnnealingLR`. The cosine is that of SGDR without restarts (Loshchilov and Hutter, ICLR 2017, Eq. 5); the
    warm-up is that of Goyal et al., 2017, Section 2.2.

    As `lr_scheduler`, it needs no `steps`: `T` is the number of steps or epochs of each client's own fit, as
    `lr_scheduler_interval` says, times `lr_scheduler_rounds`.

    Args:
        optimizer: The optimizer.
        warmup: `W`: a share of `steps` below 1 (rounded down), or a whole number of steps.
        end: The last factor, in [0, 1].
        steps: `T`. By default the length of the client's fit.

    Raises:
        ConfigError: An argument is out of range.

    Example:
        >>> sgd = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        >>> schedule, rates = WarmupCosine(sgd, warmup=1, steps=3), []
        >>> for _ in range(3):
        ...     rates.append(round(schedule.get_last_lr()[0], 3))
        ...     sgd.step()
        ...     schedule.step()
        >>> rates
        [0.5, 1.0, 0.5]
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, warmup: float = 0.0, end: float = 0.0, steps: int | None = None
    ) -> None:
        check_number("warmup", warmup, "[0, inf)", "give a share of the steps below 1, or a number of steps")
        check_number("end", end, "[0, 1]")
        check_number("steps", steps, "[1, inf)", "leave it out for the length of each client's fit")
        if warmup >= 1 and warmup % 1:
            raise ConfigError(f"warmup: {warmup} is no whole number. Give a share below 1, or a number of steps.")
        self.warmup, self.end, self.steps = warmup, end, steps
        super().__init__(optimizer, self.factor)

    def factor(self, step: int) -> float:
        """Return the factor on the learning rate at a step, counted from 0. From `steps` on it is `end`.

        Raises:
            ValueError: The number of steps is unknown.
        """
        if self.steps is None:
            if not step:  # the number may be set later
                return 1.0
            raise ValueError("WarmupCosine needs the number of steps here. Give it, such as steps: 100.")
        warmup = min(int(self.warmup * self.steps if self.warmup < 1 else self.warmup), self.steps)
        if step < warmup:
            return (step + 1) / (warmup + 1)
        done = min(1.0, (step - warmup) / max(1, self.steps - warmup))
        return self.end + (1 - self.end) * (1 + math.cos(math.pi * done)) / 2

    def set_length(self, steps: int) -> None:
        """Set the number of steps before the first one, and the learning rate of the first step."""
        self.steps = steps
        for group, rate in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = rate * self.factor(0)
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]


class ScheduleStarts:
    """The learning-rate schedules of clients at the start of a round, if they span several rounds.

    A client's schedule has taken as many steps as if the client had taken part in all rounds before, with as many steps
    in each as it has now. So all clients of a round are at the same part of their schedules, and a client without a
    state, such as a new one, needs none.

    The schedule of the last round is kept for each number of steps, so a run computes each step of it once.

    Args:
        rounds: Number of rounds that a schedule spans. With 1, it starts again in each round.
    """

    def __init__(self, rounds: int = 1) -> None:
        self.rounds = rounds
        self._kept: dict[Any, tuple[int, dict[str, Any], list[dict[str, Any]]]] = {}

    def advance(self, schedule: LRScheduler, optimizer: torch.optim.Optimizer, round: int, length: int) -> None:
        """Step a new schedule to the start of a round. After the last round of its span, it is that of the last round.

        Args:
            schedule: The schedule.
            optimizer: Its optimizer. Its parameters have no gradients, so its weights do not change.
            round: The round, from 1.
            length: The client's number of schedule steps in a round.
        """
        steps = (min(round, self.rounds) - 1) * length
        if steps <= 0:
            return
        key = length, tuple(float(group["lr"]) for group in optimizer.param_groups)
        done, state, options = self._kept.get(key, (0, {}, []))
        if 0 < done <= steps:
            schedule.load_state_dict(copy.deepcopy(state))
            for group, own in zip(optimizer.param_groups, copy.deepcopy(options), strict=True):
                group.update(own)
        else:
            done = 0
            optimizer.step(lambda: 0.0)  # torch warns of a schedule that is stepped before its optimizer
        for _ in range(done, steps):
            schedule.step()
        self._kept[key] = copy.deepcopy((steps, schedule.state_dict(), options_of(optimizer)))


class OptionTable:
    """The options of an optimizer's parameter groups, such as learning rates, after each step of a scheduler.

    Args:
        optimizer: An optimizer whose parameters have no gradients. It is stepped, which changes nothing.
        schedule: Its scheduler.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, schedule: LRScheduler) -> None:
        self._optimizer, self._schedule, self._after = optimizer, schedule, [options_of(optimizer)]

    def after(self, steps: int) -> list[dict[str, Any]]:
        """Return the options of each parameter group after a number of scheduler steps, without its parameters."""
        while len(self._after) <= steps:
            self._optimizer.step(lambda: 0.0)
            self._schedule.step()
            self._after.append(options_of(self._optimizer))
        return self._after[steps]


def options_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the options of each parameter group of an optimizer, without its parameters."""
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
