"""Build the jsonargparse parser of an experiment's config keys, which `fit` and `partition` take."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

EXPERIMENT_DEFAULTS: dict[str, Any] = {
    "trainer.devices": 1,
    "logger": {"class_path": "fl_lightning.loggers.wandb.WandbRoundLogger"},
}
"""Defaults of the command line that differ from those of the Python classes."""


def experiment_parser() -> ArgumentParser:
    """Build the jsonargparse parser of an experiment's config keys. Imports torch, which takes seconds."""
    from jsonargparse import ActionConfigFile, ArgumentParser
    from lightning import Trainer

    import fl_lightning.loggers.files  # noqa: F401 - otherwise `logger: CSVLogger` is Lightning's
    from fl_lightning.client.local_training import LocalTraining
    from fl_lightning.core.strict_yaml import use_strict_yaml
    from fl_lightning.core.trainer_options import TRAINER_KEYS
    from fl_lightning.orchestrator import FederatedOrchestrator

    parser = use_strict_yaml(ArgumentParser(exit_on_error=False, allow_abbrev=False))
    parser.add_argument("-c", "--config", action=ActionConfigFile, metavar="FILE")
    parser.add_class_arguments(FederatedOrchestrator, skip={"training"}, fail_untyped=False)
    parser.add_class_arguments(LocalTraining, skip={"trainer"}, fail_untyped=False)
    parser.add_argument("--baselines", type=str | dict | list | None)
    unsupported = set(inspect.signature(Trainer).parameters) - TRAINER_KEYS
    parser.add_class_arguments(Trainer, "trainer", skip=unsupported, instantiate=False)
    parser.set_defaults(EXPERIMENT_DEFAULTS)
    return parser


def config_argument(config: Mapping[str, Any]) -> str:
    """Return a config as YAML text that the option `--config` accepts in place of a file's path.

    The text begins with a comment that is too long for a file name, so that jsonargparse does not read it as a path.
    """
    return f"#{' ' * 256}\n{yaml.safe_dump(dict(config), sort_keys=False)}"
