"""Terminal output and figures: forty columns are enough, Ctrl-C removes the bars, labels do not overlap."""

import fcntl
import io
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from itertools import combinations

import numpy as np
import pytest
from commands import TINY, run, tiny
from matplotlib.text import Text
from rich.console import Console

from fl_lightning.analysis import summary_tables as tables
from fl_lightning.analysis.summary_tables import summary_table
from fl_lightning.callbacks import KnowledgeMap
from fl_lightning.callbacks.knowledge_map import MOST_IN_LEGEND, MOST_LABELS, places_around

FAMILIES = ("global/acc", "client/acc_mean", "client/acc_weighted", "personal_on_global/acc_mean")
SUMMARY = {
    "rounds": 2000,
    **{f"{name}_{what}": 0.51234 for name in FAMILIES for what in ("last", "best")},
    **{f"{name}_best_round": 1999 for name in FAMILIES},
    "R_0.55": 1234,
    "R_0.9": None,
    "comm/total_up_bytes": 123_456_789_012,
    "comm/total_down_bytes": 1,
}
METRICS = {
    "round": 2000,
    "global/acc": 0.5,
    "global/loss": 123.25,
    "global/acc_interval": 0.01,
    "client/acc_worst_decile": 0.25,
    "client_3/acc": 0.125,
}


def shown(table, width):
    """Render a table in a terminal of some columns."""
    console = Console(file=(screen := io.StringIO()), width=width, color_system=None)
    console.print(table)
    return screen.getvalue()


def words(text):
    return " ".join(re.sub(r"[│┃├┤┼─┏┓┗┛┡┩╇┳└┘┴━]", " ", text).split())


# --- Tables ---


@pytest.mark.parametrize("width", [42, 60, 200])
@pytest.mark.parametrize(
    "table",
    [summary_table(SUMMARY), tables.test_table(METRICS, server=True, validation=False)],
    ids=["summary", "test"],
)
def test_every_word_and_number_is_visible_in_a_narrow_terminal(table, width):
    text = shown(table, width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    assert all(line[-1] in "│┃┓┩┤┘" for line in text.splitlines() if line[0] in "│┃┏┡├└")
    cells = {cell for column in table.columns for cell in (column.header, *column.cells)}
    for word in {word for cell in cells for word in cell.split()}:
        assert re.search(rf"(?<!\S){re.escape(word)}(?!\S)", words(text)), word


def test_numbers_are_on_the_first_line_of_their_names_in_a_narrow_terminal():
    lines = [line.strip("│ ").split("│") for line in shown(summary_table(SUMMARY), 42).splitlines() if "│" in line]
    first = {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in lines}
    assert first["personal"] == ["0.5123", "0.5123", "1999"]
    assert first["bytes up"][0] == "123 GB"


@pytest.mark.parametrize(
    ("clients", "expected"), [("trained", "as trained in the round"), ("received", "as received after the round")]
)
def test_the_final_table_says_which_model_was_evaluated(clients, expected):
    assert summary_table(SUMMARY, clients).caption.splitlines() == [
        "global: the global model, on the global test set",
        f"client: each client's model {expected}, on its own test split",
        "personal: clients' models as trained, on the global test set",
    ]


def test_the_caption_omits_metrics_that_are_not_there():
    summary = {name: value for name, value in SUMMARY.items() if not name.startswith(("global", "personal"))}
    assert summary_table(summary).caption == (
        "client: each client's model as trained in the round, on its own test split"
    )


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), ("as trained in the round", "as received after the round")),
        (("--evaluation.client_model", "received"), ("as received after the round", "as received after the round")),
        (("--algorithm", "PeerFedPer"), ("as trained in the round", "as it was trained last")),
    ],
)
def test_fit_and_test_say_which_model_was_evaluated(tmp_path, words, expected):
    at_the_end = tiny(tmp_path / "run", "--rounds", "1", *words).out
    afterwards = run("test", tmp_path / "run").out
    for text, model in zip((at_the_end, afterwards), expected, strict=True):
        text = " ".join(text.split())
        assert f"client: each client's model {model}, on its own test split" in text
        assert ("global: the global model" in text) == ("--algorithm" not in words)


def test_watch_and_test_need_only_forty_columns(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    tiny(tmp_path / "run", "--rounds", "1", "--evaluation.personal_on_global", "true")
    for command in (["watch", "--once"], ["test"]):
        out = run(*command, tmp_path / "run").out
        assert "…" not in out
        assert max(len(line) for line in out.splitlines() if line not in str(tmp_path / "run")) <= 40


# --- A terminal of forty columns ---


class Screen:
    """A terminal for rich's bars: characters, line ends, cursor up, and erased lines."""

    def __init__(self, columns):
        self.columns, self.lines, self.row, self.column = columns, [""], 0, 0

    def feed(self, text):
        for part in re.findall(r"\x1b\[[?\d;]*[A-Za-z]|[^\x1b]", text):
            number = int(re.sub(r"\D", "", part) or 1) if part[0] == "\x1b" else 0
            if part == "\r":
                self.column = 0
            elif part == "\n":
                self.row, self.column = self.row + 1, 0 if self.column == self.columns else self.column
            elif part.endswith("A") and number:
                self.row -= number
            elif part.endswith("K") and number:
                self.lines[self.row] = ""
            elif len(part) == 1:
                if self.column == self.columns:
                    self.row, self.column = self.row + 1, 0
                self.put(part)
            self.lines += [""] * (self.row + 1 - len(self.lines))

    def put(self, letter):
        self.lines += [""] * (self.row + 1 - len(self.lines))
        line = self.lines[self.row].ljust(self.column)
        self.lines[self.row] = line[: self.column] + letter + line[self.column + 1 :]
        self.column += 1


def in_a_terminal(words, folder, columns, until, key):
    """Run a command in a new terminal. Return its exit code, its output until a key is pressed, and all output."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
    command = [sys.executable, "-m", "fl_lightning", *words]
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    environment = {**kept, "TERM": "xterm-256color", "OMP_NUM_THREADS": "1"}
    ends = {"stdin": follower, "stdout": follower, "stderr": follower}
    process = subprocess.Popen(
        command, cwd=folder, env=environment, **ends, start_new_session=True, preexec_fn=lambda: own_terminal(follower)
    )
    os.close(follower)
    written, before, deadline = "", None, time.monotonic() + 300
    while time.monotonic() < deadline:
        if select.select([leader], [], [], 0.2)[0]:
            try:
                written += os.read(leader, 65536).decode(errors="replace")
            except OSError:
                break
        if before is None and re.search(until, written):
            before = written
            os.write(leader, key)
    os.close(leader)
    return process.wait(300), before, written


def own_terminal(follower):
    fcntl.ioctl(follower, termios.TIOCSCTTY, 0)


@pytest.mark.slow
@pytest.mark.parametrize("columns", [40, 100])
def test_ctrl_c_removes_the_bars(tmp_path, columns):
    (tmp_path / "tiny.yaml").write_text(TINY)
    words = ["fit", "--config=tiny.yaml", "--rounds=100000", "--run_dir=run"]
    words += ["--callbacks+=Checkpointing", "--callbacks.every=50"]
    code, before, written = in_a_terminal(words, tmp_path, columns, r"global acc 0\.\d{4}", b"\x03")
    assert code == 130
    during, after = Screen(columns), Screen(columns)
    during.feed(before)
    after.feed(written)
    bars = [line for line in during.lines if re.match("rounds |clients ", line)]
    assert len(bars) == 2
    assert all(len(line) <= columns for line in during.lines)
    left = "".join(line.ljust(columns) if len(line) == columns else f"{line} " for line in after.lines)
    assert not re.search(r"━|acc 0\.", left), after.lines
    assert "stopped by SIGINT after round" in left
    assert "fit --resume run" in left


# --- The knowledge map ---


def knowledge(classes, held, samples=500, spread=12.0):
    rng = np.random.default_rng(classes)
    centres = rng.normal(size=(classes, 2)) * spread
    labels = rng.integers(0, classes, samples)
    own = np.sort(rng.choice(classes, held, replace=False))
    points = centres[labels] + 2 * rng.normal(size=(samples, 2))
    return {"points": points, "labels": labels, "knowledge": centres[own], "classes": own, "client": np.array(3)}


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(("classes", "held"), [(2, 1), (10, 7), (20, 20), (100, 60), (200, MOST_LABELS), (40, 0)])
@pytest.mark.parametrize("spread", [12.0, 0.5])
def test_labels_of_the_knowledge_map_do_not_overlap(classes, held, spread):
    """They do not cover another class's diamond and stay inside the axes, also if all points are at one place."""
    arrays = knowledge(classes, held, spread=spread)
    figure = KnowledgeMap().draw(arrays)
    figure.draw_without_rendering()
    axes = figure.axes[0]
    assert [note.get_text() for note in axes.texts] == [str(label) for label in arrays["classes"]]
    boxes = [text_box(note) for note in axes.texts]
    assert not [pair for pair in combinations(boxes, 2) if pair[0].overlaps(pair[1])]
    inside = axes.get_window_extent()
    assert all(inside.x0 <= box.x0 and box.x1 <= inside.x1 for box in boxes)
    assert all(inside.y0 <= box.y0 and box.y1 <= inside.y1 for box in boxes)
    diamonds = axes.transData.transform(arrays["knowledge"])
    assert not [1 for box in boxes for x, y in diamonds if box.contains(x, y)]


def text_box(note):
    """Return the box of a note's text, without the line that leads to it."""
    return Text.get_window_extent(note)


@pytest.mark.parametrize("classes", [10, MOST_IN_LEGEND, 100])
def test_legends_explain_points_and_colours(classes):
    figure = KnowledgeMap().draw(knowledge(classes, classes // 2))
    entries = [[text.get_text() for text in legend.get_texts()] for legend in figure.legends]
    assert entries[0] == ["test sample", "knowledge of client 3, by class"]
    if classes <= MOST_IN_LEGEND:
        assert entries[1:] == [[str(j) for j in range(classes)]]
        assert len(figure.axes) == 1
    else:
        assert len(entries) == 1
        assert figure.axes[1].get_ylabel() == "class"
    figure.draw_without_rendering()
    plot = figure.axes[0].get_window_extent()
    for legend in figure.legends:
        box = legend.get_window_extent()
        assert not box.overlaps(plot)
        assert box.x0 >= 0
        assert box.y0 >= 0
        assert box.x1 <= figure.bbox.x1
        assert box.y1 <= figure.bbox.y1


def test_samples_have_the_colour_of_the_knowledge_of_their_class():
    arrays = knowledge(10, 10)
    samples, diamonds = KnowledgeMap().draw(arrays).axes[0].collections
    colors = dict(zip(arrays["classes"], diamonds.to_rgba(diamonds.get_array()), strict=True))
    assert len({tuple(color) for color in colors.values()}) == 10
    for label, color in zip(arrays["labels"], samples.to_rgba(samples.get_array()), strict=True):
        np.testing.assert_array_equal(color, colors[label])


def test_very_many_classes_have_no_labels():
    assert not KnowledgeMap().draw(knowledge(300, MOST_LABELS + 1)).axes[0].texts


def test_places_around_a_point_are_sorted_by_distance():
    places = np.array([*places_around(np.array([3.0, 4.0]), 10.0)])
    distances = np.linalg.norm(places - [3, 4], axis=1)
    assert np.all(np.diff(distances) > -1e-9)
    assert distances[0] == pytest.approx(10)
    assert len(np.unique(places.round(6), axis=0)) == len(places)
