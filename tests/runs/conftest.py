"""Fixtures of the tests of run folders."""

from pathlib import Path

import pytest
from commands import tiny


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished run that names no classes of the user."""
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    tiny(run_dir)
    return run_dir
