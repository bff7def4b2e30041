"""Check that the trials of a sweep will log its metric, before the first trial runs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from difflib import get_close_matches
from functools import partial
from typing import Any

import optuna

from fl_lightning.analysis.study.sweep_file import Sweep
from fl_lightning.cli.jobs import in_job_processes, open_experiment
from fl_lightning.core.errors import ConfigError

TOTALS = ("comm/total_up_bytes", "comm/total_down_bytes")
"""Entries of every `final/summary.json`."""


def check_metric(sweep: Sweep) -> None:
    """Raise an error if a sweep's trials will not log its metric. Builds one trial per algorithm, but trains nothing.

    A trial that cannot be built passes. Its own run reports the reason.

    Raises:
        ConfigError: A trial will not have the metric; the message lists those that it will have.
    """
    trials = list(_one_per_algorithm(sweep))
    find_others = partial(other_metrics, sweep.metric, bool(sweep.pruner))
    with suppress(BrokenProcessPool):
        found = list(in_job_processes(find_others, [sweep.command(params) for params in trials]))
        for params, names in zip(trials, found, strict=True):
            if names:
                algorithm = f" with algorithm {params['algorithm']}" if "algorithm" in params else ""
                missing = f"no {'round' if sweep.pruner else 'run'} has {sweep.metric}{algorithm}"
                reason = ", and early_terminate needs the metric of each round" if sweep.pruner else ""
                raise ConfigError(f"metric: {missing}{reason}. Use one of {', '.join(names)}.")


def _one_per_algorithm(sweep: Sweep) -> Iterator[dict[str, Any]]:
    """Yield the hyperparameters of one trial for each algorithm in the sweep."""
    distributions = {key: parameter.distribution for key, parameter in sweep.parameters.items()}
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    params = sweep.grid()[0] if sweep.method == "grid" else study.ask(distributions).params
    algorithms = sweep.parameters["algorithm"].values if "algorithm" in sweep.parameters else None
    yield from ({**params, "algorithm": name} for name in algorithms) if algorithms else [params]


def other_metrics(metric: str, by_round: bool, words: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Suggest metrics, best match first, if a sweep's trial will not log `metric`. Otherwise return an empty list.

    Runs in a job process, because it imports torch and loads data.

    Args:
        metric: The metric: a column of `metrics.csv` or an entry of `final/summary.json`.
        by_round: Only accept columns of `metrics.csv`.
        words: The trial's command line, after `fit`.
        environment: The environment of the sweep's process.
    """
    from fl_lightning.callbacks.monitor import is_among, may_add_metrics, round_metrics

    try:
        with open_experiment(words, environment) as (run, _):
            run.check()
            names = list(dict.fromkeys(round_metrics(run)))
            may_have = may_add_metrics(run)
    except Exception:  # the trial's own run reports it
        return []
    column = metric if by_round else re.sub(r"_(best|best_round|last|last10)$", "", metric)
    if not by_round:
        names += ["rounds", *(f"R_{target:g}" for target in run.evaluation.target_accuracies), *TOTALS]
    if may_have or any(is_among(name, names) for name in (metric, column)):
        return []
    client_mean = f"client/{column.partition('/')[2]}_mean"
    near = client_mean if client_mean in names else get_close_matches(column, names, 1, cutoff=0)[0]
    return [near, *(name for name in names if name != near and not name.startswith("client_"))]
