"""Search for the best settings: Optuna proposes and prunes the trials of a sweep, and the executor runs them."""

from __future__ import annotations

import json
import math
import shlex
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np
import optuna
from optuna.samplers import RandomSampler, TPESampler
from optuna.storages import RDBStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial
from sqlalchemy.exc import SQLAlchemyError

from fl_lightning.analysis.baselines import option_values
from fl_lightning.analysis.study.checks import is_count, require
from fl_lightning.analysis.study.executor import Job, JobResult, RunJobs, earlier_result, is_finished
from fl_lightning.analysis.study.folder import open_study, run_folder
from fl_lightning.analysis.study.sweep_file import UNRELATED_KEYS, Sweep
from fl_lightning.analysis.study.sweep_results import TrialResult, used_seconds, write_trials
from fl_lightning.core.config import read_config as read_config_file
from fl_lightning.core.config_files import config_path
from fl_lightning.core.errors import ConfigError, FLError, one_line, reason_of
from fl_lightning.core.files import read_file, write_atomically
from fl_lightning.evaluation.summary import Row, sum_of
from fl_lightning.runs.csv_reader import read_rows
from fl_lightning.runs.reader import DamagedRun, complete_rounds, open_run_folder, read_config

COMPLETE, PRUNED, FAIL, RUNNING = TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL, TrialState.RUNNING
STATES = {COMPLETE: "complete", PRUNED: "ended early", FAIL: "failed", RUNNING: "unfinished"}

TRIALS = "trials"
PROPOSED = "trials.json"
DATABASE = "study.db"
DATABASE_FILES = (DATABASE, *(f"{DATABASE}-{name}" for name in ("journal", "wal", "shm")))
SWEEP_FILES = (TRIALS, PROPOSED, "trials.csv", "best.yaml", *DATABASE_FILES)
"""Files and folders of a sweep."""


class Budget(NamedTuple):
    """Limits of a sweep: its number of trials, and their processor time. Trials of earlier calls count, too.

    Args:
        trials: Number of trials; None for no other limit than that of the file or its grid.
        processor_seconds: No trial begins once the trials have used this much processor time.
    """

    trials: int | None = None
    processor_seconds: float = math.inf


class StudyNotWritten(FLError):
    """Error: a file of a sweep cannot be written at the moment, for example because the disk is full."""

    exit_code = 1


def run_sweep(
    sweep: Sweep,
    folder: Path,
    run: RunJobs,
    seed: int,
    budget: Budget,
    show: Callable[[TrialResult, int], None] = lambda result, most: None,
) -> list[TrialResult]:
    """Run the trials of a sweep, or continue an interrupted sweep, and write `trials.csv` at its end.

    Args:
        sweep: The sweep.
        folder: The sweep's folder.
        run: Runs the trials.
        seed: Seed of randomly drawn parameters.
        budget: Limits of the whole sweep.
        show: Called when a trial ends, with its result and the number of all trials.

    Returns:
        The results of all trials, in the order in which they were proposed.

    Raises:
        ConfigError: The number of trials is unknown, the sweep is wrong, or the folder holds another study.
        Interrupted: SIGINT or SIGTERM was received.
        StudyNotWritten: A file of the sweep cannot be written, for example because the disk is full.
    """
    limits = [limit for limit in (sweep.run_cap, budget.trials) if limit is not None]
    if sweep.method == "grid":
        limits.append(len(sweep.grid()))
    fix = "Give --count N, or run_cap: N"
    require(limits, f"--count: method {sweep.method} needs a number of trials. {fix}")
    most, shown = min(limits), set[int]()
    with open_study(folder, describe_sweep(sweep, seed), SWEEP_FILES):
        try:
            search = Search(sweep, folder, seed)
            should_stop = search.should_stop if sweep.pruner or sweep.seeds else None
            for ended in run(search.jobs(most, budget.processor_seconds), should_stop=should_stop):
                result = search.record(ended)
                if result.number not in shown and (result.state != "unfinished" or result.reason):
                    shown.add(result.number)
                    show(result, most)
            write_trials(folder / "trials.csv", sweep, results := search.results())
        except (OSError, SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
            reason = one_line(_root_cause(error))
            fix = "Fix this, then run the same command to continue."
            raise StudyNotWritten(f"{folder}: {reason}. {fix}") from error
    return results


def describe_sweep(sweep: Sweep, seed: int) -> dict[str, Any]:
    """Return what must stay the same when a sweep continues: its file, its configs and its seed."""
    words = [*sweep.words, *sweep.words_after]
    configs = {name: read_config_file(Path(config_path(name))) for name in option_values(words, "config")}
    related = {key: value for key, value in sweep.content.items() if key not in {*UNRELATED_KEYS, "run_cap", "command"}}
    return {"study": "sweep", "command": shlex.join(["fit", *words]), **related, "seed": seed, "configs": configs}


def _root_cause(error: BaseException) -> BaseException:
    return _root_cause(error.__cause__) if error.__cause__ else error


class Search:
    """The trials of a sweep: an Optuna study in memory, whose state is read from the sweep's folder.

    The file `trials.json` has the parameters of each trial, and the last round that the pruner has seen. The folders
    of the runs have everything else. The random numbers of a trial derive from the seed and its number, so a killed
    sweep continues with the same trials. Trials that have ended are also written to a database for Optuna's tools,
    which is never read.

    Args:
        sweep: The sweep.
        folder: The sweep's folder; no other process may use it.
        seed: Seed of randomly drawn parameters.
    """

    def __init__(self, sweep: Sweep, folder: Path, seed: int) -> None:
        self.sweep, self.folder, self.seed = sweep, folder, seed
        self._distributions = {key: parameter.distribution for key, parameter in sweep.parameters.items()}
        self._direction = StudyDirection.MAXIMIZE if sweep.maximize else StudyDirection.MINIMIZE
        self._study = optuna.create_study(direction=self._direction, pruner=sweep.pruner)
        self._jobs: list[dict[int | None, Job]] = []
        self._trials: dict[Path, tuple[Trial, int | None]] = {}  # and its seed, by the folder of a run
        self._reasons: dict[int, str] = {}
        proposed = self._read_proposed()
        self._database = create_database(folder, self._direction, sweep.metric)
        for entry in proposed:
            self._restore(self._add(entry["params"]), entry)

    # --- Proposing trials ---

    def jobs(self, most: int, processor_seconds: float = math.inf) -> Iterator[Job]:
        """Yield the jobs of a sweep's open trials: unfinished trials, then new trials.

        A trial has one job per seed. No more jobs follow once the trial has failed or was pruned.

        Args:
            most: Number of trials of the whole sweep.
            processor_seconds: No trial begins once the trials have used this much processor time.
        """
        for number in range(most):
            if number == len(self._jobs):
                if processor_seconds < math.inf and used_seconds(self.results()) >= processor_seconds:
                    return
                self._add(self._propose(number))
                self._write_proposed()
            for job in self._jobs[number].values():
                if self._frozen(number).state == RUNNING:
                    yield job

    def _propose(self, number: int) -> dict[str, Any]:
        if self.sweep.method == "grid":
            return self.sweep.grid()[number]
        if number == 0 and self.sweep.start:
            return dict(self.sweep.start)
        seed = int(np.random.SeedSequence([self.seed, number]).generate_state(1)[0])
        sampler = TPESampler(seed=seed) if self.sweep.method == "bayes" else RandomSampler(seed=seed)
        copy = optuna.create_study(direction=self._direction, sampler=sampler)
        copy.add_trials(self._study.get_trials())
        params = copy.ask(self._distributions).params
        return {key: parameter.rounded(params[key]) for key, parameter in self.sweep.parameters.items()}

    def _add(self, params: Mapping[str, Any]) -> Trial:
        parent, words = self._parent(len(self._jobs)), self.sweep.command(params)
        seeds: tuple[int | None, ...] = self.sweep.seeds or (None,)
        jobs = {
            seed: Job(run_folder(self.folder, parent, seed, words), self.sweep.command(params, seed)) for seed in seeds
        }
        self._study.enqueue_trial(dict(params))
        trial = self._study.ask(self._distributions)
        self._jobs.append(jobs)
        self._trials |= {job.folder: (trial, seed) for seed, job in jobs.items()}
        return trial

    def _parent(self, number: int) -> Path:
        return Path(TRIALS, f"{number:04d}")

    def _frozen(self, number: int) -> FrozenTrial:
        return self._study.get_trials(deepcopy=False)[number]

    # --- The file of the proposed trials ---

    def _read_proposed(self) -> list[dict[str, Any]]:
        path = self.folder / PROPOSED
        try:
            entries = json.loads(read_file(path, most=2**27))
            for entry in entries:
                create_trial(state=RUNNING, params=entry["params"], distributions=self._distributions)
                require(is_count(entry["rounds"], 0) and type(entry["ended_early"]) is bool, "no number of rounds")
        except FileNotFoundError:
            return []
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            fix = "Restore it from a backup, or choose another folder with --out."
            raise ConfigError(f"{path}: damaged ({reason_of(error)}). {fix}") from error
        return entries

    def _write_proposed(self) -> None:
        trials = self._study.get_trials(deepcopy=False)
        entries = [
            {"params": one.params, "rounds": one.last_step or 0, "ended_early": one.state == PRUNED} for one in trials
        ]
        write_atomically(self.folder / PROPOSED, json.dumps(entries, indent=1) + "\n")

    def _restore(self, trial: Trial, entry: Mapping[str, Any]) -> None:
        """Bring a trial of an earlier call to its state. The pruner's decisions are not made again."""
        while self._report_rounds(trial, entry["rounds"]):
            pass
        if entry["ended_early"]:
            self._end(trial, PRUNED)
        for job in self._jobs[trial.number].values():
            if ended := earlier_result(job):
                self.record(ended)

    # --- Recording results ---

    def record(self, ended: JobResult) -> TrialResult:
        """Take note that a run of a trial has ended, and return the trial's result.

        Raises:
            ConfigError: The first trial that ended could not run or lacks the metric, so the sweep itself is wrong.
        """
        trial, seed = self._trials[ended.job.folder]
        if self._frozen(trial.number).state == RUNNING:
            if ended.code == 0:
                self._record_value(trial)
            elif ended.code == 1:
                self._end(trial, FAIL, reason=ended.reason if seed is None else f"seed {seed}: {ended.reason}")
            else:  # the next call runs it again
                if ended.code == 2:
                    self._refuse_first(ended.reason)
                self._reasons[trial.number] = ended.reason
        return self._result(trial.number)

    def _record_value(self, trial: Trial) -> None:
        """End a trial with its mean metric once all of its runs have finished. It fails if a run lacks the metric."""
        folders = [job.folder for job in self._jobs[trial.number].values()]
        try:
            values = [self._value(folder) for folder in folders if is_finished(folder)]
        except (DamagedRun, ValueError) as error:
            if isinstance(error, ConfigError):
                self._refuse_first(str(error))
            return self._end(trial, FAIL, reason=str(error))
        if len(values) == len(folders):
            while self._report_rounds(trial):  # those since the last poll
                pass
            self._end(trial, COMPLETE, mean(values), values=values)
        return None

    def _value(self, folder: Path) -> float:
        """Return the metric of a finished run.

        Raises:
            ConfigError: The run has no such metric.
            DamagedRun: A file of the run cannot be read.
            ValueError: The metric is not finite.
        """
        run, name = open_run_folder(folder), self.sweep.metric
        values: dict[str, Any] = {key: value for row in run.rounds for key, value in row.items()}
        if not self.sweep.pruner:
            values |= run.summary
        where = "by round, which early_terminate needs" if self.sweep.pruner else "in this run"
        require(name in values, f"metric: {name} not found {where}. Use one of {', '.join(sorted(values))}")
        value = values[name]
        if value is None or not math.isfinite(value):
            raise ValueError(f"{name} is {'never reached' if value is None else value}")
        return value

    def _end(self, trial: Trial, state: TrialState, value: float | None = None, **attributes: Any) -> None:
        for key, attribute in {"number": trial.number, **attributes}.items():
            trial.set_user_attr(key, attribute)
        self._study.tell(trial, value, state)
        self._database.add_trial(self._frozen(trial.number))

    def _refuse_first(self, reason: str) -> None:
        """Stop the sweep with a `ConfigError` if the first trial to end has failed: the sweep itself may be wrong."""
        ended = any(trial.state.is_finished() for trial in self._study.get_trials(deepcopy=False))
        require(ended, reason)

    # --- Early termination ---

    def should_stop(self, job: Job) -> bool:
        """Return whether a running job must be stopped, because the sweep's pruner has ended its trial.

        The pruner first gets the metric of the trial's new rounds. A trial has one job for each seed.
        """
        trial, _ = self._trials[job.folder]
        before = self._frozen(trial.number)
        if before.state == RUNNING:
            if self._report_rounds(trial):
                self._end(trial, PRUNED)
            if self._frozen(trial.number).last_step != before.last_step:
                self._write_proposed()
        return self._frozen(trial.number).state != RUNNING

    def _report_rounds(self, trial: Trial, until: float = math.inf) -> bool:
        """Report the metric of a trial's new rounds to the pruner, and return whether the pruner ends the trial."""
        if not self.sweep.pruner:
            return False
        last_step = self._frozen(trial.number).last_step or 0
        new = {round: value for round, value in self._means(trial.number).items() if last_step < round <= until}
        if not new:
            return False
        planned = read_config(next(iter(self._jobs[trial.number].values())).folder).get("rounds")
        last = min(planned if isinstance(planned, int) else math.inf, self.sweep.rounds_to_prune)
        for round, value in new.items():
            if round < last:
                trial.report(value, round)
                if trial.should_prune():
                    return True
        return False

    def _means(self, number: int) -> dict[int, float]:
        """Return the metric's mean over a trial's runs for each round in which every run has logged the metric."""
        name = self.sweep.metric
        first, *others = [
            {int(row["round"]): row[name] for row in read_rounds(job.folder) if name in row}
            for job in self._jobs[number].values()
        ]
        common = [round for round in first if all(round in other for other in others)]
        return {round: mean(run[round] for run in (first, *others)) for round in common}

    # --- All results ---

    def results(self) -> list[TrialResult]:
        """Return the results of all trials, in the order in which they were proposed."""
        return [self._result(number) for number in range(len(self._jobs))]

    def _result(self, number: int) -> TrialResult:
        trial = self._frozen(number)
        rows = [row for job in self._jobs[number].values() for row in read_rounds(job.folder)]
        rounds = max((int(row["round"]) for row in rows), default=0)
        if trial.state == PRUNED:  # a run may have more rounds than the one whose mean decided
            rounds = trial.last_step or rounds
        return TrialResult(
            number,
            self.folder / self._parent(number),
            {key: parameter.word(trial.params[key]) for key, parameter in self.sweep.parameters.items()},
            STATES[trial.state],
            trial.value,
            rounds,
            trial.user_attrs.get("reason", self._reasons.get(number, "")) if trial.state != COMPLETE else "",
            trial.user_attrs.get("values", ()),
            sum_of(rows, "time/processor_s"),
        )


def read_rounds(run: Path) -> list[Row]:
    """Return the rows of a run's `metrics.csv`; none, with a warning, if it is damaged."""
    try:
        return complete_rounds(read_rows(run / "metrics.csv"))
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        warnings.warn(f"{run}: metrics.csv cannot be read: {reason_of(error)}; left out", stacklevel=2)
        return []


def create_database(folder: Path, direction: StudyDirection, metric: str) -> optuna.Study:
    """Return an empty Optuna study that is stored in a new SQLite file of a folder."""
    for name in DATABASE_FILES:  # SQLite would also read a journal
        (folder / name).unlink(missing_ok=True)
    storage = RDBStorage(f"sqlite:///{(folder / DATABASE).absolute()}")
    study = optuna.create_study(storage=storage, study_name="sweep", direction=direction)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study.set_metric_names([metric])  # the dashboard shows it
    return study
