"""Make `index.json`, which the command line answers from: `python -m fl_lightning.cli.indexing`."""

from __future__ import annotations

import inspect
import json
import re
from argparse import SUPPRESS, Action
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from jsonargparse import ArgumentParser

from fl_lightning.cli.catalogue import BASES, classes
from fl_lightning.cli.commands import COMMANDS
from fl_lightning.core.lazy import load
from fl_lightning.models import ModelFactory

PATH = Path(__file__).with_name("index.json")
NEW = "python -m fl_lightning.cli.indexing"

OWN_WORDS = {
    "print_config": "Print all settings as a config, and end.",
    "trainer.accelerator": "Where to compute, `cpu`, `gpu`, `mps` or `auto` for the first there is.",
    "trainer.devices": "1 for any device, or which one, as in [2].",
    "trainer.precision": "How precisely to compute, `bf16-mixed` say.",
    "trainer.max_epochs": "Epochs of a client's training each round, unless there is a max_steps.",
    "trainer.max_steps": "Most optimizer steps of a client each round, -1 for no bound.",
    "trainer.limit_train_batches": "Batches of an epoch, or a share of them.",
    "trainer.accumulate_grad_batches": "Batches an optimizer step.",
    "trainer.gradient_clip_val": "Most that a gradient may be; no bound by default.",
    "trainer.gradient_clip_algorithm": "What of a gradient is bounded, its `norm` or each `value`.",
    "trainer.deterministic": "Deterministic algorithms only, or with `warn` where there are any.",
    "trainer.benchmark": "Let cuDNN look for its fastest algorithms.",
    "trainer.detect_anomaly": "Look for what makes a gradient NaN, slowly.",
}
"""What jsonargparse and Lightning say of theirs is longer, and not always true of a client's fit."""

OWN_DEFAULTS = {
    "trainer.precision": "32-true",
    "trainer.max_epochs": 1,
    "trainer.limit_train_batches": 1.0,
    "trainer.gradient_clip_algorithm": "norm",
    "trainer.deterministic": False,
    "trainer.benchmark": False,
}
"""What null comes to in a client's fit."""

TYPES = {int: "INT", float: "NUMBER", str: "TEXT", dict: "MAPPING", list: "LIST", tuple: "LIST"}
"""What stands for a value in a help; whatever else there is, is a class that one names."""


def made() -> str:
    """What `index.json` has to hold."""
    found = {
        "classes": {kind: {cls.__name__: about(cls, kind) for cls in classes(kind)} for kind in BASES},
        "commands": {name: options(load(f"fl_lightning.cli.commands.{name}").parser()) for name in COMMANDS},
    }
    return laid_out(found) + "\n"


def laid_out(value: Any, indent: str = "") -> str:
    """JSON with a line for each option, so that two branches' changes can be merged and read."""
    if not isinstance(value, dict) or not any(isinstance(each, dict) for each in value.values()):
        return json.dumps(value, ensure_ascii=False)
    inner = f"{indent} "
    lines = (f"{inner}{json.dumps(key)}: {laid_out(each, inner)}" for key, each in value.items())
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}"


def about(cls: Any, kind: str) -> dict[str, Any]:
    """What is to be known of a class that a config can name."""
    parser = ArgumentParser(exit_on_error=False)
    from_data = set(inspect.signature(ModelFactory.__call__).parameters) if kind == "models" else set()
    parser.add_class_arguments(cls, skip=from_data, fail_untyped=False)
    found = {"line": (inspect.getdoc(cls) or "").partition("\n")[0], "module": cls.__module__}
    return found | ({"family": cls.family()} if kind == "algorithms" else {}) | {"options": options(parser)}


def options(parser: ArgumentParser) -> dict[str, dict[str, Any]]:
    """What a parser takes, by name, positional arguments without `flags`."""
    actions = {action.dest: action for action in parser._actions if is_told(action, parser)}
    needed = required(parser)
    return {name: dict(described(action, name in needed)) for name, action in actions.items()}


def is_told(action: Action, parser: ArgumentParser) -> bool:
    """Whether an argument is worth a line: no `--help`, and no file of a group's keys."""
    group = any(other.dest.startswith(f"{action.dest}.") and not hidden(other) for other in parser._actions)
    return not group and not hidden(action)


def hidden(action: Action) -> bool:
    """Whether an argument only shows a help, or is not to be shown itself."""
    return action.help == SUPPRESS or action.dest == "help" or action.dest.endswith(".help")


def described(action: Action, needed: bool) -> Iterator[tuple[str, Any]]:
    """What there is to say of one argument, and nothing that is so with most."""
    hint = getattr(action, "_typehint", action.type)
    if action.option_strings:
        yield "flags", [flag for flag in action.option_strings if not flag.endswith("+")]
    if action.nargs == 0 or action.dest == "print_config":  # that one takes a value only after a `=`
        yield "nargs", 0
    else:
        if action.nargs is not None:
            yield "nargs", action.nargs
        named = action.metavar if str(action.metavar)[0].isalpha() else None  # not jsonargparse's own
        yield "metavar", named or told(hint)
    yield "help", OWN_WORDS.get(action.dest, " ".join((action.help or "").split()))
    if given := [word for one in parts(hint) for word in words(one)]:
        yield "choices", given
    if needed:
        yield "needed", True
    default = OWN_DEFAULTS.get(action.dest) if action.default is None else plain(action.default)
    if action.nargs != 0 and default not in (None, SUPPRESS, "", []):
        yield "default", default


def parts(hint: Any) -> list[Any]:
    """A type, or those that a union is of, less None."""
    if get_origin(hint) in (Union, UnionType):
        return [part for one in get_args(hint) for part in parts(one)]
    return [] if hint in (None, type(None)) else [hint]


def words(hint: Any) -> list[str]:
    """The words that a type consists of, if it does."""
    if hint is bool:
        return ["true", "false"]
    return list(dict.fromkeys(map(str, get_args(hint)))) if get_origin(hint) is Literal else []


def told(hint: Any) -> str:
    """A type as a help tells of it: `INT`, `fresh|kept`, `NAME` of a class."""
    kinds = [words(one) or [TYPES.get(get_origin(one) or one, "NAME")] for one in parts(hint)]
    found = list(dict.fromkeys(word for kind in kinds for word in kind)) or ["VALUE"]
    if found == ["INT", "NUMBER"]:
        return "NUMBER"
    if "NAME" in found or len(found) > 4:
        return "NAME"
    return "VALUE" if len(found) > 1 and found[0].isupper() else "|".join(found)


def plain(default: Any) -> Any:
    """A default as JSON holds it; of a class its name, of a sequence a list."""
    if hasattr(default, "class_path") or (isinstance(default, dict) and "class_path" in default):
        return default["class_path"].rpartition(".")[2]
    if isinstance(default, list | tuple):
        return [plain(one) for one in default]
    return default if isinstance(default, bool | int | float | str | None) else str(default)


def required(parser: ArgumentParser) -> set[str]:
    """The arguments that must be given, as the parser says that they are missing."""
    try:
        parser.parse_args([])
    except Exception as error:
        found = re.search(r"arguments are required: ([\w., +-]+?)(?= - |\. |$)", str(error))
        return set(found[1].split(", ")) if found else set()
    return set()


if __name__ == "__main__":
    PATH.write_text(made(), encoding="utf-8")
    print(f"wrote {PATH}")
