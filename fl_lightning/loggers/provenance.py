"""Which fl-lightning a run was carried out with."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

import fl_lightning


def source() -> dict[str, str]:
    """The package's `version` and, where it lies in a git checkout, the `commit` that is checked out."""
    found = {"version": fl_lightning.__version__}
    if commit := commit_of(Path(fl_lightning.__file__).resolve().parents[1]):
        found["commit"] = commit
    return found


def commit_of(checkout: Path) -> str | None:
    """The commit that is checked out in a folder, read from its `.git`; None where there is none.

    Only the folder itself counts, not one above it: a package that is installed below somebody's project is no part of
    that. Git is not run.
    """
    with suppress(OSError, UnicodeDecodeError, IndexError):
        git = checkout / ".git"
        if git.is_file():  # a further worktree, or a submodule
            git = checkout / git.read_text().split("gitdir:")[1].strip()
        common = git / "commondir"
        shared = git / common.read_text().strip() if common.is_file() else git
        head = (git / "HEAD").read_text().strip()
        found = _resolved(head.removeprefix("ref: "), shared) if head.startswith("ref: ") else head
        return found if found and re.fullmatch(r"[0-9a-f]{40,64}", found) else None
    return None


def _resolved(ref: str, git: Path) -> str | None:
    """The commit that a ref names, in a file of its own or among the packed ones."""
    if (git / ref).is_file():
        return (git / ref).read_text().strip()
    lines = (line.split(" ") for line in (git / "packed-refs").read_text().splitlines())
    return next((line[0] for line in lines if line[1:] == [ref]), None)
