"""The snippets and commands of docs/language-models.md, in their order."""

from pathlib import Path

import pytest
from commands import rows, run_page

from fl_lightning.data.instructions import messages_of, plain_pieces
from fl_lightning.data.tokenizers import ByteTokenizer

PAGE = (Path(__file__).parents[2] / "docs" / "language-models.md").read_text()


@pytest.mark.thorough
def test_the_snippets_of_the_page_run_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    run_page(PAGE)
    assert "perplexity of the grammar: 2.206" in capsys.readouterr().out
    federated, alone = (rows(Path("runs", name))[-1] for name in ("grammar", "alone"))
    assert float(federated["global/perplexity"]) < 2.6
    assert float(alone["personal_on_global/perplexity_mean"]) > 5


def test_the_plain_template_of_the_page_is_the_one_that_is_used() -> None:
    pieces = plain_pieces(messages_of({"prompt": "What is 1 plus 2?", "response": "3."}), ByteTokenizer())
    text = ""
    for tokens, learned in pieces:
        part = "".join("<end>" if token == 2 else chr(int(token) - 3) for token in tokens)
        text += f"[{part}]" if learned else part
    assert f"```text\n{text}\n```" in PAGE
