"""One optimizer for clients whose weights are rows of stacked tensors."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fl_lightning.client.module import ClientModule
from fl_lightning.client.optimizers import load_optimizer_tensors, optimizer_tensors
from fl_lightning.core.message import Tensors

COUNTS = ("step", "eta", "mu", "mu_product")
"""Optimizer state that torch keeps once per parameter. All other state has one number per weight."""


class Block(NamedTuple):
    """A block of consecutive rows (clients) of the stacked weights, from `start` to `stop` (exclusive)."""

    start: int
    stop: int


class BlockOptimizer:
    """An optimizer for several clients' stacked weights. It updates each client as an optimizer of its own would.

    The optimizers of `StackedEngine` treat each number of a parameter separately, except for counts such as the number
    of steps. So a block of rows that have taken the same steps is one parameter, a view of the stack. This is faster
    than a parameter for each client. A block is split when only some of its rows take a step.

    Args:
        client: A client. Its optimizer has the options of all.
        stacks: The clients' parameters by name, `(n, ...)`. They are updated in place.
        started: The initial optimizer state of each client, as `optimizer_tensors` returns it.

    Attributes:
        optimizer: The optimizer.
    """

    def __init__(self, client: ClientModule, stacks: Tensors, started: Sequence[Tensors]) -> None:
        """Replace the parameters of the client's optimizer by blocks of the stacks, and load the clients' states."""
        self.optimizer = client.optimizer_for(client.backbone.parameters())
        self.stacks = stacks
        fresh = optimizer_tensors(self.optimizer)  # Adagrad has a state before its first step
        self.optimizer.state.clear()  # it belongs to the client's parameters
        started = [own or fresh for own in started]
        self._group_names = group_names(self.optimizer, client.backbone)
        self.names = [name for group in self._group_names for name in group]
        self._bounds = block_bounds(started)
        self._parameters: dict[tuple[str, Block], Tensor] = {}
        self._blocks_of: dict[tuple[int, ...], list[tuple[Block, slice]]] = {}
        self._rebuild_parameters()
        if any(started):
            load_optimizer_tensors(self.optimizer, self._stack_states([by_parameter(own) for own in started]))
        use_foreach(self.optimizer)

    @property
    def blocks(self) -> list[Block]:
        """All blocks of clients, in ascending order."""
        return [Block(*bounds) for bounds in pairwise(self._bounds)]

    def set_gradients(self, rows: Sequence[int], gradients: Tensors) -> None:
        """Set the gradients of some clients for the next step. Each client is one row of the stacked tensors.

        The gradients of other clients do not change. Clients without gradients take no step.

        Args:
            rows: Some rows, ascending.
            gradients: The gradients by parameter name, `(len(rows), ...)`.
        """
        key = tuple(rows)
        if key not in self._blocks_of:
            self._split_blocks(rows)
        for block, positions in self._blocks_of[key]:
            for name, gradient in gradients.items():
                self._parameters[name, block].grad = gradient[positions]

    def state_of(self, row: int) -> Tensors:
        """Return the optimizer state of one client as tensors by `<parameter index>/<state name>`."""
        block = next(block for block in self.blocks if block.start <= row < block.stop)
        kept: Tensors = {}
        for number, name in enumerate(self.names):
            state = self.optimizer.state.get(self._parameters[name, block], {})
            for key, value in state.items():
                if value is not None:
                    kept[f"{number}/{key}"] = value if key in COUNTS else value[row - block.start]
        return kept

    def _stack_states(self, started: Sequence[dict[int, Tensors]]) -> Tensors:
        """Stack the initial optimizer states of the clients into one state, with one row per client.

        Keys are `<parameter index>/<state name>`. There is one parameter for each weight and block of clients.
        """
        tensors: Tensors = {}
        for number, (name, block) in enumerate(self._parameters):
            states = [own.get(self.names.index(name), {}) for own in started[slice(*block)]]
            for key, value in states[0].items():
                tensors[f"{number}/{key}"] = value if key in COUNTS else torch.stack([state[key] for state in states])
        return tensors

    def _split_blocks(self, rows: Sequence[int]) -> None:
        """Split the blocks of clients so that each block contains only clients in `rows` or none of them.

        `_blocks_of[rows]` becomes the blocks of these clients, each with the positions of its clients in `rows`.
        """
        chosen, count = set(rows), self._bounds[-1]
        bounds = {row for row in range(1, count) if (row in chosen) != (row - 1 in chosen)}
        if bounds - set(self._bounds):
            self._bounds = sorted(bounds | set(self._bounds))
            self._blocks_of.clear()
            self._rebuild_parameters()
        position = {row: i for i, row in enumerate(rows)}
        self._blocks_of[tuple(rows)] = [
            (block, slice(position[block.start], position[block.stop - 1] + 1))
            for block in self.blocks
            if block.start in chosen
        ]

    def _rebuild_parameters(self) -> None:
        """Give the optimizer one parameter per weight and block, and carry over the gradients and state it has."""
        before, self._parameters = self._parameters, {}
        for group, names in zip(self.optimizer.param_groups, self._group_names, strict=True):
            group["params"] = []
            for name in names:
                for block in self.blocks:
                    self._parameters[name, block] = parameter = self.stacks[name][slice(*block)].detach()
                    group["params"].append(parameter)
        for (name, old_block), old in before.items():
            state = self.optimizer.state.pop(old, {})
            for block in self.blocks:
                if old_block.start <= block.start < old_block.stop:
                    rows = slice(block.start - old_block.start, block.stop - old_block.start)
                    parameter = self._parameters[name, block]
                    parameter.grad = None if old.grad is None else old.grad[rows]
                    if state:
                        self.optimizer.state[parameter] = {k: copy_rows(k, value, rows) for k, value in state.items()}


def group_names(optimizer: torch.optim.Optimizer, backbone: nn.Module) -> list[list[str]]:
    """Return the names of the backbone's parameters in each of the optimizer's parameter groups."""
    names = {id(parameter): name for name, parameter in backbone.named_parameters()}
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def block_bounds(started: Sequence[Tensors]) -> list[int]:
    """Return the first row of each initial block, and the number of rows.

    A block ends where the next client has a different number of steps. The arguments are the clients' initial states.
    """
    changes = (i for i in range(1, len(started)) if counts(started[i - 1]) != counts(started[i]))
    return [0, *changes, len(started)]


def use_foreach(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer update all parameters in one loop in C++, unless its options say otherwise."""
    for group in optimizer.param_groups:
        if group["foreach"] is None and not group.get("fused") and not group.get("differentiable"):
            group["foreach"] = True


def copy_rows(key: str, value: object, rows: slice) -> object:
    """Return a copy of an optimizer state tensor with only some of its rows. Each row belongs to one client.

    A count, such as the number of steps, is copied whole. A value that is not a tensor is returned unchanged.
    """
    if not isinstance(value, Tensor):
        return value
    return (value if key in COUNTS else value[rows]).clone()


def counts(started: Tensors) -> dict[str, float]:
    """Return the counts in a client's initial optimizer state, such as the number of steps, by key.

    Keys of all other state have the value 0. Clients with equal results can share one parameter.
    """
    return {key: float(value) if key.partition("/")[2] in COUNTS else 0.0 for key, value in started.items()}


def by_parameter(started: Tensors) -> dict[int, Tensors]:
    """Return a client's initial optimizer state, grouped by parameter index."""
    parts: dict[int, Tensors] = {}
    for key, value in started.items():
        number, _, name = key.partition("/")
        parts.setdefault(int(number), {})[name] = value
    return parts
