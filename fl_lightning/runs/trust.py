"""Load the config of a run folder. A signature distinguishes the user's own runs from those of other users.

A config that the user signed, or passes with `--trust`, is trusted. `core.trusted_imports` restricts any other config.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import secrets
import stat
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from fl_lightning.core.config import parse_config
from fl_lightning.core.config_files import read_run_config
from fl_lightning.core.errors import ConfigError, one_line
from fl_lightning.core.files import open_file, write_atomically
from fl_lightning.core.trusted_imports import Untrusted, begin, is_untrusted
from fl_lightning.runs.folder import SIGNATURE

TO_TRUST = "If you trust its author, use --trust (in Python trust=True)"
DESCRIPTION = "# Describes a run that was started from Python without `config`.\n"
"""First line of a `config.yaml` from which the experiment cannot be rebuilt."""

KEY_BYTES = 32
PATH = re.compile(r"[^\W\d]\w*(?:[.:][^\W\d]\w*)+")
"""Pattern of import paths, including the colon of `pkgutil.resolve_name`."""


# --- The config of a run folder ---


def restrict_and_load_config(
    run_dir: Path,
    keys: Collection[str],
    allowed: Callable[[], Mapping[str, Any]],
    trust: bool = False,
    without: Collection[str] = (),
) -> dict[str, Any]:
    """Load the config of a run folder. If the config is not trusted, restrict imports and writes from here on.

    The restriction lasts until the caller's `contextvars` context ends. The file is read once, so the config is that of
    the verified text.

    Args:
        run_dir: The run's folder.
        keys: The keys that a run's config can have.
        allowed: Returns the objects that an untrusted config may name, by import path.
        trust: Trust the config without a signature.
        without: Keys to leave out.

    Raises:
        ConfigError: The config is missing or cannot be read, or only describes a run from Python.
    """
    path, content = run_dir / "config.yaml", read_run_config(run_dir)
    if content.startswith(DESCRIPTION.encode()):
        fix = "Build its FederatedOrchestrator in Python with this run_dir, and call load() or fit(resume=True)."
        raise ConfigError(f"{run_dir}: started from Python without `config`, so it cannot be rebuilt here. {fix}")
    config = parse_config(content, str(path))
    rest = {key: value for key, value in config.items() if key not in without}
    if trust or not (reason := _reason_not_own(run_dir, content, config)):
        allow_local_modules(rest)
    else:
        untrusted = Untrusted(config, f"{path}: ", f"{reason}. {TO_TRUST}", run_dir, allowed)
        begin(untrusted)
        if unknown := sorted(map(str, rest.keys() - set(keys))):
            raise untrusted.refuse("a key that no run writes", unknown[0])
    return rest


# --- Modules in the working folder ---


def allow_local_modules(value: Any) -> None:
    """Add the working folder to `sys.path` if a config that the user trusts names a module there.

    Otherwise the working folder is not searched: it may contain another user's `torch_xla.py`, which Lightning tries to
    import.

    Args:
        value: A config, or words of a command line, that the user trusts.
    """
    here = os.getcwd()
    if here not in sys.path and local_modules(value):
        sys.path.append(here)


def local_modules(value: Any) -> list[str]:
    """Return the paths of the modules in the working folder that a config names by import path."""
    here = os.getcwd()
    files = ((_module_file(path, [here]), _module_file(path)) for path in _import_paths(value))
    return sorted({os.path.realpath(file) for file, installed in files if file and installed in (None, file)})


def _import_paths(value: Any) -> Iterator[str]:
    """Yield everything in the strings of a config that looks like an import path. Searches nested dicts and lists."""
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _import_paths(each)
    elif isinstance(value, str):
        yield from PATH.findall(value)


def _module_file(path: str, places: list[str] | None = None) -> str | None:
    """Return the path of the package or module at an import path, without importing it; None if not found."""
    root, *parts = re.split("[.:]", path)
    spec = PathFinder.find_spec(root, places)
    while spec and spec.origin is None and parts:  # a namespace package
        spec = PathFinder.find_spec(parts.pop(0), spec.submodule_search_locations)
    return spec.origin if spec else None


# --- Signatures ---


def sign(run_dir: Path, content: str, config: Mapping[str, Any]) -> None:
    """Sign the config of a run that the user starts or resumes, unless the config is untrusted.

    The signature covers every byte of the config and the locations of the user's own modules. It stays valid if the
    folder is moved.

    Args:
        run_dir: The run's folder.
        content: Content of `config.yaml`.
        config: The content as a mapping.
    """
    if is_untrusted():
        return
    try:
        write_atomically(run_dir / SIGNATURE, _signature(content.encode(), config, _load_key(make=True)) + "\n")
    except (OSError, ValueError, RuntimeError) as error:
        reason = f"{one_line(error)}; testing or resuming this run may need --trust"
        warnings.warn(f"config.yaml cannot be signed as yours: {reason}", stacklevel=2)


def _reason_not_own(run_dir: Path, content: bytes, config: Mapping[str, Any]) -> str | None:
    """Return None if a run folder's signature proves that the run is the user's own, else the reason why not."""
    try:
        signature, _ = _read_small_file(run_dir / SIGNATURE, 2 * hashlib.sha256().digest_size + 1)
        valid = hmac.compare_digest(signature.strip(), _signature(content, config, _load_key(make=False)).encode())
        if valid:
            return None
        where = "or this is not the working folder in which it was made, where its own modules are"
        return f"The run was signed by another user, its config was edited, {where}"
    except FileNotFoundError:
        return "The run is not signed as yours"
    except (OSError, ValueError, RuntimeError) as error:
        return f"Whether the run is yours cannot be checked ({one_line(error)})"


def _signature(content: bytes, config: Mapping[str, Any], key: bytes) -> str:
    return hmac.new(key, content + json.dumps(local_modules(config)).encode(), "sha256").hexdigest()


def _load_key(make: bool) -> bytes:
    """Return the user's secret key for signing run configs. With `make`, create the key if it does not exist."""
    configs = os.environ.get("XDG_CONFIG_HOME", "")
    path = (Path(configs) if os.path.isabs(configs) else Path.home() / ".config") / "fl-lightning" / "key"
    if make and not path.exists():
        _create_key(path)
    key, about = _read_small_file(path, KEY_BYTES)
    if about.st_uid != os.geteuid() or stat.S_IMODE(about.st_mode) & 0o077:
        raise ValueError(f"{path} is accessible to other users. Remove it; a new one is created.")
    if len(key) != KEY_BYTES:
        raise ValueError(f"{path} is damaged. Remove it; a new one is created.")
    return key


def _create_key(path: Path) -> None:
    """Create the user's signing key atomically. If several processes create one at once, the first key stays."""
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


def _read_small_file(path: Path, most: int) -> tuple[bytes, os.stat_result]:
    """Return the content and the `os.stat_result` of a small file, without following links."""
    with open_file(path) as file:
        return file.read(most + 1), os.fstat(file.fileno())
