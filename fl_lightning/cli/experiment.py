"""From a config to the `FederatedOrchestrator` it describes, and from a run's folder back to one."""

from __future__ import annotations

import inspect
import warnings
from contextvars import copy_context
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ActionConfigFile, ArgumentParser, Namespace
from lightning import Trainer

from fl_lightning import HOMES
from fl_lightning.cli.allowed_objects import allowed_objects
from fl_lightning.cli.errors import readable_errors, refuse_nulls
from fl_lightning.cli.options import EXPERIMENT_DEFAULTS
from fl_lightning.core.config import strict
from fl_lightning.core.errors import CheckpointError, ConfigError
from fl_lightning.core.renamed import MODULES
from fl_lightning.core.trainer_options import TRAINER_KEYS
from fl_lightning.orchestrator import FederatedOrchestrator
from fl_lightning.runs.checkpoint import CheckpointFolder
from fl_lightning.runs.trust import run_config

NOTED_BARE = ("FedAvg", "FedSKC")
"""The algorithms that runs have noted without the module they are in."""

WATCHERS = ("engine", "logger", "callbacks")
"""Keys of a run that change nothing about what a checkpoint of it holds."""


def experiment_parser() -> ArgumentParser:
    """The parser of an experiment's keys."""
    parser = strict(ArgumentParser(exit_on_error=False, allow_abbrev=False))
    parser.add_argument("-c", "--config", action=ActionConfigFile, metavar="FILE")
    parser.add_class_arguments(FederatedOrchestrator, skip={"trainer"}, fail_untyped=False)
    parser.add_argument("--baselines", type=str | dict | list | None)
    unwanted = set(inspect.signature(Trainer).parameters) - TRAINER_KEYS
    parser.add_class_arguments(Trainer, "trainer", skip=unwanted, instantiate=False)
    parser.set_defaults(EXPERIMENT_DEFAULTS)
    return parser


def build(given: Namespace, parser: ArgumentParser, run_dir: Path) -> FederatedOrchestrator:
    """The orchestrator that a parsed command line describes."""
    objects = instantiate(given, parser)
    parameters = inspect.signature(FederatedOrchestrator).parameters
    options = {name: objects[name] for name in parameters if name not in ("trainer", "run_dir")}
    return FederatedOrchestrator(**options, trainer=given.trainer.as_dict(), run_dir=run_dir)


def instantiate(given: Namespace, parser: ArgumentParser) -> Namespace:
    """The objects that a parsed command line describes."""
    for group in ("scenario", "evaluation", "trainer"):
        if not isinstance(value := given[group], Namespace):
            held = "null" if value is None else repr(value)
            raise ConfigError(f"{group}: it needs lines `key: value`, it holds {held}")
    refuse_nulls(given, FederatedOrchestrator)
    with readable_errors(parser):
        return parser.instantiate(given)


def plain_config(given: Namespace, parser: ArgumentParser) -> dict[str, Any]:
    """The resolved config as plain values, less what belongs to one run only."""
    config = by_home(yaml.safe_load(parser.dump(given, skip_unset=False)))
    return {name: value for name, value in config.items() if name in run_keys()}


def by_home(value: Any) -> Any:
    """A config with our classes by the modules they are in, as runs have always noted them: seals go by that."""
    if isinstance(value, dict):
        return {key: by_home(each) for key, each in value.items()}
    if isinstance(value, list):
        return [by_home(each) for each in value]
    root, _, name = value.partition(".") if isinstance(value, str) else ("", "", "")
    if root != "fl_lightning" or name in NOTED_BARE or name not in HOMES:
        return value
    noted = {now: before for before, now in MODULES.items()}
    return f"{root}.{noted.get(HOMES[name], HOMES[name])}.{name}"


def run_keys() -> set[str]:
    """The keys that a run's own config can hold."""
    return set(inspect.signature(FederatedOrchestrator).parameters) - {"run_dir"}


def open_run(run_dir: str | Path, checkpoint: str = "last", trust: bool = False) -> FederatedOrchestrator:
    """A run as a checkpoint left it, to look into: `open_run("runs/...").client_module(3)` is client 3's module.

    The module is in train mode, ready for a `Trainer.fit` of your own; call `eval()` before you predict.

    Args:
        run_dir: Folder of a finished or half-finished run.
        checkpoint: `last`, `best`, or the number of a round.
        trust: Run the code that the folder's config names, whoever made it. Your own runs need no such word.

    Raises:
        ConfigError: There is no run, or no such checkpoint, or the run is somebody else's and names code of its own.
        CheckpointError: The run holds no checkpoint, or only damaged ones.
    """
    return copy_context().run(load_run, Path(run_dir), checkpoint, trust)


def load_run(run_dir: Path, checkpoint: str = "last", trust: bool = False) -> FederatedOrchestrator:
    """Return what `open_run` does; for an untrusted run the gate applies from here on in the calling context."""
    parser = experiment_parser()
    text = run_config(run_dir, run_keys(), allowed_objects, trust, without=WATCHERS)
    with readable_errors(parser):
        config = parser.parse_args(["--config", text, "--logger", "null"])
    orchestrator = build(config, parser, run_dir)
    orchestrator.load(chosen_round(checkpoint, run_dir), plain_config(config, parser))
    if not orchestrator.round:
        raise CheckpointError(f"{run_dir} holds no checkpoint yet")
    return orchestrator


def chosen_round(checkpoint: str, run_dir: Path) -> int | None:
    """The round that `last`, `best` or a number stands for; None is the newest sound one.

    Raises:
        ConfigError: It stands for none.
    """
    folder = CheckpointFolder(run_dir / "checkpoints")
    if checkpoint == "last":
        return None
    if checkpoint == "best":
        newest = folder.newest(report=warnings.warn)
        best = newest.state["callbacks"].get("Checkpointing", {}).get("best_round") if newest else None
        if best is None:
            raise ConfigError("--checkpoint: no round is the best yet; take last, or the number of a round")
        return best
    by_name = {str(round): round for round in folder.rounds()}
    if checkpoint in by_name:
        return by_name[checkpoint]
    asked, held = repr(checkpoint[:20]) + "..." * (len(checkpoint) > 20), ", ".join(by_name) or "none"
    raise ConfigError(f"--checkpoint: no checkpoint {asked}; there are last, best and rounds {held}")
