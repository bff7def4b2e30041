"""Summary of a run in six lines, which `fit` prints before round 1."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from torch import nn

from fl_lightning.algorithms import WeightedMean
from fl_lightning.compression.codec import COMPRESSED
from fl_lightning.core.errors import one_line
from fl_lightning.core.inputs import describe_inputs
from fl_lightning.data.lazy import first_samples
from fl_lightning.models import FromModule, Mixed

if TYPE_CHECKING:
    from fl_lightning.algorithms import Algorithm
    from fl_lightning.callbacks.base import FederatedRun

SHOWN_PARTS = 3
"""Maximum number of personal (never sent) parts of the model that the summary names."""


def summarize_run(run: FederatedRun) -> list[str]:
    """Return the lines of the summary: method, data and clients, input, model, device, folder."""
    return [
        f"method: {describe_method(run.algorithm)}; sends {', '.join(sent_sections(run)) or 'nothing'}"
        + describe_compression(run),
        f"data: {describe_data(run)}",
        describe_input(run),
        f"model: {describe_model(run)}",
        f"device: {describe_device(run)}",
        f"folder: {describe_folder(run)}",
    ]


def describe_method(algorithm: Algorithm) -> str:
    """Return the name of a method with its loss terms, and with its aggregator unless that is the weighted mean."""
    aggregator = algorithm.aggregator
    parts = [*algorithm.loss_terms, *([] if type(aggregator) is WeightedMean else [aggregator])]
    names = ", ".join(type(part).__name__ for part in parts)
    return type(algorithm).__name__ + (f" with {names}" if names else "")


def describe_compression(run: FederatedRun) -> str:
    """Return a text with the names of the run's compressors, such as `, compressed by TopK (up)`, or an empty text."""
    both = {"up": run.worker.compression, "down": run.worker.download_compression}
    names = [f"{type(compressor).__name__} ({way})" for way, compressor in both.items() if compressor]
    return f", compressed by {' and '.join(names)}" if names else ""


def sent_sections(run: FederatedRun) -> list[str]:
    """Return the names of the parts that a round's messages contain, such as the model and shared knowledge.

    Additions by the server's `download` are included. Additions by a method's own `upload` are not, because they are
    not known before round 1.
    """
    algorithm = run.algorithm
    parts = [prefix.rstrip(".") for prefix in algorithm.personal]
    own = ", ".join(parts[:SHOWN_PARTS]) + (f" and {len(parts) - SHOWN_PARTS} more" if parts[SHOWN_PARTS:] else "")
    model = [f"model without {own}" if own else "model"] * bool(algorithm.shared_names(run.worker.template.backbone))
    download = run.evaluator.server.download(run.round + 1, 0).sections if algorithm.server else {}
    sections = dict.fromkeys([*(piece.name for piece in algorithm.knowledge), *download])
    return [*model, *(name for name in sections if name not in ("model", COMPRESSED))]


def describe_data(run: FederatedRun) -> str:
    """Return a text with the dataset's name, its number of classes, and the number and sizes of its clients."""
    objective, outputs, sizes = run.data.objective, run.data.data.num_classes, run.algorithm.samples
    labels = f"{outputs:,} classes" if objective.classes else f"{type(objective).__name__} of {outputs:,} outputs"
    dataset, partition = type(run.scenario.dataset).__name__, type(run.scenario.partition).__name__
    ends = " to ".join(f"{size:,}" for size in sorted({min(sizes), max(sizes)}))
    text = f"{dataset}, {labels}; {run.clients:,} clients ({partition}) with {ends} training samples each"
    text += f"; {len(run.data.held_out):,} more are held out" if run.data.held_out else ""
    adversary = run.evaluator.server.adversary
    text += f"; {len(adversary.attackers):,} attack ({type(adversary).__name__})" if adversary.attackers else ""
    return text + ("; tested on validation samples" if run.scenario.validation_share else "")


def describe_input(run: FederatedRun) -> str:
    """Return a line of text about the network's input: the columns of a table, or the shape of a sample."""
    data = run.data.data
    if data.schema:
        return data.schema.summary()
    return f"input: {describe_inputs(first_samples(data.x_train, 1))}"


def describe_model(run: FederatedRun) -> str:
    """Return a text with the class name and the number of parameters of the network, or of each one in a `Mixed`."""
    model = run.worker.model
    if not isinstance(model, Mixed):
        backbone = run.worker.template.backbone
        name = backbone.path if isinstance(backbone, FromModule) else type(backbone).__name__
        return describe_network(name, backbone)
    clients = Counter(model.group_of(client, run.worker.seed) for client in range(run.clients))
    texts = []
    for name, group in zip(model.names, run.worker.groups, strict=True):
        texts.append(f"{describe_network(name, group.template.backbone)}, {clients[group.group]:,} clients")
    return "; ".join(texts)


def describe_network(name: str, backbone: nn.Module) -> str:
    """Return a text with the name and the number of parameters of a network."""
    parameters = list(backbone.parameters())
    frozen = sum(parameter.numel() for parameter in parameters if not parameter.requires_grad)
    count = sum(parameter.numel() for parameter in parameters)
    return f"{name}, {count:,} parameters{f', {frozen:,} of them frozen' if frozen else ''}"


def describe_device(run: FederatedRun) -> str:
    """Return a text with the device that clients train on, the precision and how clients are run (the engine).

    The engine is, for example, `sequential`. The text also names the memory format of images if it is channels last.
    """
    engine = type(run.engine).__name__.removesuffix("Engine").lower()
    images = ", channels last" if run.worker.uses_channels_last else ""
    return f"{run.worker.device}, precision {run.worker.idle_trainer.precision}{images}, engine {engine}"


def describe_folder(run: FederatedRun) -> str:
    """Return a text with the path of the run folder and, for a resumed run, the last finished round."""
    if run.is_dry_run:
        return "none, because this is a dry run, with a few samples of each client"
    return one_line(str(run.run_dir)) + (f", resumed after round {run.round}" if run.round else "")
