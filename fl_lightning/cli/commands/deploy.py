"""`fl-lightning deploy`: write a Flower app that runs an experiment on the clients' own machines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser, Namespace

from fl_lightning.cli.commands.fit import expand
from fl_lightning.cli.experiment import plain_config
from fl_lightning.core.errors import ConfigError

__all__ = ["expand", "main"]

PYPROJECT = """\
[project]
name = "fl-lightning-app"
version = "1.0.0"
description = "An experiment of fl-lightning on the clients' own machines"
license = "Apache-2.0"
dependencies = ["fl-lightning[flower]"]

[tool.flwr.app]
publisher = "fl-lightning"

[tool.flwr.app.components]
serverapp = "server_app:app"
clientapp = "client_app:app"

[tool.flwr.app.config]
run-dir = ""
resume = false
wait = 600
"""

SERVER_APP = '''\
"""The server of the experiment in experiment.yaml."""

from pathlib import Path

from fl_lightning.cli.flower_app import server_app

app = server_app(Path(__file__).with_name("experiment.yaml"))
'''

CLIENT_APP = '''\
"""Clients' machines run `fl-lightning node` in place of Flower's SuperNode, which would run this app."""

from flwr.clientapp import ClientApp

app = ClientApp()
'''

CERTIFICATES = """\
#!/bin/sh
# Writes ca.crt, server.pem and server.key for the server whose name or address is the first argument.
set -e
case "$1" in "") echo "usage: sh certificates.sh SERVER"; exit 2 ;; *[!0-9.]*) name="DNS:$1" ;; *) name="IP:$1" ;; esac
new="-newkey ec -pkeyopt ec_paramgen_curve:secp384r1 -nodes"
umask 077
openssl req -x509 $new -days 365 -subj "/CN=authority" -keyout ca.key -out ca.crt
openssl req $new -subj "/CN=server" -addext "subjectAltName=$name" -keyout server.key -out server.csr
openssl x509 -req -in server.csr -CA ca.crt -CAkey ca.key -days 365 -copy_extensions copy -out server.pem
rm server.csr
"""


def main(given: Namespace, parser: ArgumentParser) -> int:
    """Write the folder of the app, and print the commands that start the server, the clients and the run."""
    folder = Path(given.out)
    clients = given.scenario.clients
    for key in ("held_out_clients", "validation_share"):
        if given.scenario[key] is not None:
            raise ConfigError(f"scenario.{key}: clients on their own machines do not support it. Leave it out")
    if clients is None:
        raise ConfigError("scenario.clients: how many clients have their own machines? Set --scenario.clients")
    content = yaml.safe_dump(remote_config(plain_config(given, parser), clients, given.test), sort_keys=False)
    texts = {"pyproject.toml": PYPROJECT, "server_app.py": SERVER_APP, "client_app.py": CLIENT_APP}
    texts |= {"certificates.sh": CERTIFICATES}
    try:
        folder.mkdir(parents=True)
        for name, text in {**texts, "experiment.yaml": content}.items():
            (folder / name).write_text(text, encoding="utf-8")
    except FileExistsError:
        raise ConfigError(f"--out: {folder} exists already. Choose another folder") from None
    except OSError as error:
        raise ConfigError(f"--out: {folder} cannot be written to: {error}") from error
    print(f"wrote {folder}/: {', '.join(sorted(path.name for path in folder.iterdir()))}\n")
    print(commands(folder, clients))
    return 0


def remote_config(config: dict[str, Any], clients: int, test_data: str | None) -> dict[str, Any]:
    """Return an experiment's config with the data on the clients' machines.

    Args:
        config: The resolved config.
        clients: Number of clients.
        test_data: Folder or `.npz` file with the global test set on the server; None for no global test set.
    """
    test = None
    if test_data is not None:
        arguments = {"path": str(Path(test_data).resolve())}
        test = {"class_path": "fl_lightning.data.arrays.Arrays", "init_args": arguments}
    dataset = {"class_path": "fl_lightning.data.remote.RemoteClients", "init_args": {"clients": clients, "test": test}}
    partition = "fl_lightning.data.natural_partitions.ByClient"
    scenario = {"dataset": dataset, "partition": partition, "clients": clients}
    if objective := config["scenario"].get("objective"):
        scenario["objective"] = objective
    return {**config, "scenario": scenario, "engine": "fl_lightning.engines.flower.FlowerEngine"}


def commands(folder: Path, clients: int) -> str:
    """Return the text that says which commands start the server, the clients and the run."""
    return f"""\
1. on the server, make certificates. SERVER is the name or the address at which the clients reach it:
   sh {folder}/certificates.sh SERVER

2. on the server, start Flower's SuperLink:
   flower-superlink --ssl-ca-certfile ca.crt --ssl-certfile server.pem --ssl-keyfile server.key \\
     --enable-supernode-auth --disable-runtime-dependency-installation --database flower.db
   and name the connection in ~/.flwr/config.toml:
   [superlink.federation]
   address = "SERVER:8000"
   root-certificates = "{Path("ca.crt").resolve()}"

3. on the machine of each client, 0 to {clients - 1}, make a key, and send client.pub to the server:
   ssh-keygen -t ecdsa -b 384 -N '' -f client
   on the server, register it:
   flwr supernode register client.pub federation
   on the client's machine, with ca.crt from the server and a file that describes its data:
   fl-lightning node client.yaml --superlink SERVER:8000 --certificate ca.crt --key client

4. on the server, start the run:
   flwr run {folder} federation --stream --run-config 'run-dir="{Path("run").resolve()}"'
   and to resume it: --run-config 'run-dir="{Path("run").resolve()}" resume=true'"""
