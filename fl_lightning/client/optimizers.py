"""Optimizers and learning-rate schedules: optimizer state as tensors, learning rates over epochs and rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from fl_lightning.core.errors import ConfigError, blame, check_number, one_line
from fl_lightning.core.message import Tensors

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
SchedulerFactory = Callable[[torch.optim.Optimizer], Any]

PLAIN_SGD = {name: value for name, value in torch.optim.SGD([torch.zeros(1)]).defaults.items() if name != "lr"}
"""The default options of SGD, without the learning rate."""

LOOK_AHEAD = 10_000
"""Number of epochs or rounds of a schedule that are checked before round 1."""


def descend(
    optimizer: torch.optim.Optimizer, loss: Tensor, clip: Callable[[torch.optim.Optimizer], None] | None = None
) -> None:
    """Take one optimizer step on a loss, outside of Lightning's training loop.

    Args:
        optimizer: The optimizer.
        loss: The loss to minimise.
        clip: Clips the gradients of the optimizer's parameters.
    """
    optimizer.zero_grad()
    loss.backward()
    if clip:
        clip(optimizer)
    optimizer.step()
    torch.clear_autocast_cache()  # it may contain weights from before the step


def groups_by_factor(
    parameters: Iterable[Any], network: nn.Module, factors: Mapping[str, float]
) -> dict[float, list[nn.Parameter]]:
    """Group the parameters of an optimizer by the factor on their learning rate, in order of first appearance.

    Args:
        parameters: The parameters.
        network: The network that they belong to.
        factors: Factors by pattern, such as `{"head.*": 10.0}`. The first pattern that matches a name in the network
            counts. Without a match, the factor is 1.

    Raises:
        ConfigError: Something is none of the network's parameters.
    """
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    groups: dict[float, list[nn.Parameter]] = {}
    for parameter in parameters:
        if id(parameter) not in names:
            what = "the method trains parameters that are not the model's, which have no name for a pattern"
            raise ConfigError(f"lr_factors: {what}. Leave lr_factors out, or use another method.")
        pattern = matching_pattern(names[id(parameter)], factors)
        groups.setdefault(1.0 if pattern is None else factors[pattern], []).append(parameter)
    return groups


def matching_pattern(name: str, patterns: Iterable[str]) -> str | None:
    """Return the first of some shell patterns (`*`, `?`, `[...]`) that matches a parameter's name, or None."""
    return next((pattern for pattern in patterns if fnmatchcase(name, pattern)), None)


def step_function(optimizer: torch.optim.Optimizer) -> Callable[[Callable[[], Tensor]], object]:
    """Return a function that takes an optimizer step, as `optimizer.step` does, given the closure that it calls first.

    For plain SGD on a CPU it is a function that is several times as fast for a small model. It calls no hooks of the
    optimizer.
    """
    on_cpu = all(weight.device.type == "cpu" for group in optimizer.param_groups for weight in group["params"])
    return partial(step_plain_sgd, optimizer) if on_cpu and is_plain_sgd(optimizer) else cast(Any, optimizer.step)


def is_plain_sgd(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer is SGD with no options besides the learning rate, and no scheduler changes it."""
    return (
        type(optimizer) is torch.optim.SGD
        and "step" not in vars(optimizer)  # a scheduler replaces it
        and all(isinstance(group["lr"], float) for group in optimizer.param_groups)
        and all(PLAIN_SGD.items() <= group.items() for group in optimizer.param_groups)
    )


def step_plain_sgd(optimizer: torch.optim.Optimizer, closure: Callable[[], Tensor]) -> None:
    """Call `closure`, which computes the gradients, and take a step of SGD without momentum or other options."""
    closure()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.data.add_(parameter.grad, alpha=-group["lr"])  # `data` needs no `no_grad`


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> Tensors:
    """Return the state tensors of an optimizer, such as momentum, by `<parameter index>/<state name>`.

    Raises:
        ConfigError: Part of the state is not a tensor.
    """
    kept: Tensors = {}
    for number, values in optimizer.state_dict()["state"].items():
        for name, value in values.items():
            if isinstance(value, Tensor):
                kept[f"{number}/{name}"] = value
            elif value is not None:
                what = f"{type(optimizer).__name__}'s {name!r} is of type {type(value).__name__}"
                raise ConfigError(f"optimizer_state: {what}, and only tensors can be kept; set fresh")
    return kept


def load_optimizer_tensors(optimizer: torch.optim.Optimizer, kept: Tensors) -> None:
    """Restore an optimizer's state, such as momentum, from saved tensors. Its learning rate does not change.

    The tensors come from `optimizer_tensors`.
    """
    state: dict[int, Tensors] = {}
    for key, value in kept.items():
        number, _, name = key.partition("/")
        state.setdefault(int(number), {})[name] = value.clone()  # optimizer steps change it in place
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def learning_rates(key: str, optimizer: torch.optim.Optimizer, scheduler: SchedulerFactory) -> Iterator[float]:
    """Yield the learning rate that a scheduler gives for each epoch or round, endlessly.

    Args:
        key: The config key of the scheduler.
        optimizer: An optimizer without gradients. The learning rate is that of its first group.
        scheduler: Builds the scheduler.

    Raises:
        ConfigError: The scheduler cannot be built, ends, or does not yield learning rates.
    """
    fix = "Give a function that takes an optimizer and returns a scheduler, such as partial(StepLR, step_size=10)"
    try:
        schedule = scheduler(optimizer)
    except TypeError as error:
        raise ConfigError(f"{key}: {one_line(error)}. {fix}") from error
    except Exception as error:
        raise ConfigError(f"{key}: {one_line(error) or type(error).__name__}") from error
    if not hasattr(schedule, "step"):
        raise ConfigError(f"{key}: it returned {type(schedule).__name__}, not a scheduler. {fix}")
    if isinstance(schedule, ReduceLROnPlateau):
        raise ConfigError(f"{key}: {type(schedule).__name__} needs a metric to watch, and there is none; take another")
    while True:
        rate = float(optimizer.param_groups[0]["lr"])
        check_number(f"{key}: the learning rate it makes", rate, "[0, inf)")
        yield rate
        with blame(key):
            optimizer.step(lambda: 0.0)
            schedule.step()


class LRScales:
    """Factors that scale the clients' learning rates: one for each round, computed by a learning-rate scheduler.

    Args:
        scheduler: Builds the scheduler, which starts from a learning rate of 1. Without one, all factors are 1.
        rounds: Number of rounds. The first 10,000 factors are computed at once, to find errors early.

    Raises:
        ConfigError: The scheduler cannot be built, or ends before the last round.

    Example:
        >>> LRScales(lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), rounds=10**18).of(3)
        0.25
    """

    def __init__(self, scheduler: SchedulerFactory | None, rounds: int) -> None:
        self._scheduler, self._round = scheduler, 0
        if scheduler:
            self._begin(scheduler)
            self.of(min(rounds, LOOK_AHEAD))

    def of(self, round: int) -> float:
        """Return the factor by which the clients' learning rates are multiplied in a round.

        Rounds are counted from 1. Round 0 has the same factor as round 1.
        """
        if not self._scheduler:
            return 1.0
        round = max(round, 1)
        if round < self._round:
            self._begin(self._scheduler)
        for _ in range(self._round, round):
            self._scale = next(self._rates)
        self._round = round
        return self._scale

    def _begin(self, scheduler: SchedulerFactory) -> None:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=1.0)
        self._rates, self._round = learning_rates("round_lr_scheduler", optimizer, scheduler), 0
