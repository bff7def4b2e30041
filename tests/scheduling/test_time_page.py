"""The commands of the page on simulated time."""

from pathlib import Path

import pytest
from commands import rows, run_page

PAGE = Path(__file__).parents[2] / "docs" / "time.md"


@pytest.mark.thorough
def test_the_page_runs_as_printed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_page(PAGE.read_text())
    fedbuff, fedavg = (rows(Path("runs/time") / name) for name in ("fedbuff", "fedavg"))
    seconds = [sum(float(row["time/simulated_s"]) for row in table) for table in (fedbuff, fedavg)]
    assert len(fedbuff) == len(fedavg) == 20
    assert seconds[0] < seconds[1]
    assert Path("time.svg").stat().st_size
