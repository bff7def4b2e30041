"""A trained network as a file that other programs open: `fl-lightning export`."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import lightning as L
import torch
from torch import Tensor, nn

from fl_lightning.client.exported import described_objective, rebuilt
from fl_lightning.client.module import ClientModule
from fl_lightning.core.errors import ConfigError, one_line
from fl_lightning.core.files import write_atomically
from fl_lightning.core.objectives import Classification, Objective
from fl_lightning.data.schema import TableSchema
from fl_lightning.models.wrapped import original_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fl_lightning.orchestrator import FederatedOrchestrator

NEEDED = ("onnx", "onnxscript", "onnxruntime")
"""What an `.onnx` file is written, and tried, with."""

SAMPLES, SHOWN = 5, 2
"""How many samples an exported network is compared on, and how many of them whoever traces it is shown."""

NEAR = 1e-3
"""How far outputs may be apart, as a share of the largest: other programs sum in another order."""

Call = Callable[[Tensor], Tensor]


@dataclass
class Network:
    """A network to be written to a file.

    Args:
        backbone: The network, trained; a copy of it is written, in float32.
        model: What a run's config says of it: its `class_path` and `init_args`.
        in_shape: Shape of one input, without the batch, as the network was built for it.
        num_classes: As the network was built for it.
        samples: What the network is given, `(n, ...)`, n being 2 or more.
        objective: What its outputs are for.
        schema: The table's columns, where it was trained on a table.
    """

    backbone: nn.Module
    model: Mapping[str, Any]
    in_shape: tuple[int, ...]
    num_classes: int
    samples: Tensor
    objective: Objective = Classification()
    schema: TableSchema | None = None
    outputs: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.backbone = copy.deepcopy(self.backbone).cpu().float().eval()
        samples = self.samples[torch.arange(SAMPLES) % len(self.samples)].cpu().contiguous()
        as_stored = isinstance(self.backbone, Prepared) or not samples.is_floating_point()
        self.samples = samples if as_stored else samples.float()
        with torch.no_grad():
            self.outputs = self.backbone(self.samples)

    @cached_property
    def described(self) -> dict[str, Any]:
        """The network in plain data, of which `rebuilt` makes one of the same kind."""
        return {**self.model, "in_shape": list(self.in_shape), "num_classes": self.num_classes}


class Prepared(nn.Module):
    """A network that takes samples as a dataset stores them, or a table's raw rows.

    Args:
        backbone: The network.
        prepare: Turns a batch of them into what the network takes.
    """

    def __init__(self, backbone: nn.Module, prepare: Call) -> None:
        super().__init__()
        self.backbone, self.prepare = backbone, prepare

    def forward(self, x: Tensor) -> Tensor:
        """The network's outputs for a stored batch."""
        return self.backbone(self.prepare(x))


def network_of(
    run: FederatedOrchestrator, model: Mapping[str, Any], client: int | None = None, prepare: bool = False
) -> Network:
    """The network of a run that was opened: the global one, or a client's as it stands.

    Args:
        run: The run.
        model: What its config says of the model.
        client: Whose.
        prepare: Have it take samples as they are stored, or a table's raw rows.

    Raises:
        ConfigError: There is no global one, or no such client.
    """
    run.worker.compile = False
    if client is not None:
        module = run.client_module(client)
    elif run.algorithm.one_model:
        module = run.worker.shared_module(run.state["model"])
    else:
        method, last = type(run.algorithm).__name__, len(run.data.shards) - 1
        raise ConfigError(f"client: {method} has no global model; say whose is wanted with --client, 0 to {last}")
    loaded = run.data.data
    backbone, schema = original_of(module.backbone.cpu()), loaded.schema
    samples = schema.examples(SAMPLES) if schema else loaded.x_test[:SAMPLES]
    to_input = (lambda rows: loaded.prepare(schema.encode(rows))) if schema else loaded.prepare
    if prepare:
        backbone = Prepared(backbone, to_input)
    else:
        samples = to_input(samples)
    return Network(backbone, model, loaded.in_shape, loaded.num_classes, samples, run.data.objective, schema)


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
    described = {"backbone": network.described, "objective": described_objective(network.objective)}
    # ClientModule has no argument `schema`, so Lightning leaves it out when it builds one.
    schema = {"schema": network.schema.to_json()} if network.schema else {}
    checkpoint = {
        "pytorch-lightning_version": L.__version__,
        "epoch": 0,
        "global_step": 0,
        "state_dict": ClientModule(network.backbone).state_dict(),
        "hyper_parameters": described | schema,
    }
    torch.save(checkpoint, content := BytesIO())
    return content.getvalue()


def _from_checkpoint(content: bytes, network: Network) -> Call:
    backbone = rebuilt(network.described, trust=True)  # the run that says so was trusted
    own: dict[str, Any] = {"backbone": backbone, "objective": network.objective}
    module = ClientModule.load_from_checkpoint(BytesIO(content), map_location="cpu", **own)
    return module.eval()


def _torchscript(network: Network) -> bytes:
    traced = torch.jit.trace(network.backbone, network.samples[:SHOWN], check_trace=False)
    extra = {"schema.json": network.schema.to_json()} if network.schema else {}
    torch.jit.save(traced, content := BytesIO(), _extra_files=extra)
    return content.getvalue()


def _from_torchscript(content: bytes, network: Network) -> Call:
    return torch.jit.load(BytesIO(content))


def _onnx(network: Network) -> bytes:
    program = torch.onnx.export(
        network.backbone,
        (network.samples[:SHOWN],),
        dynamo=True,
        dynamic_shapes=({0: torch.export.Dim("batch")},),
        input_names=["input"],
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
    return lambda x: torch.from_numpy(session.run(["output"], {"input": x.numpy()})[0])


class Format(NamedTuple):
    """How a network becomes a file's content, and how that is called again."""

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
"""Formats that hold no code, and so cannot prepare samples."""


def refuse_target(path: Path, prepare: bool = False) -> None:
    """Refuse a file that cannot be written, before there is anything to be written.

    Args:
        path: The file.
        prepare: Whether the network is to take samples as they are stored.

    Raises:
        ConfigError: Its name tells of no format, it is there already, packages are missing, or it holds weights alone.
    """
    if path.suffix not in FORMATS:
        known = ", ".join(f"{suffix} ({form.name})" for suffix, form in FORMATS.items())
        raise ConfigError(f"-o: {path} does not end in one of {known}")
    for file in (path, schema_path(path)) if path.suffix == ".pt" else (path,):
        if os.path.lexists(file):
            raise ConfigError(f"-o: {file} is there already; name another file, or remove it")
    if prepare and path.suffix in WEIGHTS_ONLY:
        raise ConfigError(f"--prepare: a {FORMATS[path.suffix].name} holds weights alone; take .onnx or .ts")
    if path.suffix == ".onnx":
        for package in NEEDED:
            try:
                import_module(package)
            except ImportError as error:
                mend = "pip install 'fl-lightning[onnx]'"
                raise ConfigError(f"-o: an .onnx file needs {package}, which is not there; {mend}") from error


def schema_path(path: Path) -> Path:
    """Return the JSON file beside a state dict that holds its table's schema: `model.schema.json` of `model.pt`."""
    return path.with_suffix(".schema.json")


def write(network: Network, path: Path) -> None:
    """Write a network to a file in the format of its suffix, once what would be written gives the same outputs.

    Raises:
        ConfigError: The format cannot hold this network, or the file cannot be written.
    """
    form = FORMATS[path.suffix]
    model = network.model["class_path"].rpartition(".")[2]
    others = ", ".join(suffix for suffix in FORMATS if suffix != path.suffix)
    try:
        with _hushed(), torch.no_grad():
            content = form.write(network)
            outputs = form.read(content, network)(network.samples)
    except Exception as error:
        why = f"{type(error).__name__}; --debug shows more"
        raise ConfigError(f"-o: {model} cannot be written as {form.name} ({why}); take one of {others}") from error
    if not same_outputs(outputs, network.outputs):
        raise ConfigError(f"-o: {model} gives other outputs as {form.name}; take one of {others}")
    try:
        if network.schema and path.suffix == ".pt":
            write_atomically(schema_path(path), network.schema.to_json())
        write_atomically(path, content)
    except OSError as error:
        raise ConfigError(f"-o: {path} cannot be written: {one_line(error)}") from error


def same_outputs(one: Tensor, other: Tensor) -> bool:
    """Whether two networks' outputs are the same but for how sums round."""
    if one.shape != other.shape:
        return False
    return bool((one - other).abs().max() <= NEAR * other.abs().max().clamp(min=1e-6))


@contextmanager
def _hushed() -> Iterator[None]:
    """Without the warnings of torch's exporters, which are for who writes networks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
