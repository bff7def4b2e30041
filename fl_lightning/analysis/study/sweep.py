"""Run a W&B sweep on this machine: Optuna proposes and prunes the trials, and the executor runs them."""

from __future__ import annotations

import math
import os
import secrets
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np
import optuna
from optuna.samplers import RandomSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState, create_trial
from sqlalchemy.exc import SQLAlchemyError

from fl_lightning.analysis.study.executor import FAILED, Job, JobResult, RunJobs, is_finished
from fl_lightning.analysis.study.sweep_file import Sweep
from fl_lightning.analysis.study.sweep_folder import ATTRIBUTES, DATABASE, TRIALS, database_error, open_database
from fl_lightning.analysis.study.sweep_results import TrialResult, used_seconds
from fl_lightning.core.errors import ConfigError, reason_of
from fl_lightning.evaluation.summary import Row, sum_of
from fl_lightning.runs.csv_reader import read_rows
from fl_lightning.runs.folder import subfolder
from fl_lightning.runs.reader import DamagedRun, complete_rounds, open_run_folder, read_config

COMPLETE, PRUNED, FAIL, RUNNING = TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL, TrialState.RUNNING
STATES = {COMPLETE: "complete", PRUNED: "ended early", FAIL: "failed", RUNNING: "unfinished"}


class Budget(NamedTuple):
    """Limits of a sweep: its number of trials, and their processor time. Trials of earlier calls count, too.

    Args:
        trials: Number of trials; None for no other limit than that of the file or its grid.
        processor_seconds: No trial begins once the trials have used this much processor time.
    """

    trials: int | None = None
    processor_seconds: float = math.inf


class Study:
    """The trials of a sweep and their results, stored in the sweep's folder.

    Optuna stores them in SQLite, whose transactions survive a kill; a line of Optuna's journal file could be cut. For
    the same reason a trial is proposed in a copy in memory and stored in one transaction: Optuna itself stores a
    trial's parameters one by one. The random numbers of a trial derive from the seed and its number, so a killed sweep
    continues with the same trials.

    Args:
        sweep: The sweep.
        folder: The sweep's folder; no other process may use it.
        seed: Seed of randomly drawn parameters.
    """

    def __init__(self, sweep: Sweep, folder: Path, seed: int) -> None:
        self.sweep, self.folder, self.seed = sweep, folder, seed
        self._reasons: dict[int, str] = {}
        self._storage, self._study = open_database(folder / DATABASE, sweep)
        self._id = self._storage.get_study_id_from_name(self._study.study_name)

    def close(self) -> None:
        """Close the sweep's database."""
        self._storage.remove_session()
        self._storage.engine.dispose()

    # --- Proposing trials ---

    def jobs(self, most: int, processor_seconds: float = math.inf) -> Iterator[Job]:
        """Yield the jobs of a sweep's open trials: unfinished trials, failed trials to run again, then new trials.

        Args:
            most: Number of trials of the whole sweep.
            processor_seconds: No trial begins once the trials have used this much processor time.
        """
        for trial in self._trials():
            runs = self._runs(trial)
            failed = any(os.path.lexists(run / FAILED) for run in runs) or all(map(is_finished, runs))
            if trial.state == FAIL and not failed:
                self._add(trial.params, {key: trial.user_attrs[key] for key in ATTRIBUTES})
        for number in range(min(most, len(self._trials()))):
            yield from self._jobs(number)
        while (number := len(self._trials())) < most and self._is_within(processor_seconds):
            folder_name = f"{number:04d}-{secrets.token_hex(3)}"  # unique, because W&B's run takes this name
            self._add(self._propose(number), {"number": number, "folder": folder_name})
            yield from self._jobs(number)

    def _is_within(self, processor_seconds: float) -> bool:
        """Return whether the processor time that the trials have used is below a limit.

        If the limit is infinite, no files are read.
        """
        return processor_seconds == math.inf or used_seconds(self.results()) < processor_seconds

    def _jobs(self, number: int) -> Iterator[Job]:
        """Yield the jobs of a trial, one per seed. No more jobs follow once the trial has failed or was pruned."""
        for run, seed in self._runs(self._trials()[number]).items():
            trial = self._trials()[number]
            if trial.state == RUNNING:
                yield Job(run, self.sweep.command(trial.params, seed))

    def _trials(self) -> list[FrozenTrial]:
        """Return the database entry of each trial (the latest one of a repeated trial), in order of trial number."""
        trials = self._study.get_trials(deepcopy=False)
        return list({trial.user_attrs["number"]: trial for trial in trials}.values())

    def _add(self, params: Mapping[str, Any], attributes: Mapping[str, Any]) -> None:
        trial = create_trial(
            state=RUNNING, params=dict(params), distributions=self._distributions, user_attrs=dict(attributes)
        )
        self._study.add_trial(trial)

    def _propose(self, number: int) -> dict[str, Any]:
        if self.sweep.method == "grid":
            return self.sweep.grid()[number]
        if number == 0 and self.sweep.start:
            return dict(self.sweep.start)
        seed = int(np.random.SeedSequence([self.seed, number]).generate_state(1)[0])
        sampler = TPESampler(seed=seed) if self.sweep.method == "bayes" else RandomSampler(seed=seed)
        copy = optuna.create_study(direction=self._study.direction, sampler=sampler)
        copy.add_trials(self._study.get_trials())
        params = copy.ask(self._distributions).params
        return {key: parameter.rounded(params[key]) for key, parameter in self.sweep.parameters.items()}

    @property
    def _distributions(self) -> dict[str, Any]:
        return {key: parameter.distribution for key, parameter in self.sweep.parameters.items()}

    def _folder(self, trial: FrozenTrial) -> Path:
        return subfolder(self.folder, Path(TRIALS, trial.user_attrs["folder"]))

    def _runs(self, trial: FrozenTrial) -> dict[Path, int | None]:
        return self.sweep.runs(self._folder(trial))

    def _trial_of(self, job: Job) -> FrozenTrial:
        return next(trial for trial in self._trials() if job.folder in self._runs(trial))

    # --- Recording results ---

    def record(self, ended: JobResult) -> TrialResult:
        """Store in the sweep's database that a run of a trial has ended, and return the trial's result.

        Raises:
            ConfigError: The first trial that ended could not run or lacks the metric, so the sweep itself is wrong.
        """
        trial = self._trial_of(ended.job)
        if trial.state == RUNNING:
            if ended.code == 0:
                self._record_value(trial)
            elif ended.code == 1:
                seed = self._runs(trial)[ended.job.folder]
                self._fail(trial, ended.reason if seed is None else f"seed {seed}: {ended.reason}")
            else:  # the next call runs it again
                self._refuse_first(ended.reason if ended.code == 2 else None)
                self._reasons[trial.user_attrs["number"]] = ended.reason
        return self._result(self._trials()[trial.user_attrs["number"]])

    def _record_value(self, trial: FrozenTrial) -> None:
        """Store a trial's mean metric once all of its runs have finished. The trial fails if a run lacks the metric."""
        runs = self._runs(trial)
        try:
            values = [self._value(run) for run in runs if is_finished(run)]
        except ConfigError as error:
            self._refuse_first(str(error))
            return self._fail(trial, str(error))
        except (DamagedRun, ValueError) as error:
            return self._fail(trial, str(error))
        if len(values) == len(runs):
            while self._report_rounds(trial):  # those since the last poll
                pass
            self._storage.set_trial_user_attr(self._trial_id(trial), "values", values)
            self._study.tell(trial.number, mean(values))
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
        if name not in values:
            where = "by round, which early_terminate needs" if self.sweep.pruner else "in this run"
            raise ConfigError(f"metric: {name} not found {where}. Use one of {', '.join(sorted(values))}")
        value = values[name]
        if value is None or not math.isfinite(value):
            raise ValueError(f"{name} is {'never reached' if value is None else value}")
        return value

    def _fail(self, trial: FrozenTrial, reason: str) -> None:
        self._storage.set_trial_user_attr(self._trial_id(trial), "reason", reason)
        self._study.tell(trial.number, state=FAIL)

    def _refuse_first(self, reason: str | None) -> None:
        """Stop the sweep with a `ConfigError` if the first trial to end has failed.

        The sweep itself may be wrong then.

        Args:
            reason: Why the trial failed; None to raise no error.
        """
        if reason and not any(trial.state.is_finished() for trial in self._trials()):
            raise ConfigError(reason)

    # --- Early termination ---

    def should_stop(self, job: Job) -> bool:
        """Return whether a running job must be stopped, because the sweep's pruner has ended its trial.

        The pruner first gets the metric of the trial's new rounds. A trial has one job for each seed.
        """
        trial = self._trial_of(job)
        if trial.state == RUNNING and self._report_rounds(trial):
            self._study.tell(trial.number, state=PRUNED)
        return self._trial_of(job).state != RUNNING

    def _report_rounds(self, trial: FrozenTrial) -> bool:
        """Report the metric of a trial's new rounds to the pruner, and return whether the pruner ends the trial."""
        if not self.sweep.pruner:
            return False
        number = self._trial_id(trial)
        last_step = self._storage.get_trial(number).last_step or 0
        new = {round: value for round, value in self._means(trial).items() if round > last_step}
        if not new:
            return False
        planned = read_config(next(iter(self._runs(trial)))).get("rounds")
        last = min(planned if isinstance(planned, int) else math.inf, self.sweep.rounds_to_prune)
        for round, value in new.items():
            if round < last:
                self._storage.set_trial_intermediate_value(number, round, value)
                if self.sweep.pruner.prune(self._study, self._storage.get_trial(number)):
                    return True
        return False

    def _means(self, trial: FrozenTrial) -> dict[int, float]:
        """Return the metric's mean over a trial's runs for each round in which every run has logged the metric."""
        name = self.sweep.metric
        first, *others = [
            {int(row["round"]): row[name] for row in self._rows(run) if name in row} for run in self._runs(trial)
        ]
        common = [round for round in first if all(round in other for other in others)]
        return {round: mean(run[round] for run in (first, *others)) for round in common}

    def _rows(self, run: Path) -> list[Row]:
        try:
            return complete_rounds(read_rows(run / "metrics.csv"))
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as error:
            warnings.warn(f"{run}: metrics.csv cannot be read: {reason_of(error)}; left out", stacklevel=2)
            return []

    def _trial_id(self, trial: FrozenTrial) -> int:
        return self._storage.get_trial_id_from_study_id_trial_number(self._id, trial.number)

    # --- All results ---

    def results(self) -> list[TrialResult]:
        """Return the results of all trials, in the order in which they were proposed."""
        return [self._result(trial) for trial in self._trials()]

    def _result(self, trial: FrozenTrial) -> TrialResult:
        rows = [row for run in self._runs(trial) for row in self._rows(run)]
        rounds, seconds = max((int(row["round"]) for row in rows), default=0), sum_of(rows, "time/processor_s")
        if trial.state == PRUNED:  # a run may have more rounds than the one whose mean decided
            rounds = trial.last_step or rounds
        settings = {key: one.word(trial.params[key]) for key, one in self.sweep.parameters.items()}
        number, attributes = trial.user_attrs["number"], trial.user_attrs
        reason = attributes.get("reason", self._reasons.get(number, "")) if trial.state != COMPLETE else ""
        value = trial.value if trial.state in (COMPLETE, PRUNED) else None
        values = attributes.get("values", [trial.value]) if trial.state == COMPLETE else ()
        state, folder = STATES[trial.state], self._folder(trial)
        return TrialResult(number, folder, settings, state, value, rounds, reason, values, seconds)


def run_sweep(
    sweep: Sweep,
    folder: Path,
    run: RunJobs,
    seed: int,
    budget: Budget,
    show: Callable[[TrialResult, int], None] = lambda result, most: None,
) -> list[TrialResult]:
    """Run the trials of a sweep, or continue an interrupted sweep.

    Args:
        sweep: The sweep.
        folder: The sweep's folder; no other process may use it.
        run: Runs the trials.
        seed: Seed of randomly drawn parameters.
        budget: Limits of the whole sweep.
        show: Called when a trial ends, with its result and the number of all trials.

    Returns:
        The results of all trials, in the order in which they were proposed.

    Raises:
        ConfigError: The number of trials is unknown, or the sweep is wrong.
        Interrupted: SIGINT or SIGTERM was received.
        StudyNotWritten: The database cannot be read or written, for example because the disk is full.
    """
    limits = [limit for limit in (sweep.run_cap, budget.trials) if limit is not None]
    if sweep.method == "grid":
        limits.append(len(sweep.grid()))
    if not limits:
        raise ConfigError(f"--count: method {sweep.method} needs a number of trials. Give --count N, or run_cap: N")
    most, study = min(limits), Study(sweep, folder, seed)
    try:
        should_stop, shown = study.should_stop if sweep.pruner or sweep.seeds else None, set[int]()
        for ended in run(study.jobs(most, budget.processor_seconds), should_stop=should_stop):
            result = study.record(ended)
            if result.number not in shown and (result.state != "unfinished" or result.reason):
                shown.add(result.number)
                show(result, most)
        return study.results()
    except (SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
        raise database_error(folder / DATABASE, error) from error
    finally:
        study.close()
