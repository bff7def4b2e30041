"""Config files: found by path or by name, read strictly, and looked at key by key."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import yaml

from fl_lightning.core.errors import ConfigError, one_line
from fl_lightning.core.files import read_file
from fl_lightning.core.public_names import public_classes
from fl_lightning.core.spelling import nearest

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

DIGITS = "digits_fedavg.yaml"
"""The config that an algorithm without one of its own gets for digits, with its name in the place of FedAvg."""

FREE_KEYS = {
    "engine",
    "checkpoint_every",
    "keep_checkpoints",
    "client_store",
    "logger",
    "log_clients",
    "callbacks",
    "run_dir",
    "scenario.dataset.data_dir",
    "scenario.dataset.download",
    "trainer.accelerator",
    "trainer.devices",
}
"""Keys that say where, how fast and what to watch, not what is computed; with all keys below them."""


def with_config_paths(words: Sequence[str]) -> list[str]:
    """The command line with each `--config` a path: a file as named from here, else a shipped config of that name."""
    found = list(words)
    for i, word in enumerate(words):
        if word in ("-c", "--config") and i + 1 < len(words):
            found[i + 1] = config_path(words[i + 1])
        elif word.startswith("--config="):
            found[i] = f"--config={config_path(word.removeprefix('--config='))}"
    return found


def config_path(name: str) -> str:
    """A config file by path, or by the bare name of a shipped one; `.yaml` may be left out.

    Raises:
        ConfigError: There is none, or it is no YAML mapping.
    """
    path = named_file(name, "configs")
    if path is None:
        if is_run(name):
            raise ConfigError(f"--config: {name} is the folder of a run; did you mean --resume {name}?")
        near = nearest_file(name, "configs")
        mend = f"did you mean {near}?" if near else "`fl-lightning list configs` names those"
        raise ConfigError(f"--config: {name} is neither a file here nor a shipped config; {mend}")
    read_config(path, f"--config: {name}")
    return str(path)


def named_file(name: str, kind: str) -> Path | None:
    """A YAML file by path, else by the bare name of a shipped one; `.yaml` may be left out. None if there is none.

    Args:
        name: The path or the name.
        kind: Where the shipped ones lie: `configs`, `sweeps` or `papers`.
    """
    folder = Path(str(files(f"fl_lightning.{kind}")))
    names = [name, f"{name}.yaml"] if name and not name.endswith(os.sep) else []
    paths = [Path(one) for one in names] + [folder / one for one in names if os.sep not in one]
    found = next((path for path in paths if os.path.isfile(path)), None)  # Path.is_file raises where a name is too long
    derived = [one for one in names if kind == "configs" and one in derived_configs()]
    return found or (_derived_file(derived[0]) if derived else None)


def nearest_file(name: str, kind: str) -> str | None:
    """The file that a name was most likely meant for: one beside where it would lie, or a shipped one; None if none."""
    folder, _, last = name.rpartition(os.sep)
    with suppress(OSError):
        near = nearest(last, (one for one in os.listdir(folder or ".") if one.endswith((".yaml", ".yml"))))
        if near:
            return os.path.join(folder, near)
    return nearest(last, shipped(kind))


def shipped(kind: str) -> list[str]:
    """Return the names of the shipped `configs`, `sweeps` or `papers`, with their ending."""
    return sorted([*_files(kind), *(derived_configs() if kind == "configs" else ())])


def shipped_text(name: str, kind: str) -> str:
    """Return the content of a shipped file, of a derived config as it would be written."""
    algorithm = derived_configs().get(name) if kind == "configs" else None
    text = files(f"fl_lightning.{kind}").joinpath(DIGITS if algorithm else name).read_text(encoding="utf-8")
    return text.replace("FedAvg", algorithm) if algorithm else text


@cache
def derived_configs() -> dict[str, str]:
    """Return the algorithms that have no config for digits in a file of its own, by the name of the one derived."""
    own = {name.removeprefix("digits_").removesuffix(".yaml").replace("_", "") for name in _files("configs")}
    algorithms = public_classes("Algorithm").keys() - {"Algorithm"}
    return {f"digits_{name.lower()}.yaml": name for name in algorithms if name.lower() not in own}


def _files(kind: str) -> list[str]:
    return [path.name for path in files(f"fl_lightning.{kind}").iterdir() if path.name.endswith(".yaml")]


@cache
def _derived_file(name: str) -> Path:
    path = Path(_derived_folder().name, name)
    path.write_text(shipped_text(name, "configs"), encoding="utf-8")
    return path


@cache
def _derived_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="fl-lightning-configs-")  # until the process ends


def is_run(path: str) -> bool:
    """Whether a path is a run's folder."""
    return os.path.isfile(os.path.join(path, "config.yaml"))


def read_config(path: Path, what: str | None = None) -> dict[str, Any]:
    """A config file's content.

    Args:
        path: Where it lies.
        what: What to call it in a message; its path by default.

    Raises:
        ConfigError: It is no readable YAML, or no mapping.
    """
    return _checked(read_yaml(path, what), what or str(path))


def parse_config(text: bytes, what: str) -> dict[str, Any]:
    """Return the content of a config file that was read already.

    Args:
        text: The bytes of the file.
        what: What to call it in a message.

    Raises:
        ConfigError: It is no readable YAML, or no mapping.
    """
    return _checked(_parse_yaml(text, what), what)


def _checked(content: Any, what: str) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise ConfigError(f"{what} needs lines `key: value`, it holds {type(content).__name__}")
    refuse_misshapen(content)
    return content


def refuse_misshapen(content: Any, key: str = "") -> None:
    """Refuse classes that a config names in no way that a class can be named.

    Raises:
        ConfigError: A `class_path` is no text, or its `init_args` are no mapping; the message names the key.
    """
    if isinstance(content, list):
        for part in content:
            refuse_misshapen(part, key)
    if not isinstance(content, dict):
        return
    path, options = content.get("class_path", "-"), content.get("init_args", {})
    if not isinstance(path, str) or not path.strip():
        raise ConfigError(f"{key}: class_path needs the name of a class or the path of one, it holds {path!r}")
    if "class_path" in content and (beside := content.keys() - {"class_path", "init_args", "dict_kwargs"}):
        told = ", ".join(sorted(map(str, beside)))
        raise ConfigError(f"{key}: the arguments of a class_path stand under init_args, beside it: {told}")
    if not isinstance(options, dict):
        raise ConfigError(f"{key}: init_args needs lines `key: value`, it holds {options!r}")
    for part, value in content.items():
        refuse_misshapen(value, key if part == "init_args" else f"{key}.{part}".lstrip("."))


def config_file(run_dir: Path) -> str:
    """A run's `config.yaml`; a folder without one is no run."""
    path = run_dir / "config.yaml"
    if not os.path.lexists(run_dir):
        raise ConfigError(f"{run_dir}: folder not found")
    if not os.path.isfile(path):
        raise ConfigError(f"{run_dir} is no run: it holds no config.yaml")
    return config_path(str(path))


def flatten(config: Any, prefix: str = "", name: Callable[[Any], Any] = lambda path: path) -> dict[str, Any]:
    """Nested dicts as one, with dotted keys; `init_args` and `class_path` are left out of the keys.

    Args:
        config: The nested dict.
        prefix: What the keys begin with.
        name: What to make of the paths of classes.
    """
    if not isinstance(config, dict):
        return {prefix: config}
    flat: dict[str, Any] = {}
    for part, value in config.items():
        if part == "class_path":
            flat[prefix] = name(value)
        else:
            flat |= flatten(value, prefix if part == "init_args" else f"{prefix}.{part}".lstrip("."), name)
    return flat


def below(key: str, others: Iterable[str]) -> bool:
    """Whether a dotted key lies below one of others: `algorithm.tau` below `algorithm`."""
    return any(key.startswith(f"{other}.") for other in others)


# --- YAML that anybody may have written ------------------------------------------------------------------------------

MOST_SETTINGS = 200_000
"""No config is larger; one that is would fill the memory of whoever reads it."""
DEEPEST = 50
LONGEST_NUMBER = 300


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # C: ten times as fast, if built
    """PyYAML's safe loader, to which a date is text, as it is to jsonargparse's: no setting is a date."""

    yaml_implicit_resolvers: ClassVar = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


class StrictYAMLError(yaml.YAMLError):
    """YAML that can be read, but not as a config; the message names line and key."""


def read_yaml(path: Path, what: str | None = None) -> Any:
    """What a YAML file holds, read strictly: see `load_yaml`.

    Args:
        path: Where it lies.
        what: What to call it in a message; its path by default.

    Raises:
        ConfigError: It cannot be read; the message names file, line and reason.
    """
    try:
        return _parse_yaml(read_file(path), what or str(path))
    except OSError as error:
        raise ConfigError(f"{what or path} is no readable YAML: {error.strerror}") from error


def _parse_yaml(text: bytes, what: str) -> Any:
    try:
        return load_yaml(text)
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{what} is no readable YAML: {one_line(error)}") from error


def load_yaml(text: str | bytes) -> Any:
    """What YAML stands for: keys come once, and nothing unfolds to more than a config can be.

    Args:
        text: The YAML; bytes are UTF-8, with or without a mark that says so.

    Raises:
        ValueError, yaml.YAMLError: It cannot be read; the message says where and why.
    """
    text = _decoded(text) if isinstance(text, bytes) else text
    refuse_traps(text)
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        raise _told(error, text) from error


def strict(parser: ArgumentParser) -> ArgumentParser:
    """Have a parser refuse in YAML what `load_yaml` refuses, in files and words alike; it reads the rest as ever."""
    from jsonargparse import get_loader, set_loader  # half a second, for those who have a parser

    usual = get_loader("yaml")

    def load(text: str) -> Any:
        refuse_traps(text)
        return usual(text)

    set_loader("strict", load, (yaml.YAMLError,))
    parser.parser_mode = "strict"
    return parser


def refuse_traps(text: str) -> None:
    """Refuse YAML that says two things of one key, or unfolds to no config: by aliases, depth or endless numbers.

    Its events are looked at, of which there are no more than the text is long, before anything is built from them.

    Raises:
        StrictYAMLError: Names the line, the key and what is wrong.
        yaml.YAMLError: It is no YAML.
    """
    if len(text) < LONGEST_NUMBER and PLAIN.fullmatch(text):
        return
    count = 0
    sizes: dict[str | None, int] = {}
    opened: list[_Opened] = []
    event: Any = None  # mypy knows less of events than there is

    def refuse(reason: str) -> None:
        key = ".".join(one.key for one in opened if one.key is not None)
        raise StrictYAMLError(f"line {event.start_mark.line + 1}: {key and f'{key}: '}{reason}")

    try:
        for event in yaml.parse(text, _Loader):
            if isinstance(event, yaml.CollectionEndEvent):
                ended = opened.pop()
                sizes[ended.anchor] = count - ended.before
            elif isinstance(event, NODES):
                if opened and (flaw := opened[-1].take(event)):
                    refuse(flaw)
                if isinstance(event, yaml.AliasEvent):
                    if event.anchor not in sizes:
                        refuse(f"*{event.anchor} leads nowhere, or into itself")
                    count += sizes[event.anchor]
                elif event.tag is not None:
                    refuse(f"{event.tag.replace('tag:yaml.org,2002:', '!!')}: a config has no tags")
                elif isinstance(event, yaml.ScalarEvent):
                    if "\0" in event.value:
                        refuse("a NUL byte")
                    if len(event.value) > LONGEST_NUMBER and NUMBER.fullmatch(event.value):
                        refuse(f"a number of {len(event.value):,} digits")
                    sizes[event.anchor] = 1
                    count += 1
                else:
                    keys: dict[str, int] | None = {} if isinstance(event, yaml.MappingStartEvent) else None
                    opened.append(_Opened(event.anchor, count, keys))
                    count += 1
                if count > MOST_SETTINGS or len(opened) > DEEPEST:
                    refuse("it unfolds to more than a config can be")
    except yaml.MarkedYAMLError as error:
        raise _told(error, text) from error


PLAIN = re.compile(r"[\w./ +-]*")
"""Text that is one word or number, or a few: nothing in it could be refused."""
NODES = (yaml.AliasEvent, yaml.ScalarEvent, yaml.CollectionStartEvent)
NUMBER = re.compile(r"[-+.]?[0-9][0-9a-fA-Fox_:.+-]*")


@dataclass
class _Opened:
    """A mapping or a list that is being looked at.

    Args:
        anchor: What aliases call it.
        before: How many settings came before it.
        keys: Of a mapping, the line of each key that came so far; None for a list.
        key: Of a mapping, the key whose value comes next.
    """

    anchor: str | None
    before: int
    keys: dict[str, int] | None
    key: str | None = None
    value_is_next: bool = False

    def take(self, event: Any) -> str | None:
        """Take in what comes next inside it, a key or a value; what is wrong with the key."""
        if self.keys is None:
            return None
        self.value_is_next = not self.value_is_next
        if not self.value_is_next:
            return None
        self.key = event.value if isinstance(event, yaml.ScalarEvent) else None
        if self.key is None:
            return "a key must be a word"
        if self.key in self.keys and self.key != "<<":
            return f"given on line {self.keys[self.key]} already"
        assert event.start_mark
        self.keys[self.key] = event.start_mark.line + 1
        return None


def _told(error: yaml.MarkedYAMLError, text: str) -> yaml.YAMLError:
    """An error of PyYAML's with its line in front, and the letter that it is about."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return error
    lines = text.splitlines() or [""]
    number = min(mark.line, len(lines) - 1)  # the end of a text may count as a line more
    reason = ", ".join(filter(None, [error.context, error.problem]))
    letter = f": {lines[number][mark.column]!r}" if reason.endswith("any token") else ""
    return StrictYAMLError(f"line {number + 1}: {reason}{letter}")


def _decoded(content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"line {line}: byte {content[error.start]:#04x} is no UTF-8") from None
