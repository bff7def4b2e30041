"""Describe the arguments of a client's module in a checkpoint, by class and arguments, and build them again."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import nn, optim
from torch.optim.lr_scheduler import LRScheduler

from fl_lightning.client.knowledge import SharedKnowledge
from fl_lightning.client.loss_term import LossTerm
from fl_lightning.core.arguments import describe
from fl_lightning.core.errors import ConfigError, one_line
from fl_lightning.core.objectives import Objective
from fl_lightning.core.trusted_imports import Untrusted, by_import_path, public_classes, refusal, untrusted
from fl_lightning.models import Adapter, Backbone, ModelFactory, NetworkFactory
from fl_lightning.models.wrapped import build_network, constructor_of, original_of

FIX = "Build it yourself: load_from_checkpoint(..., {key}=...)"


def rebuilt(described: Mapping[str, Any], trust: bool = False) -> nn.Module:
    """Build the network that an exported checkpoint describes, with newly initialised weights.

    Args:
        described: The result of `Network.described` or `described_module`.
        trust: Also run code outside of this package, torch and torchvision that the description names.

    Raises:
        ConfigError: The description is not of a network, or names other code and `trust` is False.
    """
    if not isinstance(described, Mapping) or "class_path" not in described:
        raise ConfigError(f"backbone: it needs a network (an nn.Module), got {type(described).__name__}")
    if not {"in_shape", "num_classes"} <= described.keys():
        what = f"the checkpoint does not contain the arguments of {described['class_path']}"
        raise ConfigError(f"backbone: {what}. {FIX.format(key='backbone')}")
    shape = described["in_shape"]
    in_shape = shape if isinstance(shape, dict) else tuple(shape)
    model = {name: described[name] for name in ("class_path", "init_args") if name in described}
    finish = (lambda network: network) if described.get("wrapped") else original_of
    return _built(
        "backbone",
        model,
        ModelFactory | NetworkFactory,
        lambda factory: finish(build_network(factory, in_shape, described["num_classes"])),
        trust,
    )


def described_module(module: Any) -> dict[str, Any]:
    """Return the constructor arguments of a client's module, to be stored in a checkpoint of Lightning."""
    backbone = describe(module.backbone)
    arguments = backbone.get("init_args", {})
    from_data = {name: arguments.pop(name) for name in ("in_shape", "num_classes") if name in arguments}
    others = {
        "loss_terms": [describe(term) for term in module.terms()],
        "optimizer": describe(_plain_factory(module.optimizer_factory)),
        "lr_scheduler": describe(_plain_factory(module.scheduler_factory)),
        "lr_scheduler_interval": module.lr_scheduler_interval if module.scheduler_factory else None,
        "lr_factors": module.lr_factors,
    }
    return {
        "backbone": backbone | from_data | {"wrapped": True},  # a `FromModule`, not the user's module inside
        "objective": described_objective(module.unweighted_objective),
        **{key: value for key, value in others.items() if value},
    }


def _plain_factory(factory: Any) -> Any:
    """Return a factory that jsonargparse has built as a `partial` of the class with the same arguments."""
    called = constructor_of(factory)
    return factory if called is factory else partial(called, **factory.keywords)


def rebuilt_part(key: str, described: Any) -> Any:
    """Build an argument of `ClientModule` that a checkpoint describes. Any other value is returned unchanged.

    Args:
        key: The argument: `loss_terms`, `optimizer` or `lr_scheduler`.
        described: Its value in the result of `described_module`.

    Raises:
        ConfigError: The description names code outside of this package and torch.
    """
    first = described[0] if isinstance(described, list) and described else described
    if not isinstance(first, Mapping):
        return described
    kinds: dict[str, Any] = {"optimizer": OptimizerCallable, "lr_scheduler": LRSchedulerCallable}
    return _built(key, described, kinds.get(key, list[LossTerm]), lambda value: value)


def described_objective(objective: Objective) -> dict[str, Any]:
    """Return an objective's import path and arguments, to be stored in an exported checkpoint."""
    kind = type(objective)
    options = {
        name: getattr(objective, name) for name in inspect.signature(kind).parameters if hasattr(objective, name)
    }
    return {"class_path": f"{kind.__module__}.{kind.__qualname__}", "init_args": options}


def rebuilt_objective(described: Mapping[str, Any]) -> Objective:
    """Build the objective that an exported checkpoint describes by import path and arguments.

    Args:
        described: The result of `described_objective`.

    Raises:
        ConfigError: The description names code outside of this package.
    """
    return _built("objective", dict(described), Objective, lambda objective: objective)


def _built(key: str, spec: Any, kind: Any, finish: Callable[[Any], Any], trust: bool = False) -> Any:
    """Build an object from the import path and arguments in an exported checkpoint, if its class is allowed."""
    from jsonargparse import ArgumentParser  # half a second

    fix = FIX.format(key=key)
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument(f"--{key}", type=kind)
    with nullcontext() if trust else untrusted(Untrusted({key: spec}, "", fix, allowed=allowed_objects)):
        try:
            return finish(parser.instantiate(parser.parse_object({key: spec}))[key])
        except Exception as error:
            raise refusal() or ConfigError(
                f"{key}: cannot be built from the checkpoint ({one_line(error)}). {fix}"
            ) from error


@cache
def allowed_objects() -> dict[str, Any]:
    """Return what a checkpoint may import: classes of this package, torch.nn, torch.optim and torchvision's models."""
    from torchvision import models

    return {
        **public_classes("fl_lightning", (Backbone, Objective, LossTerm, SharedKnowledge, LRScheduler)),
        **public_classes("fl_lightning.models", (Adapter, Backbone)),
        **public_classes("fl_lightning.core.objectives", (Objective,)),
        **public_classes("torch.nn", (nn.Module,)),
        **public_classes("torch.optim", (optim.Optimizer,)),
        **public_classes("torch.optim.lr_scheduler", (LRScheduler,)),
        **by_import_path(models.get_model_builder(name) for name in models.list_models(models)),
    }
