"""The training steps of several clients as one call of `torch.vmap`.

Clients that differ only in tensors can be stacked. Everything else about them must be equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from fl_lightning.core.errors import ConfigError
from fl_lightning.core.message import Tensors
from fl_lightning.core.seeding import RandomStates
from fl_lightning.data.loaders import send
from fl_lightning.engines.stacked_functions import ClientFunctions
from fl_lightning.engines.step_contents import (
    BACKBONE,
    CONTAINERS,
    StepContents,
    StepOutput,
    attributes,
    difference,
    leaves,
    plain,
    versions,
    with_tensors,
)

Rows = slice | Tensor
"""Rows (clients) of stacked tensors: a slice, which gives a view, or an index tensor, which gives a copy."""


def impure(path: str) -> ConfigError:
    """Return the exception to raise if a training step changes a tensor or attribute that it may only read."""
    return ConfigError(f"its forward changes {path.removeprefix('client.')!r}")


class StackedStep:
    """A training step of several clients as one batched call. Their modules differ only in the values of tensors.

    Args:
        steps: The clients' steps in their current state, by row in ascending order. The module of the first client
            computes the steps of all.
        device: The training device.
        random_states: The clients' random states by row, which dropout, `torch.rand` and `torch.randn` draw from.

    Attributes:
        random_states: The same; empty once a step has called none of the functions that `ClientFunctions` replaces.
    """

    def __init__(
        self, steps: Mapping[int, StepContents], device: torch.device, random_states: Mapping[int, RandomStates]
    ) -> None:
        self.numbers = {row: number for number, row in enumerate(steps)}
        contents = list(steps.values())
        first, self.device, self.random_states = contents[0], device, random_states
        self.step, self.homes, self.names = first.step, first.homes, first.names
        constant = [name for name in first.registered if not name.startswith(BACKBONE)]
        self.constants = {name: torch.stack([one.registered[name].detach() for one in contents]) for name in constant}
        free = [one.free() for one in contents]
        self.free = {path: torch.stack([one[path].detach() for one in free]) for path in free[0]}
        held = (*self.constants.values(), *self.free.values())
        self._devices = {value.device for value in held}  # class counts are on the CPU
        self.attributes = [
            (vars(module), name, value, f"{prefix}.{name}")
            for prefix, module in first.modules.items()
            for name, value in attributes(module).items()
            if any(isinstance(leaf, Tensor) for leaf in leaves(value).values())
        ]
        self.watch()

    def watch(self) -> None:
        """Record the tensors, attributes and random states that steps must not change, for a later `verify`."""
        self.held, self.written = plain(self.step), versions({**self.constants, **self.free})
        self.outside = RandomStates(self.device)

    def __call__(self, backbone: Tensors, rows: list[int], x: Tensor, y: Tensor) -> StepOutput:
        """Run a training step of some of the clients as one batched call.

        Args:
            backbone: Weights and buffers of the backbone by name, `(n, ...)`. The buffers are updated.
            rows: Ascending rows of the n clients.
            x: Their inputs, `(n, B, ...)`.
            y: Their labels, `(n, B)`.

        Raises:
            ConfigError: The step replaces a tensor.
        """
        chosen = [self.numbers[row] for row in rows]
        index = {device: as_rows(chosen, device) for device in self._devices}
        constants, free = (
            {name: value[index[value.device]] for name, value in part.items()} for part in (self.constants, self.free)
        )
        weights = {BACKBONE + name: value for name, value in backbone.items()}
        # interception takes time; `verify` detects other draws
        functions = ClientFunctions([self.random_states[row] for row in rows]) if self.random_states else None

        def one(tensors: Tensors, free: Tensors, x: Tensor, y: Tensor, place: Tensor) -> StepOutput:
            if functions:
                functions.place = place
            with self._replacing_tensors(tensors, free):
                output: StepOutput = self.step(x, y)
            if output.features is None:  # vmap returns only tensors
                output = output._replace(features=output.logits.new_empty(0))
            return output

        with functions or nullcontext():
            stacked, places = torch.vmap(one, randomness="same"), torch.arange(len(rows), device=x.device)
            output: StepOutput = stacked(weights | constants, free, x, y, places)
        if functions and not functions.used:
            self.random_states = {}
        missing = output.features is None or not output.features.numel()
        return output._replace(features=None) if missing else output

    def verify(self) -> None:
        """Raise an error if training steps have changed something other than the backbones' weights and buffers.

        The module's attributes, its other tensors and the global random states must be as at the last call of `watch`.

        Raises:
            ConfigError: A step has changed something, or drawn random numbers that are not those of `ClientFunctions`.
        """
        if not self.outside.unmoved():
            drawn = "dropout, torch.rand and torch.randn"
            raise ConfigError(f"the step draws random numbers, and only those of {drawn} can be drawn for each client")
        now = versions({**self.constants, **self.free})
        if path := difference(self.held, plain(self.step)) or difference(self.written, now):
            raise impure(path)

    @contextmanager
    def _replacing_tensors(self, registered: Tensors, free: Tensors) -> Iterator[None]:
        """Context in which the module that computes the batched step has the given tensors and a stand-in trainer.

        The stand-in raises an error if the step reads what differs between clients. The context restores everything
        on exit.

        Args:
            registered: The new parameters and buffers by name.
            free: The new tensors of other attributes by path.

        Raises:
            ConfigError: The step replaces a tensor or the trainer.
        """

        def other(leaf: Any) -> Tensor | None:
            return registered.get(self.names.get(id(leaf), ""))

        client = vars(self.step.client)
        put: list[tuple[dict[str, Any], str, Any, str]] = [
            *((held, key, registered[name], name) for held, key, name in self.homes),
            *((held, key, with_tensors(value, path, other, free), path) for held, key, value, path in self.attributes),
            (client, "_trainer", SharedTrainer(client["_trainer"]), "client._trainer"),
        ]
        before = [(held, key, held[key]) for held, key, *_ in put]
        for held, key, value, _ in put:
            held[key] = value
        within = [(leaves(value), value, path) for *_, value, path in put if isinstance(value, CONTAINERS)]
        try:
            yield
            for held, key, value, path in put:
                if held.get(key) is not value:
                    raise impure(path)
            for own, value, path in within:
                if difference(own, leaves(value)):
                    raise impure(path)
        finally:
            for held, key, value in before:
                held[key] = value


class SharedTrainer:
    """Stands in for Lightning's `Trainer` while the training step of several clients runs as one batched call.

    It raises an error if an attribute is read that differs between clients.

    Args:
        trainer: The trainer of one client.

    Raises:
        ConfigError: The step reads something that differs between clients.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def __getattr__(self, name: str) -> Any:
        if name in ("global_step", "num_training_batches", "estimated_stepping_batches"):
            raise ConfigError(f"it reads trainer.{name}, which differs between clients")
        return getattr(self.trainer, name)


def as_rows(chosen: list[int], device: torch.device) -> Rows:
    """Return ascending row numbers as a slice if they are consecutive, otherwise as an index tensor."""
    if chosen[-1] - chosen[0] + 1 == len(chosen):
        return slice(chosen[0], chosen[-1] + 1)
    return send(torch.tensor(chosen), device)
