"""The app of an experiment on tables."""

import pytest
from commands import run
from flower_tables import CONFIG
from layouts import table, write_csv


@pytest.fixture
def app(tmp_path, monkeypatch):
    """The app of an experiment on tables, beside the tables of the server and of two clients."""
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(("artificial", "client-0", "client-1")):
        write_csv(tmp_path / f"{name}.csv", table(seed=seed))
    (tmp_path / "tables.yaml").write_text(CONFIG)
    assert run("deploy", "--config", "tables.yaml").code == 0
    return tmp_path / "app"
