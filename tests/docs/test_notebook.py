"""The snippets of docs/notebook.md run in one namespace, like the cells of a notebook."""

import ast
import re
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "notebook.md"


def run_cell(cell, namespace):
    """Run a cell. Return the value of its last line if this is an expression."""
    body = ast.parse(cell).body
    last = ast.Expression(body.pop().value) if isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), str(PAGE), "exec"), namespace)
    return eval(compile(last, str(PAGE), "eval"), namespace) if last else None


@pytest.mark.thorough
def test_the_cells_run_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {}
    cells = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    accuracy, history, dry_run, table, clients, curves, _, client_accuracy, _ = [
        run_cell(cell, namespace) for cell in cells
    ]
    assert accuracy == namespace["run"].csv.rows[-1]["global/acc"]
    assert history["global/acc"].tolist()[-1] == accuracy
    assert len(history) == 4
    assert (len(dry_run.rounds), dry_run.run_dir.exists()) == (2, False)
    assert table["algorithm"].tolist() == ["FedAvg", "FedAvg", "FedProx", "FedProx"]
    assert table["seed"].tolist() == [0, 1, 0, 1]
    assert table["finished"].all()
    assert table["global/acc_last"].tolist()[-1] == accuracy
    rounds = namespace["tables"].rounds
    assert rounds.groupby("run").size().tolist() == [4] * 4
    assert len(clients) == 8
    assert client_accuracy == pytest.approx(accuracy, abs=1e-6)
    assert curves.axes[0].lines[0].get_ydata()[-1] == 100 * accuracy
    assert Path("curves.pdf").stat().st_size > 1000
    line = namespace["figure"].axes[0].lines[0]
    fedavg = rounds[rounds.run.str.contains("FedAvg")].groupby("round")["global/acc"].mean()
    assert line.get_ydata().tolist() == pytest.approx(fedavg.tolist())
    weights = torch.load("client-3.pt", weights_only=True)
    assert weights.keys() == namespace["module"].backbone.state_dict().keys()
