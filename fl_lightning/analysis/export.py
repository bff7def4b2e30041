"""Export a trained network to a file that other programs can open."""

from __future__ import annotations

import copy
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from io import BytesIO, StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import lightning as L
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from fl_lightning.client.exported import described_objective, rebuilt
from fl_lightning.client.module import ClientModule
from fl_lightning.core.errors import ConfigError, one_line, require_extra
from fl_lightning.core.files import write_atomically
from fl_lightning.core.inputs import Inputs, Shapes, map_inputs
from fl_lightning.core.objectives import Classification, Objective
from fl_lightning.core.trusted_imports import find_object
from fl_lightning.data import FederatedData
from fl_lightning.data.lazy import first_samples
from fl_lightning.data.schema import TableSchema
from fl_lightning.models import Adapted, Mixed, ResizedFeatures
from fl_lightning.models.adapted import merge_adapters
from fl_lightning.models.wrapped import FromModule, call_arguments, original_of

if TYPE_CHECKING:
    from fl_lightning.orchestrator import FederatedOrchestrator

EXPORTERS = ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")
"""Loggers whose records, such as about packages that are not installed, do not concern the export of a run."""

NEEDED = ("onnx", "onnxscript", "onnxruntime")
"""Packages that are needed to write and check an `.onnx` file."""

SAMPLES, TRACED_SAMPLES = 5, 2
"""Number of samples on which outputs are compared, and number of samples for tracing."""

NEAR = 1e-3
"""Relative tolerance when outputs are compared. Other programs sum in another order."""

Call = Callable[[Any], Tensor]


@dataclass
class Network:
    """A trained network to export, with its config and example inputs.

    Args:
        backbone: The trained network; a copy in float32 is exported.
        model: The network in the run's config: its `class_path` and `init_args`.
        in_shape: Shape of one input, or the shapes of several, without the batch dimension.
        num_classes: Number of classes that the network was built for.
        samples: Example inputs, `(n, ...)` with n >= 2.
        objective: The objective of its training.
        schema: The table's columns, if it was trained on a table.
    """

    backbone: nn.Module
    model: Mapping[str, Any]
    in_shape: tuple[int, ...] | Shapes
    num_classes: int
    samples: Tensor | Inputs
    objective: Objective = Classification()
    schema: TableSchema | None = None
    outputs: Tensor = field(init=False)

    def __post_init__(self) -> None:
        """Copy the network, repeat its example inputs up to `SAMPLES`, and compute its outputs for them."""
        self.backbone = copy.deepcopy(self.backbone).cpu().float().eval()
        samples = map_inputs(Tensor.contiguous, self.samples[torch.arange(SAMPLES) % len(self.samples)].to("cpu"))
        prepares = isinstance(self.backbone, NetworkWithPreparation)
        self.samples = samples if prepares else map_inputs(as_float32, samples)  # it takes them as they are stored
        with torch.no_grad():
            self.outputs = self.backbone(self.samples)

    @cached_property
    def described(self) -> dict[str, Any]:
        """A dict to build the network again: class path, constructor arguments, input shape and number of classes."""
        in_shape = self.in_shape if isinstance(self.in_shape, dict) else list(self.in_shape)
        return {**self.model, "in_shape": in_shape, "num_classes": self.num_classes}

    def arguments(self, samples: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and keyword arguments with which to call the network on samples."""
        return call_arguments(self.backbone, samples.tensors) if isinstance(samples, Inputs) else ((samples,), {})

    @property
    def named_inputs(self) -> dict[str, Tensor]:
        """The example inputs by the names that they have in an ONNX file."""
        if not isinstance(self.samples, Inputs):
            return {"input": self.samples}
        return {key if isinstance(key, str) else f"input_{key}": value for key, value in self.samples.items()}


def as_float32(x: Tensor) -> Tensor:
    """Return floating-point inputs in float32, and others unchanged."""
    return x.float() if x.is_floating_point() else x


class NetworkWithPreparation(nn.Module):
    """A network that includes the dataset's preprocessing, so its inputs are unprocessed samples or table rows.

    Args:
        backbone: The network.
        prepare: Converts a batch of stored samples to the network's inputs.
    """

    def __init__(self, backbone: nn.Module, prepare: Call) -> None:
        super().__init__()
        self.backbone, self.prepare = backbone, prepare

    def forward(self, x: Tensor) -> Tensor:
        """Preprocess a batch of unprocessed samples or table rows, and return the network's outputs."""
        return self.backbone(self.prepare(x))


def network_of(
    run: FederatedOrchestrator,
    model: Mapping[str, Any] | None = None,
    client: int | None = None,
    prepare: bool = False,
) -> Network:
    """Return a run's network to export: the global model, or a client's personalised model.

    Args:
        run: The run.
        model: The network in the run's config: its `class_path` and `init_args`. By default its class.
        client: The client; None for the global model.
        prepare: Whether the network takes samples as they are stored, or raw rows of a table.

    Raises:
        ConfigError: The method has no global model, the client does not exist, or its model is on its own machine.
    """
    run.worker.for_client(client or 0).modules.compile = False
    method, one_model = type(run.algorithm).__name__, run.algorithm.one_model
    if run.data.is_remote and (client is not None or not one_model):
        instead = "Leave out --client to export the global model" if one_model else f"{method} has no global model"
        raise ConfigError(f"client: the clients' models are on their own machines. {instead}")
    if client is not None:
        module = run.client_module(client)
    elif one_model:
        module = run.evaluator.global_module(run.round)
    else:
        last = len(run.data.shards) - 1
        raise ConfigError(f"client: {method} has no global model. Choose a client with --client, 0 to {last}")
    return network_of_module(module, run.data, model, prepare)


def network_of_module(
    module: ClientModule, data: FederatedData, model: Mapping[str, Any] | None = None, prepare: bool = False
) -> Network:
    """Return the network inside a trained client module, with the config and example inputs that an export needs.

    Args:
        module: The module. Its network is not compiled.
        data: The data that it was trained on.
        model: The network in the run's config: its `class_path` and `init_args`. By default its class.
        prepare: Whether the network takes samples as they are stored, or raw rows of a table.

    Raises:
        ConfigError: `prepare` is true, and a sample has several inputs.
    """
    loaded = data.data
    backbone, schema = original_of(module.backbone.cpu()), loaded.schema
    model = model or {"class_path": f"{type(backbone).__module__}.{type(backbone).__qualname__}"}
    samples = schema.examples(SAMPLES) if schema else first_samples(loaded.x_test, SAMPLES)
    to_input = (lambda rows: loaded.prepare(schema.encode(rows))) if schema else loaded.prepare
    if prepare and isinstance(samples, Inputs):
        raise ConfigError("--prepare: a sample has several inputs. Leave it out, and prepare them in your program")
    if prepare:
        backbone = NetworkWithPreparation(backbone, to_input)
    else:
        samples = to_input(samples)
    return Network(backbone, model, loaded.in_shape, loaded.num_classes, samples, data.objective, schema)


def described_model(config: Mapping[str, Any], group: int = 0, shared: bool = False) -> dict[str, Any]:
    """Return the class path and arguments of the model in a run's config, as a dict.

    Args:
        config: The config.
        group: The number of the network in a `Mixed`.
        shared: Whether to describe the global model, for which a method may have the option `shared_model`.
    """
    method = config.get("algorithm")
    if shared and isinstance(method, dict) and (given := method.get("init_args", {}).get("shared_model")):
        return as_class(given)
    model = as_class(config["model"])
    if find_object(model["class_path"]) is not Mixed:
        return model
    options = model["init_args"]
    network, size = as_class(options["models"][group]), options.get("feature_dim")
    resized = f"{ResizedFeatures.__module__}.{ResizedFeatures.__name__}"
    return {"class_path": resized, "init_args": {"model": network, "feature_dim": size}} if size else network


def as_class(model: Any) -> dict[str, Any]:
    """Return a model of a config, which may be only the name of a class, as a dict with `class_path`."""
    return {"class_path": model} if isinstance(model, str) else model


def merged_network(network: Network) -> Network:
    """Return a network whose LoRA adapters are added to the weights of their layers, so that it needs no peft.

    Its model is the one that the adapters were added to. That of a `FromModule` is the user's module.

    Raises:
        ConfigError: The network has no adapters, or other outputs with merged weights.
    """
    model, backbone = network.model, merge_adapters(network.backbone)
    if find_object(model["class_path"]) is Adapted:
        model = as_class(model["init_args"]["base"])
        if isinstance(backbone, Adapted) and find_object(model["class_path"]) is FromModule:
            backbone.encoder.set_submodule(model["init_args"]["head"], backbone.head)
            backbone = backbone.encoder
    merged = replace(network, backbone=backbone, model=model)
    if not same_outputs(merged.outputs, network.outputs):
        raise ConfigError("--merge: the network has other outputs with merged weights. Leave it out.")
    return merged


def takes_rows(data: FederatedData, path: Path) -> bool:
    """Return whether an exported network takes the raw rows of a table as inputs.

    It does so for a tabular dataset, unless the file's format holds only weights (`WEIGHTS_ONLY`).
    """
    return data.data.schema is not None and path.suffix not in WEIGHTS_ONLY


# --- The formats ---


def _state_dict(network: Network) -> bytes:
    torch.save(network.backbone.state_dict(), content := BytesIO())
    return content.getvalue()


def _from_state_dict(content: bytes, network: Network) -> Call:
    backbone = copy.deepcopy(network.backbone)
    for value in backbone.state_dict().values():
        value.zero_()
    backbone.load_state_dict(torch.load(BytesIO(content), weights_only=True))
    return backbone


def _checkpoint(network: Network) -> bytes:
    parameters = {"backbone": network.described, "objective": described_objective(network.objective)}
    # ClientModule has no argument `schema`, so Lightning leaves it out when it builds one.
    schema = {"schema": network.schema.to_json()} if network.schema else {}
    checkpoint = {
        "pytorch-lightning_version": L.__version__,
        "epoch": 0,
        "global_step": 0,
        "state_dict": ClientModule(network.backbone).state_dict(),
        "hyper_parameters": parameters | schema,
    }
    torch.save(checkpoint, content := BytesIO())
    return content.getvalue()


def _from_checkpoint(content: bytes, network: Network) -> Call:
    backbone = rebuilt(network.described, trust=True)  # the run was trusted when it was opened
    arguments: dict[str, Any] = {"backbone": backbone, "objective": network.objective}
    module = ClientModule.load_from_checkpoint(BytesIO(content), map_location="cpu", **arguments)
    return module.eval()


def _torchscript(network: Network) -> bytes:
    args, options = network.arguments(network.samples[:TRACED_SAMPLES])
    examples = {"example_kwarg_inputs": options} if options else {"example_inputs": args}
    traced = torch.jit.trace(network.backbone, **examples, check_trace=False)
    extra = {"schema.json": network.schema.to_json()} if network.schema else {}
    torch.jit.save(traced, content := BytesIO(), _extra_files=extra)
    return content.getvalue()


def _from_torchscript(content: bytes, network: Network) -> Call:
    traced = torch.jit.load(BytesIO(content))
    args, options = network.arguments(network.samples)
    return lambda _: traced(*args, **options)


def _onnx(network: Network) -> bytes:
    args, options = network.arguments(network.samples[:TRACED_SAMPLES])
    any_batch_size = {0: torch.export.Dim("batch")}
    program = torch.onnx.export(
        network.backbone,
        args,
        kwargs=options,
        dynamo=True,
        dynamic_shapes=apply_to_collection((*args, *options.values()), Tensor, lambda _: any_batch_size),
        input_names=[*network.named_inputs],
        output_names=["output"],
        verbose=False,
    )
    assert program
    content = program.model_proto
    if network.schema:
        content.metadata_props.add(key="schema.json", value=network.schema.to_json())
    return content.SerializeToString()


def _from_onnx(content: bytes, network: Network) -> Call:
    session = import_module("onnxruntime").InferenceSession(content, providers=["CPUExecutionProvider"])
    inputs = {name: value.numpy() for name, value in network.named_inputs.items()}
    return lambda _: torch.from_numpy(session.run(["output"], inputs)[0])


class Format(NamedTuple):
    """An export format: its name, and functions that convert a network to bytes and bytes to a network."""

    name: str
    write: Callable[[Network], bytes]
    read: Callable[[bytes, Network], Call]


FORMATS = {
    ".pt": Format("state dict", _state_dict, _from_state_dict),
    ".onnx": Format("ONNX", _onnx, _from_onnx),
    ".ts": Format("TorchScript", _torchscript, _from_torchscript),
    ".ckpt": Format("Lightning checkpoint", _checkpoint, _from_checkpoint),
}


WEIGHTS_ONLY = (".pt", ".ckpt")
"""Formats that hold only weights. They cannot include the preprocessing, which is code."""


def refuse_target(path: Path, prepare: bool = False) -> None:
    """Check the path and format of an export before the run is loaded. Raise an error if the export is impossible.

    Args:
        path: The file.
        prepare: Whether the network takes samples as they are stored.

    Raises:
        ConfigError: The suffix is unknown, the file exists, packages are missing, or the format cannot prepare samples.
    """
    check_format(path)
    for file in (path, schema_path(path)) if path.suffix == ".pt" else (path,):
        if os.path.lexists(file):
            raise ConfigError(f"-o: {file} already exists. Name another file, or remove it")
    if prepare and path.suffix in WEIGHTS_ONLY:
        raise ConfigError(f"--prepare: a {FORMATS[path.suffix].name} holds only weights. Use .onnx or .ts")


def check_format(path: Path, key: str = "-o") -> None:
    """Raise an error if a file's suffix is not an export format, or if a package for this format is not installed.

    Args:
        path: The file.
        key: The option that names it.

    Raises:
        ConfigError: The suffix is unknown, or a package is not installed.
    """
    if path.suffix not in FORMATS:
        known = ", ".join(f"{suffix} ({form.name})" for suffix, form in FORMATS.items())
        raise ConfigError(f"{key}: {path} does not end in one of {known}")
    for package in NEEDED if path.suffix == ".onnx" else ():
        with require_extra("onnx", f"{key}: an .onnx file needs {package}"):
            import_module(package)


def schema_path(path: Path) -> Path:
    """Return the path of the table schema that is written next to a state dict: `model.schema.json` for `model.pt`."""
    return path.with_suffix(".schema.json")


def write_network(network: Network, path: Path, key: str = "-o") -> None:
    """Write a network to a file, in the format of the file's suffix.

    It is written only if the converted network has the same outputs as the original network.

    Args:
        network: The network.
        path: The file.
        key: The option that names it, for error messages.

    Raises:
        ConfigError: The format cannot hold this network, or the file cannot be written.
    """
    form = FORMATS[path.suffix]
    model = network.model["class_path"].rpartition(".")[2]
    others = ", ".join(suffix for suffix in FORMATS if suffix != path.suffix)
    try:
        with quiet_exporters(), torch.no_grad():
            content = form.write(network)
            outputs = form.read(content, network)(network.samples)
    except Exception as error:
        reason = f"{type(error).__name__}; --debug shows more"
        raise ConfigError(f"{key}: {model} cannot be written as {form.name} ({reason}). Use one of {others}") from error
    if not same_outputs(outputs, network.outputs):
        raise ConfigError(f"{key}: {model} gives other outputs as {form.name}. Use one of {others}")
    try:
        if network.schema and path.suffix == ".pt":
            write_atomically(schema_path(path), network.schema.to_json())
        write_atomically(path, content)
    except OSError as error:
        raise ConfigError(f"{key}: {path} cannot be written: {one_line(error)}") from error


@contextmanager
def quiet_exporters() -> Iterator[None]:
    """Context in which exporters show no warnings, log records and prints. Their errors are raised as usual."""
    loggers = [logging.getLogger(name) for name in EXPORTERS]
    before = [each.level for each in loggers]
    with warnings.catch_warnings(), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        warnings.simplefilter("ignore")
        for each in loggers:
            each.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for each, level in zip(loggers, before, strict=True):
                each.setLevel(level)


def same_outputs(one: Tensor, other: Tensor) -> bool:
    """Return whether the outputs of two networks for the same inputs are equal up to rounding errors."""
    if one.shape != other.shape:
        return False
    return bool((one - other).abs().max() <= NEAR * other.abs().max().clamp(min=1e-6))
