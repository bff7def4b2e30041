"""The folder of a study: it belongs to one study and one process, and holds a folder for each run.

All commands that make many runs use this format. `study.yaml` describes what the study must not change once a run has
begun. The folder of a run is `seed_<seed>-<digest>`, where the digest is that of all settings but the seed. So another
setting is another run, and a repeated call finds the runs of earlier calls.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.core.config import flatten, parse_config
from fl_lightning.core.errors import ConfigError, reason_of
from fl_lightning.core.files import read_file, write_atomically
from fl_lightning.runs.folder import lock_run_dir, subfolder

DESCRIPTION = "study.yaml"


@contextmanager
def open_study(folder: Path, description: Mapping[str, Any], files: Collection[str] = ()) -> Iterator[None]:
    """Context that locks the folder of a study, so that only one process uses it. Creates the folder if necessary.

    Before the first run has begun the description may change, so a mistake can be corrected.

    Args:
        folder: The study's folder.
        description: The command, and all settings that must stay the same when the command is repeated.
        files: Names of the other files and folders that the command writes in the folder.

    Raises:
        ConfigError: Another process uses the folder, or it holds another study (the message names the differences), or
            it holds links or special files.
    """
    with lock_run_dir(folder, (DESCRIPTION, *files)):
        text, path = yaml.safe_dump(dict(description), sort_keys=False), folder / DESCRIPTION
        before, now = _read_description(path), yaml.safe_load(text)
        if before != now:
            if any(folder.rglob("config.yaml")):
                raise ConfigError(f"{folder} holds {_describe_changes(before, now)}, or give another --out")
            for file in filter(Path.is_file, map(folder.joinpath, files)):
                file.unlink()  # of the description before
            write_atomically(path, text)
        yield


def _read_description(path: Path) -> dict[str, Any] | None:
    try:
        return parse_config(read_file(path), str(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {reason_of(error)}") from error


def _describe_changes(before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> str:
    """Return what is wrong with a folder whose description differs, and how to fix it."""
    if before is None:
        return f"runs, but no {DESCRIPTION}. Put the file back"
    stored, new = flatten(before), flatten(now)
    keys = sorted(key for key in stored.keys() | new.keys() if stored.get(key) != new.get(key))
    changes = "; ".join(f"{key} ({stored.get(key)} -> {new.get(key)})" for key in keys)
    return f"another study: {changes}. Undo the change"


def run_folder(study: Path, parent: str | Path, seed: int | None, settings: object) -> Path:
    """Return the folder of a run in a study: `<parent>/seed_<seed>-<digest of the settings>`, or `run-<digest>`.

    Args:
        study: The study's folder.
        parent: The folder of the runs that differ only in the seed, relative to the study's folder.
        seed: The seed; None if the settings contain it.
        settings: The settings, without the seed. Other settings are another run.

    Raises:
        ConfigError: There is a link on the way to the folder.
    """
    content = json.dumps(settings, sort_keys=True, default=str)
    digest = hashlib.sha256(content.encode()).hexdigest()[:10]
    return subfolder(study, Path(parent, f"{'run' if seed is None else f'seed_{seed}'}-{digest}"))


def folder_name(name: str) -> str:
    """Return a text as a folder name: unusual characters become dashes, and at most 80 characters are kept."""
    return re.sub(r"[^\w.+]+", "-", name).strip("-.")[:80]
