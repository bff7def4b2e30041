"""An engine that measures which other engine trains the run's clients fastest on this machine."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any, Literal

from fl_lightning.core.errors import ConfigError, FLError, check_instance, check_number
from fl_lightning.core.task import Task, Tasks
from fl_lightning.engines.base import Engine
from fl_lightning.engines.client_order import ClientOrder
from fl_lightning.engines.processes import ProcessesEngine, usable_cores
from fl_lightning.engines.ray import RayEngine
from fl_lightning.engines.sequential import SequentialEngine
from fl_lightning.engines.stacked import StackedEngine
from fl_lightning.engines.worker import Worker

ENGINES: dict[str, type[Engine]] = {
    "sequential": SequentialEngine,
    "stacked": StackedEngine,
    "processes": ProcessesEngine,
}
MAX_TASKS = 64  # maximum number of tasks taken from the iterator for the measurements
FIRST_TASKS = 3  # tasks from which the duration of the run is estimated
SHORT_RUN = 10.0  # seconds of all fits below which measuring takes longer than it saves
MAX_SHARE = 0.9  # another engine is chosen only if it takes at most this fraction of `sequential`'s time
START_SECONDS = 8.0  # estimated seconds to start processes
GAIN = 2.0  # processes are tried only if they could save this many times START_SECONDS


class AutoEngine(Engine):
    """Times the other engines on some of the run's fits in the first training round, and uses the fastest.

    A run with less than ten seconds of fits uses `sequential`. Engines that do not support the experiment are left out.
    `processes` is tried only if it could save twice the time that it takes to start. The choice is stored in
    checkpoints, and a resumed run keeps it. It depends on the machine, and engines round differently, so results with
    the same seed may differ in rounding on another machine. Therefore `auto` is not the default.

    Args:
        budget: Approximate number of seconds for the measurements.

    Attributes:
        choice: Name of the chosen engine; None before the choice.

    Raises:
        ConfigError: `budget` is not above 0.
    """

    def __init__(self, budget: float = 5.0) -> None:
        check_number("engine.budget", budget, "(0, inf)")
        self.budget = budget
        self.choice: str | None = None
        self._chosen: Engine | None = None
        self._here: dict[str, Engine] = {"sequential": SequentialEngine(), "stacked": StackedEngine()}

    def run(self, worker: Worker, tasks: Tasks, done: ClientOrder) -> None:
        """Run the tasks with the chosen engine. The engine is chosen by timing the first tasks that train clients."""
        if not self._chosen and tasks.fit:
            arriving = iter(tasks)
            ahead = list(islice(arriving, MAX_TASKS))
            self._choose(worker, ahead)
            tasks = Tasks(tasks.clients, chain(ahead, arriving))
        (self._chosen or self._here["sequential"]).run(worker, tasks, done)

    def close(self) -> None:
        """Close all engines."""
        for engine in filter(None, (*self._here.values(), self._chosen)):
            engine.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the name of the chosen engine for checkpoints; empty before the choice."""
        return {"chosen": self.choice} if self.choice else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Use the engine whose name `state_dict` returned, without measuring again."""
        if state:
            self.choice = state["chosen"]
            self._chosen = self._engine(self.choice)

    def _engine(self, name: str) -> Engine:
        engine = self._here.get(name) or ENGINES[name]()
        engine.check_interrupt = self.check_interrupt
        return engine

    def _choose(self, worker: Worker, tasks: Sequence[Task]) -> None:
        """Choose the engine that is fastest on the first tasks: sequential unless another one is clearly faster."""
        sequential = self._here["sequential"]
        seconds_a_task(sequential, worker, tasks[:1])  # warm-up
        once = seconds_a_task(sequential, worker, tasks[:FIRST_TASKS])
        if self.fits * once < SHORT_RUN:
            self.choice, self._chosen = "sequential", sequential
            self.note = f"engine: sequential, because the run has only {self.fits} fits of {1e3 * once:.1f} ms"
            return
        tasks = tasks[: max(1, int(self.budget / 8 / once))]
        times = {"sequential": seconds_a_task(sequential, worker, tasks)}
        candidates = {name: self._engine(name) for name in self._candidates(times["sequential"], len(tasks))}
        for name, engine in candidates.items():
            try:
                engine.check(worker)
                engine.start(worker)
                seconds_a_task(engine, worker, tasks)  # warm-up of all workers
                times[name] = seconds_a_task(engine, worker, tasks)
            except FLError as error:
                if not isinstance(error, ConfigError):
                    warnings.warn(f"engine: {name} is left out: {error}", stacklevel=2)
        best = min(times, key=lambda name: times[name])
        if times[best] > MAX_SHARE * times["sequential"]:
            best = "sequential"
        self.choice, self._chosen = best, candidates.pop(best, sequential)
        for engine in candidates.values():
            engine.close()
        measured = ", ".join(f"{name} {1e3 * spent:.1f}" for name, spent in times.items())
        self.note = f"engine: {best}, by milliseconds per fit: {measured}"

    def _candidates(self, seconds: float, tasks: int) -> Iterator[str]:
        """Yield the names of the engines that are worth timing against `sequential`.

        Args:
            seconds: Seconds per fit with `sequential`.
            tasks: Number of fits that are timed.
        """
        if tasks > 1:
            yield "stacked"
        saved_at_most = self.fits * seconds * (1 - 1 / usable_cores())
        if saved_at_most > GAIN * START_SECONDS:
            yield "processes"


def seconds_a_task(engine: Engine, worker: Worker, tasks: Sequence[Task]) -> float:
    """Run tasks with an engine, and return the mean number of seconds per task."""
    started = time.perf_counter()
    clients = [task.client for task in tasks]
    engine.run(worker, Tasks(clients, tasks), ClientOrder(clients, lambda result: None))
    return (time.perf_counter() - started) / len(tasks)


EngineName = Literal["auto", "sequential", "stacked", "processes", "ray"]
"""The name of an engine with its default arguments."""


def engine_of(engine: Engine | EngineName) -> Engine:
    """Return the engine itself or, given a name such as `stacked`, a new engine with default arguments."""
    if isinstance(engine, Engine):
        return engine
    kinds: dict[Any, type[Engine]] = {**ENGINES, "auto": AutoEngine, "ray": RayEngine}
    if engine not in [*kinds]:  # a list, because other objects may have no hash
        check_instance("engine", engine, Engine, f"Give an engine, such as StackedEngine(), or {', '.join(kinds)}")
    return kinds[engine]()
