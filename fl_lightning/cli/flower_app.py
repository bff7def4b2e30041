"""The two sides of an experiment on Flower: the app that runs on the server, and the experiment on a client's machine.

`fl-lightning deploy` writes an app that consists of `server_app(FILE)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING, Any

import yaml
from jsonargparse import ArgumentParser, Namespace

from fl_lightning.cli.allowed_objects import allowed_objects
from fl_lightning.cli.errors import readable_errors
from fl_lightning.cli.experiment import build, plain_config, run_keys
from fl_lightning.cli.experiment_parser import experiment_parser
from fl_lightning.core.config import parse_config
from fl_lightning.core.errors import ConfigError, FLError, one_line
from fl_lightning.core.trusted_imports import Untrusted, begin
from fl_lightning.data.remote import RemoteClients
from fl_lightning.engines.flower import ClientLink, FlowerEngine
from fl_lightning.orchestrator import FederatedOrchestrator
from fl_lightning.runs.trust import NO_PATH, run_config

if TYPE_CHECKING:
    from flwr.serverapp import Grid, ServerApp

SERVER_KEYS = (
    *("rounds", "clients_per_round", "client_sampler", "round_lr_scheduler", "engine", "client_store"),
    *("on_client_failure", "min_clients", "logger", "log_clients", "callbacks", "baselines"),
)
"""Keys of an experiment that only concern the server. Clients' machines do not get them."""


def server_app(file: Path) -> ServerApp:
    """Return the Flower ServerApp of the experiment in a config file.

    `flwr run --run-config 'run-dir="/data/run" resume=false wait=600'` sets the run folder, whether to resume its run,
    and the seconds to wait for the clients' machines.

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
        options: The values `run-dir`, `resume` and `wait` of Flower's run config.

    Raises:
        ConfigError: An option is wrong, or the clients' machines do not answer or have other data.
    """
    run_dir, resume = Path(str(options.get("run-dir", ""))), bool(options.get("resume", False))
    if not run_dir.is_absolute():
        raise ConfigError(f"run-dir: {str(run_dir)!r} is not an absolute path. Set it with flwr run --run-config")
    content = run_config(run_dir, run_keys(), allowed_objects).encode() if resume else file.read_bytes()
    config, parser = parse_config(content, str(run_dir if resume else file)), experiment_parser()
    arguments = config["scenario"]["dataset"]["init_args"]
    link = ClientLink(grid)
    described = [asdict(each) for each in link.find(arguments["clients"], float(options.get("wait", 600)))]
    if resume and described != arguments["described"]:
        changed = [client for client, each in enumerate(described) if each != arguments["described"][client]]
        raise ConfigError(
            f"client {changed[0]}: its data changed since the run began. Restore them, or start a new run"
        )
    arguments["described"] = described
    link.expected = link.find(arguments["clients"], 0)
    given = parse_text(config, parser)
    orchestrator = build(given, parser, run_dir)
    engine, recorded = orchestrator.engine, plain_config(given, parser)
    if not isinstance(engine, FlowerEngine):
        raise ConfigError("engine: the app of `fl-lightning deploy` needs FlowerEngine. Set engine: FlowerEngine")
    engine.connect(link, client_config(recorded))
    orchestrator.fit(resume, recorded)


def client_config(config: Mapping[str, Any]) -> str:
    """Return the part of an experiment's config that its clients need, as text."""
    kept = {key: value for key, value in config.items() if key not in SERVER_KEYS}
    evaluation = {key: config["evaluation"][key] for key in ("metrics", "positive_class")}
    dataset = dict(config["scenario"]["dataset"])
    dataset["init_args"] = {**dataset["init_args"], "test": None}  # it is on the server
    kept |= {"evaluation": evaluation, "scenario": {**config["scenario"], "dataset": dataset}, "logger": None}
    return yaml.safe_dump(kept, sort_keys=True)


def client_experiment(text: str, trusted: bool) -> FederatedOrchestrator:
    """Build an experiment on a client's machine. From here on, the calling context is restricted by its config.

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
        fix = "If you trust the server, add the experiment's digest to `allow` in the file of this machine"
        begin(Untrusted(config, "the experiment: ", fix, None, allowed_objects))
    orchestrator = build(parse_text(config, parser), parser, Path(gettempdir(), "fl-lightning-node"))
    if not isinstance(orchestrator.scenario.dataset, RemoteClients):
        raise ConfigError("scenario.dataset: the experiment names data of this machine. It needs RemoteClients")
    return orchestrator


def parse_text(config: Mapping[str, Any], parser: ArgumentParser) -> Namespace:
    """Parse an experiment's config that is not in a file."""
    with readable_errors(parser):
        return parser.parse_args(["--config", NO_PATH + yaml.safe_dump(dict(config), sort_keys=False)])
