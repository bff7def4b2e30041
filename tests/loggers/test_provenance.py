"""The commit of a checkout, compared with git."""

import shutil
import subprocess

import pytest

import fl_lightning
from fl_lightning.loggers.provenance import commit_of, source

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


def git(folder, *words):
    who = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "protocol.file.allow=always"]
    done = subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path):
    folder = tmp_path / "checkout"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    for i in range(2):
        (folder / "file").write_text(str(i))
        git(folder, "add", "file")
        git(folder, "commit", "-q", "-m", "one")
    return folder


def test_commit_of_a_branch_a_packed_branch_and_a_detached_head(checkout):
    git(checkout, "tag", "-a", "v1", "-m", "one")
    commits = {git(checkout, "rev-parse", "HEAD")}
    steps = ["checkout -q main", "checkout -q -b some/branch HEAD~1", "pack-refs --all", "checkout -q --detach main"]
    for step in steps:
        git(checkout, *step.split())
        assert commit_of(checkout) == git(checkout, "rev-parse", "HEAD")
        commits.add(commit_of(checkout))
    assert len(commits) == 2


@pytest.mark.parametrize("packed", [False, True])
def test_commit_of_a_worktree(checkout, packed):
    git(checkout, "worktree", "add", "-q", "-b", "side", "../side", "HEAD~1")
    if packed:
        git(checkout, "pack-refs", "--all")
    side = checkout.parent / "side"
    assert commit_of(side) == git(side, "rev-parse", "HEAD") != commit_of(checkout)


def test_commit_of_a_submodule(checkout, tmp_path):
    outer = tmp_path / "outer"
    outer.mkdir()
    git(outer, "init", "-q")
    git(outer, "submodule", "--quiet", "add", str(checkout), "inner")
    assert commit_of(outer / "inner") == git(checkout, "rev-parse", "HEAD")


def test_no_commit_outside_of_a_checkout(checkout, tmp_path):
    """A package that is installed inside of a project is not part of it."""
    (checkout / "site-packages").mkdir()
    assert commit_of(checkout / "site-packages") is None
    empty = tmp_path / "empty"
    empty.mkdir()
    git(empty, "init", "-q")
    assert commit_of(empty) is None
    for text in ("gitdir: /nowhere", "", "\xff"):
        (tmp_path / ".git").write_text(text, encoding="latin-1")
        assert commit_of(tmp_path) is None
    (checkout / ".git" / "HEAD").write_text("nonsense")
    assert commit_of(checkout) is None


def test_source_of_the_package(checkout, monkeypatch):
    """The package is part of a checkout only if it is at its top."""
    for place, commit in (("fl_lightning", {"commit": git(checkout, "rev-parse", "HEAD")}), ("lib/fl_lightning", {})):
        monkeypatch.setattr(fl_lightning, "__file__", str(checkout / place / "__init__.py"))
        assert source() == {"version": fl_lightning.__version__} | commit
