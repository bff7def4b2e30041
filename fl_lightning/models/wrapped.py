"""Wrap any `nn.Module` as a backbone."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import product
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from fl_lightning.core.errors import ConfigError, one_line
from fl_lightning.core.inputs import Inputs, Shapes
from fl_lightning.core.trusted_imports import find_object, require_trust
from fl_lightning.models.base import Backbone, tapped

WEIGHTS = {"weights", "weights_backbone", "pretrained", "pretrained_backbone"}
"""Arguments of torchvision's functions that download weights."""

HUGGING_FACE = (
    "is a model of Hugging Face, which takes a config and returns an object. Use model: Pretrained with a folder of "
    "weights, or build it in your own nn.Module and return its `.logits` from forward (docs/your-model.md)"
)
"""Why such a model cannot be used directly, and what to do."""

OURS = "fl_lightning.models."
"""Package of our networks. Most of them take one tensor."""


class FromModule(Backbone):
    """Your own `nn.Module` as a model. You name its head; everything before the head is the encoder.

    The module's own `forward` is computed. If it ends with the head, the encoder and the head can be used separately.
    If it computes anything after or around the head (a `log_softmax`, a skip connection), the module is kept whole:
    features are the head's input, and methods that need the encoder or the head alone refuse it. In a config:

        model:
          class_path: FromModule
          init_args:
            module: torchvision.models.resnet18
            module_args: {num_classes: 10}
            head: fc

    Args:
        in_shape: Shape of one input, which the module has to accept, or the shapes of several inputs.
        num_classes: Number of classes, `C`, and of the module's outputs.
        module: Import path of a class, or of a function that builds the module.
        module_args: Arguments of the class or function.
        head: Name of the layer, with dots if it is nested (`classifier.6`).

    Raises:
        ConfigError: `module` cannot be imported or does not build a module, or the module does not accept such inputs
            or does not have or call this layer.
    """

    several_inputs: ClassVar = True

    def __init__(
        self,
        in_shape: tuple[int, ...] | Shapes,
        num_classes: int,
        module: str,
        head: str,
        module_args: dict[str, Any] | None = None,
    ) -> None:
        network = build(module, module_args or {}, in_shape, num_classes)
        accept_inputs(network, in_shape)
        try:
            layer = network.get_submodule(head)
        except AttributeError:
            names = ", ".join(name for name, _ in network.named_children())
            raise ConfigError(f"model.head: {module} has no layer {head!r}; its layers are {names}") from None
        widths = [child.in_features for child in layer.modules() if isinstance(child, nn.Linear)]
        if not head or not widths:
            raise ConfigError(f"model.head: {head!r} of {module} holds no linear layer. Name a head that has one.")
        is_split = ends_with(network, head, in_shape, module)
        if is_split:
            network.set_submodule(head, nn.Identity())
            super().__init__(network, layer, widths[0])
        else:
            nn.Module.__init__(self)
            self.module, self.feature_dim, self.predictor = network, widths[0], None
        self.path, self.cut, self.is_split = module, head, is_split

    def __getattr__(self, name: str) -> Any:
        """Raise a clear error if `encoder` or `head` is read, but the module could not be split into them."""
        if name in ("encoder", "head") and not self.is_split:
            raise ConfigError(
                f"model.head: {self.path} computes something after or around {self.cut!r}, so its encoder and head "
                "cannot be used separately, as this method needs. Use a module whose forward ends with the head"
            )
        return super().__getattr__(name)

    def features_and_logits(self, x: Tensor | Inputs) -> tuple[Tensor, Tensor]:
        """Return the features `(B, d)`, which are the head's input, and the logits `(B, C)` of a batch."""
        if self.is_split:
            return super().features_and_logits(x)
        with tapped(self.module, [self.cut]) as taps:
            logits = self.module(x)
        return taps[self.cut], logits

    def forward(self, x: Tensor | Inputs) -> Tensor:
        """Return the logits `(B, C)` that the module's own `forward` computes."""
        return super().forward(x) if self.is_split else cast(Tensor, self.module(x))

    @property
    def network(self) -> nn.Module:
        """The user's module, or only the encoder if the module could be split into encoder and head."""
        return self.encoder if self.is_split else self.module

    @contextmanager
    def assembled(self) -> Iterator[nn.Module]:
        """Context manager that yields the user's original module, with its head in place."""
        if not self.is_split:
            yield self.module
            return
        placeholder = self.encoder.get_submodule(self.cut)
        self.encoder.set_submodule(self.cut, self.head)
        try:
            yield self.encoder
        finally:
            self.encoder.set_submodule(self.cut, placeholder)

    def original(self) -> nn.Module:
        """Return the user's module with the current weights under their original names."""
        if not self.is_split:
            return self.module
        with self.assembled() as network:
            return copy.deepcopy(network)


def original_of(backbone: nn.Module) -> nn.Module:
    """Return the module inside a `FromModule`. Any other network is returned unchanged."""
    return backbone.original() if isinstance(backbone, FromModule) else backbone


def ends_with(module: nn.Module, head: str, in_shape: tuple[int, ...] | Shapes, path: str) -> bool:
    """Return whether a module returns its head's output unchanged, so that it can be split before the head.

    It is called with two samples, in train mode and in eval mode. Equal numbers are not enough, because a `clamp` does
    not change small ones. The output must be the same tensor, not modified in place.

    Args:
        module: The module. A copy of it is called.
        head: The name of the head.
        in_shape: Shape of one input.
        path: Name of the module in messages.

    Raises:
        ConfigError: The module does not accept such inputs, or does not call the layer.
    """
    module = copy.deepcopy(module)
    layer, outputs = module.get_submodule(head), []
    layer.register_forward_hook(lambda _layer, _inputs, output: outputs.append((output, output._version)))
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        x = probe(module.eval(), in_shape, path)
        for training in (True, False):
            outputs.clear()
            returned = module.train(training)(x)
            if not outputs:
                raise ConfigError(f"model.head: {path} does not call {head!r}. Name the layer of the outputs")
            if any(returned is not output or version != output._version for output, version in outputs):
                return False
        module.set_submodule(head, nn.Identity())
        try:
            return torch.equal(layer(module(x)), returned)
        except Exception:  # the module transforms the layer's output in a way that fails on the layer's input
            return False


def probe(module: nn.Module, in_shape: tuple[int, ...] | Shapes, path: str) -> Tensor | Inputs:
    """Try a module on batches of two made-up samples, and return the first batch that it accepts.

    For each input, random floating-point numbers are tried first, then integer zeros as token ids.

    Raises:
        ConfigError: The module accepts no such batch.
    """
    several = has_several_inputs(in_shape)
    shapes: Any = in_shape if several else (in_shape,)
    sizes = [(2, *shape) for shape in (shapes.values() if isinstance(shapes, dict) else shapes)]
    first: Exception | None = None
    kind: Any = torch.rand, partial(torch.zeros, dtype=torch.long)
    for kinds in product(kind, repeat=len(sizes)):
        parts = [kind(*size) for kind, size in zip(kinds, sizes, strict=True)]
        named = dict(zip(shapes, parts, strict=True)) if isinstance(shapes, dict) else tuple(parts)
        batch = Inputs(named) if several else parts[0]
        try:
            module(batch)
            return batch
        except Exception as error:
            first = first or error
    shape = ", ".join(map(str, sizes))
    raise ConfigError(
        f"model.module: {path} cannot take a batch of shape {shape}: {one_line(str(first))}. Fix module_args, or "
        "take another module"
    ) from first


def has_several_inputs(in_shape: Sequence[Any] | Shapes) -> bool:
    """Return whether `in_shape` describes several inputs, which is the case for a dict or tuple of shapes."""
    return isinstance(in_shape, dict) or any(isinstance(size, Sequence) for size in in_shape)


def accept_inputs(network: nn.Module, in_shape: tuple[int, ...] | Shapes) -> None:
    """If samples have several inputs, add a hook that unpacks an `Inputs` object into the arguments of `forward`.

    Raises:
        ConfigError: `forward` does not take these tensors.
    """
    if has_several_inputs(in_shape):
        call_arguments(network, in_shape)
        network.register_forward_pre_hook(_give_tensors, with_kwargs=True)


def _give_tensors(network: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, Any] | None:
    return call_arguments(network, args[0].tensors) if args and isinstance(args[0], Inputs) else None


def call_arguments(network: nn.Module, tensors: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Convert the inputs of a network to positional and keyword arguments for its `forward`.

    A dict becomes keyword arguments and a tuple becomes positional arguments, if `forward` takes these. Otherwise
    `forward` gets the dict or tuple as its only argument.

    Raises:
        ConfigError: `forward` takes neither.
    """
    signature = inspect.signature(network.forward)
    separate: tuple[Any, Any] = ((), tensors) if isinstance(tensors, dict) else (tuple(tensors), {})
    for args, options in (separate, ((tensors,), {})):
        with suppress(TypeError):
            signature.bind(*args, **options)
            return args, options
    given = ", ".join(tensors) if isinstance(tensors, dict) else f"a tuple of {len(tensors)}"
    what = f"{type(network).__name__}.forward takes {signature}, and the inputs of a sample are {given}"
    raise ConfigError(f"model: {what}. Use the same names, or one parameter for all inputs.")


def build_network(factory: Any, in_shape: tuple[int, ...] | Shapes, num_classes: int) -> nn.Module:
    """Build a network with a factory: a class or function, which need not take `in_shape` and `num_classes`.

    Raises:
        ConfigError: The factory is a module, not its class; or the network does not take several inputs.
    """
    if isinstance(factory, nn.Module):
        fix = "Give its class, or a function that builds it, so that the initial weights come from the run's seed."
        raise ConfigError(f"model: got an object of the class {type(factory).__name__}. {fix}")
    if not callable(factory):
        fix = "Give a class, a function that builds the network, or partial(FromModule, module=..., head=...)"
        raise ConfigError(f"model: got an object of type {type(factory).__name__}, which cannot be called. {fix}.")
    called = constructor_of(factory)
    called = called.func if isinstance(called, partial) else called
    unpacks = getattr(called, "several_inputs", False)
    if has_several_inputs(in_shape) and not unpacks and called.__module__.startswith(OURS):
        what = f"{called.__name__} takes one tensor, and a sample of this dataset has {len(in_shape)} inputs"
        raise ConfigError(f"model: {what}. Name a network of your own whose forward takes them.")
    if is_hugging_face(called):
        raise ConfigError(f"model: {called.__qualname__} {HUGGING_FACE}")
    network = factory(**arguments_from_data(factory, in_shape, num_classes))
    if not isinstance(network, nn.Module):
        raise ConfigError(f"model: it builds an object of type {type(network).__name__}. Return an nn.Module.")
    if not unpacks:
        accept_inputs(network.encoder if isinstance(network, Backbone) else network, in_shape)
    return network


def initialise_lazy_layers(network: nn.Module, x: Tensor | Inputs) -> None:
    """Initialise lazy layers, such as `nn.LazyLinear`, by a forward pass. Without such layers, do nothing.

    Args:
        network: The network.
        x: A batch of inputs.
    """
    if any(map(torch.nn.parameter.is_lazy, (*network.parameters(), *network.buffers()))):
        modes = [(layer, layer.training) for layer in network.modules()]
        with torch.no_grad():
            network.eval()(x)
        for layer, training in modes:
            layer.training = training


def is_hugging_face(builder: Any) -> bool:
    """Return whether a class or function is a model class of Hugging Face's `transformers`, or a method of one."""
    return str(getattr(getattr(builder, "__self__", builder), "__module__", "")).partition(".")[0] == "transformers"


def arguments_from_data(factory: Any, in_shape: tuple[int, ...] | Shapes, num_classes: int) -> dict[str, Any]:
    """Return `in_shape` and `num_classes` as keyword arguments, each only if the network's factory takes it."""
    values = {"in_shape": in_shape, "num_classes": num_classes}
    called = constructor_of(factory)
    parameters = inspect.signature(called).parameters
    passes_on = not inspect.isclass(called) or issubclass(called, Backbone)  # any nn.Module has **kwargs without a use
    takes_any = passes_on and any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    return {name: value for name, value in values.items() if takes_any or name in parameters}


def constructor_of(factory: Any) -> Any:
    """Return the class or function that builds a network, unwrapped from jsonargparse's `partial` if necessary.

    For a factory from a config, this is the class inside jsonargparse's `partial`. Any other is returned unchanged.
    """
    if isinstance(factory, partial):  # in that of jsonargparse, the class is the first argument
        return next(filter(inspect.isclass, factory.args), factory)
    return factory


def outputs_option(factory: Any) -> str | None:
    """Return the config key for a network's number of outputs, guessed from its constructor's argument names.

    None if no argument has such a name.
    """
    key, called, from_data = "model", constructor_of(factory), {"in_shape", "num_classes"}
    if isinstance(factory, partial) and "module" in factory.keywords:  # of a `FromModule`
        key, called = "model.module_args", find_object(factory.keywords["module"])
        from_data -= set(factory.keywords.get("module_args") or {})
    parameters = [name for name in inspect.signature(called).parameters if name not in from_data | {"dropout"}]
    return next((f"{key}.{name}" for name in parameters if re.search("class|out|label", name)), None)


def build(path: str, arguments: dict[str, Any], in_shape: tuple[int, ...] | Shapes, num_classes: int) -> nn.Module:
    """Import a class or function by its path, and return the `nn.Module` that it builds.

    `in_shape` and `num_classes` are passed to it if its signature names them and `arguments` does not.

    Raises:
        ConfigError: The import or the call fails, or the result is not an `nn.Module`.
    """
    if not re.search("[.:]", path):  # `find_object` would import it as a module
        raise ConfigError(f"model.module: {path} is not an import path such as package.module.Class")
    try:
        builder = find_object(path)
        if not (issubclass(builder, nn.Module) if inspect.isclass(builder) else inspect.isroutine(builder)):
            raise TypeError("it is neither an nn.Module class nor a function")
        if inspect.isbuiltin(builder):  # such as os.system
            raise TypeError("a built-in function does not build an nn.Module")
        for name in WEIGHTS & arguments.keys():
            require_trust(f"model.module_args.{name}", arguments[name])
        named = inspect.signature(builder).parameters
        from_data = arguments_from_data(builder, in_shape, num_classes).items()
        module = builder(**{name: value for name, value in from_data if name in named} | arguments)
    except ConfigError:
        raise
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"model.module: {path} cannot be built: {error}; check module and module_args") from error
    if not isinstance(module, nn.Module):
        raise ConfigError(f"model.module: {path} builds a {type(module).__name__}, not an nn.Module")
    return module
