"""Checkpoints: written atomically, verified by checksums, and loaded without executing code."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fl_lightning.core.errors import CheckpointError, Damaged, one_line
from fl_lightning.core.files import file_checksum, flush, path_below, read_file, write_atomically
from fl_lightning.core.flat_tensors import unflatten
from fl_lightning.runs.fingerprint import Fingerprint

MANIFEST = "manifest.json"
ROUND = re.compile("round-[0-9]{6,18}")
"""Matches the names of the folders of checkpoints."""


@dataclass(frozen=True)
class Checkpoint:
    """The content of a checkpoint that was read and verified.

    Args:
        round: The last finished round.
        state: Nested dicts and lists of tensors, numbers and strings.
        files: The client-state files that belong to the checkpoint, and their checksums.
        fingerprint: The run's fingerprint.
    """

    round: int
    state: dict[str, Any]
    files: dict[str, str]
    fingerprint: Fingerprint

    def require_sections(self, sections: Iterable[str]) -> None:
        """Raise an error if sections of the method's state are missing, as in another version's checkpoint.

        Args:
            sections: The names of the sections that the method starts with.

        Raises:
            CheckpointError: One of them is missing.
        """
        if missing := ", ".join(name for name in sections if name not in self.state["state"]):
            what = f"the checkpoint of round {self.round} lacks the method's {missing}, so another version wrote it"
            raise CheckpointError(f"{what}. Resume the run with that version, or start a new one.")


class CheckpointFolder:
    """The checkpoints of one run, a folder per round: `round-000012/{state.pt, manifest.json}`.

    A checkpoint is written to a temporary folder, which is then renamed. So after a kill, it is either complete or
    absent. It is flushed to disk, so that this is also true after a power failure. The manifest's checksums, including
    one of itself, detect later damage. Client states are in other files, which the manifest names. They are written
    once and never changed.

    Args:
        path: The folder of the checkpoints; created when the first one is written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._damaged: set[int] = set()

    def write(
        self,
        round: int,
        state: dict[str, Any],
        files: Mapping[str, str] | None = None,
        fingerprint: Fingerprint | None = None,
    ) -> Path:
        """Write the checkpoint of a round. An earlier checkpoint of the same round is replaced.

        Args:
            round: The last finished round.
            state: Nested dicts and lists of tensors, numbers and strings.
            files: Client-state files that belong to the checkpoint: paths relative to the run folder, with checksums.
            fingerprint: The run's fingerprint.

        Raises:
            CheckpointError: Writing fails.
        """
        target = self._folder(round)
        partial, replaced = (target.with_name(f".writing-{kind}{target.name}") for kind in ("", "replaced-"))
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            partial.mkdir()
            with open(partial / "state.pt", "xb") as file:  # torch's own files do not say that the disk is full
                torch.save(unflatten(state), file)
            inside = {"state.pt": file_checksum(partial / "state.pt")}
            manifest = {
                "round": round,
                "files": inside,
                "outside": dict(files or {}),
                "seal": vars(fingerprint or Fingerprint()),
            }
            (partial / MANIFEST).write_text(_to_json(manifest))
            for path in (partial / "state.pt", partial / MANIFEST, partial):
                flush(path)
            if target.exists():
                target.rename(replaced)
            partial.rename(target)
            flush(self.path)
        except (OSError, RuntimeError) as error:  # torch.save raises RuntimeError if the disk is full
            reason = error.__context__ if isinstance(error.__context__, OSError) else error
            raise CheckpointError(f"cannot write checkpoint {target}: {one_line(reason)}") from error
        finally:
            for folder in (partial, replaced):
                shutil.rmtree(folder, ignore_errors=True)
        self._damaged.discard(round)
        return target

    def replace_fingerprint(self, round: int, fingerprint: Fingerprint) -> None:
        """Replace the fingerprint (config, environment and digests) in the manifest of a round's checkpoint.

        The checkpoint must be valid.

        Raises:
            CheckpointError: Writing fails.
        """
        path = self._folder(round) / MANIFEST
        try:
            write_atomically(path, _to_json(self._manifest(round) | {"seal": vars(fingerprint)}))
        except OSError as error:
            raise CheckpointError(f"cannot write {path}: {one_line(error)}") from error

    def rounds(self) -> list[int]:
        """Return the rounds that have a checkpoint, newest first, except those whose checkpoint was found damaged."""
        with suppress(FileNotFoundError), os.scandir(self.path) as entries:
            folders = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
            rounds = {int(name.removeprefix("round-")) for name in folders if ROUND.fullmatch(name)}
            return sorted((r for r in rounds - self._damaged if self._folder(r).name in folders), reverse=True)
        return []

    def read(self, round: int) -> Checkpoint:
        """Load and verify the checkpoint of a round. No code in the file is executed.

        Raises:
            CheckpointError: The checkpoint is missing or damaged.
        """
        folder = self._folder(round)
        try:
            manifest = self._manifest(round)
            _verify(folder, {"state.pt": manifest["files"]["state.pt"]})
            _verify(self.path.parent, manifest["outside"])
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Validating sparse")  # a failed load may leave it
                state = torch.load(folder / "state.pt", weights_only=True, map_location="cpu")
            return Checkpoint(round, state, manifest["outside"], Fingerprint(**manifest["seal"]))
        except PermissionError as error:
            raise CheckpointError(f"checkpoint {folder} cannot be read: {error}. Fix its permissions first.") from error
        except Exception as error:  # a damaged file can fail in as many ways as there are bytes
            raise Damaged(f"checkpoint {folder} is damaged: {one_line(error)}") from error

    def read_newest(
        self, report: Callable[[str], None], check: Callable[[Checkpoint], None] = lambda _: None
    ) -> Checkpoint | None:
        """Load and return the newest valid checkpoint; None if there are no checkpoints.

        Damaged checkpoints that are skipped are removed once newer ones exist.

        Args:
            report: Called with a message for each checkpoint that is skipped.
            check: Raises `Damaged` if the rest of the run folder does not agree with a checkpoint.

        Raises:
            CheckpointError: There are checkpoints, but none can be used.
        """
        rounds, errors = self.rounds(), dict[int, CheckpointError]()
        for round in rounds:
            try:
                checkpoint = self.read(round)
                check(checkpoint)
            except Damaged as error:
                errors[round] = error
                continue
            for skipped in errors.values():
                report(f"{skipped}; resuming from round {round}'s")
            self._damaged.update(errors)
            return checkpoint
        if errors:
            earlier = ". No earlier checkpoint is valid either" if len(errors) > 1 else ""
            fix = "Restore the changed files, or start the run again."
            raise CheckpointError(f"{errors[rounds[0]]}{earlier}. {fix}")
        return None

    def prune(self, keep: set[int]) -> None:
        """Remove the checkpoints of all rounds that are not in `keep`, and the partial files of killed processes."""
        for round in {*self.rounds(), *self._damaged} - keep:
            with suppress(FileNotFoundError):  # renaming is atomic: a kill leaves no partial checkpoint
                self._folder(round).rename(self.path / f".writing-pruned-{round}")
        self._damaged &= keep
        for leftover in self.path.glob(".writing-*"):
            shutil.rmtree(leftover)

    def files(self, round: int) -> dict[str, str]:
        """Return the checksums of the client-state files that belong to a round's checkpoint, by path."""
        return dict(self._manifest(round)["outside"])

    def named_files(self) -> set[str]:
        """Return the paths of the client-state files that belong to any checkpoint with a readable manifest."""
        names: set[str] = set()
        for round in self.rounds():
            with suppress(Exception):  # a damaged file can fail in as many ways as there are bytes
                names |= self.files(round).keys()
        return names

    def _manifest(self, round: int) -> dict[str, Any]:
        """Read a round's `manifest.json`, verify the checksum in it, and return the rest of the content."""
        path = (self._folder(round) / MANIFEST).relative_to(self.path.parent)
        content = json.loads(read_file(path_below(self.path.parent, path)))
        manifest = {name: value for name, value in content.items() if name != "checksum"}
        if content.get("checksum") != _own_checksum(manifest) or manifest["round"] != round:
            raise ValueError(f"{MANIFEST} does not match its checksum")
        return manifest

    def _folder(self, round: int) -> Path:
        return self.path / f"round-{round:06d}"


def _verify(base: Path, files: Mapping[str, str]) -> None:
    """Check that files match their checksums and that their paths are within the folder `base`."""
    for name, checksum in files.items():
        if file_checksum(path_below(base, name)) != checksum:
            raise ValueError(f"{name} does not match its checksum")


def _to_json(manifest: Mapping[str, Any]) -> str:
    return json.dumps({**manifest, "checksum": _own_checksum(manifest)}) + "\n"


def _own_checksum(manifest: Mapping[str, Any]) -> str:
    return f"sha256:{hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()}"
