"""Connect an experiment to clients on other machines with Flower, and build the experiment on these machines.

`fl-lightning deploy` writes an app that consists of `server_app(FILE)`.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from hashlib import sha256
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING, Any

import yaml
from jsonargparse import ArgumentParser, Namespace

from fl_lightning.cli.allowed_objects import allowed_objects
from fl_lightning.cli.errors import readable_errors
from fl_lightning.cli.experiment import build, plain_config, run_keys
from fl_lightning.cli.experiment_parser import config_argument, experiment_parser
from fl_lightning.core.config import parse_config
from fl_lightning.core.errors import ConfigError, FLError, one_line
from fl_lightning.core.interrupt import raise_on_signal
from fl_lightning.core.trusted_imports import Untrusted, begin
from fl_lightning.data.remote import RemoteClients
from fl_lightning.engines.flower import ClientLink, FlowerEngine
from fl_lightning.engines.flower_adapter import limit_answers
from fl_lightning.engines.flower_records import MEGABYTE, describe_excess
from fl_lightning.flower.server_run import start_run
from fl_lightning.orchestrator import FederatedOrchestrator
from fl_lightning.runs.trust import restrict_and_load_config

if TYPE_CHECKING:
    from flwr.serverapp import Grid, ServerApp

SERVER_KEYS = (
    *("rounds", "clients_per_round", "client_sampler", "adversary", "round_lr_scheduler", "engine", "client_store"),
    *("on_client_failure", "min_clients", "logger", "log_clients", "max_logged_clients", "callbacks"),
    "baselines",
)
"""Keys of an experiment that only concern the server. Clients' machines do not get them."""


@contextmanager
def connected_clients(run: FederatedOrchestrator, config: dict[str, Any], resume: bool) -> Iterator[None]:
    """Context manager: connect an experiment to the clients' machines if its engine is a `FlowerEngine`.

    Args:
        run: The experiment.
        config: Its resolved config, which gets the descriptions of the clients' data.
        resume: Whether the run is resumed.

    Raises:
        ConfigError: No SuperLink is named or it does not answer, or `connect_clients` has failed.
    """
    if not isinstance(run.engine, FlowerEngine):
        yield
        return
    remote_parts(run)
    if run.engine.superlink is None:
        fix = "Name its connection in Flower's config.toml, such as --engine.superlink federation"
        raise ConfigError(f"engine.superlink: which SuperLink reaches the clients? {fix}")
    with raise_on_signal(signal.SIGTERM), start_run(run.engine.superlink) as grid:  # the SuperLink learns of the signal
        connect_clients(run, config, grid, resume)
        yield


def connect_clients(run: FederatedOrchestrator, config: dict[str, Any], grid: Grid, resume: bool) -> None:
    """Connect an experiment to its clients' machines, after asking each machine to describe its data.

    Args:
        run: The experiment.
        config: Its resolved config, which gets the descriptions of the clients' data.
        grid: Flower's grid.
        resume: Whether the run is resumed.

    Raises:
        ConfigError: The clients' machines do not answer, or have other data than before.
    """
    engine, dataset = remote_parts(run)
    limit_answers(grid, (engine.max_megabytes + 1) * MEGABYTE, describe_excess)  # 1 MB for what is not tensors
    link = ClientLink(grid)
    found, before = link.find(dataset.clients, engine.wait, partial(print, flush=True)), dataset.described
    if resume and before and found != before:
        changed = [client for client, each in enumerate(found) if each != before[client]]
        raise ConfigError(f"client {changed[0]}: its data changed since the run began. Restore them or start a new run")
    dataset.described = link.expected = found
    config["scenario"]["dataset"]["init_args"]["described"] = [asdict(each) for each in found]
    engine.connect(link, client_config(config))


def remote_parts(run: FederatedOrchestrator) -> tuple[FlowerEngine, RemoteClients]:
    """Return the `FlowerEngine` and the `RemoteClients` dataset of an experiment on the clients' own machines.

    Raises:
        ConfigError: It has another engine or dataset.
    """
    engine, dataset = run.engine, run.scenario.dataset
    if not isinstance(engine, FlowerEngine):
        raise ConfigError("engine: clients on their own machines need FlowerEngine. Set engine: FlowerEngine")
    if not isinstance(dataset, RemoteClients):
        fix = "`fl-lightning deploy` writes the config of a run on the clients' machines"
        raise ConfigError(f"engine: FlowerEngine needs scenario.dataset RemoteClients. {fix}")
    return engine, dataset


def server_app(file: Path) -> ServerApp:
    """Return the Flower ServerApp that runs the experiment of a config file.

    It is for a SuperLink (Flower's server process) that starts the ServerApp itself.

    `flwr run --run-config 'run-dir="/data/run" resume=false'` sets the run folder, and whether to resume its run.

    Args:
        file: The config that `fl-lightning deploy` wrote.
    """
    from flwr.serverapp import ServerApp

    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Any) -> None:
        try:
            run_experiment(file, grid, context.run_config)
        except FLError as error:
            raise FLError(one_line(error)) from None  # Flower shows a traceback

    return app


def run_experiment(file: Path, grid: Grid, options: Mapping[str, Any]) -> None:
    """Run or resume an experiment whose clients are on their own machines.

    Args:
        file: The config.
        grid: Flower's grid.
        options: The values `run-dir` and `resume` of Flower's run config.

    Raises:
        ConfigError: An option is wrong, or the clients' machines do not answer or have other data.
    """
    run_dir, resume = Path(str(options.get("run-dir", ""))), bool(options.get("resume", False))
    if not run_dir.is_absolute():
        raise ConfigError(f"run-dir: {str(run_dir)!r} is not an absolute path. Set it with flwr run --run-config")
    if resume:
        stated = restrict_and_load_config(run_dir, run_keys(), allowed_objects)
    else:
        stated = parse_config(file.read_bytes(), str(file))
    parser = experiment_parser()
    given = parse_mapping(stated, parser)
    run, config = build(given, parser, run_dir), plain_config(given, parser)
    connect_clients(run, config, grid, resume)
    run.fit(resume, config)


def client_config(config: Mapping[str, Any]) -> str:
    """Return a YAML text with the part of an experiment's config that its clients need."""
    kept = {key: value for key, value in config.items() if key not in SERVER_KEYS}
    evaluation = {key: config["evaluation"][key] for key in ("metrics", "positive_class")}
    dataset = dict(config["scenario"]["dataset"])
    dataset["init_args"] = {**dataset["init_args"], "test": None, "schema": None}  # they are on the server
    kept |= {"evaluation": evaluation, "scenario": {**config["scenario"], "dataset": dataset}, "logger": None}
    return yaml.safe_dump(kept, sort_keys=True)


def client_experiment(text: str, trusted: bool) -> FederatedOrchestrator:
    """Build an experiment on a client's machine, from the config that the server sent.

    Unless `trusted`, imports are restricted to an allowlist until the caller's `contextvars` context ends.

    Args:
        text: The config that the server sent.
        trusted: Whether it may name classes outside of this package.

    Raises:
        ConfigError: The config is wrong, or names what it may not.
    """
    config, parser = parse_config(text.encode(), "the experiment"), experiment_parser()
    if wrong := sorted(key for key in config if key not in run_keys() or (key in SERVER_KEYS and config[key])):
        raise ConfigError(f"the experiment has a key that is not for clients: {one_line(wrong[0])}")
    if not trusted:
        digest = sha256(text.encode()).hexdigest()
        fix = f"If you trust the server, add {digest} to allow in the file of this machine"
        begin(Untrusted(config, "the experiment: ", fix, None, allowed_objects))
    orchestrator = build(parse_mapping(config, parser), parser, Path(gettempdir(), "fl-lightning-node"))
    if not isinstance(orchestrator.scenario.dataset, RemoteClients):
        raise ConfigError("scenario.dataset: the experiment names data of this machine. It needs RemoteClients")
    return orchestrator


def parse_mapping(config: Mapping[str, Any], parser: ArgumentParser) -> Namespace:
    """Parse an experiment's config, given as a mapping instead of a file."""
    with readable_errors(parser):
        return parser.parse_args(["--config", config_argument(config)])
