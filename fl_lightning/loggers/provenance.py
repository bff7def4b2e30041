"""Version and git commit of the installed package, which loggers record."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

import fl_lightning


def source() -> dict[str, str]:
    """Return this package's `version` and, if it is run from a git checkout, the `commit`."""
    commit = commit_of(Path(fl_lightning.__file__).resolve().parents[1])
    return {"version": fl_lightning.__version__} | ({"commit": commit} if commit else {})


def commit_of(checkout: Path) -> str | None:
    """Return the commit that is checked out in a folder, read from `.git`; None if the folder is no git checkout.

    Parent folders are not searched, since a package that is installed inside of another project is not part of it. Git
    is not called.
    """
    with suppress(OSError, UnicodeDecodeError, IndexError):
        git = checkout / ".git"
        if git.is_file():  # a linked worktree, or a submodule
            git = checkout / git.read_text().split("gitdir:")[1].strip()
        common = git / "commondir"
        shared = git / common.read_text().strip() if common.is_file() else git
        head = (git / "HEAD").read_text().strip()
        commit = _commit_of_ref(head.removeprefix("ref: "), shared) if head.startswith("ref: ") else head
        return commit if commit and re.fullmatch(r"[0-9a-f]{40,64}", commit) else None
    return None


def _commit_of_ref(ref: str, git: Path) -> str | None:
    """Return the commit hash that a git ref points to, from the ref's file or from `packed-refs`."""
    if (git / ref).is_file():
        return (git / ref).read_text().strip()
    lines = (line.split(" ") for line in (git / "packed-refs").read_text().splitlines())
    return next((line[0] for line in lines if line[1:] == [ref]), None)
