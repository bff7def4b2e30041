"""`fl-lightning export`: write a run's model to a file, or its adapters to a folder, for other programs."""

from __future__ import annotations

from pathlib import Path

import torch
from jsonargparse import ArgumentParser, Namespace

from fl_lightning.algorithms.protocols import Calibrates
from fl_lightning.analysis.export import (
    FORMATS,
    described_model,
    merged_network,
    network_of,
    refuse_target,
    schema_path,
    takes_rows,
    write_network,
)
from fl_lightning.analysis.peft_folder import refuse_folder, write_adapter
from fl_lightning.cli.experiment import load_run
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.inputs import describe_inputs
from fl_lightning.core.terminal import echo
from fl_lightning.orchestrator import FederatedOrchestrator
from fl_lightning.runs.reader import read_config


def main(given: Namespace, parser: ArgumentParser) -> int:
    """Export a run's global model or a client's model to a file, and print the shapes of its inputs and outputs."""
    if not given.out:
        raise ConfigError(f"-o: which file? Its ending says the format: {', '.join(FORMATS)}")
    path = Path(given.out)
    if given.peft:
        refuse_folder(path, given.merge, given.prepare)
    else:
        refuse_target(path, given.prepare)
    run = load_run(Path(given.run), given.checkpoint, given.trust)
    group = run.worker.for_client(given.client or 0).group
    described = described_model(read_config(Path(given.run)), group, shared=given.client is None)
    if given.peft:
        write_adapter(network_of(run, described, given.client), path)
        size = sum(file.stat().st_size for file in path.iterdir())
        about = f"the adapters of {describe_model(run, given.client)} after round {run.round}"
        echo(f"wrote {path} (peft's folder, {size / 1e6:.2f} MB): {about}")
        return 0
    has_rows = takes_rows(run.data, path)
    network = network_of(run, described, given.client, given.prepare or has_rows)
    network = merged_network(network) if given.merge else network
    write_network(network, path)
    kind, size = FORMATS[path.suffix].name, path.stat().st_size
    about = f"{describe_model(run, given.client)} after round {run.round}"
    echo(f"wrote {path} ({kind}, {size / 1e6:.2f} MB): {about}")
    taken = "samples as they are stored" if given.prepare else "samples as scenario.dataset prepares them"
    if network.schema:
        where = schema_path(path) if path.suffix == ".pt" else "the file"
        taken = f"{'raw rows' if has_rows else 'rows that TableSchema.encode returns'} (the schema is in {where})"
    inputs, outputs = (describe_inputs(x, batch=True) for x in (network.samples, network.outputs))
    echo(f"it takes {taken}, {inputs}, and gives {outputs}")
    return 0


def describe_model(run: FederatedOrchestrator, client: int | None) -> str:
    """Return text that says whose model is exported.

    If a client's model is equal to the global model, the text says so, too.
    """
    if client is None:
        return "the global model"
    same = False
    if run.algorithm.one_model and not isinstance(
        run.algorithm, Calibrates
    ):  # a calibrated global model differs from all clients'
        modules = (run.client_module(client), run.evaluator.global_module(run.round))
        own, shared = (module.backbone.cpu().state_dict() for module in modules)
        same = own.keys() == shared.keys() and all(torch.equal(own[name], value) for name, value in shared.items())
    return f"the model of {run.data.names.client(client)}{', with this method the global model,' if same else ''}"
