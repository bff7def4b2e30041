"""`fl-lightning deploy`: write a Flower app that runs an experiment on the clients' own machines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser, Namespace

from fl_lightning.cli.commands.fit import expand
from fl_lightning.cli.experiment import instantiate, plain_config
from fl_lightning.cli.new_folder import write_new_folder
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.terminal import echo
from fl_lightning.data import Table, TableSchema
from fl_lightning.flower.server_run import APP_FILES

__all__ = ["expand", "main"]

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
    """Write the folder of a Flower app, and print the commands that start the server, the clients and the run."""
    folder, clients = Path(given.out), given.scenario.clients
    for key in ("held_out_clients", "validation_share"):
        if given.scenario[key] is not None:
            raise ConfigError(f"scenario.{key}: clients on their own machines do not support it. Leave it out")
    if clients is None:
        raise ConfigError("scenario.clients: how many clients have their own machines? Set --scenario.clients")
    test = None if given.test is None else Path(given.test)
    if test and not (test.is_dir() or (test.is_file() and test.suffix == ".npz")):
        fix = "`fl-lightning partition --export` writes such a folder"
        raise ConfigError(f"--test: {test} is neither a folder of arrays nor an .npz file. {fix}")
    config, files = plain_config(given, parser), {**APP_FILES, "certificates.sh": CERTIFICATES}
    schema = None
    if encoding := encoding_of(given, parser):
        schema = folder / "schema.json"
        files[schema.name] = encoding.to_json()
    config = remote_config(config, clients, test, schema)
    write_new_folder("--out", folder, files | {"experiment.yaml": yaml.safe_dump(config, sort_keys=False)})
    echo(commands(folder, clients, config["engine"]["init_args"]["superlink"], schema))
    return 0


def encoding_of(given: Namespace, parser: ArgumentParser) -> TableSchema | None:
    """Return the column encoding of a tabular dataset, for use on the clients' tables; None for other datasets."""
    dataset = instantiate(given, parser).scenario.dataset
    return dataset.checked().schema if isinstance(dataset, Table) else None


def remote_config(config: dict[str, Any], clients: int, test_data: Path | None, schema: Path | None) -> dict[str, Any]:
    """Return an experiment's config, adapted to clients that train on their own machines with Flower.

    Args:
        config: The resolved config.
        clients: Number of clients.
        test_data: Folder or `.npz` file with the global test set on the server; None for no global test set.
        schema: File with the schema with which the clients' tables are encoded; None for other data.
    """
    test = None
    if test_data is not None:
        arguments = {"path": str(test_data.resolve())}
        test = {"class_path": "fl_lightning.data.arrays.Arrays", "init_args": arguments}
    options = {"clients": clients, "test": test, "schema": schema and str(schema.resolve())}
    dataset = {"class_path": "fl_lightning.data.remote.RemoteClients", "init_args": options}
    partition = "fl_lightning.data.natural_partitions.ByClient"
    scenario = {"dataset": dataset, "partition": partition, "clients": clients}
    if objective := config["scenario"].get("objective"):
        scenario["objective"] = objective
    engine = config["engine"]
    if not isinstance(engine, dict) or not engine["class_path"].endswith(".FlowerEngine"):
        engine = {"class_path": "fl_lightning.engines.flower.FlowerEngine", "init_args": {}}
    engine["init_args"]["superlink"] = engine["init_args"].get("superlink") or "federation"
    return {**config, "scenario": scenario, "engine": engine}


def commands(folder: Path, clients: int, superlink: str, schema: Path | None) -> str:
    """Return the text that says which commands start the server, the clients and the run."""
    files = "ca.crt" + (f" and {schema}" if schema else "")
    return f"""
1. on the server, make certificates. SERVER is the name or the address at which the clients reach it:
   sh {folder}/certificates.sh SERVER

2. on the server, start Flower's SuperLink:
   flower-superlink --ssl-ca-certfile ca.crt --ssl-certfile server.pem --ssl-keyfile server.key \\
     --enable-supernode-auth --isolation process --database flower.db --host 0.0.0.0
   and name the connection in ~/.flwr/config.toml:
   [superlink.{superlink}]
   address = "SERVER:8000"
   root-certificates = "{Path("ca.crt").resolve()}"

3. on the machine of each client, 0 to {clients - 1}, make a key, and send client.pub to the server:
   ssh-keygen -t ecdsa -b 384 -N '' -f client
   on the server, register it:
   flwr supernode register client.pub {superlink}
   on the client's machine, with {files} from the server and a file that describes its data:
   fl-lightning node client.yaml --superlink SERVER:8000 --certificate ca.crt --key client

4. on the server, start the run:
   fl-lightning fit --config {folder}/experiment.yaml"""
