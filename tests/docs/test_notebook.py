"""The tutorials run, and so do the snippets of docs/notebook.md: in one namespace, like the cells of a notebook."""

import ast
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "notebook.md"
TUTORIALS = sorted((DOCS / "tutorials").glob("*.ipynb"))


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


def code_cells(path):
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_has_the_outputs_of_one_run(path):
    cells = code_cells(path)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1)), "run docs/run_tutorials.py"
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]
    assert any("<progress" in "".join(output.get("data", {}).get("text/html", "")) for output in outputs)
    assert path.stat().st_size < 300_000


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*")
@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_runs(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    module = ModuleType("tutorial")  # the classes of a notebook are in a module, too
    monkeypatch.setitem(sys.modules, "tutorial", module)
    for cell in code_cells(path):
        run_cell("".join(cell["source"]), vars(module))
