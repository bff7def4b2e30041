"""The snippets of docs/privacy.md, with one round, one seed and one value of epsilon."""

import re
from pathlib import Path

import pytest
from commands import rows, run_page

from fl_lightning.core.public_names import public_classes

pytest.importorskip("opacus")
PAGE = (Path(__file__).parents[2] / "docs" / "privacy.md").read_text()


def shorten(block: str) -> str:
    """Return a block of commands with one round, one seed and one value of epsilon."""
    block = re.sub("epsilon=[0-9,]+", "epsilon=8", block).replace("--seeds 0 1 2", "--seeds 0").replace("\\\n", " ")
    return "".join(f"{line} --rounds 1\n" for line in block.splitlines())


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:algorithm.aggregator. only the global model is private")
def test_the_snippets_of_the_page_run_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    run_page(PAGE, shorten)
    last = rows(Path("runs/private"))[-1]
    assert 7.99 < float(last["privacy/epsilon"]) <= 8
    assert float(last["privacy/epsilon_prv"]) < 8
    assert Path("privacy_utility.svg").stat().st_size > 1000


def test_the_page_names_all_options_and_methods_that_exist() -> None:
    assert "PrivateMean" in public_classes("Aggregator")
    for option in ("clip", "noise", "epsilon", "delta", "server_lr", "quantile", "clip_lr", "bit_noise"):
        assert f"`{option}`" in PAGE
