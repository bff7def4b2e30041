"""`fl-lightning watch`: what it reads, what it shows, and that the run does not notice."""

import csv
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
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml
from commands import contents, run, tiny, untimed_rows
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from fl_lightning.analysis import run_status as follow
from fl_lightning.analysis.run_screen import RunScreen, Terminal, hours, legend, rows_of_plots
from fl_lightning.analysis.run_status import GrowingCsv, RunMonitor, RunStatus, last_lines, last_measured
from fl_lightning.evaluation.metrics import read_rows
from fl_lightning.runs.reader import DamagedRun, Run

CONFIG = {
    "scenario": {"dataset": {"class_path": "fl_lightning.data.Digits"}, "clients": 20},
    "algorithm": {"class_path": "fl_lightning.algorithms.FedSKC", "init_args": {"tau": 0.1}},
    "clients_per_round": 5,
    "rounds": 30,
    "evaluation": {"every": 1},
    "seed": 7,
}


def rounds(number: int, **more: float) -> list[dict[str, float]]:
    """Metrics of so many rounds; accuracies grow, the loss falls, each round takes longer."""
    return [
        {"round": n, "global/acc": n / 100, "client/acc_mean": n / 200, "client/train_loss": 3 / n, "time/round_s": n}
        | more
        for n in range(1, number + 1)
    ]


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """As a run writes it: beside its place, then moved there."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with (beside := path.with_name(f".{path.name}.writing")).open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    beside.replace(path)


def run_folder(path: Path, number: int, config: Mapping[str, Any] | None = CONFIG, ended: bool = False) -> Path:
    """A run's folder after so many rounds."""
    path.mkdir(parents=True, exist_ok=True)
    write_csv(path / "metrics.csv", rounds(number))
    if config:
        (path / "config.yaml").write_text(yaml.safe_dump(config))
    if ended:
        (path / "final").mkdir(exist_ok=True)
        (path / "final" / "summary.json").write_text(json.dumps({"rounds": number}))
    return path


def look_at(
    rows: Sequence[dict[str, float]],
    config: Mapping[str, Any] = CONFIG,
    clients: Sequence[dict[str, float]] = (),
    warnings: Sequence[str] = (),
    ended: bool = False,
    silence: float = 0.0,
    since_round: float = 0.0,
    folder: str = "runs/one",
) -> RunStatus:
    return RunStatus(
        Run(Path(folder), dict(config), list(rows)), list(clients), list(warnings), ended, silence, since_round
    )


def shown(
    look: RunStatus, width: int = 80, height: int | None = None, encoding: str = "utf-8", colors: bool = False
) -> str:
    """What a terminal of so many columns gets, less its colours."""
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=file, width=width, force_terminal=colors, color_system="truecolor" if colors else None)
    console.print(RunScreen(look, height))
    file.flush()
    return re.sub(r"\x1b\[[\d;]*m", "", file.buffer.getvalue().decode(encoding))


# --- Reading metrics.csv while it grows ---


def test_a_file_that_grows_byte_by_byte_is_read_as_if_whole(tmp_path):
    write_csv(tmp_path / "whole.csv", [*rounds(3), {"round": 4, "global/acc": 0.5}])
    whole, path = (tmp_path / "whole.csv").read_bytes(), tmp_path / "metrics.csv"
    growing = GrowingCsv(path)
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        assert growing.read() == list(read_rows(path))
    assert len(growing.read()) == 4


def test_a_row_is_parsed_once(tmp_path, monkeypatch):
    parsed, parse = [], follow.parse_rows
    monkeypatch.setattr(follow, "parse_rows", lambda content: parsed.extend(parse(content)) or parse(content))
    path = tmp_path / "metrics.csv"
    write_csv(path, rounds(50))
    growing = GrowingCsv(path)
    growing.read()
    for n in range(51, 60):
        with path.open("a") as file:
            file.write(f"{n},0.1,0.2,0.3,1\n")
        assert growing.read()[-1]["round"] == n
        growing.read()
    assert [row["round"] for row in parsed] == list(range(1, 60))


@given(st.lists(st.tuples(st.integers(0, 12), st.booleans(), st.integers(0, 9)), max_size=8))
def test_whatever_becomes_of_the_file_it_is_read_as_it_is(tmp_path_factory, changes):
    """Rounds are added or, after a resume, computed again with other times; a column comes in, or goes."""
    path = tmp_path_factory.mktemp("growing") / "metrics.csv"
    growing = GrowingCsv(path)
    for number, wider, seconds in changes:
        extra = {"client/failed": 1} if wider else {}
        write_csv(path, [row | extra | {"time/round_s": row["round"] + seconds} for row in rounds(number)])
        assert growing.read() == list(read_rows(path))
        with path.open("a") as file:
            file.write(f"{number + 1},0.5,0.25,0.125,{seconds}{',1' if wider else ''}\n")
        assert growing.read() == list(read_rows(path))


# --- Reading the ends of clients.csv and warnings.txt ---


@pytest.mark.parametrize("tail", [40, 200, 2**16])
def test_the_clients_measured_last_are_those_of_the_whole_file(tail, tmp_path, monkeypatch):
    monkeypatch.setattr(follow, "TAIL", tail)
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


def test_of_a_round_that_is_being_written_nothing_is_shown(tmp_path):
    folder = run_folder(tmp_path, 2)
    write_csv(folder / "clients.csv", [{"round": n, "client": k, "acc": 0.5} for n in (1, 2, 3) for k in (4, 5)])
    assert [row["round"] for row in RunMonitor(folder).poll().clients] == [2, 2]


@pytest.mark.parametrize(
    "content",
    [None, b"", b"\n", b"round,client\n", b"round,client,acc\n1,2,0.", b"\xff\x00", b"a,b\nx,y\n", b"x" * 300_000],
)
def test_a_clients_file_without_what_is_looked_for_is_none(content, tmp_path):
    path = tmp_path / "clients.csv"
    if content is not None:
        path.write_bytes(content)
    assert last_measured(path, 5) == []


@pytest.mark.parametrize("tail", [5, 30, 2**16])
def test_the_last_lines_are_those_of_the_whole_file(tail, tmp_path, monkeypatch):
    monkeypatch.setattr(follow, "TAIL", tail)
    path = tmp_path / "warnings.txt"
    assert last_lines(path, 2) == []
    lines = [f"round {n}: µ{'!' * (n % 4)}" for n in range(20)]
    for number in range(20):
        path.write_text("".join(f"{line}\n" for line in lines[:number]) + "round 9: half")
        expected = lines[:number][-2:]
        got = last_lines(path, 2)
        assert got == expected[len(expected) - len(got) :]
        if tail == 2**16:
            assert got == expected


# --- What is looked at ---


def test_a_look_tells_what_the_folder_holds(tmp_path):
    folder = run_folder(tmp_path, 4)
    write_csv(folder / "clients.csv", [{"round": 4, "client": 2, "acc": 0.5}])
    (folder / "warnings.txt").write_text("round 1: a\nround 2: b\nround 3: c\nround 4: d\n")
    for path, age in (("metrics.csv", 100), ("config.yaml", 500), ("clients.csv", 110), ("warnings.txt", 50)):
        os.utime(folder / path, (time.time() - age,) * 2)
    look = RunMonitor(folder).poll()
    assert look.run.rounds == rounds(4)
    assert look.run.config == CONFIG
    assert look.clients == [{"round": 4, "client": 2, "acc": 0.5}]
    assert look.warnings == ["round 2: b", "round 3: c", "round 4: d"]
    assert look.since_round == pytest.approx(100, abs=5)
    assert look.silence == pytest.approx(50, abs=5)
    assert not look.ended


def test_a_later_look_tells_what_has_changed(tmp_path):
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


def test_what_has_not_changed_is_not_read_again(tmp_path, monkeypatch):
    folder = run_folder(tmp_path, 4)
    write_csv(folder / "clients.csv", [{"round": 4, "client": 2, "acc": 0.5}])
    monitor = RunMonitor(folder)
    first = monitor.poll()
    monkeypatch.setattr(follow, "read_config", None)
    monkeypatch.setattr(follow, "last_measured", None)
    again = monitor.poll()
    assert (again.run.config, again.clients) == (first.run.config, first.clients)


def test_a_run_has_ended_when_the_summary_is_of_all_its_rounds(tmp_path):
    assert not RunMonitor(run_folder(tmp_path / "running", 30)).poll().ended
    ended = run_folder(tmp_path / "ended", 30, ended=True)
    assert RunMonitor(ended).poll().ended
    os.utime(ended / "metrics.csv")  # a copy's times say nothing
    assert RunMonitor(ended).poll().ended
    early = run_folder(tmp_path / "early", 12, ended=True)
    assert RunMonitor(early).poll().ended
    assert RunMonitor(run_folder(tmp_path / "of python", 12, None, ended=True)).poll().ended


def test_a_run_that_goes_on_has_not_ended_though_the_summary_of_its_first_end_is_there(tmp_path):
    folder = run_folder(tmp_path, 30, ended=True)
    summary = folder / "final" / "summary.json"
    os.utime(summary, (time.time() - 60,) * 2)
    run_folder(tmp_path, 30, CONFIG | {"rounds": 50})  # a resume writes both anew
    assert not RunMonitor(folder).poll().ended
    run_folder(tmp_path, 31, CONFIG | {"rounds": 50})
    assert not RunMonitor(folder).poll().ended
    run_folder(tmp_path, 50, CONFIG | {"rounds": 50}, ended=True)
    assert RunMonitor(folder).poll().ended


@pytest.mark.parametrize(
    ("done", "every", "since", "last"), [(4, 1, 0.0, 4), (12, 1, 3.0, 10), (25, 20, 0.0, 20), (9, 1, 1e9, 9)]
)
def test_the_time_left_is_that_of_the_rounds_to_come(done, every, since, last):
    look = look_at(rounds(done), CONFIG | {"evaluation": {"every": every}}, since_round=since)
    mean = statistics.fmean(range(done - last + 1, done + 1))  # round n takes n seconds
    assert look.round_seconds == pytest.approx(mean)
    assert look.seconds_left == pytest.approx((30 - done) * mean - min(since, mean))


def test_there_is_no_time_left_to_tell_of_without_a_round_or_a_number_of_them():
    assert look_at([]).seconds_left is None
    assert look_at(rounds(3), {}).seconds_left is None
    assert look_at(rounds(3), {"rounds": "many"}).seconds_left is None
    assert look_at(rounds(3, **{"time/round_s": math.nan})).seconds_left is None
    assert look_at(rounds(12), ended=True).seconds_left is None
    assert look_at(rounds(30)).seconds_left == 0
    assert look_at(rounds(31)).seconds_left == 0


@given(st.integers(0, 10**6))
def test_hours_and_minutes(seconds):
    whole = timedelta(minutes=-(-seconds // 60))
    days, clock = whole.days, str(whole - timedelta(days=whole.days))
    h, m, _ = clock.split(":")
    assert hours(seconds) == f"{24 * days + int(h)}:{m}"


# --- What is shown ---

ACC = {3: 0.5, 8: 0.25, 11: 1.0, 14: 0.125, 2: 0.25}
CLIENTS = [{"round": 11, "client": client, "acc": acc} for client, acc in ACC.items()]


def test_what_is_shown_of_a_run():
    lines = shown(look_at(rounds(12), clients=CLIENTS, warnings=["round 9: low"])).splitlines()
    assert lines[:2] == ["runs/one", "FedSKC on Digits, 5 of 20 clients a round, seed 7"]
    assert re.fullmatch(r"round 12/30 ━+ +0:03 left", lines[2])  # 18 rounds of 7.5 s
    assert lines[3] == "round 13 is under way; a round takes 7.5 s"
    text = " ".join("\n".join(lines).split())
    assert "global acc 0.1200" in text
    assert "client acc 0.0600" in text
    assert "training loss 0.2500" in text
    spread = f"median {statistics.median(ACC.values()):.4f}, deviation {statistics.pstdev(ACC.values()):.4f}"
    assert f"5 clients in round 11: acc 0.1250 to 1.0000, {spread}" in text
    assert "the worst: 14 (0.1250), 2 (0.2500), 8 (0.2500)" in lines
    assert lines[-2:] == ["last warnings:", "round 9: low"]


def test_the_bar_is_as_full_as_the_run():
    drawn = [shown(look_at(rounds(done)), 60).splitlines()[2].count("━") for done in (0, 15, 30)]
    assert drawn[0] == 0
    assert drawn[2] > 30
    assert drawn[1] == pytest.approx(drawn[2] / 2, abs=4)


@pytest.mark.parametrize(
    ("look", "line"),
    [
        (look_at([], since_round=90, silence=90), "waits for its first round to end, for 0:02 so far"),
        (look_at(rounds(12), silence=59), "round 13 is under way; a round takes 7.5 s"),
        (
            look_at(rounds(12), silence=61),
            "nothing has changed for 0:02; if it was stopped, resume it with: fl-lightning",
        ),
        (look_at(rounds(29), silence=70), "round 30 is under way; a round takes 24.5 s"),  # three may pass
        (look_at(rounds(29), silence=74), "nothing has changed for 0:02"),
        (look_at(rounds(3, **{"time/round_s": math.inf})), "round 4 is under way"),
        (look_at(rounds(30)), "all rounds are done, final files are being written"),
        (look_at(rounds(12), ended=True, silence=1e6), "ended after round 12"),
    ],
    ids=["waits", "running", "silent", "slow", "slow and silent", "no times", "all done", "ended"],
)
def test_whether_the_run_goes_on(look, line):
    lines = shown(look, 200).splitlines()
    assert any(told.startswith(line) for told in lines), lines
    assert ("--resume runs/one" in "".join(lines)) == line.startswith("nothing")


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (CONFIG | {"clients_per_round": None}, "FedSKC on Digits, 20 clients, seed 7"),
        (CONFIG | {"clients_per_round": 20}, "FedSKC on Digits, 20 clients, seed 7"),
        (CONFIG | {"scenario": {"dataset": "Digits", "clients": None}}, "FedSKC on Digits, 5 clients a round, seed 7"),
        ({"algorithm": "FedAvg", "seed": 0}, "FedAvg, seed 0"),
        ({"rounds": 5}, "round 3/5"),
        ({}, "round 3"),
    ],
)
def test_of_the_config_is_told_what_there_is(config, line):
    assert shown(look_at(rounds(3), config)).splitlines()[1].startswith(line)


def test_without_single_clients_their_spread_is_that_of_the_metrics():
    spread = {"client/acc_std": 0.125, "client/acc_worst_decile": 0.0625}
    rows = [*rounds(4, **spread), {"round": 5, "client/train_loss": 1.0}]
    line = "clients in round 4: acc mean 0.0200, deviation 0.1250, worst tenth 0.0625"
    assert line in shown(look_at(rows)).splitlines()
    assert "clients in" not in shown(look_at(rounds(4)))


def test_one_client_is_one():
    assert "1 client in round 11: acc 0.5000 to 0.5000" in shown(look_at(rounds(12), clients=CLIENTS[:1]))


def many(number: int = 40) -> RunStatus:
    """A look at a run that has all there is to show."""
    values = {"global/loss": 1.5, "client/loss_mean": 0.5, "personal_on_global/acc_mean": 0.25}
    warnings = [f"round {n}: client 3, round {n}: the loss is NaN " + "and more " * n for n in (2, 30, 300)]
    return look_at(rounds(number, **values), clients=CLIENTS, warnings=warnings)


@pytest.mark.parametrize("colors", [False, True])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
@pytest.mark.parametrize("width", [12, 40, 71, 72, 80, 200])
def test_it_fits_the_width_and_the_encoding(width, encoding, colors):
    for look in (many(), many(1), look_at([]), look_at(rounds(2))):
        lines = shown(look, width, encoding=encoding, colors=colors).splitlines()
        assert max(map(len, lines)) <= width
        frame = any(line.startswith(("┌──", "+--")) for line in lines)
        assert frame == (width >= 24 and bool(look.run.rounds))
        text = "".join(lines)
        assert ("┌" in text) == (frame and encoding == "utf-8")
        assert bool(re.search("[\u2800-\u28ff]", text)) == (frame and colors and encoding == "utf-8")


@pytest.mark.parametrize("width", [40, 80, 200])
def test_it_fits_the_height_and_uses_it(width):
    plots = {}
    for height in range(34, 70, 3):
        lines = shown(many(), width, height, colors=True).splitlines()
        assert len(lines) <= height
        assert "".join(lines).endswith("q or Ctrl-C closes this view; the run continues")
        plots[height] = sum("│" in line for line in lines)
    assert max(plots.values()) >= 12
    assert all(fewer <= more for fewer, more in zip(plots.values(), list(plots.values())[1:], strict=False))


def test_a_warning_takes_three_lines_at_most():
    look = look_at([], warnings=["x" * 119, "y" * 120, "z" * 121])
    lines = shown(look, 40).splitlines()
    assert [line for line in lines if set(line) == {"x"}] == ["x" * 40, "x" * 40, "x" * 39]
    assert [line for line in lines if set(line) == {"y"}] == ["y" * 40] * 3
    assert [line for line in lines if "z" in line] == ["z" * 40, "z" * 40, "z" * 37 + "..."]


def test_what_a_file_holds_is_shown_as_it_is_and_never_obeyed():
    look = look_at(
        [], {"algorithm": "[red]µ\x1b[2J"}, warnings=["[bold]x[/] \x1b]0;title\x07 \x9b1m"], folder="a\x1b[H"
    )
    raw = io.StringIO()
    Console(file=raw, width=80, force_terminal=True, color_system=None).print(RunScreen(look))
    text = raw.getvalue()
    assert not set(text) & set("\x1b\x07\x9b")
    for line in ("a?[H", "[red]µ?[2J", "[bold]x[/] ?]0;title? ?1m"):
        assert line in text
    assert "[red]??[2J" in shown(look, encoding="ascii")


@given(st.none() | st.integers(0, 60), st.lists(st.integers(1, 3), min_size=1, max_size=2), st.booleans())
def test_plots_get_as_many_rows_as_there_is_room_for(lines, legends, beside):
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
    """Each plot's rows, what is in the frame."""
    plots: list[list[str]] = []
    for line in text.splitlines():
        if line.startswith("┌"):
            plots.append([])
        elif line.startswith("│"):
            plots[-1].append(line[1 : line.index("│", 1)])
    return plots


def test_curves_are_where_the_values_are():
    """Accuracies 0.01 to 0.40 on a line, and half of that: at each column, the rows in which they belong."""
    (accuracy, loss) = framed(shown(look_at(rounds(40)), 60))
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


def test_beside_a_plot_stand_its_limits_and_below_it_its_rounds():
    text = shown(look_at(rounds(40)), 60)
    numbers = [line.rpartition("│")[2].strip() for line in text.splitlines() if line.startswith("│")]
    assert numbers == ["0.4", *[""] * 8, "0.005", "3", *[""] * 8, "0.075"]
    below = [after for line, after in zip(text.splitlines(), text.splitlines()[1:], strict=False) if line[0:1] == "└"]
    assert [line.split() for line in below] == [["1", "40"], ["1", "40"]]
    assert len(below[0]) == next(line.index("│", 1) for line in text.splitlines() if line.startswith("│"))


def test_a_plot_of_one_round_or_of_equal_values_has_its_point_in_the_middle():
    text = shown(look_at(rounds(1)), 60)
    assert " 1" in text.splitlines()
    rows = [{"round": n, "global/acc": 0.5} for n in (1, 2, 3)]
    text = shown(look_at(rows), 60)
    (plot,) = framed(text)
    assert [("*" in row) for row in plot].index(True) in (4, 5)
    assert {"0.55", "0.45"} <= set(text.split())


def test_what_cannot_be_drawn_is_left_out():
    rows = rounds(4)
    rows[1]["client/train_loss"] = math.inf
    rows[2]["client/train_loss"] = 1e12
    rows[3]["client/train_loss"] = math.nan
    text = shown(look_at(rows), 60)
    assert "training loss 3.0000" in text
    assert "inf" not in text
    assert "nan" not in text


def test_a_legend_names_the_best_where_there_is_room():
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


def test_it_shows_a_run_once_where_there_is_no_terminal(tmp_path, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes anything for a terminal then
    for words in ([], ["--once"]):
        code, out, err = run("watch", run_folder(tmp_path / "run", 12), *words)
        assert (code, err) == (0, "")
        assert "round 12/30" in re.sub(r"\x1b\[[\d;]*m", "", out)
        assert "q or Ctrl-C" not in out


def test_it_waits_for_a_run_that_has_not_begun(tmp_path):
    folder = run_folder(tmp_path / "run", 0)
    (folder / "metrics.csv").write_text("\n")
    code, out, err = run("watch", folder)
    assert (code, err) == (0, "")
    assert "waits for its first round to end" in out
    assert "round 0/30" in out


def damaged(tmp_path: Path, **files: bytes) -> Path:
    folder = run_folder(tmp_path / "run", 3, ended=True)
    for name, content in files.items():
        (folder / name.replace("__", "/").replace("_", ".")).write_bytes(content)
    return folder


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({"metrics_csv": b"epoch,step\n1,2\n"}, "metrics.csv cannot be read: round 1 is missing"),
        ({"metrics_csv": b"round\n1\n3\n"}, "metrics.csv cannot be read: round 2 is missing"),
        (
            {"metrics_csv": b"x" * 200_000 + b"\n1\n"},
            "metrics.csv cannot be read: line 1: field larger than",
        ),
        ({"config_yaml": b"a: [1\n"}, "config.yaml cannot be read: "),
        ({"config_yaml": b"- 1\n"}, "config.yaml cannot be read: it holds no mapping of settings"),
        ({"final__summary_json": b"{"}, "final/summary.json cannot be read: "),
        ({"final__summary_json": b"3"}, "final/summary.json cannot be read: "),
    ],
)
def test_a_damaged_or_foreign_folder_is_one_line(files, told, tmp_path):
    folder = damaged(tmp_path, **files)
    code, out, err = run("watch", folder)
    assert (code, out) == (2, "")
    assert err.startswith(f"fl-lightning: error: {folder}: {told}")
    assert err.count("\n") == 1


def test_what_is_no_run_is_one_line(tmp_path):
    for path, told in ((tmp_path / "no", "no such folder"), (tmp_path, "no run there")):
        assert run("watch", path) == (2, "", f"fl-lightning: error: {path}: {told}\n")
    reasons = {"-1": "-1.0 is outside [0, 86400]", ".inf": "inf is no finite number", ".nan": "nan is no finite number"}
    for seconds, reason in reasons.items():
        code, _, err = run("watch", tmp_path, "--every", seconds)
        assert (code, err) == (2, f"fl-lightning: error: --every: {reason}\n")


def test_of_a_folder_of_runs_the_newest_that_has_not_ended_is_shown(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    ages = {"a/old": (40, False), "a/running": (30, False), "b/ended": (20, True), "b/broken": (10, False)}
    for name, (age, ended) in ages.items():
        folder = run_folder(tmp_path / name, 3, ended=ended)
        if name == "b/broken":
            (folder / "metrics.csv").write_text("foreign\n1\n")
        for file in folder.glob("*.*"):
            os.utime(file, (time.time() - age,) * 2)
    warnings.simplefilter("always")  # as on the command line: pytest makes errors of them
    code, out, err = run("watch", tmp_path)
    assert (code, out.splitlines()[0]) == (0, str(tmp_path / "a" / "running"))
    assert err.startswith(f"fl-lightning: warning: {tmp_path / 'b' / 'broken'}: metrics.csv cannot be read: round 1")
    shutil.rmtree(tmp_path / "a")
    assert run("watch", tmp_path).out.splitlines()[0] == str(tmp_path / "b" / "ended")
    shutil.rmtree(tmp_path / "b" / "ended")
    code, _, err = run("watch", tmp_path)
    assert (code, err.splitlines()[-1]) == (2, f"fl-lightning: error: {tmp_path}: no run there")


def test_it_imports_no_torch(tmp_path):
    folder = run_folder(tmp_path / "run", 3)
    code = (
        "import sys; from fl_lightning.cli.main import main; code = main(sys.argv[1:]);"
        "print(code, [name for name in ('torch', 'lightning', 'wandb') if name in sys.modules])"
    )
    words = [sys.executable, "-c", code, "watch", str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"


# --- On a terminal ---


class Watcher:
    """`fl-lightning watch` on a terminal of its own."""

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
        """Return when it has shown this so many times."""
        deadline = time.monotonic() + 60
        while self.output.decode(errors="replace").count(text) < times:
            assert time.monotonic() < deadline, self.output.decode(errors="replace")[-2000:]
            assert self.process.poll() is None, self.output.decode(errors="replace")[-2000:]
            time.sleep(0.02)

    def press(self, key: bytes) -> None:
        os.write(self.ours, key)

    def end(self) -> int:
        """Its exit code, once it has ended."""
        code = self.process.wait(60)
        self.after = termios.tcgetattr(self.ours)
        self._reader.join(60)
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
@pytest.mark.parametrize("how", ["q", "SIGINT", "SIGTERM"])
def test_it_is_left_at_will_and_leaves_the_terminal_as_it_was(how, tmp_path):
    folder = run_folder(tmp_path / "run", 12)
    with watcher(folder, "--every", "0.05") as one:
        one.wait_for("q or Ctrl-C", 2)
        one.press(b"x")  # no other key does anything
        one.wait_for("q or Ctrl-C", 4)
        one.press(b"q") if how == "q" else one.process.send_signal(getattr(signal, how))
        assert one.end() == 0
    assert one.after == one.before
    screen, _, left = one.output.decode().rpartition("\x1b[?1049l")
    assert "\x1b[?25h" in screen  # the cursor is back
    assert "round \x1b" in left or "round 12/30" in left  # the last view stays
    assert "q or Ctrl-C" not in left


def test_ctrl_c_ends_it_where_it_was_ignored(tmp_path):
    """As a shell without job control has it for what runs in the background; children inherit that."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with watcher(run_folder(tmp_path / "run", 12), "--every", "0.05") as one:
            one.wait_for("q or Ctrl-C", 2)
            one.process.send_signal(signal.SIGINT)
            assert one.end() == 0
    finally:
        signal.signal(signal.SIGINT, before)


def test_it_follows_the_run_and_ends_with_it(tmp_path):
    folder = run_folder(tmp_path / "run", 12)
    with watcher(folder, "--every", "0.05") as one:
        one.wait_for("round 12/30")
        run_folder(folder, 29)
        one.wait_for("round 29/30")
        run_folder(folder, 30, ended=True)
        assert one.end() == 0
    assert "ended after round 30" in one.output.decode().rpartition("\x1b[?1049l")[2]


def test_it_says_so_when_the_folder_goes_away(tmp_path):
    folder = run_folder(tmp_path / "run", 12)
    with watcher(folder, "--every", "0.05") as one:
        one.wait_for("round 12/30")
        (folder / "metrics.csv").unlink()
        assert one.end() == 2
    assert f"{folder}: no run: it holds no metrics.csv" in "".join(one.output.decode().split("\r\n"))
    assert one.after == one.before


def untimed(folder: Path) -> dict[str, Any]:
    """All that a run leaves, less its times, of which manifests hold digests."""
    timed = ("metrics.csv", "manifest.json")
    left = {name: content for name, content in contents(folder).items() if Path(name).name not in timed}
    return left | {"metrics.csv": untimed_rows(folder)}


def test_a_run_that_is_watched_leaves_what_one_that_is_not_leaves(tmp_path):
    """Two watchers look as fast as they can, one of them killed and started again and again; another in between."""
    tiny(tmp_path / "alone", "--rounds", "6")
    over = threading.Event()
    seen: list[int] = []

    def on_and_off() -> None:
        while not over.is_set():
            with watcher(folder, "--every", "0") as one:
                one.wait_for("1049h")
                time.sleep(0.3)

    def look() -> None:
        monitor = RunMonitor(folder)
        while not over.is_set():
            look = monitor.poll()
            assert list(read_rows(folder / "metrics.csv"))[: len(look.run.rounds)] == look.run.rounds
            seen.append(len(look.run.rounds))

    folder = tmp_path / "watched"
    failed: list[BaseException] = []

    def all_the_while(work: Any) -> None:
        try:
            while not (folder / "metrics.csv").exists() and not over.is_set():
                time.sleep(0.001)
            work()
        except BaseException as error:
            failed.append(error)

    watching = [threading.Thread(target=all_the_while, args=[work]) for work in (on_and_off, look)]
    for thread in watching:
        thread.start()
    try:
        tiny(folder, "--rounds", "6")
    finally:
        over.set()
        for thread in watching:
            thread.join()
    assert not failed
    assert untimed(folder) == untimed(tmp_path / "alone")
    assert seen == sorted(seen)
    assert len(set(seen)) > 2


def test_looking_keeps_no_file_open_and_writes_none(tmp_path):
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


def test_a_folder_that_is_no_run_cannot_be_looked_at(tmp_path):
    with pytest.raises(DamagedRun, match=r"holds no metrics\.csv"):
        RunMonitor(tmp_path).poll()


# --- Files that would never end ---


def sparse(path):
    path.touch()
    os.truncate(path, 5 * 2**30)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("name", ["metrics.csv", "clients.csv", "warnings.txt", "config.yaml", "final/summary.json"])
@pytest.mark.parametrize(
    "make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), sparse], ids=["pipe", "device", "sparse"]
)
def test_a_file_that_never_ends_keeps_nobody_waiting(make, name, tmp_path):
    folder = run_folder(tmp_path / "run", 3)
    (folder / "final").mkdir(exist_ok=True)
    (folder / name).unlink(missing_ok=True)
    make(folder / name)
    command = [sys.executable, "-m", "fl_lightning", "watch", str(folder), "--once"]
    done = subprocess.run(command, timeout=60, capture_output=True, text=True, preexec_fn=limit_memory)
    needed = name not in ("clients.csv", "warnings.txt")
    assert done.returncode == 2 * needed
    if needed:
        assert re.search(
            rf"{name} cannot be read: .*(it is no file|larger than it can be)",
            done.stderr,
        )


def limit_memory():
    resource.setrlimit(resource.RLIMIT_AS, (4 * 2**30, 4 * 2**30))
