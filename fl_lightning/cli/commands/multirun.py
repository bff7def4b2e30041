"""`fl-lightning fit --seeds ... --multirun ...`: compare runs of an experiment with several seeds and settings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from fl_lightning.analysis.baselines import option_values, warn_of_dropped_options
from fl_lightning.analysis.comparison import comparable_runs, compare
from fl_lightning.analysis.study.checks import errors_at, require
from fl_lightning.analysis.study.executor import Job, is_finished
from fl_lightning.analysis.study.folder import open_study
from fl_lightning.analysis.study.multirun import PLACE, Combination, combinations, multirun_jobs, parse_grid
from fl_lightning.cli.command_line import read_command_line
from fl_lightning.cli.commands.compare import print_comparison, reference_settings
from fl_lightning.cli.jobs import FIT, check_experiment, in_each, resolve_config, run_missing
from fl_lightning.cli.options import MULTIRUN, key_of, options_of, split_options
from fl_lightning.cli.unknown_names import check_names
from fl_lightning.core.config_files import CommandLine, is_run
from fl_lightning.core.errors import ConfigError, check_number, check_positive
from fl_lightning.core.terminal import echo
from fl_lightning.runs.search import open_runs

CONFLICTS = {
    "resume": "the same command resumes all its runs. Leave --resume out",
    "run_dir": "each run has its own folder. Use --out for the folder of all runs",
    "print_config": "it shows the config of one run. Leave out --seeds and --multirun",
}
"""Options of `fit` that cannot be used for several runs, with the reason and the fix."""


def expand(line: CommandLine) -> CommandLine:
    """Move the options for several runs, such as `--seeds`, to the start of a command line, and write `--` after them.

    In the words of each run, `PLACE` marks the position of `--multirun`.

    Raises:
        ConfigError: An option is repeated, conflicts with another, or needs `--seeds` or `--multirun`.
    """
    own: dict[str, Sequence[str]] = {}
    rest: list[str] = []
    for key, _, part in split_options(line.words, options_of("fit")):
        if key not in map(key_of, MULTIRUN):
            rest += part
        else:
            require(key not in own, f"--{key}: given twice. Write all its values after one --{key}")
            own[key] = part
            rest += [PLACE] * (key == "multirun")
    if not {"seeds", "multirun"} & own.keys():
        raise ConfigError(f"--{next(iter(own))}: needs --seeds or --multirun. Add one of them, or leave it out")
    return CommandLine([*(word for part in own.values() for word in part), "--", *rest])


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
    require(not is_run(str(out)), f"--out: {out} is the folder of a run. Give another folder")
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
        require(given[key] != [], f"--{key}: no value is given. Write --{key} {example}")
    for i, seed in enumerate(given.seeds or ()):
        check_number("--seeds", seed, "[0, inf)")
        require(seed not in given.seeds[:i], f"--seeds: {seed} is given twice. Leave one out")
    grid = parse_grid(given.multirun or ())
    for key, *_ in split_options(given.words, options_of("fit")):
        if key in CONFLICTS:
            raise ConfigError(f"--{key}: {CONFLICTS[key]}")
        for other, is_set in (("--multirun", key in grid), ("--seeds", key == "seed" and given.seeds)):
            require(not is_set, f"--{key}: {other} sets it, too. Leave one of them out")
    found = combinations(grid, given.words)
    for each in found:
        with errors_at(each.name):
            check_names("fit", read_command_line("fit", each.words))
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
        ConfigError: A value is wrong or does not fit the others, two combinations are equal, or the reference is no
            combination.
    """
    configs = in_each(resolve_config, [(each.name, each.words) for each in grid], given.workers)
    for each, config in zip(grid, configs, strict=True):
        warn_of_dropped_options([content for _, content in read_command_line("fit", each.words).configs], config)
    groups = multirun_jobs(grid, configs, given.seeds or (), out, reference_settings(given.reference))
    new = [
        (each.name, each.words)
        for each, jobs in zip(grid, groups, strict=True)
        if not any(job.folder.exists() for job in jobs)
    ]
    in_each(check_experiment, new, given.workers)
    return [job for jobs in groups for job in jobs]
