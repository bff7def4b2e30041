"""Anybody's network as a backbone."""

from __future__ import annotations

import inspect
import re
from typing import Any

from torch import nn

from fl_lightning.errors import ConfigError
from fl_lightning.gate import find_object, require_trust
from fl_lightning.models.base import Backbone

WEIGHTS = {"weights", "weights_backbone", "pretrained", "pretrained_backbone"}
"""Arguments of torchvision's builders that download files."""


class FromModule(Backbone):
    """Your own `nn.Module`, cut in two at a layer you name: that layer is the head, all before it the encoder.

    The named layer must be the last thing that the module's `forward` does. In a config:

        model:
          class_path: FromModule
          init_args:
            module: torchvision.models.resnet18
            module_args: {num_classes: 10}
            head: fc

    Args:
        in_shape: Shape of one input; the module has to fit it.
        num_classes: Number of classes, `C`; the module has to put out as many numbers.
        module: Import path of a class, or of a function that builds the module.
        module_args: What it is called with.
        head: Name of the layer, dotted where it is nested (`classifier.6`).

    Raises:
        ConfigError: Nothing can be imported from `module`, it makes no module, or it has no such layer.
    """

    def __init__(
        self,
        in_shape: tuple[int, ...],
        num_classes: int,
        module: str,
        head: str,
        module_args: dict[str, Any] | None = None,
    ) -> None:
        encoder = build(module, module_args or {})
        try:
            layer = encoder.get_submodule(head)
        except AttributeError:
            names = ", ".join(name for name, _ in encoder.named_children())
            raise ConfigError(f"model.head: {module} has no layer {head!r}; its layers are {names}") from None
        widths = [child.in_features for child in layer.modules() if isinstance(child, nn.Linear)]
        if not head or not widths:
            raise ConfigError(f"model.head: {head!r} of {module} holds no linear layer, so it is no head")
        encoder.set_submodule(head, nn.Identity())
        super().__init__(encoder, layer, widths[0])


def build(path: str, arguments: dict[str, Any]) -> nn.Module:
    """Import a class or function and call it; what cannot make an `nn.Module` is not called.

    Raises:
        ConfigError: That fails, or what comes of it is no `nn.Module`.
    """
    if not re.search("[.:]", path):  # it would be imported for being looked at
        raise ConfigError(f"model.module: {path} names nothing in a module; give package.module.Class")
    try:
        maker = find_object(path)
        if not (issubclass(maker, nn.Module) if inspect.isclass(maker) else inspect.isroutine(maker)):
            raise TypeError("it is neither an nn.Module class nor a function")
        if inspect.isbuiltin(maker):  # such as os.system
            raise TypeError("no function of Python's own makes an nn.Module")
        for name in WEIGHTS & arguments.keys():
            require_trust(f"model.module_args.{name}", arguments[name])
        module = maker(**arguments)
    except ConfigError:
        raise
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"model.module: {path} cannot be built: {error}; check module and module_args") from error
    if not isinstance(module, nn.Module):
        raise ConfigError(f"model.module: {path} makes a {type(module).__name__}, not an nn.Module")
    return module
