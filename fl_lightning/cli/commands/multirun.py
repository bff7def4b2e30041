"""`fl-lightning fit --seeds ... --multirun ...`: compare runs of an experiment with several seeds and settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from fl_lightning.analysis.baselines import option_values, warn_of_dropped_options
from fl_lightning.analysis.comparison import comparable_runs, compare
from fl_lightning.analysis.study.executor import Job, is_finished
from fl_lightning.analysis.study.folder import open_study
from fl_lightning.analysis.study.multirun import (
    PLACE,
    Combination,
    check_seeds,
    combinations,
    multirun_jobs,
    parse_grid,
)
from fl_lightning.cli.command_line import normalize_words
from fl_lightning.cli.commands.compare import print_comparison, reference_settings
from fl_lightning.cli.jobs import (
    FIT,
    Environment,
    Result,
    Words,
    check_experiment,
    in_job_processes,
    resolve_config,
    run_missing,
)
from fl_lightning.cli.options import MULTIRUN, key_of, options_of, split_options
from fl_lightning.cli.unknown_names import check_names
from fl_lightning.core.config_files import config_path, is_run
from fl_lightning.core.errors import ConfigError, check_positive
from fl_lightning.core.terminal import echo
from fl_lightning.runs.search import open_runs

CONFLICTS = {
    "resume": "the same command resumes all its runs. Leave --resume out",
    "run_dir": "each run has its own folder. Use --out for the folder of all runs",
    "print_config": "it shows the config of one run. Leave out --seeds and --multirun",
}
"""Options of `fit` that cannot be used for several runs, with the reason and the fix."""


def expand(words: Sequence[str]) -> list[str]:
    """Move the options for several runs, such as `--seeds`, to the start of a command line, and write `--` after them.

    In the words of each run, `PLACE` marks the position of `--multirun`.

    Raises:
        ConfigError: An option is repeated, conflicts with another, or needs `--seeds` or `--multirun`.
    """
    own: dict[str, Sequence[str]] = {}
    rest: list[str] = []
    for key, _, part in split_options(words, options_of("fit")):
        if key not in map(key_of, MULTIRUN):
            rest += part
        elif key in own:
            raise ConfigError(f"--{key}: given twice. Write all its values after one --{key}")
        else:
            own[key] = part
            rest += [PLACE] * (key == "multirun")
    if not {"seeds", "multirun"} & own.keys():
        raise ConfigError(f"--{next(iter(own))}: needs --seeds or --multirun. Add one of them, or leave it out")
    return [*(word for part in own.values() for word in part), "--", *rest]


def main(given: Namespace, parser: ArgumentParser) -> int:
    """Run an experiment with several seeds and settings, and print a comparison. Return 1 if a run failed.

    Finished runs are not repeated.
    """
    check_positive("--", workers=given.workers, threads=given.threads)
    grid = combine(given)
    if "--fast" in given.words:
        return dry_runs(grid)
    config = option_values(given.words, "config")
    out = Path(given.out or Path("runs", "multirun", Path(config[-1]).stem if config else "run"))
    if is_run(str(out)):
        raise ConfigError(f"--out: {out} is the folder of a run. Give another folder")
    jobs = check_jobs(grid, given, out)
    with open_study(out, {"study": "multirun"}):
        failed = run_missing(jobs, out, given.workers, given.threads)
    if finished := [job.folder for job in jobs if is_finished(job.folder)]:
        reference = reference_settings(given.reference)
        found = compare(comparable_runs(open_runs(finished)), reference=reference)
        print_comparison(found, given.format, given.percent)
        echo(f"compare again: fl-lightning compare {out}", to_stderr=True)
    return 1 if failed else 0


def combine(given: Namespace) -> list[Combination]:
    """Return the combinations of settings that a command line asks for, after checking their keys and class names.

    Raises:
        ConfigError: A value is missing, repeated or not allowed, or a key or class is unknown.
    """
    for key, example in (("seeds", "0 1 2"), ("multirun", "algorithm=FedAvg,FedProx")):
        if given[key] == []:
            raise ConfigError(f"--{key}: no value is given. Write --{key} {example}")
    check_seeds(given.seeds or ())
    grid = parse_grid(given.multirun or ())
    typed = [key for key, *_ in split_options(given.words, options_of("fit"))]
    for key in typed:
        if key in CONFLICTS:
            raise ConfigError(f"--{key}: {CONFLICTS[key]}")
        if key in grid or (key == "seed" and given.seeds):
            other = "--multirun" if key in grid else "--seeds"
            raise ConfigError(f"--{key}: {other} sets it, too. Leave one of them out")
    found = combinations(grid, given.words)
    for each in found:
        try:
            check_names("fit", normalize_words("fit", each.words))
        except ConfigError as error:
            raise each.refusal(error) from error
    return found


def dry_runs(grid: Sequence[Combination]) -> int:
    """Make a dry run of each combination until one fails, and return the last exit code."""
    for each in grid:
        if each.name:
            echo(f"{each.name}:")
        if code := FIT.main(["fit", *each.words]):
            return code
    return 0


def check_jobs(grid: Sequence[Combination], given: Namespace, out: Path) -> list[Job]:
    """Check the combinations of settings in a multirun, and return its jobs: one for each combination and seed.

    The checks of `fit` are made only for combinations that have no run yet.

    Raises:
        ConfigError: A value is wrong or does not fit the others, two combinations are equal, or none is the reference.
    """
    configs = in_each(grid, resolve_config, given.workers)
    for each, config in zip(grid, configs, strict=True):
        warn_of_dropped_options([config_path(name) for name in option_values(each.words, "config")], config)
    groups = multirun_jobs(grid, configs, given.seeds or (), out, reference_settings(given.reference))
    new = [each for each, jobs in zip(grid, groups, strict=True) if not any(job.folder.exists() for job in jobs)]
    in_each(new, check_experiment, given.workers)
    return [job for jobs in groups for job in jobs]


def in_each(
    grid: Sequence[Combination], function: Callable[[Words, Environment], Result], workers: int
) -> list[Result]:
    """Call a function with the command line of each combination, in job processes, and return the results.

    Raises:
        ConfigError: The function raised one; the message begins with the combination.
    """
    results, found = in_job_processes(function, [each.words for each in grid], workers), []
    for each in grid:
        try:
            found.append(next(results))
        except ConfigError as error:
            raise each.refusal(error) from error
    return found
