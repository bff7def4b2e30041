"""Shorten jsonargparse's error messages to one line: the key, the value, and the expected type.

`unknown_names` refuses unknown keys and classes before jsonargparse parses them. The errors handled here are about
values of a wrong type, missing arguments, and classes that have to be imported first.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, get_args

from jsonargparse import ArgumentParser, Namespace

from fl_lightning.cli.catalogue import CLASS_KEYS
from fl_lightning.cli.class_names import as_backbone
from fl_lightning.cli.unknown_names import CLASS_EXPECTED, KeyChecker, class_choices, quote
from fl_lightning.core.arguments import argument_types
from fl_lightning.core.config_files import CommandLine
from fl_lightning.core.errors import ConfigError, FLError, one_line
from fl_lightning.core.trusted_imports import find_object, refusal

VALUE = r" value: ?(.*?)(?: - |- Expected| Given value|\. Got value|$)"
"""Matches the value in a message of jsonargparse, after `Got` or, with several alternatives, `Given`."""

MIXED = re.compile(
    r"- Type <class '[\w.]+'> expects a function or a callable class: Expected '[\w.]+\.Mixed' to be a subclass of "
    r"<class '\w+'>\.(\. Got value: .*?(?= - (Type|Problem) )| )"
)
"""Matches what a message about a `Mixed` says about the other types of `model`, which it does not have."""

FUNCTIONS = {
    "optimizer": "(params: Iterable) -> torch.optim.Optimizer",
    **dict.fromkeys(
        ("lr_scheduler", "round_lr_scheduler"),
        "(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler",
    ),
}
"""Types with which jsonargparse accepts a function in the place of a class, by key."""


@contextmanager
def readable_errors(parser: ArgumentParser, line: CommandLine = CommandLine()) -> Iterator[None]:
    """Context manager: turn errors of jsonargparse and of the constructors it calls into a one-line `ConfigError`.

    Args:
        parser: The parser that is used inside.
        line: The command line that it parses. With it, a message shows a fix as it is typed.
    """
    try:
        yield
    except (FLError, BrokenPipeError):
        raise
    except Exception as error:
        raise refusal() or ConfigError(simplify_message(one_line(error), parser, line)) from error


def simplify_message(message: str, parser: ArgumentParser, line: CommandLine = CommandLine()) -> str:
    """Return jsonargparse's error message shortened to the key, the value and the expected type."""
    message = MIXED.sub("", message.removeprefix('Parser key "config": '))
    key = ".".join(dict.fromkeys(re.findall(r'Parser key "([\w.]+)"', message)))
    is_experiment = "config" in parser.get_defaults(skip_validation=True)
    shown = key if is_experiment or not key else f"--{key}"
    reason = (
        _model_of_hugging_face(key, message)
        or _missing_argument(message, parser.prog, is_experiment)
        or _options_of_function(message)
        or _unknown_argument(key, message, line)
        or _wrong_value(key, message)
        or _wrong_class(key, message)
        or _without_noise(message)
    )
    return f"{shown}: {reason}" if shown else reason


def _model_of_hugging_face(key: str, message: str) -> str | None:
    """Return our message about a class of `transformers` that is given as the model. Return None for any other."""
    found = re.search(r"'(transformers\.[\w.]+)'", message) if key == "model" else None
    if not found:
        return None
    from fl_lightning.models.wrapped import HUGGING_FACE

    return f"{found[1]} {HUGGING_FACE}"


def _missing_argument(message: str, program: str, is_experiment: bool) -> str | None:
    """Return our message about missing required arguments; None if jsonargparse's message is about another error."""
    found = re.search(r"arguments are required: (.+?)(?= - |\. Got value| Given value|$)", message)
    if not found:
        return None
    if is_experiment:
        return f"{found[1]} must be given, in the config (--config) or as an option"
    return f"{found[1]}: not given. Write it after the command; `{program} --help` shows how"


def _options_of_function(message: str) -> str | None:
    """Return our message about options for a function in the place of a class. Return None for any other message."""
    if "got NestedArg(" not in message:
        return None
    return "a function takes no options here. Set their defaults in the function, or name a class"


def _unknown_argument(key: str, message: str, line: CommandLine) -> str | None:
    """Rewrite jsonargparse's message about an unknown argument of a user's class. Return None for any other message."""
    option, paths = re.search(r"Option '([\w.-]+)", message), re.findall(r"class_path[ =]'([\w.]+)'", message)
    return KeyChecker("fit", line).unknown_argument(option[1], paths[-1], key) if option and paths else None


def _wrong_value(key: str, message: str) -> str | None:
    """Rewrite jsonargparse's message about a value of the wrong type. Return None for any other message."""
    if "Unable to load config" in message:
        return "expected lines `key: value`"
    if key in CLASS_KEYS:  # `unknown_names` has checked its type
        return None
    innermost = message.rpartition('Parser key "')[2]  # earlier parts are about the enclosing classes
    start = "Given" if "Does not validate" in innermost else "Got"
    given = re.search(start + VALUE, innermost)
    if not given or given[1].lstrip('"').startswith("Namespace(class_path"):  # the class itself raised it
        return None
    types = re.findall(r"Expected an? (?:<class '(.+?)'>|typing\.Literal\[(.+?)\])", innermost[: given.start()])
    expected = dict.fromkeys(name for a, b in types for name in (a or b.replace("'", "")).split(", "))
    expected.pop("NoneType", None)
    if not expected:
        return None
    fix = ""
    if list(expected) == ["list"] and given[1] == "None":
        fix = ". Leave it out for the default, or give [] for none"
    elif list(expected) == ["list"] and re.fullmatch(r"[\w.+-]{1,60}", given[1]):
        fix = f". Did you mean [{given[1]}]?"
    return f"got {quote(given[1])}, expected {' | '.join(expected)}{fix}"


def _wrong_class(key: str, message: str) -> str | None:
    """Rewrite jsonargparse's message about a class that a key does not take. Return None for any other message."""
    if abstract := re.search(r"class, but '?([\w.]+)'? is abstract", message):
        return f"{abstract[1]} is abstract; name one of its subclasses"
    pattern = r"(?:path|Expected) (\S*) ?(?:does not|to be) .*?(?:subclass of|that returns) (?:<class ')?(\w+)"
    if wrong := re.search(pattern, message):
        given = re.search("Given" + VALUE, message)
        path = wrong[1].strip("'") or (given[1] if given else "")
        return _hint_for_class(key, path) or f"{path} is no {wrong[2]}. {class_choices(key)}"
    no_class = ("Not a valid subclass", "a subclass spec", "dot import path string:")
    return CLASS_EXPECTED if any(text in message for text in no_class) else None


def _hint_for_class(key: str, path: str) -> str | None:
    """Return how a key takes a class or function that it does not take directly, such as a torch dataset; else None."""
    if key == "model":
        if inspect.isroutine(find_object(path)):
            return f"{path} is a function. Did you mean {as_backbone(path)}?"
        return f"{path} is no nn.Module. Give the import path of a network's class"
    if key in FUNCTIONS and inspect.isroutine(find_object(path)):
        return f"{path} is a function without these types. Write one with {FUNCTIONS[key]}, or name a class"
    if key == "scenario.dataset":
        from fl_lightning.data.torch_dataset import suggest_torch_dataset

        return f"{path} is a Dataset of torch's; {way}" if (way := suggest_torch_dataset(path)) else None
    if key in ("callbacks", "client_callbacks"):
        from fl_lightning.callbacks.defaults import describe_misplaced

        return describe_misplaced(find_object(path))
    return None


def _without_noise(message: str) -> str:
    """Return the reason from an error message of jsonargparse, without the boilerplate around it."""
    noise = (
        r'Parser key "[\w.]+": |Problem with given class_path |Type \S.*? expects a function or a callable class: '
        r"|Does not validate against any .+? Errors: - | - Expected a .*|\.? (?:Got|Given) value.*"
    )
    reason = " - ".join(dict.fromkeys(re.sub(noise, "", message).split(" - ")))
    if re.search(r"'(\w+)[\w.]*': No module named '\1'$", reason):
        reason += ". Start in the folder that contains it, or add this folder to PYTHONPATH."
    return reason


def refuse_nulls(given: Namespace, owner: Any, key: str = "") -> None:
    """Raise an error if an argument is null but its type does not allow None. jsonargparse does not check this.

    Args:
        given: The arguments and their values, classes as `class_path` and `init_args`.
        owner: The class that takes the arguments.
        key: The key above the arguments.

    Raises:
        ConfigError: Names the key and its default.
    """
    if "class_path" in given:
        if given.class_path.startswith("typing."):  # jsonargparse parses {} to this
            raise ConfigError(f"{key}: {CLASS_EXPECTED}")
        owner, given = find_object(given.class_path), given.get("init_args") or Namespace()
    try:
        parameters, hints = inspect.signature(owner).parameters, argument_types(owner)
    except Exception:  # a user's own class may have annotations that cannot be resolved
        return
    for name, value in vars(given).items():
        hint, place = hints.get(name), f"{key}.{name}".lstrip(".")
        if isinstance(value, Namespace):
            refuse_nulls(value, hint, place)
        for part in value if isinstance(value, list) else []:
            if isinstance(part, Namespace):
                refuse_nulls(part, None, place)
        nullable = hint in (None, Any) or type(None) in get_args(hint)
        if value is None and name in parameters and not nullable and parameters[name].default is not None:
            default = parameters[name].default
            is_plain = isinstance(default, int | float | str)
            fix = f"leave it out to get {default}" if is_plain else "leave it out"
            raise ConfigError(f"{place}: null is no value for it; {fix}")
