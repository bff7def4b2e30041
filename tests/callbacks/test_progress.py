"""The progress of a run: reports from every engine, lines in files, bars on terminals, and the time that is left."""

import io
import re
from math import ceil
from types import SimpleNamespace

import pytest
from experiments import ONE_EPOCH, experiment
from rich.console import Console

from fl_lightning.algorithms import FedPer
from fl_lightning.callbacks import RoundCallback, RoundProgress
from fl_lightning.callbacks.pace import Pace
from fl_lightning.callbacks.progress import Bars, Lines
from fl_lightning.core.round_progress import listen, report_client, report_evaluated, report_steps, report_waiting
from fl_lightning.engines import Engine, SequentialEngine, StackedEngine
from fl_lightning.evaluation.evaluation import Evaluation

METRICS = {"global/acc": 0.5, "client/acc_mean": 0.25, "client/train_loss": 0.125}


class Clock:
    """A clock that the test sets."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class Recorder:
    """Keeps all reports of a round in order."""

    def __init__(self):
        self.events = []

    def on_steps(self, done, total, clients):
        self.events.append((done, total, clients))

    def on_client(self):
        self.events.append("client")

    def on_evaluated(self, done, total):
        self.events.append(("evaluated", done, total))

    def on_waiting(self):
        self.events.append("waiting")


class ShownBars(Bars):
    """Bars that the test can draw at once."""

    def start(self):
        ShownBars.latest = self
        super().start()


def fake_run(round=0, rounds=10):
    engine = SimpleNamespace(note="")
    return SimpleNamespace(round=round, rounds=rounds, engine=engine, is_over=False, callbacks=[])


def started(run, monkeypatch, **console):
    """Start a progress display on a console. Return the display, its clock and the output."""
    monkeypatch.setattr("fl_lightning.callbacks.progress.summarize_run", lambda run: ["method: FedAvg; sends model"])
    monkeypatch.setattr("fl_lightning.callbacks.progress.Bars", ShownBars)
    screen = io.StringIO()
    progress = RoundProgress(Console(file=screen, **console))
    progress.clock = Clock()
    progress.on_fit_start(run)
    return progress, progress.clock, screen


# --- Reports ---


def test_without_a_listener_a_report_does_nothing():
    report_steps(1, 2)
    recorder = Recorder()
    with listen(recorder):
        report_steps(1, 2)
    report_client()
    assert recorder.events == [(1, 2, 1)]


def test_the_loop_and_a_fit_of_its_own_report_each_step_of_each_client(tmp_path):
    """Clients of the sequential engine, with 2 epochs: one report a step, and one after each client."""
    reports = {}
    for name, loop in (("loop", True), ("own", False)):
        run, recorder = experiment(tmp_path / name, rounds=2, engine=SequentialEngine(local_loop=loop)), Recorder()
        with listen(recorder):
            run.fit()
        reports[name] = recorder.events
    expected = []
    for round in (1, 2):
        for client in run.server.participants(round):
            steps = 2 * ceil(len(run.data.shards[client].train) / 64)
            expected += [(done, steps, 1) for done in range(1, steps + 1)] + ["client"]
    assert reports["loop"] == expected
    assert reports["own"] == expected


def test_stacked_clients_report_their_steps_together(tmp_path):
    run, recorder = experiment(tmp_path, rounds=1, engine=StackedEngine()), Recorder()
    with listen(recorder):
        run.fit()
    steps, ends = recorder.events[:-4], recorder.events[-4:]
    total = sum(2 * ceil(len(run.data.shards[client].train) / 64) for client in run.server.participants(1))
    assert ends == ["client"] * 4
    assert {event[1:] for event in steps} == {(total, 4)}
    done = [event[0] for event in steps]
    assert done == sorted(set(done))
    assert done[-1] == total


def test_clients_of_other_processes_are_counted_as_they_finish(tmp_path):
    """Their results are processed in the order of their ids, but the first client may be the last to finish."""

    class Backwards(Engine):
        def run(self, worker, tasks, done):
            results = [worker.run(task) for task in tasks]
            for result in reversed(results):
                self.check_interrupt()
                done(result)

    class Order(RoundCallback):
        def on_client_end(self, run, result):
            recorder.events.append(result.client)

    recorder = Recorder()
    run = experiment(tmp_path, rounds=1, trainer=ONE_EPOCH, engine=Backwards(), callbacks=[Order()])
    with listen(recorder):
        run.fit()
    waited = recorder.events[recorder.events.index("waiting") :]
    assert waited == ["waiting", "client"] * 4 + run.server.participants(1)


@pytest.mark.filterwarnings("ignore:evaluation.client_model")  # some clients have not trained yet
def test_long_evaluations_are_counted(tmp_path):
    recorder, evaluation = Recorder(), Evaluation(client_model="received")
    run = experiment(tmp_path, FedPer(), rounds=1, evaluation=evaluation)
    with listen(recorder):
        run.fit()
    alone = len(run.memory)  # the others have the same model, and are evaluated together
    assert recorder.events[-alone:] == [("evaluated", number, alone) for number in range(1, alone + 1)]


def test_a_display_shows_a_long_evaluation_until_the_round_ends(monkeypatch):
    run = fake_run()
    progress, clock, screen = started(run, monkeypatch, width=80)
    progress.on_round_start(run, range(1))
    report_steps(1, 1)
    report_client()
    clock.now += 30
    report_evaluated(3, 100)
    run.round = 1
    progress.on_round_end(run, METRICS)
    clock.now += 30
    report_waiting()
    progress.on_fit_end(run)
    lines = screen.getvalue().splitlines()
    assert lines[1].startswith("round 1/10  client 1/1  evaluated 3/100  left ")
    assert lines[3].startswith("round 2/10  left ")


@pytest.mark.thorough
def test_worker_processes_report_their_clients(tmp_path):
    run, recorder = experiment(tmp_path, rounds=1, trainer=ONE_EPOCH, engine="processes"), Recorder()
    with listen(recorder):
        run.fit()
    assert recorder.events.count("client") == 4
    assert all(event in ("client", "waiting") or event[1] > 1 for event in recorder.events)


# --- The time left ---


def test_the_time_left_is_estimated_from_the_steps_of_the_present_clients():
    clock, run = Clock(), fake_run(round=2, rounds=6)
    pace = Pace(run, clock)
    assert pace.seconds_left is None
    pace.begin_round(4)
    assert pace.seconds_left is None
    clock.now += 60
    pace.on_client()
    pace.on_steps(5, 10, 1)
    assert pace.rounds == 2 + (1 + 0.5) / 4
    assert pace.seconds_left == pytest.approx(60 / 0.375 * (4 - 0.375))
    pace.on_steps(10, 40, 3)  # three clients are trained together
    assert pace.rounds == 2 + (1 + 3 * 0.25) / 4
    for _ in range(3):
        pace.on_client()
    run.round = 3  # while the round is evaluated, it is neither unfinished nor counted twice
    assert pace.rounds == 3
    pace.begin_round(0)
    assert pace.rounds == 3
    assert pace.seconds_left == pytest.approx(60 * 3)


def test_tasks_besides_those_of_the_round_do_not_count():
    pace = Pace(fake_run(), Clock())
    pace.begin_round(2)
    for _ in range(2):
        pace.on_client()
    pace.on_steps(1, 2, 1)  # a new client, in the evaluation
    assert pace.rounds == 1


# --- Lines ---


def test_progress_is_one_line_per_round_without_a_terminal(tmp_path):
    screen = io.StringIO()
    run = experiment(tmp_path, rounds=2, trainer=ONE_EPOCH, callbacks=[RoundProgress(Console(file=screen, width=120))])
    run.fit()
    summary, lines = screen.getvalue().splitlines()[:6], screen.getvalue().splitlines()[6:]
    assert summary[0].startswith("method: ")
    assert len(lines) == 2
    for number, (line, row) in enumerate(zip(lines, run.csv.rows, strict=True), start=1):
        assert line.startswith(f"round {number}/2  global acc {row['global/acc']:.4f}  client acc")
    assert lines[-1].endswith("left 0 s")


def test_a_long_round_has_a_line_every_30_seconds(monkeypatch):
    run = fake_run()
    progress, clock, screen = started(run, monkeypatch, width=80)
    progress.on_round_start(run, range(100))
    for second in range(1, 76):
        clock.now += 1
        report_steps(second, 300)
        if second % 25 == 0:
            report_client()
    run.round = 1
    progress.on_round_end(run, METRICS)
    progress.on_round_start(run, range(100))
    clock.now += 29
    report_steps(1, 300)
    clock.now += 1
    report_waiting()
    progress.on_fit_end(run)
    report_steps(2, 300)  # nobody listens any longer
    share = [(1 + 30 / 300) / 100, (2 + 60 / 300) / 100]
    left = [ceil(30 / share[0] * (10 - share[0]) / 60), ceil(60 / share[1] * (10 - share[1]) / 60)]
    assert screen.getvalue().splitlines() == [
        "method: FedAvg; sends model",
        f"round 1/10  client 1/100  step 30/300  left {left[0] // 60} h {left[0] % 60:02} min",
        f"round 1/10  client 2/100  step 60/300  left {left[1] // 60} h {left[1] % 60:02} min",
        "round 1/10  global acc 0.5000  client acc 0.2500  train loss 0.1250  left 12 min",
        "round 2/10  client 0/100  step 1/300  left 16 min",
    ]


def test_stacked_clients_have_one_line(monkeypatch):
    run = fake_run()
    progress, clock, screen = started(run, monkeypatch, width=80)
    progress.on_round_start(run, range(100))
    clock.now += 30
    report_steps(640, 1280, 64)
    progress.on_fit_end(run)
    assert screen.getvalue().splitlines()[1:] == ["round 1/10  client 0/100  step 640/1280 of 64 clients  left 16 min"]


def test_the_line_of_a_round_of_a_regression_has_the_error(monkeypatch):
    run = fake_run(rounds=2)
    progress, _, screen = started(run, monkeypatch, width=40)
    run.round = 1
    progress.on_round_end(run, {"client/mae_mean": 0.5, "global/mae": 0.25, "global/loss": 9.0, **METRICS})
    expected = (
        "round 1/2  global acc 0.5000  client acc 0.2500  global mae 0.2500  client mae 0.5000  train loss 0.1250"
    )
    assert screen.getvalue().splitlines()[1].startswith(expected)


@pytest.mark.parametrize(
    ("environment", "view"),
    [
        ({"TERM": "xterm-256color"}, Bars),
        ({"TERM": "dumb"}, Lines),
        ({"TERM": "xterm-256color", "NO_COLOR": "1"}, Lines),
    ],
    ids=["terminal", "dumb", "no color"],
)
def test_dumb_terminals_and_those_without_colours_have_plain_lines(environment, view, monkeypatch):
    run = fake_run()
    progress, _, screen = started(run, monkeypatch, width=80, force_terminal=True, _environ=environment)
    progress.on_round_start(run, range(2))
    run.round = 1
    progress.on_round_end(run, METRICS)
    progress.on_fit_end(run)
    assert ("\x1b" in screen.getvalue()) == (view is Bars)


def test_no_word_of_the_summary_is_broken_on_a_terminal(monkeypatch):
    folder = "runs/" + 3 * "a-very-long-name-"
    summary = [f"data: {' '.join(30 * ['sequential'])}", f"folder: {folder}"]
    monkeypatch.setattr("fl_lightning.callbacks.progress.summarize_run", lambda run: summary)
    for terminal in (True, False):
        screen = io.StringIO()
        console = Console(file=screen, width=40, force_terminal=terminal, _environ={"NO_COLOR": "1"})
        RoundProgress(console).on_fit_start(fake_run())
        lines = screen.getvalue().splitlines()
        if terminal:
            assert " ".join(lines) == " ".join(summary)
            assert max(len(line) for line in lines if line != folder) <= 40
            assert folder in lines
        else:
            assert lines == summary


# --- Bars ---


def drawn(screen):
    """Return the lines of the last drawing of the bars."""
    ShownBars.latest.refresh()
    return [line.rstrip("\r") for line in screen.getvalue().rpartition("\x1b[2K")[2].split("\n")]


@pytest.mark.parametrize("width", [40, 80, 200])
def test_progress_bars_fit_any_width_and_leave_the_last_line_empty(width, monkeypatch):
    """Ctrl-C prints `^C` in the last line. After a full line it would wrap, and a bar would remain."""
    run = fake_run(round=7, rounds=2000)
    progress, clock, screen = started(run, monkeypatch, force_terminal=True, color_system=None, width=width)
    progress.on_round_start(run, range(12))
    clock.now += 60
    report_client()
    run.round = 1234
    progress.on_round_end(run, METRICS)
    progress.on_round_start(run, range(12))
    report_client()
    rounds, clients, *note, below = lines = drawn(screen)
    left = ceil(60 / (1227 + 1 / 12) * (766 - 1 / 12))
    assert re.fullmatch(rf"rounds  [━╸╺ ]{{8,}}1234/2000 0:00:{left} *", rounds)
    assert re.fullmatch(r"clients [━╸╺ ]{8,}1/12 +", clients)
    assert " ".join(" ".join(note).split()) == "global acc 0.5000 client acc 0.2500 train loss 0.1250"
    assert len(note) == (2 if width == 40 else 1)
    assert below == ""
    assert max(map(len, lines)) <= width
    progress.on_fit_end(run)
    assert "\x1b[?25h" in screen.getvalue()  # the cursor is visible again


def test_a_bar_shows_the_steps_of_a_slow_client(monkeypatch):
    run = fake_run()
    progress, clock, screen = started(run, monkeypatch, force_terminal=True, color_system=None, width=80)
    progress.on_round_start(run, range(12))
    for seconds, done, shown in ((1.9, 3, False), (2.0, 4, True)):
        clock.now = 1000 + seconds
        report_steps(done, 40)
        lines = drawn(screen)
        assert [bool(re.fullmatch(r"steps   [━╸╺ ]{8,}4/40 +", line)) for line in lines].count(True) == shown
    report_client()
    assert not [line for line in drawn(screen) if line.startswith("steps")]
    progress.on_fit_end(run)
