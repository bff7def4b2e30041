"""Descriptions of networks and objectives in exported checkpoints (`fl-lightning export`), and building from them."""

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
from fl_lightning.models import Backbone, ModelFactory
from fl_lightning.models.wrapped import original_of


def rebuilt(described: Mapping[str, Any], trust: bool = False) -> nn.Module:
    """Return the network that an exported checkpoint describes, newly initialised.

    Args:
        described: The result of `Network.described`.
        trust: Run the code that it names, also if that is not part of this package or torch.

    Raises:
        ConfigError: It describes no network, or names code outside of this package and torch.
    """
    if not isinstance(described, Mapping) or not {"class_path", "in_shape", "num_classes"} <= described.keys():
        raise ConfigError(f"backbone: it needs a network (an nn.Module), got {type(described).__name__}")
    model = {name: described[name] for name in ("class_path", "init_args") if name in described}
    return _built(
        "backbone",
        model,
        ModelFactory,
        lambda factory: original_of(
            factory(in_shape=tuple(described["in_shape"]), num_classes=described["num_classes"])
        ),
        trust,
    )


def described_objective(objective: Objective) -> dict[str, Any]:
    """Return a description of an objective (class path and arguments), for an exported checkpoint."""
    kind = type(objective)
    options = {
        name: getattr(objective, name) for name in inspect.signature(kind).parameters if hasattr(objective, name)
    }
    return {"class_path": f"{kind.__module__}.{kind.__qualname__}", "init_args": options}


def rebuilt_objective(described: Mapping[str, Any]) -> Objective:
    """Return the objective that an exported checkpoint describes.

    Args:
        described: The result of `described_objective`.

    Raises:
        ConfigError: It names code outside of this package.
    """
    return _built("objective", dict(described), Objective, lambda objective: objective)


def _built(key: str, spec: dict[str, Any], kind: Any, finish: Callable[[Any], Any], trust: bool = False) -> Any:
    """Build an object from its class path and arguments in an exported checkpoint, if that class is allowed."""
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
    """Return the objects that a checkpoint may name: our models and objectives, torch.nn and torchvision models."""
    from torchvision import models

    return {
        **public_classes("fl_lightning", (Backbone, Objective)),
        **public_classes("fl_lightning.models", (Backbone,)),
        **public_classes("fl_lightning.core.objectives", (Objective,)),
        **public_classes("torch.nn", (nn.Module,)),
        **by_import_path(models.get_model_builder(name) for name in models.list_models(models)),
    }
