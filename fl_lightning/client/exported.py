"""Build the network and the objective that a checkpoint of `fl-lightning export` describes by class and arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import cache
from typing import Any

from torch import nn

from fl_lightning.core.errors import ConfigError, one_line
from fl_lightning.core.objectives import Objective
from fl_lightning.core.trusted_imports import Untrusted, by_import_path, public_classes, refusal, untrusted
from fl_lightning.models import Backbone, ModelFactory, NetworkFactory
from fl_lightning.models.wrapped import build_network, original_of


def rebuilt(described: Mapping[str, Any], trust: bool = False) -> nn.Module:
    """Build the network that an exported checkpoint describes, with newly initialised weights.

    Args:
        described: The result of `Network.described`.
        trust: Also run code outside of this package, torch and torchvision that the description names.

    Raises:
        ConfigError: The description is not of a network, or names other code and `trust` is False.
    """
    if not isinstance(described, Mapping) or not {"class_path", "in_shape", "num_classes"} <= described.keys():
        raise ConfigError(f"backbone: it needs a network (an nn.Module), got {type(described).__name__}")
    shape = described["in_shape"]
    in_shape = shape if isinstance(shape, dict) else tuple(shape)
    model = {name: described[name] for name in ("class_path", "init_args") if name in described}
    return _built(
        "backbone",
        model,
        ModelFactory | NetworkFactory,
        lambda factory: original_of(build_network(factory, in_shape, described["num_classes"])),
        trust,
    )


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


def _built(key: str, spec: dict[str, Any], kind: Any, finish: Callable[[Any], Any], trust: bool = False) -> Any:
    """Build an object from the import path and arguments in an exported checkpoint, if its class is allowed."""
    from jsonargparse import ArgumentParser  # half a second

    fix = f"Build it yourself: load_from_checkpoint(..., {key}=...)"
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
    """Return what an exported checkpoint may import: this package's models and objectives, torch.nn, torchvision."""
    from torchvision import models

    return {
        **public_classes("fl_lightning", (Backbone, Objective)),
        **public_classes("fl_lightning.models", (Backbone,)),
        **public_classes("fl_lightning.core.objectives", (Objective,)),
        **public_classes("torch.nn", (nn.Module,)),
        **by_import_path(models.get_model_builder(name) for name in models.list_models(models)),
    }
