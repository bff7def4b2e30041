"""Pretrained models of Hugging Face, from a local folder."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from fl_lightning.core.errors import ConfigError, check_number, one_line, require_extra
from fl_lightning.core.inputs import Inputs, Shapes
from fl_lightning.core.trusted_imports import require_trust
from fl_lightning.models.base import Backbone
from fl_lightning.models.wrapped import has_several_inputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PretrainedTask = Literal["sequence_classification", "token_classification", "causal_lm", "image_classification"]
CLASSES: dict[str, str] = {
    "sequence_classification": "AutoModelForSequenceClassification",
    "token_classification": "AutoModelForTokenClassification",
    "causal_lm": "AutoModelForCausalLM",
    "image_classification": "AutoModelForImageClassification",
}
"""The class of Hugging Face's `transformers` for each task."""

SAME = 1e-3
"""Tolerance when the outputs of encoder and head are compared with those of the whole model, in float32."""


class Pretrained(Backbone):
    """A model of Hugging Face, with the weights in a local folder. It needs the package `transformers`.

    The last linear layer is the head, and everything before it is the encoder. A sample is a tensor of token ids, or
    the inputs by their names in `transformers`, such as `input_ids` and `attention_mask`. Without `attention_mask`, the
    padding tokens are masked.

    Args:
        in_shape: Shape of one input, or the shapes of several inputs by name.
        num_classes: Number of classes, `C`. A `causal_lm` has an output for each token of its vocabulary instead.
        path: Folder with `config.json` and weights, as `save_pretrained` writes it. With `download`, also the name of a
            model on the Hugging Face Hub.
        task: What is predicted: the class of a text (`sequence_classification`), of each token or of an image, or the
            next token (`causal_lm`).
        weights: Whether to load the weights. Otherwise they are random, and `config.json` is enough.
        download: Whether files may be downloaded from the Hub. By default the internet is not used.
        pad_token_id: Id of the token at the end of short texts, if `config.json` has none, such as that of GPT-2.

    Attributes:
        new_layers: Names of the layers that are not pretrained: the head and, in some models, layers before it, or a
            pooler that the folder's weights lack.

    Raises:
        ConfigError: The folder has no such model, the model computes something after its last linear layer, inputs have
            no names, or `transformers` is not installed.
    """

    several_inputs: ClassVar = True

    def __init__(
        self,
        in_shape: tuple[int, ...] | Shapes,
        num_classes: int,
        path: str,
        task: PretrainedTask = "sequence_classification",
        weights: bool = True,
        download: bool = False,
        pad_token_id: int | None = None,
    ) -> None:
        require_trust("model.download", download)
        check_number("model.pad_token_id", pad_token_id, "[0, inf)")
        if has_several_inputs(in_shape) and not isinstance(in_shape, dict):
            fix = "Name them as transformers does, such as input_ids and attention_mask"
            raise ConfigError(f"model: a sample has {len(in_shape)} inputs without names. {fix}.")
        options = {} if task == "causal_lm" else {"num_labels": num_classes}
        options |= {} if pad_token_id is None else {"pad_token_id": pad_token_id}
        network, missing = load_network(path, task, weights, download, options)
        name = output_layer(network, path)
        head: Any = network.get_submodule(name)
        probe = torch.zeros(2, *in_shape) if task == "image_classification" else torch.ones(2, 3, dtype=torch.int64)
        expected = _outputs(HiddenOutputs(network), probe, path)
        network.set_submodule(name, nn.Identity())
        super().__init__(HiddenOutputs(network, name), head, head.in_features)
        if not torch.allclose(_outputs(self, probe, path), expected, rtol=SAME, atol=SAME):
            fix = "Wrap it in an nn.Module of your own, which returns its `.logits`"
            raise ConfigError(f"model.path: {type(network).__name__} changes the outputs of its last layer. {fix}.")
        outside = [each for each, layer in _outside_base(network) if [*layer.parameters(recurse=False)]]
        new = dict.fromkeys([*(outside if task != "causal_lm" else []), *missing])
        has_new_head = task != "causal_lm" or name in missing
        self.new_layers = (*(f"encoder.network.{each}" for each in new if each != name), *["head"] * has_new_head)


class HiddenOutputs(nn.Module):
    """A model of Hugging Face that takes a tensor, or inputs by name, and returns its `logits`.

    Args:
        network: The model. Without its last layer, the logits are the features.
        output_layer: The name of the last layer in the model, if `nn.Identity` replaces it.
    """

    def __init__(self, network: PreTrainedModel, output_layer: str = "") -> None:
        super().__init__()
        self.network, self.output_layer = network, output_layer

    def forward(self, x: Tensor | Inputs | dict[str, Tensor]) -> Tensor:
        """Return the outputs of a batch: a tensor of token ids or images, or inputs by name.

        Token ids get a mask of the tokens that are no padding, if it is missing and the padding token is known.
        """
        named: Any = x.tensors if isinstance(x, Inputs) else x
        inputs = {self.network.main_input_name: named} if isinstance(named, Tensor) else dict(named)
        padding = getattr(self.network.config, "pad_token_id", None)
        if "input_ids" in inputs and "attention_mask" not in inputs and padding is not None:
            inputs["attention_mask"] = (inputs["input_ids"] != padding).long()
        return self.network(**inputs).logits


def whole_model(backbone: nn.Module) -> PreTrainedModel:
    """Return a copy of the Hugging Face model in a `Pretrained`, or in an `Adapted` of one, with its last layer.

    Raises:
        ConfigError: The backbone has no such model.
    """
    encoder, head = getattr(backbone, "encoder", None), getattr(backbone, "head", None)
    if not (isinstance(encoder, HiddenOutputs) and isinstance(head, nn.Module)):
        fix = "Its base has to be Pretrained."
        raise ConfigError(f"model: {type(backbone).__name__} contains no model of Hugging Face. {fix}")
    network, head = copy.deepcopy((encoder.network, head))
    network.set_submodule(encoder.output_layer, head)
    return network


def model_name(entry: str, output_layer: str) -> str:
    """Return the name in the Hugging Face model of a layer or an entry of a `Pretrained` or `Adapted` backbone.

    Args:
        entry: The name in the backbone, such as `encoder.network.bert.pooler.dense` or `head.weight`.
        output_layer: The name of the last layer in the model.

    Example:
        >>> model_name("encoder.network.bert.pooler.dense", "classifier"), model_name("head.weight", "classifier")
        ('bert.pooler.dense', 'classifier.weight')
    """
    part, _, rest = entry.partition(".")
    if part == "head":
        return f"{output_layer}.{rest}" if rest else output_layer
    return entry.removeprefix("encoder.network.")


def load_network(
    path: str, task: PretrainedTask, weights: bool, download: bool, options: dict[str, Any]
) -> tuple[PreTrainedModel, list[str]]:
    """Load a model of Hugging Face in float32 and train mode. Code in the folder is never run.

    Args:
        path: The folder, or with `download` also the name of a model on the Hub.
        task: What the model predicts.
        weights: Whether to load its weights; otherwise they are random.
        download: Whether the internet may be used.
        options: Entries of its configuration to replace, such as `num_labels`.

    Returns:
        The model, and the names of its layers that are not in the folder's weights, such as a pooler.

    Raises:
        ConfigError: The model cannot be loaded, or `transformers` is not installed.
    """
    with require_extra("transformers", "model: Pretrained needs the package transformers"):
        import transformers
    if not (download or Path(path).is_dir()):
        fix = "Give a folder with config.json, or set model.download to true"
        raise ConfigError(f"model.path: folder {path!r} not found. {fix}.")
    source = {"local_files_only": not download, "trust_remote_code": False}
    model = getattr(transformers, CLASSES[task])
    try:
        with _without_messages():
            config = transformers.AutoConfig.from_pretrained(path, **source, **options)
            config.use_cache = False
            if not weights:
                return model.from_config(config, trust_remote_code=False).float().train(), []
            options = {"config": config, "dtype": torch.float32, "output_loading_info": True}
            network, found = model.from_pretrained(path, **options, **source)
            return network.train(), [key.rpartition(".")[0] for key in sorted(found["missing_keys"])]
    except (OSError, ValueError, RuntimeError, AssertionError) as error:
        what = f"{path!r} cannot be loaded as a model for {task} ({one_line(error)})"
        raise ConfigError(f"model.path: {what}. Check the folder, model.task and model.weights.") from error


@contextmanager
def _without_messages() -> Iterator[None]:
    """Context without the progress bars and warnings of `transformers`, such as those about a new head."""
    from transformers.utils import logging

    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()


def output_layer(network: PreTrainedModel, path: str) -> str:
    """Return the name of a model's last linear layer, which is outside of its pretrained base model.

    Raises:
        ConfigError: There is none.
    """
    names = [name for name, layer in _outside_base(network) if isinstance(layer, nn.Linear)]
    if not names:
        what = f"{type(network).__name__} does not end with a linear layer"
        raise ConfigError(f"model.path: {path!r}: {what}. Wrap it in an nn.Module of your own.")
    return names[-1]


def _outside_base(network: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    base = f"{network.base_model_prefix}."
    return ((name, layer) for name, layer in network.named_modules() if not f"{name}.".startswith(base) and name)


def _outputs(module: nn.Module, probe: Tensor, path: str) -> Tensor:
    """Return a module's outputs for a batch, in eval mode. The module is in train mode afterwards."""
    try:
        with torch.no_grad():
            return module.eval()(probe)
    except (ValueError, RuntimeError, IndexError) as error:
        fix = "Check model.task and model.pad_token_id, and the shape of the inputs"
        raise ConfigError(f"model.path: {path!r} cannot be called ({one_line(error)}). {fix}.") from error
    finally:
        module.train()
