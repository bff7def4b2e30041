"""`fl-lightning watch`: the files that it reads, its screen, and that it does not change the run."""

import errno
import fcntl
import io
import json
import math
import os
import pty
import re
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import termios
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml
from commands import contents, run, tiny, untimed_rows
from filelock import FileLock
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from run_folders import write_csv

from fl_lightning.analysis import run_status
from fl_lightning.analysis.run_screen import RunScreen, Terminal, format_duration, legend, rows_of_plots
from fl_lightning.analysis.run_status import RunMonitor, RunStatus, last_lines, last_measured
from fl_lightning.core.names import Names
from fl_lightning.runs.csv_reader import read_rows
from fl_lightning.runs.folder import LOCK, is_locked, lock_run_dir
from fl_lightning.runs.reader import Run

CONFIG = {
    "scenario": {"dataset": {"class_path": "fl_lightning.data.Digits"}, "clients": 20},
    "algorithm": {"class_path": "fl_lightning.algorithms.FedSKC", "init_args": {"tau": 0.1}},
    "clients_per_round": 5,
    "rounds": 30,
    "evaluation": {"every": 1},
    "seed": 7,
}


def rounds(number: int, **more: float) -> list[dict[str, float]]:
    """Return the metrics of rounds: accuracies grow, the loss falls, each round takes longer."""
    return [
        {"round": n, "global/acc": n / 100, "client/acc_mean": n / 200, "client/train_loss": 3 / n, "time/round_s": n}
        | more
        for n in range(1, number + 1)
    ]


def run_folder(path: Path, number: int, config: Mapping[str, Any] | None = CONFIG, ended: bool = False) -> Path:
    """Write the folder of a run after this number of rounds, or update it."""
    path.mkdir(parents=True, exist_ok=True)
    write_csv(path / "metrics.csv", rounds(number))
    if config:
        (path / "config.yaml").write_text(yaml.safe_dump(config))
    if ended:
        (path / "final").mkdir(exist_ok=True)
        (path / "final" / "summary.json").write_text(json.dumps({"rounds": number}))
    return path


def status_of(
    rows: Sequence[dict[str, float]],
    config: Mapping[str, Any] = CONFIG,
    clients: Sequence[dict[str, float]] = (),
    names: Names = Names(),
    warnings: Sequence[str] = (),
    ended: bool = False,
    silence: float = 0.0,
    since_round: float = 0.0,
    folder: str = "runs/one",
    stopped: bool = False,
) -> RunStatus:
    return RunStatus(
        Run(Path(folder), dict(config), list(rows)),
        list(clients),
        names,
        list(warnings),
        ended,
        silence,
        since_round,
        stopped,
    )


def shown(
    status: RunStatus, width: int = 80, height: int | None = None, encoding: str = "utf-8", colors: bool = False
) -> str:
    """Return the text on a terminal of this width, without colours."""
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=file, width=width, force_terminal=colors, color_system="truecolor" if colors else None)
    console.print(RunScreen(status, height))
    file.flush()
    return re.sub(r"\x1b\[[\d;]*m", "", file.buffer.getvalue().decode(encoding))


# --- Reading the ends of clients.csv and warnings.txt ---


@pytest.mark.parametrize("tail", [40, 2**16])
def test_last_measured_gives_the_same_rows_as_the_whole_file(tail, tmp_path, monkeypatch):
    monkeypatch.setattr(run_status, "TAIL", tail)
    random, path = Random(3), tmp_path / "clients.csv"
    rows = [
        {"round": n, "client": k, "train_loss": random.random(), "acc": random.random() if n % 3 == 0 else ""}
        for n in range(1, 12)
        for k in sorted(random.sample(range(50), 7))
    ]
    write_csv(path, rows)
    for last in range(13):
        measured = [row for row in rows if row["acc"] != "" and row["round"] <= last]
        expected = [row for row in measured if row["round"] == measured[-1]["round"]]
        assert last_measured(path, last) == expected


def test_a_clients_csv_without_measured_clients_gives_no_rows(tmp_path):
    path = tmp_path / "clients.csv"
    assert last_measured(path, 5) == []
    for content in (b"", b"round,client\n", b"round,client,acc\n1,2,0.", b"\xff\x00", b"x" * 300_000):
        path.write_bytes(content)
        assert last_measured(path, 5) == []


@pytest.mark.parametrize("tail", [5, 2**16])
def test_last_lines_gives_the_same_lines_as_the_whole_file(tail, tmp_path, monkeypatch):
    monkeypatch.setattr(run_status, "TAIL", tail)
    path = tmp_path / "warnings.txt"
    assert last_lines(path, 2) == []
    lines = [f"round {n}: µ{'!' * (n % 4)}" for n in range(20)]
    for number in range(20):
        path.write_text("".join(f"{line}\n" for line in lines[:number]) + "round 9: half")
        expected = lines[:number][-2:]
        lines_read = last_lines(path, 2)
        assert lines_read == expected[len(expected) - len(lines_read) :]
        if tail == 2**16:
            assert lines_read == expected


# --- Polling ---


def test_a_poll_returns_the_state_of_the_folder(tmp_path):
    folder = run_folder(tmp_path, 4)
    write_csv(folder / "clients.csv", [{"round": 4, "client": 2, "acc": 0.5}])
    (folder / "warnings.txt").write_text("round 1: a\nround 2: b\nround 3: c\nround 4: d\n")
    for path, age in (("metrics.csv", 100), ("config.yaml", 500), ("clients.csv", 110), ("warnings.txt", 50)):
        os.utime(folder / path, (time.time() - age,) * 2)
    status = RunMonitor(folder).poll()
    assert status.run.rounds == rounds(4)
    assert status.run.config == CONFIG
    assert status.clients == [{"round": 4, "client": 2, "acc": 0.5}]
    assert status.warnings == ["round 2: b", "round 3: c", "round 4: d"]
    assert status.since_round == pytest.approx(100, abs=5)
    assert status.silence == pytest.approx(50, abs=5)
    assert not status.ended


def test_a_later_poll_returns_the_changes(tmp_path):
    folder = run_folder(tmp_path, 4)
    monitor = RunMonitor(folder)
    before = monitor.poll()
    run_folder(tmp_path, 6, CONFIG | {"rounds": 50})
    write_csv(folder / "clients.csv", [{"round": n, "client": 2, "acc": n / 10} for n in (4, 5, 6, 7)])
    after = monitor.poll()
    assert (len(before.run.rounds), before.total, before.clients) == (4, 30, [])
    assert (len(after.run.rounds), after.total) == (6, 50)
    assert after.clients == [{"round": 6, "client": 2, "acc": 0.6}]
    run_folder(tmp_path, 7, CONFIG)
    assert monitor.poll().clients == [{"round": 7, "client": 2, "acc": 0.7}]


def test_unchanged_files_are_not_read_again(tmp_path, monkeypatch):
    folder = run_folder(tmp_path, 4)
    write_csv(folder / "clients.csv", [{"round": 4, "client": 2, "acc": 0.5}])
    monitor = RunMonitor(folder)
    first = monitor.poll()
    monkeypatch.setattr(run_status, "read_config", None)
    monkeypatch.setattr(run_status, "last_measured", None)
    again = monitor.poll()
    assert (again.run.config, again.clients) == (first.run.config, first.clients)


def test_a_run_has_ended_if_the_summary_covers_all_rounds(tmp_path):
    assert not RunMonitor(run_folder(tmp_path / "running", 30)).poll().ended
    ended = run_folder(tmp_path / "ended", 30, ended=True)
    assert RunMonitor(ended).poll().ended
    os.utime(ended / "metrics.csv", (time.time() + 60,) * 2)  # in a copy, the order of the files' times means nothing
    assert RunMonitor(ended).poll().ended
    early = run_folder(tmp_path / "early", 12, ended=True)
    assert RunMonitor(early).poll().ended
    assert RunMonitor(run_folder(tmp_path / "of python", 12, None, ended=True)).poll().ended


def test_a_resumed_run_has_not_ended_despite_the_summary_of_its_first_end(tmp_path):
    folder = run_folder(tmp_path, 30, ended=True)
    summary = folder / "final" / "summary.json"
    os.utime(summary, (time.time() - 60,) * 2)
    run_folder(tmp_path, 30, CONFIG | {"rounds": 50})  # a resume writes both files again
    assert not RunMonitor(folder).poll().ended
    run_folder(tmp_path, 31, CONFIG | {"rounds": 50})
    assert not RunMonitor(folder).poll().ended
    run_folder(tmp_path, 50, CONFIG | {"rounds": 50}, ended=True)
    assert RunMonitor(folder).poll().ended


@pytest.mark.parametrize(
    ("done", "every", "since", "last"), [(4, 1, 0.0, 4), (12, 1, 3.0, 10), (25, 20, 0.0, 20), (9, 1, 1e9, 9)]
)
def test_time_left(done, every, since, last):
    status = status_of(rounds(done), CONFIG | {"evaluation": {"every": every}}, since_round=since)
    mean = statistics.fmean(range(done - last + 1, done + 1))  # round n takes n seconds
    assert status.round_seconds == pytest.approx(mean)
    assert status.seconds_left == pytest.approx((30 - done) * mean - min(since, mean))


def test_time_left_is_unknown_without_rounds():
    assert status_of([]).seconds_left is None
    assert status_of(rounds(3), {}).seconds_left is None
    assert status_of(rounds(3), {"rounds": "many"}).seconds_left is None
    assert status_of(rounds(3, **{"time/round_s": math.nan})).seconds_left is None
    assert status_of(rounds(12), ended=True).seconds_left is None
    assert status_of(rounds(30)).seconds_left == 0
    assert status_of(rounds(31)).seconds_left == 0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.2, "1 s"),
        (59, "59 s"),
        (59.5, "1 min"),
        (60, "1 min"),
        (61, "2 min"),
        (3540, "59 min"),
        (3541, "1 h 00 min"),
        (7500, "2 h 05 min"),
        (360000, "100 h 00 min"),
    ],
)
def test_durations_are_rounded_up_in_a_fitting_unit(seconds, text):
    assert format_duration(seconds) == text


# --- The screen ---

ACC = {3: 0.5, 8: 0.25, 11: 1.0, 14: 0.125, 2: 0.25}
CLIENTS = [{"round": 11, "client": client, "acc": acc} for client, acc in ACC.items()]


def test_parts_of_the_screen():
    lines = shown(status_of(rounds(12), clients=CLIENTS, warnings=["round 9: low"])).splitlines()
    assert lines[:2] == ["runs/one", "FedSKC on Digits, 5 of 20 clients a round, seed 7"]
    assert re.fullmatch(r"round 12/30 ━+╸? +3 min left", lines[2])  # 18 rounds of 7.5 s
    assert lines[3] == "round 13 is under way; a round takes 7.5 s"
    text = " ".join("\n".join(lines).split())
    assert "global acc 0.1200" in text
    assert "client acc 0.0600" in text
    assert "training loss 0.2500" in text
    spread = f"median {statistics.median(ACC.values()):.4f}, deviation {statistics.pstdev(ACC.values()):.4f}"
    assert f"5 clients in round 11: acc 0.1250 to 1.0000, {spread}" in text
    assert "the worst: 14 (0.1250), 2 (0.2500), 8 (0.2500)" in lines
    named = shown(status_of(rounds(12), clients=CLIENTS, names=Names(["site"] * 14))).splitlines()
    assert "the worst: 14 (0.1250), site (0.2500), site (0.2500)" in named
    assert lines[-2:] == ["last warnings:", "round 9: low"]


@pytest.mark.parametrize(
    ("status", "line"),
    [
        (status_of([], since_round=90, silence=90), "waits for its first round to end, for 2 min so far"),
        (status_of(rounds(12), silence=59), "round 13 is under way; a round takes 7.5 s"),
        (
            status_of(rounds(12), silence=61),
            "nothing has changed for 2 min; if it was stopped, resume it with: fl-lightning",
        ),
        (status_of(rounds(29), silence=70), "round 30 is under way; a round takes 24.5 s"),  # less than three rounds
        (status_of(rounds(3, **{"time/round_s": math.inf})), "round 4 is under way"),
        (status_of(rounds(30)), "all rounds are done, final files are being written"),
        (status_of(rounds(12), ended=True, silence=1e6), "ended after round 12"),
        (
            status_of(rounds(12), stopped=True, silence=1),
            "stopped after round 12: its process has gone; resume it with: fl-lightning fit --resume runs/one",
        ),
    ],
    ids=["waits", "running", "silent", "slow", "no times", "all done", "ended", "stopped"],
)
def test_the_line_about_progress(status, line):
    lines = shown(status, 200).splitlines()
    assert any(message.startswith(line) for message in lines), lines
    assert ("--resume runs/one" in "".join(lines)) == line.startswith(("nothing", "stopped"))


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (CONFIG | {"clients_per_round": None}, "FedSKC on Digits, 20 clients, seed 7"),
        (CONFIG | {"scenario": {"dataset": "Digits", "clients": None}}, "FedSKC on Digits, 5 clients a round, seed 7"),
        ({"algorithm": "FedAvg", "seed": 0}, "FedAvg, seed 0"),
        ({}, "round 3"),
    ],
)
def test_the_line_about_the_config(config, line):
    assert shown(status_of(rounds(3), config)).splitlines()[1].startswith(line)


def test_without_client_rows_the_spread_comes_from_the_metrics():
    spread = {"client/acc_std": 0.125, "client/acc_worst_decile": 0.0625}
    rows = [*rounds(4, **spread), {"round": 5, "client/train_loss": 1.0}]
    line = "clients in round 4: acc mean 0.0200, deviation 0.1250, worst tenth 0.0625"
    assert line in shown(status_of(rows)).splitlines()
    assert "clients in" not in shown(status_of(rounds(4)))


def full_status(number: int = 40) -> RunStatus:
    """Return the status of a run that fills every part of the screen."""
    values = {"global/loss": 1.5, "client/loss_mean": 0.5, "personal_on_global/acc_mean": 0.25}
    warnings = [f"round {n}: client 3, round {n}: the loss is NaN " + "and more " * n for n in (2, 30, 300)]
    return status_of(rounds(number, **values), clients=CLIENTS, warnings=warnings)


@pytest.mark.parametrize(("colors", "encoding"), [(False, "utf-8"), (True, "utf-8"), (True, "ascii")])
@pytest.mark.parametrize("width", [12, 40, 71, 72, 200])
def test_the_screen_fits_the_width_and_the_encoding(width, encoding, colors):
    for status in (full_status(), full_status(1), status_of([]), status_of(rounds(2))):
        lines = shown(status, width, encoding=encoding, colors=colors).splitlines()
        assert max(map(len, lines)) <= width
        frame = any(line.startswith(("┌──", "+--")) for line in lines)
        assert frame == (width >= 24 and bool(status.run.rounds))
        text = "".join(lines)
        assert ("┌" in text) == (frame and encoding == "utf-8")
        assert bool(re.search("[\u2800-\u28ff]", text)) == (frame and colors and encoding == "utf-8")


@pytest.mark.parametrize("width", [40, 80])
def test_the_screen_fits_and_fills_the_height(width):
    plots = {}
    for height in range(34, 70, 3):
        lines = shown(full_status(), width, height, colors=True).splitlines()
        assert len(lines) <= height
        assert "".join(lines).endswith("q or Ctrl-C closes this view; the run continues")
        plots[height] = sum("│" in line for line in lines)
    assert max(plots.values()) >= 12
    assert all(fewer <= more for fewer, more in zip(plots.values(), list(plots.values())[1:], strict=False))


def test_a_warning_is_cut_to_three_lines():
    status = status_of([], warnings=["x" * 119, "y" * 120, "z" * 121])
    lines = shown(status, 40).splitlines()
    assert [line for line in lines if set(line) == {"x"}] == ["x" * 40, "x" * 40, "x" * 39]
    assert [line for line in lines if set(line) == {"y"}] == ["y" * 40] * 3
    assert [line for line in lines if "z" in line] == ["z" * 40, "z" * 40, "z" * 37 + "..."]


def test_markup_and_control_characters_are_not_interpreted():
    status = status_of(
        [], {"algorithm": "[red]µ\x1b[2J"}, warnings=["[bold]x[/] \x1b]0;title\x07 \x9b1m"], folder="a\x1b[H"
    )
    raw = io.StringIO()
    Console(file=raw, width=80, force_terminal=True, color_system=None).print(RunScreen(status))
    text = raw.getvalue()
    assert not set(text) & set("\x1b\x07\x9b")
    for line in ("a?[H", "[red]µ?[2J", "[bold]x[/] ?]0;title? ?1m"):
        assert line in text
    assert "[red]??[2J" in shown(status, encoding="ascii")


@given(st.none() | st.integers(0, 60), st.lists(st.integers(1, 3), min_size=1, max_size=2), st.booleans())
def test_plots_fill_the_available_rows(lines, legends, beside):
    rows = rows_of_plots(lines, legends, beside and len(legends) == 2)
    if lines is None:
        assert rows == [10] * len(legends)
        return

    def needed(rows):
        heights = [label + (n + 3 if n else 0) for label, n in zip(legends, rows, strict=True)]
        if beside and len(legends) == 2:
            return max(legends) + (rows[0] + 3 if rows[0] else 0)
        return sum(heights)

    possible = [[n] * k + [0] * (len(legends) - k) for k in range(1, len(legends) + 1) for n in range(3, 13)]
    if beside and len(legends) == 2:
        possible = [rows for rows in possible if all(rows)]
    fitting = [rows for rows in possible if needed(rows) <= lines]
    assert rows == max(fitting, key=lambda rows: (sum(map(bool, rows)), rows), default=[0] * len(legends))


def framed(text: str) -> list[list[str]]:
    """Return the rows inside the frame of each plot."""
    plots: list[list[str]] = []
    for line in text.splitlines():
        if line.startswith("┌"):
            plots.append([])
        elif line.startswith("│"):
            plots[-1].append(line[1 : line.index("│", 1)])
    return plots


def test_curves_have_the_right_positions():
    """Two straight lines, 0.01 to 0.40 and half of it: in each column, each has the row of its value."""
    (accuracy, loss) = framed(shown(status_of(rounds(40)), 60))
    height, width = len(accuracy), len(accuracy[0])
    for column in range(width):
        share = column / (width - 1)
        for mark, low, high in (("*", 0.01, 0.40), ("o", 0.005, 0.20)):
            value = low + share * (high - low)
            row = height - 1 - (value - 0.005) / (0.40 - 0.005) * (height - 1)
            drawn = [i for i in range(height) if accuracy[i][column] == mark]
            assert all(abs(i - row) <= 1.2 for i in drawn)
            assert drawn or mark == "*"  # the later curve is drawn over the earlier
    assert loss[0][0] == "*"
    assert loss[-1][-1] == "*"


def test_a_plot_has_axis_limits():
    text = shown(status_of(rounds(40)), 60)
    numbers = [line.rpartition("│")[2].strip() for line in text.splitlines() if line.startswith("│")]
    assert numbers == ["0.4", *[""] * 8, "0.005", "3", *[""] * 8, "0.075"]
    below = [after for line, after in zip(text.splitlines(), text.splitlines()[1:], strict=False) if line[0:1] == "└"]
    assert [line.split() for line in below] == [["1", "40"], ["1", "40"]]
    assert len(below[0]) == next(line.index("│", 1) for line in text.splitlines() if line.startswith("│"))


def test_a_plot_of_one_value_is_centred():
    text = shown(status_of(rounds(1)), 60)
    assert " 1" in text.splitlines()
    rows = [{"round": n, "global/acc": 0.5} for n in (1, 2, 3)]
    text = shown(status_of(rows), 60)
    (plot,) = framed(text)
    assert [("*" in row) for row in plot].index(True) in (4, 5)
    assert {"0.55", "0.45"} <= set(text.split())


def test_values_that_cannot_be_drawn_are_left_out():
    rows = rounds(4)
    rows[1]["client/train_loss"] = math.inf
    rows[2]["client/train_loss"] = 1e12
    rows[3]["client/train_loss"] = math.nan
    text = shown(status_of(rows), 60)
    assert "training loss 3.0000" in text
    assert "inf" not in text
    assert "nan" not in text


def test_a_legend_has_the_best_value_if_it_fits():
    rows = [{"round": n, "global/acc": acc, "global/loss": 1.0} for n, acc in ((1, 0.5), (2, 0.75), (3, 0.625))]
    full = "** global acc 0.6250, best 0.7500 in round 2"
    for width in (80, len(full)):
        (line,) = legend(rows, {"global/acc": "global acc"}, Terminal(width, False, "utf-8"))
        assert line.plain == full
    (line,) = legend(rows, {"global/acc": "global acc"}, Terminal(len(full) - 1, False, "utf-8"))
    assert line.plain == "** global acc 0.6250"
    (line,) = legend(rows, {"global/loss": "global loss"}, Terminal(80, True, "utf-8"))
    assert line.plain == "━━ global loss 1.0000"


# --- The command ---


def test_without_a_terminal_the_screen_is_shown_once(tmp_path, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # then rich takes any output for a terminal
    for words in ([], ["--once"]):
        code, out, err = run("watch", run_folder(tmp_path / "run", 12), *words)
        assert (code, err) == (0, "")
        assert "round 12/30" in re.sub(r"\x1b\[[\d;]*m", "", out)
        assert "q or Ctrl-C" not in out


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("metrics.csv", b"epoch,step\n1,2\n", "round 1 is missing"),
        ("metrics.csv", b"x" * 200_000 + b"\n1\n", "line 1: field larger than"),
        ("config.yaml", b"- 1\n", "it is not a mapping of settings"),
        ("final/summary.json", b"{", ""),
    ],
)
def test_a_damaged_run_is_one_line(name, content, message, tmp_path):
    folder = run_folder(tmp_path / "run", 3, ended=True)
    (folder / name).write_bytes(content)
    code, out, err = run("watch", folder)
    assert (code, out) == (2, "")
    assert err.startswith(f"fl-lightning: error: {folder}: {name} cannot be read: {message}")
    assert err.count("\n") == 1


def test_a_folder_without_a_run_is_one_line(tmp_path):
    for path, message in ((tmp_path / "no", "folder not found"), (tmp_path, "no run found")):
        assert run("watch", path) == (2, "", f"fl-lightning: error: {path}: {message}\n")
    reasons = {"-1": "-1.0 is outside [0, 86400]", ".inf": "inf is no finite number", ".nan": "nan is no finite number"}
    for seconds, reason in reasons.items():
        code, _, err = run("watch", tmp_path, "--every", seconds)
        assert (code, err) == (2, f"fl-lightning: error: --every: {reason}\n")


def test_the_newest_unfinished_run_of_a_folder_is_shown(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    ages = {"a/old": (40, False), "a/running": (30, False), "b/ended": (20, True), "b/broken": (10, False)}
    for name, (age, ended) in ages.items():
        folder = run_folder(tmp_path / name, 3, ended=ended)
        if name == "b/broken":
            (folder / "metrics.csv").write_text("foreign\n1\n")
        for file in folder.glob("*.*"):
            os.utime(file, (time.time() - age,) * 2)
    warnings.simplefilter("always")  # as on the command line; pytest would raise them as errors
    code, out, err = run("watch", tmp_path)
    assert (code, out.splitlines()[0]) == (0, str(tmp_path / "a" / "running"))
    assert err.startswith(f"fl-lightning: warning: {tmp_path / 'b' / 'broken'}: metrics.csv cannot be read: round 1")
    shutil.rmtree(tmp_path / "a")
    assert run("watch", tmp_path).out.splitlines()[0] == str(tmp_path / "b" / "ended")
    shutil.rmtree(tmp_path / "b" / "ended")
    code, _, err = run("watch", tmp_path)
    assert (code, err.splitlines()[-1]) == (2, f"fl-lightning: error: {tmp_path}: no run found")


# --- On a terminal ---


class Watcher:
    """`fl-lightning watch` in a pseudo-terminal."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.ours, theirs = pty.openpty()
        termios.tcsetwinsize(self.ours, (40, 100)) if hasattr(termios, "tcsetwinsize") else None
        self.before = termios.tcgetattr(self.ours)
        command = [sys.executable, "-m", "fl_lightning", "watch", str(folder), *words]
        environment = os.environ | {"TERM": "xterm-256color", "PYTHONUTF8": "1", "COLUMNS": "100", "LINES": "40"}
        self.process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
        os.close(theirs)
        self.output = b""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        try:
            while block := os.read(self.ours, 65536):
                self.output += block
        except OSError:  # the other end is closed
            pass

    def wait_for(self, text: str, times: int = 1) -> None:
        """Wait until it has shown a text this number of times."""
        deadline = time.monotonic() + 300
        while self.output.decode(errors="replace").count(text) < times:
            assert time.monotonic() < deadline, self.output.decode(errors="replace")[-2000:]
            assert self.process.poll() is None, self.output.decode(errors="replace")[-2000:]
            time.sleep(0.02)

    def press(self, key: bytes) -> None:
        os.write(self.ours, key)

    def end(self) -> int:
        """Wait until it ends, and return its exit code."""
        code = self.process.wait(300)
        self.after = termios.tcgetattr(self.ours)
        self._reader.join(300)
        os.close(self.ours)
        return code


@contextmanager
def watcher(folder: Path, *words: str):
    one = Watcher(folder, *words)
    try:
        yield one
    finally:
        if one.process.poll() is None:
            one.process.kill()
            one.end()


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("how", ["q", "SIGTERM"])
def test_the_terminal_is_restored_at_the_end(how, tmp_path):
    folder = run_folder(tmp_path / "run", 12)
    with watcher(folder, "--every", "0.05") as one:
        one.wait_for("q or Ctrl-C", 2)
        one.press(b"x")  # other keys have no effect
        one.wait_for("q or Ctrl-C", 4)
        one.press(b"q") if how == "q" else one.process.send_signal(getattr(signal, how))
        assert one.end() == 0
    assert one.after == one.before
    screen, _, left = one.output.decode().rpartition("\x1b[?1049l")
    assert "\x1b[?25h" in screen  # the cursor is back
    assert "round \x1b" in left or "round 12/30" in left  # the last view stays
    assert "q or Ctrl-C" not in left


def test_ctrl_c_ends_watch_even_if_sigint_was_ignored(tmp_path):
    """Shells without job control ignore SIGINT in background processes, and their children inherit this."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with watcher(run_folder(tmp_path / "run", 12), "--every", "0.05") as one:
            one.wait_for("q or Ctrl-C", 2)
            one.process.send_signal(signal.SIGINT)
            assert one.end() == 0
    finally:
        signal.signal(signal.SIGINT, before)


def test_watch_shows_new_rounds_and_ends_with_the_run(tmp_path):
    folder = run_folder(tmp_path / "run", 12)
    with watcher(folder, "--every", "0.05") as one:
        one.wait_for("round 12/30")
        run_folder(folder, 29)
        one.wait_for("round 29/30")
        run_folder(folder, 30, ended=True)
        assert one.end() == 0
    assert "ended after round 30" in one.output.decode().rpartition("\x1b[?1049l")[2]


def test_watch_ends_when_the_process_of_the_run_has_gone(tmp_path):
    folder = run_folder(tmp_path / "run", 12)
    with FileLock(folder / LOCK) as lock, watcher(folder, "--every", "0.05") as one:
        one.wait_for("round 13 is under way", 2)
        lock.release()  # as the system does when a process ends
        assert one.end() == 0
    left = " ".join(one.output.decode().rpartition("\x1b[?1049l")[2].split())
    assert "stopped after round 12: its process has gone" in left


def test_a_poll_sees_whether_a_process_holds_the_lock(tmp_path):
    folder, ended = run_folder(tmp_path / "run", 12), run_folder(tmp_path / "ended", 30, ended=True)
    assert not RunMonitor(folder).poll().stopped  # a folder without lock, such as a copy
    for path, stopped in ((folder, True), (ended, False)):
        with FileLock(path / LOCK):
            assert is_locked(path) is True
            assert not RunMonitor(path).poll().stopped
        assert is_locked(path) is False
        status = RunMonitor(path).poll()
        assert status.stopped == stopped
        assert status.ended != stopped
        assert status.seconds_left is None


def test_a_lock_that_is_no_regular_file_or_without_support_is_unknown(tmp_path, monkeypatch):
    assert is_locked(tmp_path) is None
    (tmp_path / LOCK).touch()
    assert is_locked(tmp_path) is False

    def unsupported(*args):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr("fcntl.flock", unsupported)
    assert is_locked(tmp_path) is None


def test_watching_does_not_keep_a_run_from_starting(tmp_path):
    """The monitor holds the lock for an instant, which a starting run waits for."""
    run_folder(tmp_path, 3)
    (tmp_path / LOCK).touch()
    with open(tmp_path / LOCK) as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        threading.Timer(0.05, fcntl.flock, (file, fcntl.LOCK_UN)).start()
        with lock_run_dir(tmp_path):
            assert is_locked(tmp_path)


@pytest.mark.thorough
def test_watch_reports_that_the_run_was_removed(tmp_path):
    folder = run_folder(tmp_path / "run", 12)
    with watcher(folder, "--every", "0.05") as one:
        one.wait_for("round 12/30")
        (folder / "metrics.csv").unlink()
        assert one.end() == 2
    reason = "not a run, or its first round has not ended: metrics.csv not found"
    assert f"{folder}: {reason}" in " ".join(one.output.decode().split("\r\n"))
    assert one.after == one.before


def untimed(folder: Path) -> dict[str, Any]:
    """Return the files of a run without its times and the manifests, which contain digests of them."""
    timed = ("metrics.csv", "manifest.json")
    others = {name: content for name, content in contents(folder).items() if Path(name).name not in timed}
    return others | {"metrics.csv": untimed_rows(folder)}


@pytest.mark.thorough
def test_watching_does_not_change_a_run(tmp_path):
    """Meanwhile a thread polls the folder without pause, and a `watch` process reads it."""
    tiny(tmp_path / "alone", "--rounds", "6")
    folder, over = tmp_path / "watched", threading.Event()

    def poll() -> list[int]:
        while not (folder / "metrics.csv").exists():
            time.sleep(0.001)
        monitor, seen = RunMonitor(folder), []
        with watcher(folder, "--every", "0"):
            while not over.is_set():
                status = monitor.poll()
                assert list(read_rows(folder / "metrics.csv"))[: len(status.run.rounds)] == status.run.rounds
                seen.append(len(status.run.rounds))
        return seen

    with ThreadPoolExecutor() as pool:
        polling = pool.submit(poll)
        try:
            tiny(folder, "--rounds", "6")
        finally:
            over.set()
    assert untimed(folder) == untimed(tmp_path / "alone")
    assert polling.result() == sorted(polling.result())
    assert len(set(polling.result())) > 2


def test_polling_keeps_no_file_open_and_writes_none(tmp_path):
    folder = run_folder(tmp_path / "run", 12, ended=True)
    write_csv(folder / "clients.csv", [{"round": 12, "client": 2, "acc": 0.5}])
    (folder / "warnings.txt").write_text("round 1: a\n")
    before = contents(folder)
    for path in [*folder.rglob("*"), folder]:
        path.chmod(0o500 if path.is_dir() else 0o400)
    opened = sorted(os.listdir("/proc/self/fd"))
    monitor = RunMonitor(folder)
    for _ in range(3):
        monitor.poll()
    assert sorted(os.listdir("/proc/self/fd")) == opened
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o700)
    assert contents(folder) == before


# --- Files without an end ---


def sparse(path):
    path.touch()
    os.truncate(path, 5 * 2**30)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("make", "name"), [(os.mkfifo, "metrics.csv"), (sparse, "warnings.txt")])
def test_a_file_without_an_end_does_not_block(make, name, tmp_path):
    folder = run_folder(tmp_path / "run", 3)
    (folder / "final").mkdir(exist_ok=True)
    (folder / name).unlink(missing_ok=True)
    make(folder / name)
    command = [sys.executable, "-m", "fl_lightning", "watch", str(folder), "--once"]
    done = subprocess.run(command, timeout=300, capture_output=True, text=True, preexec_fn=limit_memory)
    if name == "warnings.txt":
        assert done.returncode == 0
    else:
        assert done.returncode == 2
        assert re.search(rf"{name} cannot be read: .*it is no file", done.stderr)


def limit_memory():
    resource.setrlimit(resource.RLIMIT_AS, (4 * 2**30, 4 * 2**30))
