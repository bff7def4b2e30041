"""A W&B sweep carried out here: Optuna says which point is next and which to end early, the executor runs them."""

from __future__ import annotations

import math
import secrets
import shlex
import sqlite3
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import optuna
import yaml
from optuna.exceptions import StorageInternalError
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState, create_trial
from rich.markup import escape
from rich.table import Table
from sqlalchemy.exc import SQLAlchemyError

from fl_lightning.analysis.report.sheet import csv_text
from fl_lightning.analysis.rivals import given
from fl_lightning.analysis.study.executor import FAILED, Outcome, Point, carry_out, finished
from fl_lightning.analysis.study.sweep_file import IGNORED, Sweep
from fl_lightning.core.config import config_path, flatten, read_config
from fl_lightning.core.errors import ConfigError, FLError, one_line
from fl_lightning.core.files import write_atomically
from fl_lightning.evaluation.metrics import Row, read_rows
from fl_lightning.runs.reader import DamagedRun, open_run_folder

POINTS = "points"
DATABASE = "study.db"
SWEEP = "sweep.yaml"
COMPLETE, PRUNED, FAIL, RUNNING = TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL, TrialState.RUNNING
STATES = {COMPLETE: "complete", PRUNED: "ended early", FAIL: "failed", RUNNING: "unfinished"}


@dataclass(frozen=True)
class Result:
    """What came of a point.

    Args:
        number: Its number, in the order in which points were drawn.
        folder: Its run's folder.
        settings: The words that its parameters have on the command line.
        state: One of `complete`, `ended early`, `failed`, `unfinished`.
        value: The metric; of one that was ended early, the last there was. None if there is none.
        rounds: How many rounds it came to.
        reason: Why it failed, or is unfinished.
    """

    number: int
    folder: Path
    settings: Mapping[str, str]
    state: str
    value: float | None
    rounds: int
    reason: str


class Study:
    """A sweep's points and what came of them, kept in the sweep's folder.

    They are kept by Optuna in SQLite, where a change is there whole or not at all after a kill: of Optuna's journal
    file, half a line may be left. For the same reason a point is drawn in a copy in memory and recorded in one: Optuna
    itself writes a point's parameters one after another. Random numbers come from the seed and the point's number, so
    that they are the same with and without a kill.

    Args:
        sweep: What is asked for.
        folder: The sweep's folder; nobody else may be at it.
        seed: Random points derive from it.
    """

    def __init__(self, sweep: Sweep, folder: Path, seed: int) -> None:
        self.sweep, self.folder, self.seed = sweep, folder, seed
        self._troubles: dict[str, str] = {}
        path = folder / DATABASE
        if not path.exists():
            create_database(path, sweep.maximize)
        self._storage, self._study = open_database(path, sweep.parameters)
        self._id = self._storage.get_study_id_from_name(NAME)

    def close(self) -> None:
        """Let go of the database."""
        close(self._storage)

    # --- Which point is next ---

    def points(self, most: int) -> Iterator[Point]:
        """Points to be run: those under way, those that failed and are to be tried again, then new ones.

        Args:
            most: How many the sweep is to have in all.
        """
        for trial in self._trials():
            if trial.state == FAIL and not (self._run(trial) / FAILED).exists() and not finished(self._run(trial)):
                self._add(trial.params, trial.user_attrs)
        for trial in self._trials()[:most]:
            if trial.state == RUNNING:
                yield self._point(trial)
        while (number := len(self._trials())) < most:
            folder = f"{number:04d}-{secrets.token_hex(3)}"  # W&B's run is named after it, so no other may be
            self._add(self._draw(number), {"point": number, "folder": folder})
            yield self._point(self._trials()[number])

    def _trials(self) -> list[FrozenTrial]:
        """The points; of one that was tried again, the last trial."""
        trials = self._study.get_trials(deepcopy=False)
        return list({trial.user_attrs["point"]: trial for trial in trials}.values())

    def _add(self, drawn: Mapping[str, Any], notes: Mapping[str, Any]) -> None:
        trial = create_trial(
            state=RUNNING, params=dict(drawn), distributions=self._distributions, user_attrs=dict(notes)
        )
        self._study.add_trial(trial)

    def _draw(self, number: int) -> dict[str, Any]:
        if self.sweep.method == "grid":
            return self.sweep.grid()[number]
        copy = optuna.create_study(direction=self._study.direction, sampler=self._sampler(number))
        copy.add_trials(self._study.get_trials())
        return copy.ask(self._distributions).params

    def _sampler(self, number: int) -> BaseSampler:
        seed = int(np.random.SeedSequence([self.seed, number]).generate_state(1)[0])
        return TPESampler(seed=seed) if self.sweep.method == "bayes" else RandomSampler(seed=seed)

    @property
    def _distributions(self) -> dict[str, Any]:
        return {key: parameter.distribution for key, parameter in self.sweep.parameters.items()}

    def _point(self, trial: FrozenTrial) -> Point:
        return Point(self._run(trial), self.sweep.command(trial.params))

    def _run(self, trial: FrozenTrial) -> Path:
        return self.folder / POINTS / trial.user_attrs["folder"]

    def _trial_at(self, folder: Path) -> FrozenTrial:
        return next(trial for trial in self._trials() if trial.user_attrs["folder"] == folder.name)

    # --- What came of it ---

    def tell(self, outcome: Outcome) -> Result:
        """Note what came of a point.

        Raises:
            ConfigError: It could not run, or has no such metric, and no other has ended yet: there is something wrong
                with the sweep.
        """
        folder = outcome.point.folder
        trial = self._trial_at(folder)
        if trial.state == RUNNING:
            if outcome.code == 0:
                self._judge(trial)
            elif outcome.code == 1:
                self._fail(trial, outcome.reason)
            else:  # it is tried again by the next call
                self._refuse_first(outcome.reason if outcome.code == 2 else None)
                self._troubles[folder.name] = outcome.reason
        return self._result(self._trials()[trial.user_attrs["point"]])

    def _judge(self, trial: FrozenTrial) -> None:
        while self._show(trial):  # the rounds that went by since the last look
            pass
        try:
            run = open_run_folder(self._run(trial))
            figures: dict[str, Any] = {key: value for row in run.rounds for key, value in row.items()}
            if not self.sweep.pruner:
                figures |= run.summary
        except DamagedRun as error:
            return self._fail(trial, str(error))
        name = self.sweep.metric
        if name not in figures:
            which = "by round, which early_terminate needs" if self.sweep.pruner else "in this run"
            missing = f"metric: there is no {name} {which}; there are {', '.join(sorted(figures))}"
            self._refuse_first(missing)
            return self._fail(trial, missing)
        value = figures[name]
        if value is None or not math.isfinite(value):
            return self._fail(trial, f"{name} is {'never reached' if value is None else value}")
        self._study.tell(trial.number, value)
        return None

    def _fail(self, trial: FrozenTrial, reason: str) -> None:
        self._storage.set_trial_user_attr(self._trial_id(trial), "reason", reason)
        self._study.tell(trial.number, state=FAIL)

    def _refuse_first(self, reason: str | None) -> None:
        if reason and not any(trial.state.is_finished() for trial in self._trials()):
            raise ConfigError(reason)

    # --- Which to end early ---

    def unwanted(self, point: Point) -> bool:
        """Whether the pruner would rather have a point end, going by the rounds that it has come to."""
        trial = self._trial_at(point.folder)
        if trial.state == RUNNING and self._show(trial):
            self._study.tell(trial.number, state=PRUNED)
            return True
        return False

    def _show(self, trial: FrozenTrial) -> bool:
        """Show the pruner the rounds that it has not seen, up to one at which it would end the point."""
        if not self.sweep.pruner or not (new := self._unseen(trial)):
            return False
        config = read_config(self._run(trial) / "config.yaml")
        number, last = self._trial_id(trial), min(config["rounds"], self.sweep.rounds_to_prune)
        for row in new:
            if row["round"] < last:
                self._storage.set_trial_intermediate_value(number, int(row["round"]), row[self.sweep.metric])
                if self.sweep.pruner.prune(self._study, self._storage.get_trial(number)):
                    return True
        return False

    def _unseen(self, trial: FrozenTrial) -> list[Row]:
        path, seen = self._run(trial) / "metrics.csv", self._storage.get_trial(self._trial_id(trial)).last_step or 0
        rows = read_rows(path) if path.exists() else []
        return [row for row in rows if self.sweep.metric in row and row["round"] > seen]

    def _trial_id(self, trial: FrozenTrial) -> int:
        return self._storage.get_trial_id_from_study_id_trial_number(self._id, trial.number)

    # --- What came of all ---

    def results(self) -> list[Result]:
        """Every point, in the order in which they were drawn."""
        return [self._result(trial) for trial in self._trials()]

    def _result(self, trial: FrozenTrial) -> Result:
        path = self._run(trial) / "metrics.csv"
        rounds = max((int(row["round"]) for row in read_rows(path) if row), default=0) if path.exists() else 0
        settings = {key: one.word(trial.params[key]) for key, one in self.sweep.parameters.items()}
        folder, notes = self._run(trial), trial.user_attrs
        reason = notes.get("reason", self._troubles.get(folder.name, "")) if trial.state != COMPLETE else ""
        value = trial.value if trial.state in (COMPLETE, PRUNED) else None
        return Result(notes["point"], folder, settings, STATES[trial.state], value, rounds, reason)


# --- The database ------------------------------------------------------------------------------------------------

NAME = "sweep"


def create_database(path: Path, maximize: bool) -> None:
    """An empty study; it takes its place when it is whole."""
    with TemporaryDirectory(prefix=".writing-", dir=path.parent) as partial:
        storage = storage_at(Path(partial) / path.name)
        optuna.create_study(storage=storage, study_name=NAME, direction="maximize" if maximize else "minimize")
        close(storage)
        (Path(partial) / path.name).replace(path)


def storage_at(path: Path) -> RDBStorage:
    """Return Optuna's storage in a file; a file that exists gets no new tables."""
    return RDBStorage(f"sqlite:///{path.absolute()}", skip_table_creation=path.exists())


def open_database(path: Path, keys: Collection[str] = ()) -> tuple[RDBStorage, optuna.Study]:
    """Open the study in a file after checking that all of it can be read.

    Args:
        path: The file.
        keys: Parameters that every point must have.

    Raises:
        ConfigError: The file is damaged.
    """
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True)) as database:
            found = database.execute("PRAGMA quick_check").fetchone()[0]
        if found != "ok":
            raise ValueError(found)
        storage = storage_at(path)
        try:
            study = optuna.load_study(study_name=NAME, storage=storage)
            for trial in study.get_trials(deepcopy=False):
                if lost := [*({"point", "folder"} - trial.user_attrs.keys()), *(set(keys) - trial.params.keys())]:
                    raise ValueError(f"trial {trial.number} has no {lost[0]}")
        except BaseException:
            close(storage)
            raise
    except Exception as error:  # whatever SQLite, SQLAlchemy, JSON and Optuna make of damaged content
        mend = "Restore it from a backup, or choose another folder with --out."
        raise ConfigError(f"{path}: damaged ({one_line(root_cause(error))}). {mend}") from error
    return storage, study


def root_cause(error: BaseException) -> BaseException:
    """Return the first of the errors that led to an error."""
    while error.__cause__:
        error = error.__cause__
    return error


def has_results(path: Path) -> bool:
    """Return whether the study in a file has a point with a value."""
    storage, study = open_database(path)
    try:
        return any(trial.state in (COMPLETE, PRUNED) for trial in study.get_trials(deepcopy=False))
    finally:
        close(storage)


def close(storage: RDBStorage) -> None:
    """Let go of a storage's file."""
    storage.remove_session()
    storage.engine.dispose()


# --- The sweep ---------------------------------------------------------------------------------------------------


class StudyNotWritten(FLError):
    """A sweep's results cannot be written to its database."""

    exit_code = 1


def carry_out_sweep(
    sweep: Sweep,
    folder: Path,
    seed: int = 0,
    count: int | None = None,
    workers: int = 1,
    threads: int | None = None,
    show: Callable[[Result, int], None] = lambda result, most: None,
) -> list[Result]:
    """Carry a sweep out, or go on with it.

    Args:
        sweep: What is asked for.
        folder: The sweep's folder; nobody else may be at it.
        seed: Random points derive from it.
        count: How many points it is to have in all; by default as many as the file or its grid has.
        workers: How many points run at a time.
        threads: Torch's threads in each.
        show: Called with what came of each point as it ends, and with the number of all.

    Returns:
        What came of every point, in the order in which they were drawn.

    Raises:
        ConfigError: There is no end to the sweep, or something is wrong with it.
        Interrupted: SIGINT or SIGTERM came.
        StudyNotWritten: The database cannot be written to, because the disk is full for example.
    """
    limits = [limit for limit in (sweep.run_cap, count) if limit is not None]
    if sweep.method == "grid":
        limits.append(len(sweep.grid()))
    if not limits:
        raise ConfigError(f"--count: {sweep.method} has no end of its own; say how many points, here or as run_cap")
    most, study = min(limits), Study(sweep, folder, seed)
    try:
        unwanted = study.unwanted if sweep.pruner else None
        for outcome in carry_out(study.points(most), workers, threads, unwanted):
            show(study.tell(outcome), most)
        return study.results()
    except (SQLAlchemyError, StorageInternalError) as error:
        reason = one_line(root_cause(error))
        mend = "Once that is fixed, the same command goes on from here."
        raise StudyNotWritten(f"{folder / DATABASE}: {reason}. {mend}") from error
    finally:
        study.close()


def hold_to(folder: Path, sweep: Sweep, content: Mapping[str, Any], seed: int) -> None:
    """Keep in a sweep's folder what sweep it is of, and let it be gone on with only as that.

    A folder in which no point has begun may become another's: that is how a mistake is fixed.

    Args:
        folder: The sweep's folder.
        sweep: The sweep.
        content: Its file's content.
        seed: What random points derive from.

    Raises:
        ConfigError: It is another's; the message names what differs. Or a file of it is lost.
    """
    words = [*sweep.words, *sweep.after]
    configs = {name: read_config(Path(config_path(name))) for _, name in given(words, "config")}
    told = {key: value for key, value in content.items() if key not in {*IGNORED, "run_cap", "command"}}
    now = {"command": shlex.join(["fit", *words]), **told, "seed": seed, "configs": configs}
    text, path, database = yaml.safe_dump(now, sort_keys=False), folder / SWEEP, folder / DATABASE
    begun = any(folder.glob(f"{POINTS}/*/config.yaml"))
    refuse_incomplete(folder, begun)
    before = read_config(path) if path.exists() else None
    now = yaml.safe_load(text)
    if before == now:
        return
    if before and (begun or (database.exists() and has_results(database))):
        old, new = flatten(before), flatten(now)
        keys = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
        changes = "; ".join(f"{key} ({old.get(key)} -> {new.get(key)})" for key in keys)
        raise ConfigError(f"{folder} holds another sweep: {changes}; leave it as it was, or give another --out")
    database.unlink(missing_ok=True)
    write_atomically(path, text)


def refuse_incomplete(folder: Path, begun: bool) -> None:
    """Refuse a sweep's folder that lost the description or the results of its points.

    Args:
        folder: The sweep's folder.
        begun: Whether a point in it has begun.

    Raises:
        ConfigError: Names the lost file.
    """
    left = {DATABASE: (folder / DATABASE).exists(), POINTS: begun}
    for name in (SWEEP, DATABASE):
        rest = [one for one, there in left.items() if there and one != name]
        if rest and not (folder / name).exists():
            mend = "Put it back, or choose another folder with --out."
            raise ConfigError(f"{folder}: {name} not found, but {rest[0]} of a sweep. {mend}")


# --- What it ends with -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """Points that differ in nothing but the seed.

    Args:
        settings: Their words, less the seed.
        results: What came of each.
    """

    settings: Mapping[str, str]
    results: Sequence[Result]

    @property
    def complete(self) -> list[Result]:
        """Those that came to their end."""
        return [result for result in self.results if result.state == "complete"]

    @property
    def values(self) -> list[float]:
        """The metric of those that came to their end."""
        return [result.value for result in self.complete if result.value is not None]


def ranked(results: Sequence[Result], maximize: bool) -> list[Setting]:
    """Settings, best first by their seeds' mean; those that some seed failed come after, then those that all did."""
    groups: dict[tuple[tuple[str, str], ...], list[Result]] = {}
    for result in results:
        groups.setdefault(tuple((k, v) for k, v in result.settings.items() if k != "seed"), []).append(result)

    def place(setting: Setting) -> tuple[float, float]:
        if not setting.values:
            return 2, 0
        return len(setting.values) < len(setting.results), mean(setting.values) * (-1 if maximize else 1)

    return sorted((Setting(dict(key), group) for key, group in groups.items()), key=place)


def sweep_table(sweep: Sweep, results: Sequence[Result]) -> Table:
    """The table a sweep ends with: settings, best first, and what became of points that have no value."""
    keys = [key for key in sweep.parameters if key != "seed"]
    seeds, ends = "seed" in sweep.parameters, any(result.state != "complete" for result in results)
    columns = [*keys, sweep.metric, *(["seeds"] if seeds else []), *(["otherwise"] if ends else [])]
    table = Table(*columns, title=f"{sweep.name}: {len(results)} points")
    for setting in ranked(results, sweep.maximize):
        values = setting.values
        figure = f"{mean(values):.4f}" if values else ""
        spread = f" ± {stdev(values):.4f}" if len(values) > 1 else ""
        cells = [*(setting.settings[key] for key in keys), figure + spread]
        if seeds:
            cells.append(f"{len(values)} of {len(setting.results)}")
        if ends:
            others = (result for result in setting.results if result.state != "complete")
            cells.append("; ".join((f"seed {one.settings['seed']} " if seeds else "") + told(one) for one in others))
        table.add_row(*map(escape, cells))
    return table


def told(result: Result) -> str:
    """What came of a point, in a few words."""
    if result.state == "complete":
        return f"{result.value:.4f}"
    if result.state == "ended early":
        return f"ended early after round {result.rounds}, at {result.value:.4f}"
    return f"{result.state}: {result.reason}" if result.reason else result.state


def write_best(path: Path, sweep: Sweep, results: Sequence[Result]) -> Result | None:
    """Write the config of the best setting's first seed, for `fl-lightning fit --config`; None if no point ended."""
    best = ranked(results, sweep.maximize)[0].complete
    if not best:
        return None
    settings = " ".join(f"{key}={value}" for key, value in best[0].settings.items())
    config = (best[0].folder / "config.yaml").read_text()
    write_atomically(path, f"# The best of the sweep {sweep.name}: {settings}.\n{config}")
    return best[0]


def write_trials(path: Path, sweep: Sweep, results: Sequence[Result]) -> None:
    """Write a line a point."""
    lines: list[list[Any]] = [["point", *sweep.parameters, sweep.metric, "state", "rounds", "reason", "folder"]]
    for one in results:
        folder = f"{POINTS}/{one.folder.name}"
        lines.append([one.number, *one.settings.values(), one.value, one.state, one.rounds, one.reason, folder])
    write_atomically(path, csv_text(lines))
