"""Checkpoints that survive a kill at any moment, say so when they are damaged, and run no code when loaded."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from fl_lightning.errors import CheckpointError

MANIFEST = "manifest.json"


class CheckpointFolder:
    """The checkpoints of one run, one folder a round: `round-000012/{state.pt, manifest.json}`.

    Each is written beside its place, flushed to disk and renamed, so a folder that is there is whole; the manifest's
    checksums find what went bad later. What lasts from checkpoint to checkpoint lies outside, in files that are never
    changed, and the manifest names them: it is written once.

    Args:
        path: The folder that holds them, in the run's; made when first written to.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, round: int, state: dict[str, Any], files: Mapping[str, str] | None = None) -> Path:
        """Write one round's checkpoint; one that is there already for the round is replaced.

        Args:
            round: The last finished round.
            state: Nested dicts and lists of tensors, numbers and strings.
            files: Files that belong to it, on disk already: paths from the run's folder, and their checksums.

        Raises:
            CheckpointError: The disk refuses.
        """
        target = self._folder(round)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".writing-", dir=self.path) as parent:
                partial = Path(parent) / target.name
                partial.mkdir()
                torch.save(state, partial / "state.pt")
                inside = {"state.pt": _checksum(partial / "state.pt")}
                manifest = {"round": round, "files": inside, "outside": dict(files or {})}
                (partial / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
                for path in (partial / "state.pt", partial / MANIFEST, partial):
                    flush(path)
                if target.exists():
                    target.rename(Path(parent) / "replaced")
                partial.rename(target)
            flush(self.path)
        except (OSError, RuntimeError) as error:  # torch.save makes a RuntimeError of a full disk
            raise CheckpointError(f"cannot write checkpoint {target}: {' '.join(str(error).split())}") from error
        return target

    def rounds(self) -> list[int]:
        """Rounds that have a checkpoint, newest first."""
        names = (re.fullmatch(r"round-(\d+)", path.name) for path in self.path.glob("round-*"))
        return sorted((int(name[1]) for name in names if name), reverse=True)

    def read(self, round: int) -> dict[str, Any]:
        """Load one round's checkpoint, weights only.

        Raises:
            CheckpointError: It is missing or damaged.
        """
        folder = self._folder(round)
        try:
            manifest = self._manifest(round)
            if "outside" not in manifest:
                raise CheckpointError(f"checkpoint {folder} is of an earlier fl-lightning, this one cannot read it")
            for base, files in ((folder, manifest["files"]), (self.path.parent, manifest["outside"])):
                for name, checksum in files.items():
                    if _checksum(base / name) != checksum:
                        raise CheckpointError(f"checkpoint {folder} is damaged: {name} does not match its checksum")
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Validating sparse")  # left over from whatever failed to load
                return torch.load(folder / "state.pt", weights_only=True, map_location="cpu")
        except CheckpointError:
            raise
        except Exception as error:  # a damaged file can fail in as many ways as there are bytes
            reason = " ".join(str(error).split())
            raise CheckpointError(f"checkpoint {folder} is damaged: {reason}") from error

    def newest(self, report: Callable[[str], None]) -> dict[str, Any] | None:
        """Load the newest sound checkpoint, reporting each damaged one on the way; None if there is none at all.

        Raises:
            CheckpointError: There are checkpoints, and every one of them is damaged.
        """
        rounds = self.rounds()
        for round in rounds:
            try:
                return self.read(round)
            except CheckpointError as error:
                report(f"{error}; using the one before it")
        if rounds:
            raise CheckpointError(f"every checkpoint in {self.path} is damaged: start the run again")
        return None

    def prune(self, keep: set[int]) -> None:
        """Remove all checkpoints but those of the given rounds, and what a killed writer left behind."""
        for round in set(self.rounds()) - keep:
            self._folder(round).rename(self.path / f".writing-pruned-{round}")  # at once, whatever a kill interrupts
        for leftover in self.path.glob(".writing-*"):
            shutil.rmtree(leftover)

    def files(self, round: int) -> dict[str, str]:
        """The files outside that a round's checkpoint names, and their checksums."""
        return dict(self._manifest(round)["outside"])

    def named(self) -> set[str]:
        """The files that any checkpoint names; a damaged one, whose manifest cannot be read, names none."""
        names: set[str] = set()
        for round in self.rounds():
            with suppress(ValueError, TypeError, LookupError, FileNotFoundError):
                names |= self.files(round).keys()
        return names

    def _manifest(self, round: int) -> dict[str, Any]:
        return json.loads((self._folder(round) / MANIFEST).read_text())

    def _folder(self, round: int) -> Path:
        return self.path / f"round-{round:06d}"


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            yield block


def _checksum(path: Path) -> str:
    digest = hashlib.sha256()
    for block in _blocks(path):
        digest.update(block)
    return f"sha256:{digest.hexdigest()}"


def flush(path: Path) -> None:
    """Have a file's content, or a folder's entries, on disk when this returns."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
