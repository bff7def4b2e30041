"""The commands of docs/private-training.md run, and the columns that it names exist."""

import re
from pathlib import Path

import pytest
from commands import rows, run_page
from test_private_training import ACCEPTED

PAGE = (Path(__file__).parents[2] / "docs" / "private-training.md").read_text()


@pytest.mark.thorough
def test_the_page_runs(tmp_path, monkeypatch):
    pytest.importorskip("opacus")
    monkeypatch.chdir(tmp_path)
    reduced = " --rounds 1 --trainer.max_epochs 1"
    run_page(PAGE, lambda block: "\n".join(line + reduced for line in block.splitlines()))
    last = rows(Path("runs/protected"))[-1]
    assert float(last["privacy/record_epsilon"]) <= 8
    named = re.findall(r"`audit/<attack>_(\w+)`", PAGE)
    assert {f"audit/{attack}_{name}" for attack in ("loss", "lira") for name in named} <= last.keys()
    assert "record_epsilon" in rows(Path("runs/private"), "clients.csv")[0]
    assert "privacy/record_epsilon" not in rows(Path("runs/open"))[0]


def test_no_accepted_method_is_among_the_refused_ones_of_the_page():
    refused = PAGE.partition("| refused | reason |")[2].partition("\n\n")[0]
    named = set(re.findall(r"\b[A-Z][A-Za-z-]+", refused.replace("cwFedAVG", "")))
    assert {"FedSKC", "IFCA", "FedUV", "FedLC"} <= named
    assert not named & ACCEPTED
