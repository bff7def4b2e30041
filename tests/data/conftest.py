"""Fixtures of the tests of datasets and partitions."""

from typing import Any

import pytest


@pytest.fixture
def library() -> Any:
    """The `datasets` library."""
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    return datasets
