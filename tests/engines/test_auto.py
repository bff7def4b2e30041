"""`engine: auto` takes the fastest, says so, and keeps to it; it changes no result of the engine it takes."""

import io
import re

import pytest
from experiments import experiment, same_bytes, task_of_round
from rich.console import Console
from task_runners import run_tasks

from fl_lightning.algorithms import UAPDFL, FedSiamDA
from fl_lightning.callbacks import RoundProgress
from fl_lightning.core.errors import ConfigError
from fl_lightning.engines import AutoEngine, Engine, ProcessesEngine, SequentialEngine, StackedEngine, auto, engine_of
from fl_lightning.engines.pool_worker import WorkerLost
from fl_lightning.models import MLP, Head


@pytest.fixture
def timed(monkeypatch):
    """Engines take as long as the test says, in seconds a task; what was tried is noted."""
    seconds = {SequentialEngine: 0.01, StackedEngine: 0.002, ProcessesEngine: 0.001}
    tried = []

    def pretended(engine, worker, tasks):
        tried.append((type(engine), len(tasks)))
        return seconds[type(engine)]

    monkeypatch.setattr(auto, "seconds_a_task", pretended)
    monkeypatch.setattr(auto, "SHORT_RUN", 0)
    return seconds, tried


@pytest.mark.thorough
def test_the_fastest_is_taken_and_told(tmp_path, timed):
    screen = io.StringIO()
    run = experiment(tmp_path / "auto", engine="auto", callbacks=[RoundProgress(Console(file=screen))])
    run.fit()
    assert run.engine.choice == "stacked"
    assert re.fullmatch("engine: stacked, .*: sequential 10.0, stacked 2.0", run.engine.note)
    assert screen.getvalue().count(run.engine.note) == 1
    stacked = experiment(tmp_path / "stacked", engine="stacked")
    stacked.fit()
    assert same_bytes(run.state["model"], stacked.state["model"])


@pytest.mark.parametrize(("stacked", "choice"), [(0.0095, "sequential"), (0.0085, "stacked")])
def test_another_engine_must_be_worth_its_while(tmp_path, timed, stacked, choice):
    timed[0][StackedEngine] = stacked
    run = experiment(tmp_path, engine="auto", rounds=1)
    run.fit()
    assert run.engine.choice == choice


def test_nothing_is_tried_for_a_short_run(tmp_path, timed, monkeypatch):
    monkeypatch.setattr(auto, "SHORT_RUN", 12 * 0.01 + 1e-9)
    run = experiment(tmp_path, engine="auto")
    run.fit()
    assert run.engine.choice == "sequential"
    assert re.fullmatch("engine: sequential, .* 12 fits of 10.0 ms", run.engine.note)
    assert {engine for engine, _ in timed[1]} == {SequentialEngine}


def test_what_an_engine_refuses_is_not_tried(tmp_path, timed):
    model = Head(projection=16, prediction=16)
    run = experiment(
        tmp_path, FedSiamDA(), engine="auto", rounds=1, model=lambda **k: MLP(hidden=(16,), head=model, **k)
    )
    run.fit()
    assert run.engine.choice == "sequential"
    assert StackedEngine not in {engine for engine, _ in timed[1]}


def test_an_engine_that_breaks_down_is_left_out_and_told(tmp_path, timed, monkeypatch):
    def breaks(engine, worker, tasks):
        if isinstance(engine, StackedEngine):
            raise WorkerLost("a member is gone")
        return 0.01

    monkeypatch.setattr(auto, "seconds_a_task", breaks)
    run = experiment(tmp_path, engine="auto", rounds=1)
    with pytest.warns(UserWarning, match=r"engine: stacked .*a member is gone"):
        run.fit()
    assert run.engine.choice == "sequential"


def test_processes_are_tried_where_they_can_save_twice_their_start(tmp_path, timed, monkeypatch):
    tried = timed[1]
    run = experiment(tmp_path, engine="auto", rounds=1)
    run.check()
    monkeypatch.setattr(ProcessesEngine, "start", lambda self, worker: None)
    timed[0][ProcessesEngine] = 1.0  # tried, and not taken
    cases = {(2, 1000): False, (2, 3100): False, (2, 3300): True, (4, 2100): False, (4, 2200): True, (1, 10**6): False}
    for (cores, fits), expected in cases.items():  # fits of 10 ms: 16 s can be saved, or not
        monkeypatch.setattr(auto, "usable_cores", lambda cores=cores: cores)
        engine = AutoEngine()
        engine.fits = fits
        tried.clear()
        run_tasks(engine, run.worker, [run.server.task(1, 0, run.server.download(1, 0))])
        assert (ProcessesEngine in {kind for kind, _ in tried}) == expected


def test_an_engine_is_started_and_warmed_up_before_its_time_is_taken(tmp_path, timed, monkeypatch):
    monkeypatch.setattr(StackedEngine, "start", lambda self, worker: timed[1].append("start"))
    experiment(tmp_path, engine="auto", rounds=1).fit()
    stacked = (StackedEngine, 4)
    assert timed[1][-3:] == ["start", stacked, stacked]


class Distant(SequentialEngine):
    """Notes its runs and when it is closed, and looks for signals."""

    def __init__(self, events):
        super().__init__()
        self.events = events

    def run(self, worker, tasks, done):
        self.check_interrupt()
        self.events.append("run")
        super().run(worker, tasks, done)

    def close(self):
        self.events.append("close")


def test_the_chosen_engine_looks_for_signals_and_is_closed_at_the_end_only(tmp_path, timed, monkeypatch):
    run, events, engine = experiment(tmp_path), [], AutoEngine()
    run.check()
    timed[0][Distant] = 0.001
    monkeypatch.setitem(auto.ENGINES, "processes", lambda: Distant(events))
    monkeypatch.setattr(auto, "usable_cores", lambda: 2)
    engine.fits, engine.check_interrupt = 10**4, lambda: events.append("signals?")
    run_tasks(engine, run.worker, [task_of_round(run, 1, client) for client in range(2)])
    assert engine.choice == "processes"
    assert events == ["signals?", "run"]
    engine.close()
    assert events == ["signals?", "run", "close"]


def test_no_more_is_tried_than_the_budget_allows(tmp_path, timed):
    run = experiment(tmp_path, engine=AutoEngine(budget=0.25), rounds=1)
    run.fit()
    assert (SequentialEngine, 3) in timed[1]  # an eighth of it, of 10 ms each
    assert (StackedEngine, 3) in timed[1]


def test_a_resumed_run_keeps_to_the_choice(tmp_path, timed):
    experiment(tmp_path, engine="auto", rounds=1).fit()
    timed[0][StackedEngine] = 1.0
    rest = experiment(tmp_path, engine="auto", rounds=2)
    rest.fit(resume=True)
    assert rest.engine.choice == "stacked"
    assert not rest.engine.note


def test_peers_choose_when_they_first_train(tmp_path, timed):
    run = experiment(tmp_path, UAPDFL(n_com=2), engine="auto", rounds=1)
    run.fit()
    assert run.engine.choice == "stacked"


def test_trying_leaves_no_trace(tmp_path, monkeypatch):
    """Timed for once: whatever wins, the run is that engine's own."""
    monkeypatch.setattr(auto, "SHORT_RUN", 0)
    run = experiment(tmp_path / "auto", engine=AutoEngine(budget=0.5), rounds=2)
    run.fit()
    alone = experiment(tmp_path / "alone", engine=run.engine.choice, rounds=2)
    alone.fit()
    assert same_bytes(run.state["model"], alone.state["model"])


@pytest.mark.parametrize("name", ["auto", "sequential", "stacked", "processes", "ray"])
def test_every_engine_has_a_name(name):
    assert type(engine_of(name)).__name__.lower().startswith(name)
    assert isinstance(engine_of(name), Engine)


def test_a_budget_is_above_zero():
    with pytest.raises(ConfigError, match=r"engine.budget: 0 is not above 0"):
        AutoEngine(budget=0)
