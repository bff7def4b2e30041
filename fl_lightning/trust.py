"""Whose code may run: a folder that somebody else made chooses none of it, and its author does not notice.

A run's own config is read before jsonargparse sees it, for that imports while it parses. What in it leads to code
outside of this package, torch and torchvision, to files or to other machines is a doubt. A config with doubts is taken
if the user says so (`--trust`), or if the folder holds a signature of them by the user's own key.
"""

from __future__ import annotations

import hashlib
import hmac
import inspect
import json
import os
import re
import secrets
import stat
import sys
import warnings
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import get_loader
from lightning.pytorch import callbacks
from lightning.pytorch.loggers import Logger
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fl_lightning.catalogue import BASES, base
from fl_lightning.config import config_file, read_config
from fl_lightning.errors import ConfigError, one_line
from fl_lightning.files import own_file, write_atomically
from fl_lightning.run_folder import SIGNATURE

# Where the classes lie that any config may name, and what they are.
KINDS: dict[str, tuple[type, ...]] = {
    "fl_lightning": (Logger, *map(base, BASES)),
    "torch.optim": (Optimizer, LRScheduler),
    "torch.nn.modules": (nn.Module,),
    "torchvision.models": (nn.Module,),
}
GROUPS = {"scenario", "evaluation", "trainer", "head", "few_shot"}
"""Keys of several settings; jsonargparse takes text there for the path of a file with more of a config."""

LOGGER = re.compile(r"logger(\[\d+\])?")
LOGGERS = ("WandbRoundLogger", "CSVLogger", "TensorBoardLogger")
"""Loggers that write to the run's folder, or to a place that is in doubt itself."""

CLIENT_CALLBACKS = ("EarlyStopping", "LearningRateMonitor", "DeviceStatsMonitor", "Timer", "EMAWeightAveraging")
"""Lightning's callbacks that any config may name: they take numbers and names, and touch no files."""

LONGEST_TEXT = 10_000
KEY_BYTES = 32
PATH = re.compile(r"[^\W\d]\w*(?:[.:][^\W\d]\w*)+")
"""How an import path looks; the colon is `pkgutil.resolve_name`'s."""

Doubt = tuple[str, str]
"""A key of a config, and what there is in doubt."""


def run_config(run_dir: Path, keys: Collection[str], trust: bool = False, without: Collection[str] = ()) -> str:
    """A run's own config as text that jsonargparse takes for `--config`, once it may be taken.

    It is read once, so what is parsed is what was looked at.

    Args:
        run_dir: The run's folder.
        keys: The keys that a run's config can hold.
        trust: Take it as it is.
        without: Keys to leave out; what they hold is in nobody's way.

    Raises:
        ConfigError: There is no config, it cannot be read, or it chooses code and is neither trusted nor signed.
    """
    path = config_file(run_dir)
    config = read_config(Path(path))
    rest = {key: value for key, value in config.items() if key not in without}
    if (unknown := sorted(map(str, rest.keys() - set(keys)))) and not trust:
        raise ConfigError(f"{path}: {unknown[0]} is no key that a run writes; {TO_TRUST}")
    if found := doubts(rest):
        if not trust and (reason := _why_not_own(run_dir, doubts(config))):
            key, what = found[0]
            raise ConfigError(
                f"{path}: {key} is {one_line(what)[:200]}, which a run of somebody else's may not choose, "
                f"and {reason}; {TO_TRUST}"
            )
        let_in(rest)
    return NO_PATH + yaml.safe_dump(rest, sort_keys=False)


TO_TRUST = "if you trust whoever made it, say --trust (in Python trust=True)"

NO_PATH = f"#{' ' * 256}\n"
"""Begins text that jsonargparse must not take for a file's path: no file has so long a name."""


# --- What a config may choose ----------------------------------------------------------------------------------------


def doubts(config: Mapping[str, Any]) -> list[Doubt]:
    """What in a config leads to code that is not known, to a file with more of a config, or to another machine."""
    return list(_doubts("", config))


def _doubts(key: str, value: Any, owner: str | None = None) -> Iterator[Doubt]:
    """Doubts about a value and all in it; `owner` is the class whose arguments it holds."""
    if isinstance(value, list):
        for place, each in enumerate(value):
            yield from _doubts(f"{key}[{place}]", each)
    elif isinstance(value, str):
        foreign = PATH.fullmatch(value) and not is_known(value) and _origin(value, os.getcwd())
        if foreign or _unfolds(value) or (LOGGER.fullmatch(key) and _is_other_logger(value)):
            yield key, value
    elif isinstance(value, dict):
        for name, each in value.items():
            inner = key if name in ("class_path", "init_args") else f"{key}.{name}".lstrip(".")
            if _may_not_hold(inner, name, each, owner):
                yield inner, str(each)
            else:
                yield from _doubts(inner, each, _class_name(value) if name == "init_args" else None)


def _may_not_hold(key: str, name: Any, value: Any, owner: str | None) -> bool:
    """Whether a key, whose last part is `name`, may not hold what it does, whatever there is in it."""
    if name == "class_path":
        return _is_foreign(str(value))
    if owner is not None and owner.lower() == "torchdataset" and name in ("train", "test"):
        path = value.get("class_path") if isinstance(value, dict) else value
        return "." not in str(path)  # a name alone: any dataset's that torchvision has, and some unpickle files
    if name in GROUPS:
        return not isinstance(value, dict | None) and owner != "FromModule"
    if name == "address":  # of a Ray cluster: it may send any code back
        return value is not None
    if name == "offline":  # W&B's: else the run goes where the config says
        return value not in (True, None)
    if name == "save_dir":  # of a logger: else it writes where the config says
        return value is not None
    return not isinstance(name, int) and not re.fullmatch(r"(?!__)\w+", str(name))


def is_known(path: str) -> bool:
    """Whether an import path leads to a class of this package's or torch's kinds, or to a builder of torchvision's.

    What it leads to is looked up attribute by attribute, and counts where it was defined: `torch.os.system` does not.
    """
    root, *parts = path.split(".")
    if root not in {"lightning", *(home.partition(".")[0] for home in KINDS)}:
        return False
    found: Any = import_module(root)
    try:
        for part in parts:
            found = getattr(found, part)
    except Exception:  # torch.classes, which are looked up when they are asked for, raise what they like
        return False
    if inspect.isclass(found):
        if found in [getattr(callbacks, name) for name in CLIENT_CALLBACKS]:
            return True
        return any(f"{found.__module__}.".startswith(f"{home}.") and issubclass(found, KINDS[home]) for home in KINDS)
    if root != "torchvision":
        return False
    models = import_module("torchvision.models")
    return any(found is models.get_model_builder(name) for name in models.list_models())


def _is_foreign(path: str) -> bool:
    return "." in path and not is_known(path)


def _is_other_logger(path: str) -> bool:
    """Whether a logger may write where the config says, and not where the run is."""
    return _class_name(path) not in LOGGERS or _is_foreign(path)


def _class_name(value: Any) -> str | None:
    """The name of the class that a value stands for, without its module's."""
    path = value.get("class_path") if isinstance(value, dict) else value
    return None if path is None else str(path).rpartition(".")[2]


@cache
def _unfolds(text: str) -> bool:
    """Whether text holds YAML of its own, which jsonargparse reads as it reads the rest."""
    if len(text) > LONGEST_TEXT:
        return True
    try:
        return not isinstance(get_loader("yaml")(text), str | int | float | None)
    except yaml.YAMLError:
        return False
    except (ValueError, RecursionError):
        return True


# --- Where modules lie -----------------------------------------------------------------------------------------------


def let_in(value: Any) -> None:
    """Let modules be imported from the working folder, if a text in what is the user's own names one there.

    Until then the working folder is not looked into: others may have put a `torch_xla.py` there, which Lightning tries
    to import.

    Args:
        value: A config, or words of a command line, that the user vouches for.
    """
    here = os.getcwd()
    if here not in sys.path and any(not _origin(path) and _origin(path, here) for path in _paths(value)):
        sys.path.append(here)


def _paths(value: Any) -> Iterator[str]:
    """What looks like an import path in the texts of a config."""
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _paths(each)
    elif isinstance(value, str):
        yield from PATH.findall(value)


def _origin(path: str, here: str | None = None) -> str | None:
    """The file of the package or module that an import path leads into; nothing is imported.

    Args:
        path: The import path.
        here: A folder that is looked into last.
    """
    root, *parts = re.split("[.:]", path)
    if root in sys.modules and not getattr(sys.modules[root], "__spec__", None):
        return root
    spec = find_spec(root) or (PathFinder.find_spec(root, [here]) if here else None)
    while spec and spec.origin is None and parts:  # a folder without a file of its own
        spec = PathFinder.find_spec(parts.pop(0), spec.submodule_search_locations)
    return spec.origin if spec else None


# --- What is the user's own ------------------------------------------------------------------------------------------


def sign(run_dir: Path, config: Mapping[str, Any]) -> None:
    """Sign what would be in doubt about a config that is the user's own; called when its run is accepted.

    The signature covers the keys, what they hold and where modules lie, not the numbers; it moves with the folder.
    Without doubts there is none, and without a key a warning.
    """
    if not (found := doubts(config)):
        return
    try:
        write_atomically(run_dir / SIGNATURE, _signature(found, _key(make=True)) + "\n")
    except (OSError, ValueError, RuntimeError) as error:
        reason = f"{one_line(error)}; to test this run, or to go on with it, say --trust"
        warnings.warn(f"{found[0][0]}: {found[0][1]} cannot be signed: {reason}", stacklevel=2)


def _why_not_own(run_dir: Path, found: list[Doubt]) -> str | None:
    """Why a run does not count as the user's own; None if it does."""
    try:
        given, _ = _read(run_dir / SIGNATURE, 2 * hashlib.sha256().digest_size + 1)
        own = hmac.compare_digest(given.strip(), _signature(found, _key(make=False)).encode())
        return None if own else "the run is signed by somebody else, or its modules lie elsewhere now"
    except FileNotFoundError:
        return "the run is not signed as yours"
    except (OSError, ValueError, RuntimeError) as error:
        return f"whether it is yours cannot be checked ({one_line(error)})"


def _signature(found: list[Doubt], key: bytes) -> str:
    here = os.getcwd()
    places = [PATH.fullmatch(what) and os.path.realpath(_origin(what, here) or "") for _, what in found]
    return hmac.new(key, json.dumps([found, places]).encode(), "sha256").hexdigest()


def _key(make: bool) -> bytes:
    """The user's secret, made when it is first needed.

    Raises:
        OSError: It is not there, or cannot be read or made.
        ValueError: Others can read it or write to it, or it is damaged.
        RuntimeError: There is no home.
    """
    configs = os.environ.get("XDG_CONFIG_HOME", "")
    path = (Path(configs) if os.path.isabs(configs) else Path.home() / ".config") / "fl-lightning" / "key"
    if make and not path.exists():
        _make(path)
    key, about = _read(path, KEY_BYTES)
    if about.st_uid != os.geteuid() or stat.S_IMODE(about.st_mode) & 0o077:
        raise ValueError(f"{path} is not yours alone; remove it, and a new one is made")
    if len(key) != KEY_BYTES:
        raise ValueError(f"{path} is damaged; remove it, and a new one is made")
    return key


def _make(path: Path) -> None:
    """Write a new key, whole or not at all; of several processes that do so at once, the first one's stays."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = path.with_name(f".key-{secrets.token_hex(8)}")
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secrets.token_bytes(KEY_BYTES))
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(partial, path)
    except FileExistsError:
        pass
    finally:
        partial.unlink()


def _read(path: Path, most: int) -> tuple[bytes, os.stat_result]:
    """A small file, and what the system says about it; neither links are followed nor pipes waited for."""
    with own_file(path) as file:
        return file.read(most + 1), os.fstat(file.fileno())
