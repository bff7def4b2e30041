"""`fl-lightning fit`: run an experiment, or resume one."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

from jsonargparse import ArgumentParser, Namespace

from fl_lightning.analysis.baselines import expand_baseline, option_values, warn_of_dropped_options
from fl_lightning.analysis.summary_tables import clients_table, last_metrics, summary_table
from fl_lightning.callbacks.progress import describe_time
from fl_lightning.cli.allowed_objects import allowed_objects
from fl_lightning.cli.errors import readable_errors
from fl_lightning.cli.experiment import WATCHERS, build, plain_config, run_keys
from fl_lightning.cli.experiment_parser import config_argument
from fl_lightning.cli.flower_app import connected_clients
from fl_lightning.core.config_files import CommandLine, read_run_config
from fl_lightning.core.console import SafeConsole
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.terminal import echo, fit_to_terminal
from fl_lightning.engines import EngineName
from fl_lightning.loggers.naming import run_names, setting_of
from fl_lightning.orchestrator import FederatedOrchestrator
from fl_lightning.runs import dry_run
from fl_lightning.runs.folder import new_run_dir
from fl_lightning.runs.reader import Run, read_clients
from fl_lightning.runs.trust import allow_local_modules, restrict_and_load_config


def expand(line: CommandLine) -> CommandLine:
    """Expand a `fit` command line: add the options that its other options imply.

    These are the class of the engine or optimizer whose options are given, and the config of the run to resume. Modules
    of the user's own classes become importable.
    """
    configs = [content for _, content in line.configs]
    words = with_optimizer_class(with_engine_class(line.words, configs), configs)
    allow_local_modules([*words, *configs])
    return line._replace(words=with_resumed_config(words))


def main(given: Namespace, parser: ArgumentParser) -> int:
    """Run or resume an experiment and print its summary, or do a dry run."""
    if given.fast and given.resume:
        raise ConfigError("--fast: a dry run cannot resume. Leave out either --fast or --resume.")
    config = plain_config(given, parser)
    if given.resume:
        run_dir = Path(given.resume)
        read_run_config(run_dir)  # raises an error if it is no run
        if given.run_dir and Path(given.run_dir).resolve() != run_dir.resolve():
            raise ConfigError(f"--run_dir: a resumed run stays in its folder ({run_dir}). Leave --run_dir out")
    else:
        warn_of_dropped_options([content for _, content in given.config or []], config)
        run_dir = Path(given.run_dir) if given.run_dir else new_run_dir(config_name(given, parser))
    orchestrator = build(given, parser, run_dir)
    if given.fast:
        started = time.monotonic()
        orchestrator.fit(fast=True)
        echo(fit_to_terminal(dry_run_report(orchestrator, time.monotonic() - started), sys.stdout))
        return 0
    name, group = names(given, parser, config) if given.logger and not given.resume else (None, None)
    started = time.monotonic()
    with connected_clients(orchestrator, config, bool(given.resume)):
        run = orchestrator.fit(bool(given.resume), config, name, group)
    print_results(orchestrator, run)
    echo(f"ended: {orchestrator.ending}; {describe_time(time.monotonic() - started)}")
    echo(f"run: {run_dir}")
    return 0


def print_results(orchestrator: FederatedOrchestrator, run: Run) -> None:
    """Print the results of a finished run as a table and, if its clients have names, a table of the clients."""
    console = SafeConsole()
    validation = orchestrator.scenario.validation_share is not None
    console.print(summary_table(run.summary, orchestrator.evaluation.client_model, validation))
    if table := clients_table(orchestrator.data, last_metrics(run.rounds, read_clients(run.run_dir))):
        console.print(table)


def with_engine_class(words: Sequence[str], configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Replace an engine's short name by its class name if a command line has options such as `--engine.workers`.

    An engine is the object that trains the clients of a round, for example in several processes.

    `--engine=processes --engine.workers=2` becomes `--engine=ProcessesEngine --engine.workers=2`. The short name may
    also come from a config.
    """
    stated = [*(config.get("engine") for config in configs), *option_values(words, "engine")]
    short = next((name for name in reversed(stated) if name is not None), "sequential")
    if short not in get_args(EngineName) or not any(word.startswith("--engine.") for word in words):
        return list(words)
    rest = [word for word in words if not word.startswith("--engine=")]
    first = next(i for i, word in enumerate(rest) if word.startswith("--engine."))
    return [*rest[:first], f"--engine={short.capitalize()}Engine", *rest[first:]]


def with_optimizer_class(words: Sequence[str], configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Add `--optimizer=SGD` to a command line that has optimizer options but names no optimizer."""
    named = option_values(words, "optimizer") or any("optimizer" in config for config in configs)
    has_options = any(word.startswith("--optimizer.") for word in words)
    return ["--optimizer=SGD", *words] if has_options and not named else list(words)


def with_resumed_config(words: Sequence[str]) -> list[str]:
    """Add the config of the resumed run to a command line that has `--resume` but no `--config`.

    Raises:
        ConfigError: The run has no config, or another user made it and it names its own code.
    """
    resumed = option_values(words, "resume")
    if not resumed or option_values(words, "config"):
        return list(words)
    replaced = [key for key in WATCHERS if option_values(words, key)]
    run_dir, trust = Path(resumed[-1]), "--trust" in words
    config = restrict_and_load_config(run_dir, run_keys(), allowed_objects, trust, without=replaced)
    return [f"--config={config_argument(config)}", *words]


def names(given: Namespace, parser: ArgumentParser, config: dict[str, Any]) -> tuple[str, str]:
    """Return the name of a run and the name of its group. Runs that differ only in their seed form a group."""
    setting = setting_of(config)
    return run_names(config_name(given, parser), given.seed, setting, stated_setting(given, parser, setting))


def stated_setting(given: Namespace, parser: ArgumentParser, setting: dict[str, Any]) -> dict[str, Any]:
    """Return an experiment's settings as its config defines them, without changes by later files or options.

    The changes become part of the run's name. A class that replaces another one counts with its default options. If
    the experiment's config is not complete, all settings are returned.
    """
    configs = experiment_configs(given, parser)

    def stated(*more: str) -> dict[str, Any]:
        return setting_of(plain_config(parse_configs(configs, parser, *more), parser))

    try:
        found = stated()
    except ConfigError:
        return setting
    classes = {key.rpartition(".")[0] for key in setting} & setting.keys()  # the keys of classes have keys below them
    put_in = {key: found.get(key) for key in classes if setting[key] not in (None, found.get(key))}
    with suppress(ConfigError):  # a class may have required arguments
        found = stated(*(f"--{key}={setting[key]}" for key in put_in)) | put_in if put_in else found
    return found


def config_name(given: Namespace, parser: ArgumentParser) -> str:
    """Return the file name of the experiment's config without its suffix. Run names begin with it."""
    configs = experiment_configs(given, parser)
    return configs[-1][0].stem if configs else "run"


def experiment_configs(given: Namespace, parser: ArgumentParser) -> list[Any]:
    """Return the first config files of the command line, as few as together define a complete experiment.

    If it is complete only with all files, or not even then, all files are returned.
    """
    configs = given.config or []
    for count in range(1, len(configs)):
        with suppress(ConfigError):
            parse_configs(configs[:count], parser)
            return configs[:count]
    return configs


def parse_configs(configs: Sequence[Any], parser: ArgumentParser, *more: str) -> Namespace:
    """Parse config files and further options as one command line, without showing warnings."""
    words = [*(f"--config={path}" for path, _ in configs), *more]
    with readable_errors(parser), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they were shown already
        return parser.parse_args(expand_baseline(CommandLine(words, configs)).words)


def dry_run_report(run: FederatedOrchestrator, seconds: float) -> str:
    """Return the text that a dry run prints if no error occurred."""
    what = f"{type(run.algorithm).__name__} on {type(run.scenario.dataset).__name__}"
    callbacks = ", ".join(type(callback).__name__ for callback in run.callbacks)
    clients = f"{run.clients_per_round} of {len(run.data.shards)} clients"
    return (
        f"dry run passed in {seconds:.1f} s: {what}, {dry_run.ROUNDS} rounds with {clients} and up to "
        f"{dry_run.BATCHES} batches each: download, training, upload, aggregation, evaluation, checkpoint, resume, "
        f"{callbacks}, final model and figures; nothing was logged or kept"
    )
