"""Names of classes on the command line: their case, and torchvision's builders of networks."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from contextlib import suppress

from fl_lightning.cli.catalogue import is_in_source, names
from fl_lightning.cli.options import options_of
from fl_lightning.core.spelling import same

NESTED = re.compile(r"--(scenario\.\w+|(?!scenario\b)\w+)\.\w+\.[\w.]+")
"""An option within an argument of a class: `--model.head.prediction`."""


def spelled(words: Sequence[str]) -> list[str]:
    """A command line with the names of its classes in their own case, and null where jsonargparse would lose it.

    It hands what stands within an argument of a class on as text, null as Python's `None`; in a mapping it stays null.
    """
    found = list(words)
    for place, word in enumerate(words):
        option, apart, value = word.partition("=")
        if not option.startswith("--"):
            continue
        at = place if apart else place + 1
        value = value if apart else "".join(words[at : at + 1])
        key = option.removeprefix("--").removesuffix("+").removesuffix(".class_path")
        new = value
        if value == "null" and NESTED.fullmatch(option):
            option, _, last = option.rpartition(".")
            new = f"{{{last}: null}}"
        elif re.fullmatch(r"[A-Za-z][\w-]*", value) and value != "null":
            new = _in_its_own_case(value, key)
        if new != value:
            found[place : at + 1] = [f"{option}={new}"] if apart else [option, new]
    return found


def _in_its_own_case(name: str, key: str) -> str:
    """A class's name as it is spelled, but where it could be torchvision's `resnet18` as well as our `ResNet18`."""
    found = same(name, [*names(key), *options_of("fit").get(key, {}).get("choices", ())])
    unclear = key == "model" and found != name and is_in_source(key, name) and name in builders_of_torchvision()
    return name if unclear else found


def builders_of_torchvision() -> list[str]:
    """The names of torchvision's functions that build a classifier: those that `torchvision.models` itself has."""
    from torchvision import models

    return models.list_models(models)


def as_backbone(module: str) -> str:
    """The options that make of anybody's module a backbone, by `FromModule`.

    Args:
        module: Its import path, or the bare name of a function of torchvision's that builds one.
    """
    builder = module.removeprefix("torchvision.models.")
    if builder not in builders_of_torchvision():
        return f"--model FromModule --model.module {module} --model.head NAME_OF_ITS_LAST_LAYER"
    head = _last_layer(builder) or "NAME_OF_ITS_LAST_LAYER"
    options = f"--model FromModule --model.module torchvision.models.{builder} --model.head {head}"
    return f"{options} --model.module_args.num_classes 10 (as many as there are classes)"


def _last_layer(builder: str) -> str | None:
    import torch
    from torchvision import models

    linear = []
    with torch.device("meta"), suppress(NotImplementedError), warnings.catch_warnings():  # no numbers, no memory
        warnings.simplefilter("ignore")
        layers = models.get_model_builder(builder)().named_modules()
        linear = [name for name, layer in layers if isinstance(layer, torch.nn.Linear)]
    return linear[-1] if linear else None
