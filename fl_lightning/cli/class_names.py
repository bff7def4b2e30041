"""Correct the case of class names on the command line, and suggest how to use torchvision's models."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from contextlib import suppress

from fl_lightning.cli.catalogue import is_in_source, names
from fl_lightning.cli.options import options_of
from fl_lightning.core.spelling import match_case

NESTED = re.compile(r"--(scenario\.\w+|(?!scenario\b)\w+)\.\w+\.[\w.]+")
"""An option within an argument of a class: `--model.head.prediction`."""


def correct_case(words: Sequence[str]) -> list[str]:
    """Correct the case of class names on a command line.

    Nested nulls are rewritten, too: in `--model.head.prediction=null`, jsonargparse turns null into the text `None`. It
    reads the mapping in `--model.head={prediction: null}` correctly.

    Args:
        words: The command line, with each option and its value as one word.
    """
    return [_correct_word(word) for word in words]


def _correct_word(word: str) -> str:
    option, sign, value = word.partition("=")
    if not sign or not option.startswith("--"):
        return word
    if value == "null" and NESTED.fullmatch(option):
        option, _, last = option.rpartition(".")
        return f"{option}={{{last}: null}}"
    if value != "null" and re.fullmatch(r"[A-Za-z][\w-]*", value):
        key = option.removeprefix("--").removesuffix("+").removesuffix(".class_path")
        return f"{option}={_correct_name(value, key)}"
    return word


def _correct_name(name: str, key: str) -> str:
    """Return a class name in the correct case; a torchvision name such as `resnet18` does not become our `ResNet18`."""
    corrected = match_case(name, [*names(key), *options_of("fit").get(key, {}).get("choices", ())])
    is_torchvision = key == "model" and is_in_source(key, name) and name in builders_of_torchvision()
    return name if is_torchvision and corrected != name else corrected


def builders_of_torchvision() -> list[str]:
    """Return the names of torchvision's functions that build models, such as `resnet18`."""
    from torchvision import models

    return models.list_models(models)


def as_backbone(module: str) -> str:
    """Return the command-line options to use a function that builds a network, such as `resnet18`, as the model.

    Args:
        module: The import path of the function, or the name of a model builder of torchvision.
    """
    builder = re.sub(r"^torchvision\.models\.(\w+\.)?", "", module)
    if builder not in builders_of_torchvision():
        return f"--model FromModule --model.module {module} --model.head NAME_OF_ITS_LAST_LAYER"
    head = _last_layer(builder) or "NAME_OF_ITS_LAST_LAYER"
    options = f"--model FromModule --model.module torchvision.models.{builder} --model.head {head}"
    return f"{options} --model.module_args.num_classes 10 (as many as there are classes)"


def _last_layer(builder: str) -> str | None:
    import torch
    from torchvision import models

    linear: list[str] = []
    with torch.device("meta"), suppress(NotImplementedError), warnings.catch_warnings():  # allocates no memory
        warnings.simplefilter("ignore")
        layers = models.get_model_builder(builder)().named_modules()
        linear = [name for name, layer in layers if isinstance(layer, torch.nn.Linear)]
    return linear[-1] if linear else None
