"""Names of clients and classes in what a run prints, writes and logs."""

import csv
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from commands import rows, run

from fl_lightning import runs
from fl_lightning.analysis.figures import plot_runs
from fl_lightning.analysis.html_report.contents import contents
from fl_lightning.analysis.summary_tables import clients_table, last_metrics
from fl_lightning.callbacks import ConfusionMatrix
from fl_lightning.callbacks.plots import to_png
from fl_lightning.core.errors import ClientFailure
from fl_lightning.core.message import Message
from fl_lightning.core.names import Names
from fl_lightning.core.task import Task, Tasks, failed_result
from fl_lightning.data import FederatedData, LoadedData, Shard
from fl_lightning.data.transforms import Normalize
from fl_lightning.engines.evaluator import results_of
from fl_lightning.runs.csv_reader import read_rows
from fl_lightning.runs.metrics_csv import ClientsCsv
from fl_lightning.runs.partition import read_names

CONFIG = """
rounds: 2
batch_size: 8
scenario:
  dataset: {class_path: Table, init_args: {path: patients.csv, label: ill, client: site}}
  partition: ByClient
model: {class_path: MLP, init_args: {hidden: [4]}}
algorithm: FedAvg
optimizer: {class_path: SGD, init_args: {lr: 0.1}}
trainer: {max_epochs: 1, accelerator: cpu}
callbacks: [{class_path: ConfusionMatrix, init_args: {}}]
logger: CSVLogger
"""

BROKEN = """
import lightning.pytorch

class Broken(lightning.pytorch.Callback):
    def on_train_start(self, trainer, module):
        raise RuntimeError("no batch")
"""

NAMES = ["$[b]north$", "a\tsouth, 'x'", "é" * 60]
SHOWN = ["$[b]north$", "a south, 'x'", "é" * 39 + "…"]


def table(text: str, title: str) -> list[list[str]]:
    """Return the cells of a table that the command line has printed, header first."""
    lines = text[text.index(title) :].splitlines()[1:]
    cells = [[cell.strip() for cell in line.strip("│┃").replace("┃", "│").split("│")] for line in lines]
    return [line for line in cells if len(line) > 1]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return a folder with data of three sites and a run of them, and what the run has printed."""
    folder = tmp_path_factory.mktemp("sites")
    with pytest.MonkeyPatch.context() as patched, (folder / "patients.csv").open("w", encoding="utf-8") as file:
        patched.chdir(folder)
        rng, lines = np.random.default_rng(0), csv.writer(file)
        lines.writerow(["age", "site", "ill"])
        lines.writerows([int(rng.integers(90)), NAMES[i % 3], ["no", "<i>yes</i>"][i // 3 % 2]] for i in range(90))
        file.flush()
        (folder / "mine.yaml").write_text(CONFIG)
        code, out, err = run("fit", "--config", "mine.yaml", "--run_dir", "run")
        assert (code, err) == (0, "")
    return folder, out


@pytest.fixture
def folder(trained: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(trained[0])
    monkeypatch.setenv("COLUMNS", "120")
    return trained[0]


def test_fit_and_test_end_with_a_table_of_the_named_clients(folder: Path, trained: tuple[Path, str]) -> None:
    for text in (trained[1], run("test", "run").out):
        header, *lines = table(text, "clients after round 2")
        assert header == ["client", "name", "train", "test", "acc"]
        assert [line[:2] for line in lines] == [[str(k), name] for k, name in enumerate(SHOWN)]
        assert [sum(map(int, line[2:4])) for line in lines] == [30] * 3
        assert all(0 <= float(line[4]) <= 1 for line in lines)


def test_files_of_a_run_contain_the_names(folder: Path) -> None:
    assert [line["name"] for line in rows(Path("run"), "clients.csv")] == SHOWN * 2
    lines = rows(Path("run"), "partition.csv")
    assert list(lines[0]) == ["client", "split", "class_<i>yes</i>", "class_no", "name"]
    assert [line["name"] for line in lines] == [" ".join(name.split()) for name in NAMES] * 2
    assert read_names(Path("run")) == (SHOWN, ["<i>yes</i>", "no"])
    assert runs.load("run").clients["name"].tolist() == SHOWN * 2
    assert [row["client"] for row in read_rows(Path("run/clients.csv"))] == [0, 1, 2] * 2


def test_figures_and_the_report_of_a_run_show_the_names(folder: Path) -> None:
    arrays = dict(np.load("run/figures/confusion_matrix/round-000002.npz"))
    callback = ConfusionMatrix()
    callback.names = read_names(Path("run"))
    figure = callback.draw(arrays)
    assert to_png(figure) == Path("run/figures/confusion_matrix/round-000002.png").read_bytes()
    for axis in (figure.axes[0].xaxis, figure.axes[0].yaxis):
        assert [text.get_text() for text in axis.get_ticklabels()] == ["<i>yes</i>", "no"]
    finished = runs.open_run_folder(Path("run"))
    (axes,) = plot_runs([finished], "partition").axes
    assert [text.get_text() for text in axes.get_yticklabels()] == ["<i>yes</i>", "no"]
    assert axes.get_xticklabels()[0].get_text() == SHOWN[0]
    assert contents([finished])["partitions"][0]["names"] == {"clients": SHOWN, "classes": ["<i>yes</i>", "no"]}


def test_loggers_get_the_name_in_the_key_of_a_client(folder: Path) -> None:
    with Path("run/csv_logs/metrics.csv").open(encoding="utf-8") as file:
        keys = [key for key in next(csv.reader(file)) if key.startswith("client_acc/")]
    assert keys == ["client_acc/0__b_north_", "client_acc/1_a_south_x_", f"client_acc/2_{'é' * 39}_"]


def test_an_older_run_without_names_goes_on_without_them(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "clients.csv"
    path.write_text("round,client,acc\n1,0,0.5\n")
    old = ClientsCsv(path)
    old.set_names(SHOWN)
    old.rewind(1)
    old.append(2, {1: {"acc": 0.25}})
    assert path.read_text() == "round,client,acc\n1,0,0.5\n2,1,0.25\n"
    assert old.names == ()


def test_the_message_about_a_failed_client_has_its_name(folder: Path) -> None:
    Path("broken_fit.py").write_text(BROKEN)
    code, _, err = run("fit", "--config", "mine.yaml", "--run_dir", "failed", "--client_callbacks+=broken_fit.Broken")
    assert code == 1
    assert "client 0 ($[b]north$), round 1: RuntimeError: no batch" in err


def test_a_failed_evaluation_has_the_name_of_the_client() -> None:
    failed = failed_result(Task(3, 1, Message(), {}), RuntimeError("no batch"))
    worker: Any = SimpleNamespace(data=SimpleNamespace(names=Names(["north", "south"])))
    engine: Any = SimpleNamespace(run=lambda worker, tasks, done: done(failed))
    with pytest.raises(ClientFailure, match=r"client 1 \(south\), round 3: RuntimeError: no batch"):
        results_of(engine, worker, Tasks([1], []))


@pytest.mark.parametrize("clients", [20, 21])
def test_the_table_shows_few_clients_each_in_the_round_of_its_last_evaluation(clients: int) -> None:
    y = torch.zeros(clients, dtype=torch.int64)
    loaded = LoadedData(torch.zeros(clients, 1), y, torch.zeros(1, 1), y[:1], 2, Normalize())
    shards = [Shard(torch.tensor([k]), torch.tensor([])) for k in range(clients)]
    data = FederatedData(loaded, shards, [f"site {k}" for k in range(clients)])
    columns = {"round": [1, 1, 2], "client": [0, 1, 1], "acc": [0.5, 0.25, np.nan], "train_loss": [9, 9, 9]}
    last = last_metrics([{"client/acc_mean": 0.4}], {name: np.array(column) for name, column in columns.items()})
    assert last == {0: {"round": 1, "acc": 0.5}, 1: {"round": 1, "acc": 0.25}}
    shown = clients_table(data, last | {2: {"round": 2, "acc": 1.0}})
    assert (shown is None) == (clients > 20)
    assert clients_table(replace(data, client_ids=None), last) is None
    assert clients_table(data, {}) is None
    if shown:
        assert [[str(cell) for cell in column.cells] for column in shown.columns][-2:] == [
            ["1", "1", "2"],
            ["0.5000", "0.2500", "1.0000"],
        ]
