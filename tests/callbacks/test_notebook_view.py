import base64
import io
import re
import sys
from itertools import count
from types import ModuleType, SimpleNamespace

import pytest
from experiments import ONE_EPOCH, experiment
from rich.console import Console

from fl_lightning import FedPer
from fl_lightning.callbacks import EarlyStopping, RoundCallback, RoundProgress
from fl_lightning.runs import Run

PNG = b"\x89PNG"


class Notebook(ModuleType):
    """A stand-in for `IPython.display`: keeps each state of the outputs that are displayed."""

    def __init__(self):
        super().__init__("IPython.display")
        self.outputs = []

    def display(self, shown, display_id=None):
        self.outputs.append([(repr(shown), shown._repr_html_())] if display_id else [])
        return self if display_id else None

    def update(self, shown):
        self.outputs[-1].append((repr(shown), shown._repr_html_()))


@pytest.fixture
def notebook(monkeypatch):
    shown = Notebook()
    monkeypatch.setitem(sys.modules, "IPython.display", shown)
    monkeypatch.setattr("rich.jupyter.display", lambda segments, text: None)
    return shown


def in_notebook(**options):
    return RoundProgress(Console(force_jupyter=True, **options))


def set_clock(monkeypatch, monotonic):
    monkeypatch.setattr("fl_lightning.callbacks.notebook_view.time", SimpleNamespace(monotonic=monotonic))


def stop_clock(monkeypatch):
    """Make each drawing take no time, so that all updates are shown."""
    set_clock(monkeypatch, lambda: 1.0)


def test_a_notebook_shows_one_output_that_is_updated(tmp_path, notebook, monkeypatch):
    stop_clock(monkeypatch)
    run = experiment(tmp_path, rounds=2, trainer=ONE_EPOCH, callbacks=[in_notebook()])
    run.fit()
    (states,) = notebook.outputs
    texts, pages = zip(*states, strict=True)
    assert len(texts) == 1 + 2 * (4 + 1) + 1  # the start, clients and rounds, the end
    assert texts[:2] == ("round 0/2", "round 0/2  client 1/4")
    assert re.fullmatch(
        r"round 1/2  client 3/4  left \d+ s  global acc 0\.\d{4}  client acc .*  train loss .*", texts[8]
    )
    assert 'value="1.750" max="2"' in pages[8]
    assert "<table" not in pages[4]
    assert "<img" not in pages[4]
    best = max(run.csv.rows, key=lambda row: row["global/acc"])
    cells = re.findall(r"<t[dh]>(.*?)</t[dh]>", pages[-1])
    values = [f"{row['global/acc']:.4f}" for row in (run.csv.rows[-1], best)]
    assert cells[: cells.index("client acc")][-4:] == ["global acc", *values, str(best["round"])]
    assert "client train_loss" in cells
    assert "round 2/2, all 2 rounds are done" in pages[-1]
    image = re.search(r'src="data:image/png;base64,(.*?)"', pages[-1])
    assert base64.b64decode(image[1]).startswith(PNG)


def test_the_curves_are_drawn_once_per_round(tmp_path, notebook, monkeypatch):
    stop_clock(monkeypatch)
    drawn = []
    plot = Run.plot
    monkeypatch.setattr(Run, "plot", lambda run: drawn.append(len(run.rounds)) or plot(run))
    experiment(tmp_path, rounds=2, trainer=ONE_EPOCH, callbacks=[in_notebook()]).fit()
    assert drawn == [1, 2]


def test_a_method_without_a_global_model_has_a_table_and_curves(tmp_path, notebook):
    experiment(tmp_path, FedPer(), rounds=1, trainer=ONE_EPOCH, callbacks=[in_notebook()]).fit()
    page = notebook.outputs[0][-1][1]
    assert "client acc" in page
    assert "global acc" not in page
    assert re.search(r'<img alt="[^"]+" src=', page)


@pytest.mark.parametrize(
    ("took", "updates"), [(0.1, 1), (1, 3)], ids=["a pause of 0.9 seconds", "a pause of two seconds"]
)
def test_after_an_update_there_is_a_pause(tmp_path, notebook, monkeypatch, took, updates):
    seconds = count(0, took)  # each look at the clock, and so each update, takes this time
    set_clock(monkeypatch, lambda: next(seconds))
    experiment(tmp_path, rounds=1, trainer=ONE_EPOCH, callbacks=[in_notebook()]).fit()
    (states,) = notebook.outputs
    assert len(states) == 1 + updates + 1, "the start, updates after clients, the end"
    assert "1 round is done" in states[-1][0]


def test_the_view_says_why_a_run_stopped(tmp_path, notebook):
    stopper = EarlyStopping(monitor="client/train_loss", mode="max", patience=1)
    with pytest.warns(UserWarning, match="max takes the worst"):
        experiment(tmp_path, trainer=ONE_EPOCH, callbacks=[in_notebook(), stopper]).fit()
    assert "by EarlyStopping: " in notebook.outputs[0][-1][0]


def test_the_view_says_after_which_round_a_run_failed(tmp_path, notebook):
    class Failing(RoundCallback):
        def on_round_end(self, run, metrics):
            raise RuntimeError("full")

    with pytest.raises(RuntimeError, match="full"):
        experiment(tmp_path, trainer=ONE_EPOCH, callbacks=[in_notebook(), Failing()]).fit()
    assert "stopped after round 1 of 3" in notebook.outputs[0][-1][1]


def test_a_run_without_metrics_has_no_table(tmp_path, notebook, monkeypatch):
    stop_clock(monkeypatch)
    run = experiment(tmp_path, rounds=2, evaluate_every=2, trainer=ONE_EPOCH, callbacks=[in_notebook()])
    run.fit()
    first = next(page for text, page in notebook.outputs[0] if text.startswith("round 1/2"))
    assert "client train_loss" in first
    assert "global acc" not in first
    assert "<img" not in first


@pytest.mark.parametrize("console", [Console(force_jupyter=True, quiet=True), Console(file=io.StringIO())])
def test_no_view_in_a_quiet_notebook_or_a_script(tmp_path, notebook, console):
    experiment(tmp_path, rounds=1, trainer=ONE_EPOCH, callbacks=[RoundProgress(console)]).fit()
    assert not notebook.outputs
