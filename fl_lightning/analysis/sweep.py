"""Run a W&B sweep on this machine: Optuna proposes and prunes the trials, and the executor runs them."""

from __future__ import annotations

import math
import secrets
import shlex
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, Literal

import numpy as np
import optuna
import yaml
from optuna.distributions import CategoricalDistribution, distribution_to_json
from optuna.samplers import RandomSampler, TPESampler
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState, create_trial
from rich.markup import escape
from rich.table import Table
from sqlalchemy.exc import SQLAlchemyError

from fl_lightning.analysis.baselines import option_values
from fl_lightning.analysis.comparison import spread
from fl_lightning.analysis.executor import FAILED, Job, JobResult, Program, is_finished, run_jobs
from fl_lightning.analysis.result_table import mean_and_std, to_csv
from fl_lightning.analysis.sweep_file import UNRELATED_KEYS, Sweep
from fl_lightning.core.config import flatten, read_config
from fl_lightning.core.config_files import config_path
from fl_lightning.core.errors import ConfigError, FLError, one_line
from fl_lightning.core.files import write_atomically
from fl_lightning.core.renamed import new_class, new_option, update_config, update_path, update_settings
from fl_lightning.evaluation.summary import Row, sum_of
from fl_lightning.runs.csv_reader import read_rows
from fl_lightning.runs.reader import DamagedRun, open_run_folder

TRIALS = "trials"
OLD_TRIALS = "points"
"""The folder of the trials in sweeps of older versions."""
DATABASE = "study.db"
SWEEP = "sweep.yaml"
COMPLETE, PRUNED, FAIL, RUNNING = TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL, TrialState.RUNNING
ATTRIBUTES = ("number", "folder")
"""Attributes that Optuna's database stores of each trial: its number in the sweep, and the name of its folder."""
STATES = {COMPLETE: "complete", PRUNED: "ended early", FAIL: "failed", RUNNING: "unfinished"}


@dataclass(frozen=True)
class TrialResult:
    """The result of a trial of a sweep: its parameters, state and metric.

    Args:
        number: The trial's number, in the order in which trials were proposed.
        folder: The folder of its run, or of its runs if the sweep has seeds.
        settings: The values of its parameters, as written on the command line.
        state: One of `complete`, `ended early`, `failed`, `unfinished`.
        value: The metric, a mean over the sweep's seeds if it has some; for a trial that ended early, its last value.
            None for other states.
        rounds: Number of rounds that were run; for a trial that ended early, the round whose value decided.
        reason: Why the trial failed or is unfinished.
        values: The metric with each of the sweep's seeds, or that of the only run; empty unless the trial is complete.
        processor_seconds: Processor time of its rounds, over all of its runs.
    """

    number: int
    folder: Path
    settings: Mapping[str, str]
    state: str
    value: float | None
    rounds: int
    reason: str
    values: Sequence[float] = ()
    processor_seconds: float = 0.0

    def describe(self) -> str:
        """Return the trial's result as text: its value if it is complete, else its state with the reason."""
        if self.state == "complete":
            return f"{self.value:.4f}"
        if self.state == "ended early":
            return f"ended early after round {self.rounds}, at {self.value:.4f}"
        return f"{self.state}: {self.reason}" if self.reason else self.state


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
            failed = any((run / FAILED).exists() for run in runs) or all(map(is_finished, runs))
            if trial.state == FAIL and not failed:
                self._add(trial.params, {key: trial.user_attrs[key] for key in ATTRIBUTES})
        for number in range(min(most, len(self._trials()))):
            yield from self._jobs(number)
        while (number := len(self._trials())) < most and self._is_within(processor_seconds):
            folder_name = f"{number:04d}-{secrets.token_hex(3)}"  # unique, because W&B's run takes this name
            self._add(self._propose(number), {"number": number, "folder": folder_name})
            yield from self._jobs(number)

    def _is_within(self, processor_seconds: float) -> bool:
        """Return whether the trials have used less than this much processor time. Without a limit, read no files."""
        return processor_seconds == math.inf or used_seconds(self.results()) < processor_seconds

    def _jobs(self, number: int) -> Iterator[Job]:
        """Yield the jobs of a trial, one per run, while the trial has neither failed nor ended early."""
        for run, seed in self._runs(self._trials()[number]).items():
            trial = self._trials()[number]
            if trial.state == RUNNING:
                yield Job(run, self.sweep.command(trial.params, seed))

    def _trials(self) -> list[FrozenTrial]:
        """Return the latest database entry of each trial, in the order in which the trials were proposed."""
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
        return self.folder / TRIALS / trial.user_attrs["folder"]

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
        """Store the metric of a trial if all of its runs have finished, or that the trial failed if one lacks it."""
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
        """Raise a `ConfigError` with a trial's error if no trial has ended before: the sweep itself may be wrong."""
        if reason and not any(trial.state.is_finished() for trial in self._trials()):
            raise ConfigError(reason)

    # --- Early termination ---

    def should_stop(self, job: Job) -> bool:
        """Report a running trial's new rounds to the pruner, and return whether a run of the trial is to end early."""
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
        config = read_config(next(iter(self._runs(trial))) / "config.yaml")
        for round, value in new.items():
            if round < min(config["rounds"], self.sweep.rounds_to_prune):
                self._storage.set_trial_intermediate_value(number, round, value)
                if self.sweep.pruner.prune(self._study, self._storage.get_trial(number)):
                    return True
        return False

    def _means(self, trial: FrozenTrial) -> dict[int, float]:
        """Return the mean of the metric over the runs of a trial, for each round in which all of them have it."""
        name = self.sweep.metric
        first, *others = [
            {int(row["round"]): row[name] for row in self._rows(run) if name in row} for run in self._runs(trial)
        ]
        common = [round for round in first if all(round in other for other in others)]
        return {round: mean(run[round] for run in (first, *others)) for round in common}

    def _rows(self, run: Path) -> list[Row]:
        path = run / "metrics.csv"
        return [row for row in read_rows(path) if row] if path.exists() else []

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


def used_seconds(results: Sequence[TrialResult]) -> float:
    """Return the processor time of some trials in seconds."""
    return sum(result.processor_seconds for result in results)


# --- The database ------------------------------------------------------------------------------------------------


def storage_at(path: Path) -> RDBStorage:
    """Return Optuna's storage in a SQLite file. The file is created if it does not exist."""
    return RDBStorage(f"sqlite:///{path.absolute()}")


def open_database(path: Path, sweep: Sweep) -> tuple[RDBStorage, optuna.Study]:
    """Open or create the database of a sweep, and check that all of its trials can be read.

    Raises:
        ConfigError: The file is damaged.
    """
    direction: Literal["maximize", "minimize"] = "maximize" if sweep.maximize else "minimize"
    try:
        storage = storage_at(path)
        study = optuna.create_study(storage=storage, study_name="sweep", direction=direction, load_if_exists=True)
        if not study.metric_names:  # the dashboard shows it
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                study.set_metric_names([sweep.metric])
        for trial in study.get_trials(deepcopy=False):
            if lost := [*({*ATTRIBUTES} - trial.user_attrs.keys()), *(sweep.parameters.keys() - trial.params)]:
                raise ValueError(f"trial {trial.number} has no {lost[0]}")
    except Exception as error:  # SQLite, SQLAlchemy, JSON and Optuna raise different errors for damaged content
        fix = "Restore it from a backup, or choose another folder with --out."
        raise ConfigError(f"{path}: damaged ({one_line(root_cause(error))}). {fix}") from error
    return storage, study


def root_cause(error: BaseException) -> BaseException:
    """Return the innermost cause of an error."""
    while error.__cause__:
        error = error.__cause__
    return error


# --- The sweep ---------------------------------------------------------------------------------------------------


class StudyNotWritten(FLError):
    """Error: the database of a sweep cannot be written to."""

    exit_code = 1


def run_sweep(
    sweep: Sweep,
    folder: Path,
    program: Program,
    seed: int = 0,
    count: int | None = None,
    workers: int = 1,
    threads: int | None = None,
    show: Callable[[TrialResult, int], None] = lambda result, most: None,
    processor_seconds: float = math.inf,
) -> list[TrialResult]:
    """Run the trials of a sweep, or continue an interrupted sweep.

    Args:
        sweep: The sweep.
        folder: The sweep's folder; no other process may use it.
        program: Runs a trial.
        seed: Seed of randomly drawn parameters.
        count: Number of trials of the whole sweep; by default that of the file or its grid.
        workers: Number of runs at a time.
        threads: Number of torch threads of each trial.
        show: Called when a trial ends, with its result and the number of all trials.
        processor_seconds: No trial begins once the trials have used this much processor time.

    Returns:
        The results of all trials, in the order in which they were proposed.

    Raises:
        ConfigError: The number of trials is unknown, or the sweep is wrong.
        Interrupted: SIGINT or SIGTERM was received.
        StudyNotWritten: The database cannot be written to, for example because the disk is full.
    """
    limits = [limit for limit in (sweep.run_cap, count) if limit is not None]
    if sweep.method == "grid":
        limits.append(len(sweep.grid()))
    if not limits:
        raise ConfigError(f"--count: method {sweep.method} needs a number of trials. Give --count N, or run_cap: N")
    most, study = min(limits), Study(sweep, folder, seed)
    try:
        should_stop, shown = study.should_stop if sweep.pruner or sweep.seeds else None, set[int]()
        for ended in run_jobs(study.jobs(most, processor_seconds), program, workers, threads, should_stop):
            result = study.record(ended)
            if result.number not in shown and (result.state != "unfinished" or result.reason):
                shown.add(result.number)
                show(result, most)
        return study.results()
    except (SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
        reason = one_line(root_cause(error))
        fix = "Fix this, then run the same command to continue."
        raise StudyNotWritten(f"{folder / DATABASE}: {reason}. {fix}") from error
    finally:
        study.close()


def describe_sweep(folder: Path, sweep: Sweep, content: Mapping[str, Any], seed: int) -> None:
    """Write a sweep's description to its folder; if trials have begun there, check that it equals the stored one.

    Before the first trial has begun the description may change, so a mistake in the file can be corrected.

    Args:
        folder: The sweep's folder.
        sweep: The sweep.
        content: The content of its file.
        seed: Seed of randomly drawn parameters.

    Raises:
        ConfigError: The folder holds another sweep (the message names the differences), or a file of it is lost.
    """
    words = [*sweep.words, *sweep.words_after]
    configs = {name: read_config(Path(config_path(name))) for _, name in option_values(words, "config")}
    related = {key: value for key, value in content.items() if key not in {*UNRELATED_KEYS, "run_cap", "command"}}
    now = {"command": shlex.join(["fit", *words]), **related, "seed": seed, "configs": configs}
    text, path, database = yaml.safe_dump(now, sort_keys=False), folder / SWEEP, folder / DATABASE
    old = (folder / OLD_TRIALS).is_dir()
    begun = any((folder / (OLD_TRIALS if old else TRIALS)).rglob("config.yaml"))
    for file in (path, database):
        if begun and not file.exists():
            fix = "Put it back, or choose another folder with --out."
            raise ConfigError(f"{folder}: {file.name} not found, but {TRIALS} of a sweep. {fix}")
    now = yaml.safe_load(text)
    recorded = read_config(path) if path.exists() else now
    before = update_description(recorded, now)
    if begun and before != now:
        stored, new = flatten(before), flatten(now)
        keys = sorted(key for key in stored.keys() | new.keys() if stored.get(key) != new.get(key))
        changes = "; ".join(f"{key} ({stored.get(key)} -> {new.get(key)})" for key in keys)
        raise ConfigError(f"{folder} holds another sweep: {changes}. Undo the change, or give another --out")
    if before != now:
        database.unlink(missing_ok=True)
    elif (renamed := {key: name for key in recorded["parameters"] if (name := new_option(key))}) or old:
        update_database(database, sweep, renamed)
    if old:
        (folder / OLD_TRIALS).rename(folder / TRIALS)
    write_atomically(path, text)


def update_database(path: Path, sweep: Sweep, renamed: Mapping[str, str]) -> None:
    """Update the database of a sweep that began with an older version, in which listed values were stored as text.

    Args:
        path: The database.
        sweep: The sweep.
        renamed: The present name of each renamed parameter, by its old name.
    """
    storage = storage_at(path)
    with storage.engine.begin() as connection:
        for old, new in renamed.items():
            connection.exec_driver_sql("UPDATE trial_params SET param_name = ? WHERE param_name = ?", (new, old))
        connection.exec_driver_sql("UPDATE trial_user_attributes SET key = 'number' WHERE key = 'point'")
        for key, parameter in sweep.parameters.items():
            if parameter.words:
                before = distribution_to_json(CategoricalDistribution(list(parameter.words.values())))
                values = (distribution_to_json(parameter.distribution), key, before)
                update = "UPDATE trial_params SET distribution_json = ? WHERE param_name = ? AND distribution_json = ?"
                connection.exec_driver_sql(update, values)
    storage.engine.dispose()


def update_description(recorded: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sweep's stored description with the present names of renamed options and classes.

    Args:
        recorded: The description in the sweep's folder.
        now: The present description. The baselines of its configs replace those recorded under their old name,
            `rivals`, because the shipped files with baselines moved, too.
    """
    configs = {name: update_config(config) for name, config in recorded["configs"].items()}
    for name, config in recorded["configs"].items():
        if "rivals" in config and name in now["configs"]:
            configs[name]["baselines"] = now["configs"][name].get("baselines")
    words = [_update_word(word) for word in shlex.split(recorded["command"])]
    parameters = update_settings(recorded["parameters"])
    return {**recorded, "command": shlex.join(words), "parameters": parameters, "configs": configs}


def _update_word(word: str) -> str:
    """Return one word of a command line, with a renamed option or class under its present name."""
    key, sign, value = word.partition("=") if word.startswith("--") else ("", "", word)
    new = new_option(key.removeprefix("--"))
    return (f"--{new}" if new else key) + sign + (new_class(value) or update_path(value))


# --- The results -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """One combination of parameter values in a sweep, with its trials, which differ only in the seed.

    Args:
        settings: The settings without the seed.
        results: The results of the trials.
    """

    settings: Mapping[str, str]
    results: Sequence[TrialResult]

    @property
    def complete(self) -> list[TrialResult]:
        """The results of the setting's complete trials."""
        return [result for result in self.results if result.state == "complete"]

    @property
    def values(self) -> list[float]:
        """The values of the sweep's metric in the setting's complete trials, one per seed."""
        return [value for result in self.complete for value in result.values]


def rank_settings(results: Sequence[TrialResult], maximize: bool) -> list[Setting]:
    """Group trials by setting, and sort the settings by mean metric over seeds, best first, incomplete ones last."""
    groups: dict[tuple[tuple[str, str], ...], list[TrialResult]] = {}
    for result in results:
        groups.setdefault(tuple((k, v) for k, v in result.settings.items() if k != "seed"), []).append(result)

    def key(setting: Setting) -> tuple[float, float]:
        if not setting.values:
            return 2, 0
        return len(setting.complete) < len(setting.results), mean(setting.values) * (-1 if maximize else 1)

    return sorted((Setting(dict(settings), group) for settings, group in groups.items()), key=key)


def sweep_table(sweep: Sweep, results: Sequence[TrialResult]) -> Table:
    """Return the table of a sweep's results: settings with their mean metric, best first, and incomplete trials."""
    keys = [key for key in sweep.parameters if key != "seed"]
    by_seed, incomplete = "seed" in sweep.parameters, any(result.state != "complete" for result in results)
    has_seeds = by_seed or bool(sweep.seeds)
    columns = [*keys, sweep.metric, *(["seeds"] if has_seeds else []), *(["incomplete"] if incomplete else [])]
    table = Table(*columns, title=f"{sweep.name}: {len(results)} trials")
    for setting in rank_settings(results, sweep.maximize):
        values, figures = setting.values, spread(setting.values)
        number = mean_and_std(figures.mean, figures.std, ".4f") if figures else ""
        cells = [*(setting.settings[key] for key in keys), number]
        if has_seeds:
            cells.append(f"{len(values)} of {len(setting.results) * max(1, len(sweep.seeds))}")
        if incomplete:
            others = (one for one in setting.results if one.state != "complete")
            cells.append(
                "; ".join((f"seed {one.settings['seed']} " if by_seed else "") + one.describe() for one in others)
            )
        table.add_row(*map(escape, cells))
    return table


def write_best(path: Path, sweep: Sweep, results: Sequence[TrialResult]) -> TrialResult | None:
    """Write the config of the best setting's first complete trial, and return this trial; None if none is complete."""
    best = rank_settings(results, sweep.maximize)[0].complete
    if not best:
        return None
    settings = " ".join(f"{key}={value}" for key, value in best[0].settings.items())
    seeds = f", mean over the seeds {', '.join(map(str, sweep.seeds))}" if sweep.seeds else ""
    config = (next(iter(sweep.runs(best[0].folder))) / "config.yaml").read_text()
    write_atomically(path, f"# The best of the sweep {sweep.name}: {settings}{seeds}.\n{config}")
    return best[0]


def write_trials(path: Path, sweep: Sweep, results: Sequence[TrialResult]) -> None:
    """Write the parameters and results of all trials to a CSV file, one line per trial."""
    by_seed = [f"{sweep.metric} seed {seed}" for seed in sweep.seeds]
    header = ["trial", *sweep.parameters, sweep.metric, *by_seed, "state", "rounds", "reason", "folder"]
    lines: list[list[Any]] = [header]
    for one in results:
        values = one.values if one.values and by_seed else [""] * len(by_seed)
        end = [one.state, one.rounds, one.reason, f"{TRIALS}/{one.folder.name}"]
        lines.append([one.number, *one.settings.values(), one.value, *values, *end])
    write_atomically(path, to_csv(lines))
