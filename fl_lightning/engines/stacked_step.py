"""A client's training step as a function of tensors, and the steps of several clients as one call of `torch.vmap`.

Everything that a step can read is found in the client's module: registered parameters and buffers, and tensors in plain
attributes of its parts, such as a loss term's anchors, also within lists, tuples and dicts. Clients that differ only in
tensors can be stacked. Everything else about them must be equal.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fl_lightning.client.losses import total_loss
from fl_lightning.client.module import ClientModule
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.message import Tensors
from fl_lightning.core.seeding import RandomStates
from fl_lightning.data.loaders import send

Rows = slice | Tensor
"""Rows (clients) of stacked tensors: a slice, which gives a view, or an index tensor, which gives a copy."""

BACKBONE = "client.backbone."

_CONTAINERS = (dict, list, tuple)

# Attributes that a client's step does not read. The first class that a module is an instance of counts.
_FIT = {"optimizer_factory", "scheduler_factory", "optimizer_state", "notes", "loss_record", "weight_memory"}
_MODULE, _LIGHTNING = (vars(kind()).keys() - {"training"} for kind in (nn.Module, L.LightningModule))
_HIDDEN = {ClientModule: _LIGHTNING | _FIT, L.LightningModule: _LIGHTNING, nn.Module: _MODULE}


class StepOutput(NamedTuple):
    """Output of a training step. In a stacked step, each tensor has a first dimension of clients.

    Attributes:
        loss: The sum of the losses.
        losses: Cross-entropy and each active term, by name.
        logits: `(B, C)`.
        features: `(B, d)`, or None where the model has no encoder.
    """

    loss: Tensor
    losses: dict[str, Tensor]
    logits: Tensor
    features: Tensor | None


class ClientStep(nn.Module):
    """A client's training step as an `nn.Module`, with all modules that the step may use as submodules.

    These include modules that PyTorch does not register, such as those in a list.
    """

    def __init__(self, client: ClientModule) -> None:
        super().__init__()
        self.client, self.held = client, nn.ModuleList()
        walked = list(client.modules())
        for module in walked:  # the list grows in the loop
            for leaf in leaves(attributes(module)).values():
                if isinstance(leaf, nn.Module) and not any(leaf is one for one in walked):
                    self.held.append(leaf)
                    walked += leaf.modules()

    def forward(self, x: Tensor, y: Tensor) -> StepOutput:
        """Return the losses, logits and features of the client's module on a batch."""
        step = self.client.step((x, y))
        losses = self.client.losses(step)
        return StepOutput(total_loss(losses), losses, step.logits, step.features)


def impure(path: str) -> ConfigError:
    """Return the exception to raise if a training step changes a tensor or attribute that it may only read."""
    return ConfigError(f"its forward changes {path.removeprefix('client.')!r}")


class StepContents:
    """A snapshot, taken on creation, of the tensors and attributes that a client's training step reads.

    Args:
        step: The step.

    Attributes:
        registered: Parameters and buffers by name, those of the backbone under `client.backbone.`.
        names: Their names by id.
        homes: Where they are stored, as (dict, key, name). A tensor may be in several places.
        plain: Plain attributes of its parts by path.
    """

    def __init__(self, step: ClientStep) -> None:
        self.step, self.plain = step, plain(step)
        self.modules: dict[str, nn.Module] = dict(step.named_modules())
        self.registered: Tensors = {}
        self.names: dict[int, str] = {}
        self.homes: list[tuple[dict[str, Any], str, str]] = []
        for prefix, module in self.modules.items():
            for held in (module._parameters, module._buffers):
                for key, value in held.items():
                    if value is not None:
                        name = self.names.setdefault(id(value), f"{prefix}.{key}")
                        self.registered[name] = value
                        self.homes.append((held, key, name))

    def free(self) -> Tensors:
        """Return the tensors that are stored in attributes without being parameters or buffers, by path."""
        return {
            path: leaf for path, leaf in self.plain.items() if isinstance(leaf, Tensor) and id(leaf) not in self.names
        }

    def shape(self) -> dict[str, Any]:
        """Return the step's tensor shapes and types, module classes and other attributes, without tensor values.

        The keys are paths in the step. Clients can be trained as one batch only if this dict is equal for all of them.
        """
        modules = {id(module): name for name, module in self.modules.items()}

        def described(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return self.names.get(id(leaf)) or (tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
            return modules[id(leaf)] if isinstance(leaf, nn.Module) else leaf

        tensors = {name: (tuple(t.shape), t.dtype, t.requires_grad) for name, t in self.registered.items()}
        kinds = {f"{name} is": type(module) for name, module in self.modules.items()}
        return tensors | kinds | {path: described(leaf) for path, leaf in self.plain.items()}


def tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield a module's parameters, then its buffers, with their names, including those not in the state dict."""
    yield from module.named_parameters()
    yield from module.named_buffers()


def attributes(module: nn.Module) -> dict[str, Any]:
    """Return a module's attributes that a step may read, without parameters, buffers and submodules."""
    hidden = next(names for kind, names in _HIDDEN.items() if isinstance(module, kind))
    return {name: value for name, value in vars(module).items() if name not in hidden}


def plain(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module and its submodules by path, without parameters and buffers.

    Each item of a list, tuple or dict has a path of its own.
    """
    held = {f"{name}.": attributes(part) for name, part in module.named_modules()}
    return {name + path: leaf for name, values in held.items() for path, leaf in leaves(values).items()}


def contents(module: nn.Module) -> dict[str, Any]:
    """Return the parameters, buffers and other attributes of a module and its submodules. The keys are dotted paths."""
    return {**dict(tensors_of(module)), **plain(module)}


def versions(held: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of in-place changes to each tensor in a mapping, by the tensor's key."""
    return {path: leaf._version for path, leaf in held.items() if isinstance(leaf, Tensor)}


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    """Return the leaves of nested lists, tuples and dicts by path. An empty container is a leaf."""
    if not isinstance(value, _CONTAINERS) or not value:
        return {path: value}
    found: dict[str, Any] = {}
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        place = f"{path}.{key}" if path else str(key)
        if isinstance(item, _CONTAINERS):
            found |= leaves(item, place)
        else:
            found[place] = item
    return found


def with_tensors(value: Any, path: str, alias: Callable[[Any], Tensor | None], free: Tensors) -> Any:
    """Return a tensor or container with some tensors replaced by others. The given value is not modified.

    A container in which a tensor is replaced is copied.

    Args:
        value: The value, possibly a container of tensors.
        path: The path of the value.
        alias: Returns the replacement of a tensor, or None to look it up in `free`.
        free: Replacements by path. A tensor with a path that is not among them is kept.
    """
    if isinstance(value, Tensor):
        other = alias(value)
        return free.get(path, value) if other is None else other
    if not isinstance(value, _CONTAINERS):
        return value
    keys = list(value) if isinstance(value, dict) else range(len(value))
    items = {key: with_tensors(value[key], f"{path}.{key}", alias, free) for key in keys}
    if all(items[key] is value[key] for key in keys):
        return value
    if isinstance(value, tuple):
        return type(value)(*items.values()) if hasattr(value, "_fields") else type(value)(items.values())
    container = copy.copy(value)
    for key, item in items.items():
        container[key] = item
    return container


def same(one: Any, other: Any) -> bool:
    """Return whether two attribute values are the same object or equal plain values."""
    if one is other:
        return True
    try:
        return type(one) is type(other) and not isinstance(one, Tensor | nn.Module) and bool(one == other)
    except Exception:  # what cannot be compared may differ
        return False


def difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """Return the first path at which two dicts of attribute values differ; None if they are equal."""
    if one.keys() != other.keys():
        return sorted(one.keys() ^ other.keys())[0]
    return next((path for path, leaf in one.items() if not same(leaf, other[path])), None)


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
        within = [(leaves(value), value, path) for *_, value, path in put if isinstance(value, _CONTAINERS)]
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


class ClientFunctions(TorchFunctionMode):
    """Replaces dropout and other functions inside `torch.vmap`, so that each client gets the results of training alone.

    Dropout, `torch.rand` and `torch.randn` draw from the client's own random state. Embeddings keep the padding vector
    out of the gradient of every client. torch's batching rule does so for the first client only (seen in torch 2.15).

    Args:
        random_states: The clients' random states.

    Attributes:
        used: Whether a function was replaced.
    """

    place: Tensor  # of the client in `random_states`, batched

    def __init__(self, random_states: Sequence[RandomStates]) -> None:
        super().__init__()
        self.random_states, self.used = random_states, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a torch function or its replacement."""
        if func is F.dropout:
            return self.dropout(*args, **(kwargs or {}))
        if func in (torch.rand, torch.randn) and not (kwargs or {}).get("generator"):
            return self.draw_by_client(functools.partial(func, *args, **(kwargs or {})))
        if func is F.embedding:
            return self.embedding(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """Replacement for `F.dropout` that draws each client's mask from the client's own random state."""
        if not training or p in (0.0, 1.0):
            return F.dropout(input, p, training, inplace)

        def draw_mask() -> Tensor:  # inside `torch.vmap`, `input.shape` is that of one client's input
            return torch.empty(input.shape, dtype=input.dtype, device=input.device).bernoulli_(1 - p).div_(1 - p)

        mask = self.draw_by_client(draw_mask)
        return input.mul_(mask) if inplace else input * mask

    def draw_by_client(self, draw: Callable[[], Tensor]) -> Tensor:
        """Return the random numbers that the function `draw` draws from the current client's own random state.

        Inside `torch.vmap`, `draw` is called for every client, and the result of the current client is selected.
        """
        self.used = True
        outside, drawn = RandomStates(self.place.device), []
        for random_states in self.random_states:
            with random_states.drawing_torch():
                drawn.append(draw())
        with outside.drawing_torch():
            return torch.stack(drawn).index_select(0, self.place.reshape(1).to(drawn[0].device)).squeeze(0)

    def embedding(self, input: Tensor, weight: Tensor, padding_idx: int | None = None, *args: Any, **kw: Any) -> Tensor:
        """Replacement for `F.embedding` that keeps the padding vector out of every client's gradient."""
        vectors = F.embedding(input, weight, None, *args, **kw)
        if padding_idx is None:
            return vectors
        self.used = True
        padded = (input == padding_idx % len(weight)).unsqueeze(-1)
        return torch.where(padded, vectors.detach(), vectors)


def as_rows(chosen: list[int], device: torch.device) -> Rows:
    """Return ascending row numbers as a slice if they are consecutive, otherwise as an index tensor."""
    if chosen[-1] - chosen[0] + 1 == len(chosen):
        return slice(chosen[0], chosen[-1] + 1)
    return send(torch.tensor(chosen), device)
