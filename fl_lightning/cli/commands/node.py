"""`fl-lightning node`: train a client of a federation on this machine, with its own data."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path

import yaml
from jsonargparse import ArgumentParser, Namespace

from fl_lightning.analysis.export import (
    check_format,
    described_model,
    network_of_module,
    takes_rows,
    write_network,
)
from fl_lightning.cli.errors import readable_errors
from fl_lightning.cli.flower_app import client_experiment
from fl_lightning.client.module import ClientModule
from fl_lightning.core.config import read_config
from fl_lightning.core.errors import ConfigError, one_line
from fl_lightning.core.interrupt import raise_on_signal
from fl_lightning.core.strict_yaml import use_strict_yaml
from fl_lightning.core.terminal import echo
from fl_lightning.data import FederatedData
from fl_lightning.engines.flower_adapter import import_flower
from fl_lightning.flower.connection import Address, serve
from fl_lightning.flower.node import Node, Site


def main(given: Namespace, parser: ArgumentParser) -> int:
    """Load this client's data, connect to the server (a Flower SuperLink), and answer its messages until stopped."""
    import_flower()
    paths = (None if path is None else Path(path) for path in (given.certificate, given.key))
    address = Address(given.superlink, *paths)
    site = read_site(Path(given.site))
    node = Node(site, Path(given.state), client_experiment, partial(write_model, site.export))
    described = node.description
    echo(
        f"client {node.site.client}: {described.train} training and {described.test} test samples, "
        f"inputs {tuple(described.in_shape)}, {described.outputs} {described.labels}"
    )
    with raise_on_signal(signal.SIGTERM):  # so that the SuperLink learns that this machine leaves
        serve(address, node.answer, lambda line: echo(one_line(line)))
    return 0


def write_model(path: str | None, module: ClientModule, data: FederatedData, experiment: str, group: int) -> None:
    """Write a client's trained model to a file, in one of the formats of `fl-lightning export`.

    Args:
        path: The file; None if the model is not to be written.
        module: The client's module after the last round.
        data: The client's data.
        experiment: The text of the experiment's config.
        group: The number of the client's network in a `Mixed`.

    Raises:
        ConfigError: The format cannot hold the network, or the file cannot be written.
    """
    if path is None:
        return
    file, described = Path(path), described_model(yaml.safe_load(experiment), group)
    write_network(network_of_module(module, data, described, takes_rows(data, file)), file, "export")
    echo(f"wrote {one_line(path)}: this client's model after round {module.context.round}")


def read_site(path: Path) -> Site:
    """Read the settings of this machine's client from a file, such as `client.yaml`, and build its dataset.

    Raises:
        ConfigError: The file cannot be read, or a key is wrong.
    """
    if not path.is_file():
        raise ConfigError(f"site: {path} not found. Give the file that describes this client, such as client.yaml")
    read_config(path, f"site: {path}")  # for its error messages, which name the line
    parser = use_strict_yaml(ArgumentParser(exit_on_error=False, allow_abbrev=False))
    parser.add_class_arguments(Site)
    with readable_errors(parser):
        site = Site(**vars(parser.instantiate(parser.parse_path(str(path)))))
    if site.export is not None:
        check_format(Path(site.export), "export")
    return site
