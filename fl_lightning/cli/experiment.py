"""Build the object that runs an experiment (a `FederatedOrchestrator`) from a config or a run's folder."""

from __future__ import annotations

import inspect
import warnings
from argparse import ArgumentError
from contextvars import copy_context
from itertools import chain
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from fl_lightning import HOMES
from fl_lightning.cli.allowed_objects import allowed_objects
from fl_lightning.cli.catalogue import SET_BY_DATA
from fl_lightning.cli.class_names import as_backbone
from fl_lightning.cli.errors import readable_errors, refuse_nulls
from fl_lightning.cli.experiment_parser import config_argument, experiment_parser
from fl_lightning.client.local_training import LocalTraining
from fl_lightning.core.errors import CheckpointError, ConfigError
from fl_lightning.core.strict_yaml import load_yaml
from fl_lightning.core.trusted_imports import find_object
from fl_lightning.models import Mixed
from fl_lightning.orchestrator import FederatedOrchestrator
from fl_lightning.runs.checkpoint import CheckpointFolder
from fl_lightning.runs.trust import restrict_and_load_config

RECORDED_BARE = ("FedAvg", "FedSKC")
"""Algorithms that a run's `config.yaml` records without a module: as `fl_lightning.FedAvg`."""

WATCHERS = ("engine", "logger", "callbacks")
"""Keys that do not influence the checkpoints of a run."""


def build(given: Namespace, parser: ArgumentParser, run_dir: Path) -> FederatedOrchestrator:
    """Build the experiment that a parsed command line describes."""
    objects = instantiate(given, parser)
    run, local = (
        {name: objects[name] for name in inspect.signature(kind).parameters if name in objects}
        for kind in (FederatedOrchestrator, LocalTraining)
    )
    local["trainer"] = given.trainer.as_dict()
    return FederatedOrchestrator(**run | {"training": LocalTraining(**local), "run_dir": run_dir})


def instantiate(given: Namespace, parser: ArgumentParser) -> Namespace:
    """Build the objects that a parsed command line describes, such as the algorithm, the model and the engine."""
    for group in ("scenario", "evaluation", "trainer"):
        if not isinstance(value := given[group], Namespace):
            held = "null" if value is None else repr(value)
            raise ConfigError(f"{group}: it needs lines `key: value`, it holds {held}")
    refuse_nulls(given, FederatedOrchestrator)
    refuse_nulls(given, LocalTraining)
    refuse_function(given.model)
    with readable_errors(parser):
        return parser.instantiate(given)


def refuse_function(model: Any) -> None:
    """Raise an error if the model, or one in a `Mixed`, is a function that needs arguments, such as `resnet18`.

    With `class_path`, jsonargparse would call it here, before the random state of the initial weights is set.
    """
    builder = find_object(model.class_path) if isinstance(model, Namespace) else model
    if inspect.isroutine(builder) and (
        builder is not model or not {*SET_BY_DATA} & inspect.signature(builder).parameters.keys()
    ):
        path = f"{builder.__module__}.{builder.__name__}"
        raise ConfigError(f"model: {path} is a function. Did you mean {as_backbone(path)}?")
    for network in model.get("init_args.models", ()) if builder is Mixed else ():
        refuse_function(network)


def plain_config(given: Namespace, parser: ArgumentParser) -> dict[str, Any]:
    """Return the resolved config that a run records, as plain values, without options such as `run_dir`."""
    config = use_recorded_paths(load_yaml(parser.dump(given, skip_unset=False)))
    return {name: value for name, value in config.items() if name in run_keys()}


def use_recorded_paths(value: Any) -> Any:
    """Replace short import paths in a config, such as `fl_lightning.FedProx`, by full paths as in `config.yaml`."""
    if isinstance(value, dict):
        return {key: use_recorded_paths(each) for key, each in value.items()}
    if isinstance(value, list):
        return [use_recorded_paths(each) for each in value]
    root, _, name = value.partition(".") if isinstance(value, str) else ("", "", "")
    if root != "fl_lightning" or name in RECORDED_BARE or name not in HOMES:
        return value
    return f"{root}.{HOMES[name]}.{name}"


def run_keys() -> set[str]:
    """Return the top-level keys that the `config.yaml` of a run folder can have."""
    parameters = (inspect.signature(kind).parameters for kind in (FederatedOrchestrator, LocalTraining))
    return {*chain(*parameters)} - {"run_dir", "training"}


def open_run(run_dir: str | Path, checkpoint: str = "last", trust: bool = False) -> FederatedOrchestrator:
    """Load a run from a checkpoint: `open_run("runs/...").client_module(3)` is the `ClientModule` of client 3.

    The module is in train mode, ready for a `Trainer.fit` of your own. Call `eval()` before you predict.

    Args:
        run_dir: Folder of a finished or unfinished run.
        checkpoint: `last`, `best`, or the number of a round.
        trust: Run code that the folder's config names, also if it is another user's. Your own runs do not need this.

    Raises:
        ConfigError: No run or no such checkpoint found, or the run was made by another user and names its own code.
        CheckpointError: The run has no checkpoint, or only damaged ones.
    """
    try:
        return copy_context().run(load_run, Path(run_dir), checkpoint, trust)
    except ConfigError as error:
        if isinstance(error.__cause__, ArgumentError):  # long, and only about jsonargparse
            raise error from None
        raise


def load_run(run_dir: Path, checkpoint: str = "last", trust: bool = False) -> FederatedOrchestrator:
    """Load a run from its folder and one of its checkpoints.

    Unlike after `open_run`, the import restrictions of an untrusted run stay in force.
    """
    parser = experiment_parser()
    config = restrict_and_load_config(run_dir, run_keys(), allowed_objects, trust, without=WATCHERS)
    with readable_errors(parser):
        given = parser.parse_args(["--config", config_argument(config), "--logger", "null"])
    orchestrator = build(given, parser, run_dir)
    orchestrator.load(find_round(checkpoint, run_dir), plain_config(given, parser))
    if not orchestrator.round:
        raise CheckpointError(f"{run_dir} holds no checkpoint yet")
    return orchestrator


def find_round(checkpoint: str, run_dir: Path) -> int | None:
    """Return the round of a checkpoint given as `best` or a number; None for `last`, the newest valid checkpoint.

    Raises:
        ConfigError: The run has no such checkpoint.
    """
    folder = CheckpointFolder(run_dir / "checkpoints")
    if checkpoint == "last":
        return None
    if checkpoint == "best":
        newest = folder.read_newest(report=warnings.warn)
        best = newest.state["callbacks"].get("Checkpointing", {}).get("best_round") if newest else None
        if best is None:
            raise ConfigError("--checkpoint: no round is the best yet; take last, or the number of a round")
        return best
    by_name = {str(round): round for round in folder.rounds()}
    if checkpoint in by_name:
        return by_name[checkpoint]
    asked, held = repr(checkpoint[:20]) + "..." * (len(checkpoint) > 20), ", ".join(by_name) or "none"
    raise ConfigError(f"--checkpoint: checkpoint {asked} not found. Available: last, best and rounds {held}.")
