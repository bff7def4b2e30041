"""Checkpoints that survive a kill at any moment, say so when they are damaged, and run no code when loaded."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from fl_lightning.core.errors import CheckpointError, Damaged, one_line
from fl_lightning.core.files import blocks, flush, write_atomically
from fl_lightning.runs.seal import Seal

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Checkpoint:
    """One round's checkpoint, as it was read and found sound.

    Args:
        round: The last finished round.
        state: What was written: nested dicts and lists of tensors, numbers and strings.
        files: The files outside that belong to it, and their checksums.
        seal: What the run was started from, and what it had come to.
    """

    round: int
    state: dict[str, Any]
    files: dict[str, str]
    seal: Seal


class CheckpointFolder:
    """The checkpoints of one run, one folder a round: `round-000012/{state.pt, manifest.json}`.

    Each is written beside its place, flushed to disk and renamed, so a folder that is there is whole; the manifest's
    checksums, one of which is its own, find what went bad later. What lasts from checkpoint to checkpoint lies outside,
    in files that are never changed, and the manifest names them: it is written once.

    Args:
        path: The folder that holds them, in the run's; made when first written to.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._unsound: set[int] = set()

    def write(
        self, round: int, state: dict[str, Any], files: Mapping[str, str] | None = None, seal: Seal | None = None
    ) -> Path:
        """Write one round's checkpoint; one that is there already for the round is replaced.

        Args:
            round: The last finished round.
            state: Nested dicts and lists of tensors, numbers and strings.
            files: Files that belong to it, on disk already: paths from the run's folder, and their checksums.
            seal: What the run was started from, and what it has come to.

        Raises:
            CheckpointError: The disk refuses.
        """
        target = self._folder(round)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".writing-", dir=self.path) as parent:
                partial = Path(parent) / target.name
                partial.mkdir()
                with open(partial / "state.pt", "xb") as file:
                    torch.save(state, file)
                inside = {"state.pt": _checksum(partial / "state.pt")}
                manifest = {
                    "round": round,
                    "files": inside,
                    "outside": dict(files or {}),
                    "seal": (seal or Seal()).noted(),
                }
                (partial / MANIFEST).write_text(_text(manifest))
                for path in (partial / "state.pt", partial / MANIFEST, partial):
                    flush(path)
                if target.exists():
                    target.rename(Path(parent) / "replaced")
                partial.rename(target)
            flush(self.path)
        except (OSError, RuntimeError) as error:  # torch.save makes a RuntimeError of a full disk
            reason = error.__context__ if isinstance(error.__context__, OSError) else error
            raise CheckpointError(f"cannot write checkpoint {target}: {one_line(reason)}") from error
        self._unsound.discard(round)
        return target

    def reseal(self, round: int, seal: Seal) -> None:
        """Give a sound checkpoint another seal, and leave all else as it is.

        Raises:
            CheckpointError: The disk refuses.
        """
        path = self._folder(round) / MANIFEST
        try:
            write_atomically(path, _text(self._manifest(round) | {"seal": seal.noted()}))
        except OSError as error:
            raise CheckpointError(f"cannot write {path}: {one_line(error)}") from error

    def rounds(self) -> list[int]:
        """Rounds that have a checkpoint, newest first; those that were found damaged are left out."""
        names = (path.name for path in self.path.glob("round-*") if path.is_dir() and not path.is_symlink())
        rounds = {int(name.removeprefix("round-")) for name in names if re.fullmatch("round-[0-9]{6,18}", name)}
        return sorted((r for r in rounds - self._unsound if self._folder(r).exists()), reverse=True)

    def read(self, round: int) -> Checkpoint:
        """Load one round's checkpoint, weights only.

        Raises:
            CheckpointError: It is missing or damaged.
        """
        folder = self._folder(round)
        try:
            manifest = self._manifest(round)
            _verify(folder, {"state.pt": manifest["files"]["state.pt"]})
            _verify(self.path.parent, manifest["outside"])
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Validating sparse")  # left over from whatever failed to load
                state = torch.load(folder / "state.pt", weights_only=True, map_location="cpu")
            return Checkpoint(round, state, manifest["outside"], Seal.of(manifest["seal"]))
        except PermissionError as error:
            raise CheckpointError(f"checkpoint {folder} cannot be read: {error}; take care of that first") from error
        except Exception as error:  # a damaged file can fail in as many ways as there are bytes
            raise Damaged(f"checkpoint {folder} is damaged: {one_line(error)}") from error

    def newest(
        self, report: Callable[[str], None], fits: Callable[[Checkpoint], None] = lambda _: None
    ) -> Checkpoint | None:
        """Load the newest sound checkpoint, reporting each that is not on the way; None if there is none at all.

        Those that were reported count no longer: they are removed once there are newer ones.

        Args:
            report: Is told of each.
            fits: Raises `Damaged` where the rest of the run's folder is not as it was at a checkpoint.

        Raises:
            CheckpointError: There are checkpoints, and none of them can be used.
        """
        rounds, wrong = self.rounds(), dict[int, CheckpointError]()
        for round in rounds:
            try:
                found = self.read(round)
                fits(found)
            except Damaged as error:
                wrong[round] = error
                continue
            for passed_over in wrong.values():
                report(f"{passed_over}; going on from round {round}'s")
            self._unsound.update(wrong)
            return found
        if wrong:
            several = f", nor can the {len(wrong) - 1} before it be used" if len(wrong) > 1 else ""
            mend = "put back what was changed, or start the run again"
            raise CheckpointError(f"{wrong[rounds[0]]}{several}: {mend}")
        return None

    def prune(self, keep: set[int]) -> None:
        """Remove all checkpoints but those of the given rounds, and what a killed writer left behind."""
        for round in {*self.rounds(), *self._unsound} - keep:
            with suppress(FileNotFoundError):  # at once, whatever a kill interrupts
                self._folder(round).rename(self.path / f".writing-pruned-{round}")
        self._unsound &= keep
        for leftover in self.path.glob(".writing-*"):
            shutil.rmtree(leftover)

    def files(self, round: int) -> dict[str, str]:
        """The files outside that a round's checkpoint names, and their checksums."""
        return dict(self._manifest(round)["outside"])

    def named(self) -> set[str]:
        """The files that any checkpoint names; a damaged one, whose manifest cannot be read, names none."""
        names: set[str] = set()
        for round in self.rounds():
            with suppress(Exception):  # a damaged file can fail in as many ways as there are bytes
                names |= self.files(round).keys()
        return names

    def _manifest(self, round: int) -> dict[str, Any]:
        """A round's manifest.

        Raises:
            ValueError: It is not as it was written.
        """
        noted = json.loads(b"".join(blocks(self._folder(round) / MANIFEST)))
        if "seal" not in noted:
            raise ValueError("it is of an earlier fl-lightning, this one cannot read it")
        manifest = {name: value for name, value in noted.items() if name != "checksum"}
        if noted.get("checksum") != _own_checksum(manifest) or manifest["round"] != round:
            raise ValueError(f"{MANIFEST} does not match its checksum")
        return manifest

    def _folder(self, round: int) -> Path:
        return self.path / f"round-{round:06d}"


def _verify(base: Path, files: Mapping[str, str]) -> None:
    """Compare files with their checksums.

    Raises:
        ValueError: One does not match, or there is none, or one lies elsewhere.
        OSError: One cannot be read, or is no file.
    """
    for name, checksum in files.items():
        place = PurePosixPath(name)
        if place.is_absolute() or ".." in place.parts or any((base / part).is_symlink() for part in place.parents[:-1]):
            raise ValueError(f"{name!r} lies outside of the run's folder")
        if _checksum(base / place) != checksum:
            raise ValueError(f"{name} does not match its checksum")


def _checksum(path: Path) -> str:
    digest = hashlib.sha256()
    for block in blocks(path):
        digest.update(block)
    return f"sha256:{digest.hexdigest()}"


def _text(manifest: Mapping[str, Any]) -> str:
    return json.dumps({**manifest, "checksum": _own_checksum(manifest)}, indent=1) + "\n"


def _own_checksum(manifest: Mapping[str, Any]) -> str:
    return f"sha256:{hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()}"
