"""Check that the trials of a sweep will log its metric, before the first trial runs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from difflib import get_close_matches
from typing import Any

import optuna

from fl_lightning.analysis.sweep_file import Sweep
from fl_lightning.cli.jobs import in_job_processes, open_experiment
from fl_lightning.core.errors import ConfigError

KNOWN_BEFOREHAND = re.compile(r"(?:global|client|personal_on_global)/.+")
"""Metrics whose names are known before a run begins."""


def check_metric(sweep: Sweep) -> None:
    """Raise an error if a sweep's trials will not log its metric. One trial per algorithm is built and none is run.

    A trial that cannot be built passes. Its own run reports the reason.

    Raises:
        ConfigError: A trial will not have the metric; the message names one that it will have.
    """
    column = re.sub(r"_(best|best_round|last|last10)$", "", sweep.metric)
    if not KNOWN_BEFOREHAND.fullmatch(column):
        return
    trials = list(_one_per_algorithm(sweep))
    with suppress(BrokenProcessPool):
        found = list(in_job_processes(metrics_of_trial, [sweep.command(params) for params in trials]))
        for params, names in zip(trials, found, strict=True):
            if names is not None and not {column, sweep.metric} & set(names):
                algorithm = f" with algorithm {params['algorithm']}" if "algorithm" in params else ""
                raise ConfigError(f"metric: no round has {sweep.metric}{algorithm}. Use {_alternative(column, names)}.")


def _one_per_algorithm(sweep: Sweep) -> Iterator[dict[str, Any]]:
    """Yield the hyperparameters of one trial for each algorithm in the sweep."""
    distributions = {key: parameter.distribution for key, parameter in sweep.parameters.items()}
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    params = sweep.grid()[0] if sweep.method == "grid" else study.ask(distributions).params
    algorithms = sweep.parameters["algorithm"].values if "algorithm" in sweep.parameters else None
    yield from ({**params, "algorithm": name} for name in algorithms) if algorithms else [params]


def _alternative(column: str, names: Sequence[str]) -> str:
    client_mean = f"client/{column.partition('/')[2]}_mean"
    return client_mean if client_mean in names else get_close_matches(column, names, 1, cutoff=0)[0]


def metrics_of_trial(words: Sequence[str], environment: Mapping[str, str]) -> list[str] | None:
    """Return the names of the metrics that a sweep's trial may log; None if some are not known before the trial runs.

    Runs in a job process, because it imports torch and loads data.

    Args:
        words: The trial's command line, after `fit`.
        environment: The environment of the sweep's process.
    """
    from fl_lightning.callbacks.monitor import may_add_metrics, round_metrics

    try:
        with open_experiment(words, environment) as (run, _):
            run.check()
            return None if may_add_metrics(run) else round_metrics(run)
    except Exception:  # the trial's own run reports it
        return None
