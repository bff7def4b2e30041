"""Export a run's adapters as peft's own folder, which `peft.PeftModel.from_pretrained(base, folder)` loads."""

from __future__ import annotations

import copy
import os
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from fl_lightning.analysis.export import Network, as_class, same_outputs
from fl_lightning.client.exported import rebuilt
from fl_lightning.core.errors import ConfigError, one_line
from fl_lightning.core.files import write_atomically
from fl_lightning.core.message import Tensors
from fl_lightning.core.trusted_imports import find_object
from fl_lightning.models import Adapted, Pretrained
from fl_lightning.models.pretrained import HiddenOutputs, model_name, whole_model

if TYPE_CHECKING:
    from peft import LoraConfig

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""The files of the folder, by the names that peft reads."""

PREFIX = "base_model.model."
"""The prefix that peft gives the names of the base's layers."""


def refuse_folder(path: Path, merge: bool, prepare: bool) -> None:
    """Check the options of the export before the run is loaded.

    Args:
        path: The folder to write.
        merge: Whether the adapters are to be added to the weights of their layers.
        prepare: Whether the network is to take samples as they are stored.

    Raises:
        ConfigError: The folder exists, or an option contradicts the format.
    """
    if os.path.lexists(path):
        raise ConfigError(f"-o: {path} already exists. Name another folder, or remove it")
    for key, is_set in {"--merge": merge, "--prepare": prepare}.items():
        if is_set:
            raise ConfigError(f"{key}: peft's folder holds only the adapters and the trained layers. Leave it out.")


def write_adapter(network: Network, path: Path) -> None:
    """Write the adapters of a network, and its layers that are trained whole, as peft's folder.

    It is written only if the base with the adapters from the folder has the same outputs as the network.

    Args:
        network: The network, an `Adapted` of a `Pretrained`.
        path: The folder.

    Raises:
        ConfigError: The network is another one, has other outputs with the adapters from the folder, or the folder
            cannot be written.
    """
    base = described_base(network.model)
    backbone = network.backbone
    assert isinstance(backbone, Adapted)
    assert isinstance(backbone.encoder, HiddenOutputs)
    name = backbone.encoder.output_layer
    tensors = adapter_tensors(backbone, name)
    config = adapter_config(backbone, name, str(base.get("init_args", {}).get("path", "")))
    with tempfile.TemporaryDirectory() as folder:
        files = _files(tensors, config, Path(folder))
        fresh = rebuilt({**network.described, **base}, trust=True)  # the run was trusted when it was opened
        if not same_outputs(_outputs(fresh, Path(folder), network), network.outputs):
            what = "the folder of the base with these adapters has other outputs, because the method or the config"
            fix = "Use --merge, and a .pt or .ckpt file"
            raise ConfigError(f"--peft: {what} changes frozen weights (such as FLoRA, or weights: false). {fix}")
    try:
        path.mkdir(parents=True)
        for file, content in files.items():
            write_atomically(path / file, content)
    except OSError as error:
        raise ConfigError(f"-o: {path} cannot be written: {one_line(error)}") from error


def described_base(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the base of an `Adapted` in a config, a `Pretrained`, as a dict with `class_path`.

    Raises:
        ConfigError: The model is another one.
    """
    base = as_class(model.get("init_args", {}).get("base", {"class_path": "Adapted"}))
    if find_object(model["class_path"]) is not Adapted or find_object(base["class_path"]) is not Pretrained:
        what = "only an Adapted with the base Pretrained has adapters for a model of Hugging Face"
        raise ConfigError(f"--peft: {what}. Leave it out, and name a file, such as -o model.pt")
    return base


def adapter_tensors(backbone: nn.Module, output_layer: str) -> Tensors:
    """Return the trained tensors of an `Adapted` by the names that peft gives them in a file.

    These are the factors of the adapters, without the adapter's name in them, and the layers that are trained whole.

    Args:
        backbone: The network.
        output_layer: The name of the last layer in the model of Hugging Face.
    """

    def renamed(entry: str) -> str:
        return PREFIX + model_name(entry, output_layer).replace(".default.", ".")

    trained = {name for name, parameter in backbone.named_parameters() if parameter.requires_grad}
    factors = {name for name in backbone.state_dict() if ".lora_A." in name or ".lora_B." in name}
    kept: dict[str, Tensor] = {name: backbone.state_dict()[name] for name in sorted(trained | factors)}
    return {renamed(name): value.detach().contiguous().clone() for name, value in kept.items()}


def adapter_config(backbone: Adapted, output_layer: str, path: str) -> LoraConfig:
    """Return peft's configuration of the adapters of an `Adapted`, with the names of the model of Hugging Face.

    Args:
        backbone: The network.
        output_layer: The name of the last layer in the model of Hugging Face.
        path: The folder of the base.
    """
    config: LoraConfig = copy.deepcopy(cast(Any, backbone).peft_config["default"])
    config.target_modules = sorted(model_name(name, output_layer) for name in config.target_modules or ())
    config.modules_to_save = [model_name(name, output_layer) for name in backbone.new_layers] or None
    config.base_model_name_or_path, config.inference_mode = path, True
    return config


def _files(tensors: Tensors, config: LoraConfig, folder: Path) -> dict[str, bytes]:
    """Write the folder's files into a temporary folder, and return their contents by name."""
    from safetensors.torch import save

    config.save_pretrained(str(folder))
    (folder / WEIGHTS).write_bytes(save(tensors, metadata={"format": "pt"}))
    return {name: (folder / name).read_bytes() for name in (WEIGHTS, CONFIG)}


def _outputs(base: nn.Module, folder: Path, network: Network) -> Tensor:
    """Return the outputs of a newly loaded base with the adapters in a folder, for the example inputs of a network."""
    from peft import PeftModel

    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # such as that of peft about entries that it does not find
        loaded: Any = PeftModel.from_pretrained(whole_model(base), str(folder), local_files_only=True)
        outputs: Tensor = HiddenOutputs(loaded.eval())(network.samples)
    return outputs
