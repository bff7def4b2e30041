"""Base class of callbacks that watch a metric, and functions that list the metrics of a run."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Literal

from fl_lightning.algorithms.protocols import Calibrates
from fl_lightning.callbacks.base import RoundCallback, is_own
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.spelling import suggest
from fl_lightning.core.task import Score
from fl_lightning.engines import Result
from fl_lightning.evaluation.evaluation import (
    architecture_means,
    client_summary,
    logged_metrics,
    own_metrics,
    personal_means,
    train_metrics,
)
from fl_lightning.evaluation.round_metrics import RoundMetrics, client_key
from fl_lightning.evaluation.summary import COLUMN, is_lower_better

if TYPE_CHECKING:
    from fl_lightning.callbacks.base import FederatedRun

ACCURACIES = ("global/acc", "client/acc_mean")
"""Default metrics; the first one that exists is watched."""
LOSSES = ("global/loss", "client/loss_mean")
"""Default metrics of runs without an accuracy."""

_NUMBER = re.compile(r"(?<=[/_-])(0|[1-9][0-9]{0,17})(?=[/_-]|$)")


class Monitor(RoundCallback):
    """Base class of callbacks that watch one metric, in the rounds that are evaluated.

    Args:
        monitor: The metric. By default `global/acc` or, for methods without a global model, `client/acc_mean`; without
            an accuracy, the lowest `global/loss` or `client/loss_mean`.
        mode: Whether higher (`max`) or lower (`min`) is better; `auto` is the direction of the metric.

    Raises:
        ConfigError: `mode` is unknown.

    Attributes:
        metric: The watched metric, also if it is a default; None if the run has no default metric. `check` sets it, and
            replaces the mode `auto`.
    """

    def __init__(self, monitor: str | None, mode: Literal["auto", "max", "min"]) -> None:
        if mode not in ("auto", "max", "min"):
            raise ConfigError(f"{self._key('mode')}: {mode!r} is not auto, max or min")
        self.monitor, self.metric, self.mode, self._given_mode = monitor, monitor, mode, mode
        self._known = False  # whether some rounds are known to have the metric
        self._warned = False

    def check(self, run: FederatedRun) -> None:
        """Choose the metric to watch, check that rounds will log it, and warn if `mode` is wrong for this metric."""
        names = round_metrics(run)
        self.metric = self.monitor or next((name for name in (*ACCURACIES, *LOSSES) if name in names), None)
        if self.metric is None:
            return
        self._known = is_among(self.metric, names) and not is_unknown_client(self.metric, run.clients)
        if not self._known and not may_add_metrics(run):
            fix = suggest_metric(self.metric, names, run.clients)
            raise ConfigError(f"{self._key('monitor')}: metric {self.metric!r} not found. {fix}")
        if self._given_mode == "auto":
            self.mode = "min" if is_lower_better(self.metric) else "max"
        better = metric_mode(self.metric, ["acc", *run.worker.scorer.score_names])
        if better not in (None, self.mode):
            message = f"{self._key('mode')}: {self.mode} takes the worst {self.metric} as the best. Set mode: {better}."
            warnings.warn(message, stacklevel=2)

    def watched(self, metrics: RoundMetrics) -> float | None:
        """Return the watched metric of a round, or None if the round lacks it. NaN becomes the worst possible value.

        Warns at the first evaluated round without the metric, if others will have it.

        Raises:
            ConfigError: An evaluated round lacks the metric, and it is not known that other rounds will have it.
        """
        if self.metric is None:
            return None
        value = metrics.flat().get(self.metric)
        if value is None:
            if any(name in metrics for name in (*ACCURACIES, *LOSSES)):
                self._report_missing(self.metric, metrics)
            return None
        if math.isnan(value):
            return -math.inf if self.mode == "max" else math.inf
        return value

    def _report_missing(self, name: str, metrics: RoundMetrics) -> None:
        if not self._known:
            names = ", ".join(one for one in metrics if one != "round")
            fix = f"Available: {names}. A callback that adds a metric in some rounds only must name it in `metrics`."
            raise ConfigError(f"{self._key('monitor')}: metric {name!r} not found. {fix}")
        if not self._warned:
            message = f"{self._key('monitor')}: round {metrics['round']} has no {name!r}."
            warnings.warn(f"{message} Only rounds that have it count.", stacklevel=2)
        self._warned = True

    def _key(self, option: str) -> str:
        return f"callbacks: {type(self).__name__}.{option}"


def metric_mode(name: str, known: Sequence[str]) -> Literal["max", "min"] | None:
    """Return `max` if higher values of a metric are better, `min` if lower values are better; None if unknown.

    Args:
        name: The metric.
        known: Names of the metrics of a model. Higher is better, unless the metric says otherwise.
    """
    if is_lower_better(name):
        return "min"
    column = COLUMN.fullmatch(name)
    metric = column[1] if column else name
    return "max" if metric in known or metric.endswith("_acc") else None


def round_metrics(run: FederatedRun) -> list[str]:
    """Return the names of all metrics that a round may have; `<id>` in a name stands for any whole number.

    Args:
        run: The run, with data and worker built.
    """
    score = Score(1, dict.fromkeys(run.worker.scorer.score_names, 0.0))
    losses = dict.fromkeys(["loss", *(name for group in run.worker.groups for name in group.template.loss_names)], 0.0)
    names = [*_global_metrics(run, score), *_client_metrics(run, score), *train_metrics([Result(0, 0, losses=losses)])]
    names += personal_means([score] * run.evaluation.personal_on_global)
    names += [name for aggregator in run.algorithm.aggregator.chain() for name in aggregator.reports]
    names += run.evaluator.server.attack_metrics([])
    if run.data.wanted_predictions is not None and (run.data.has_global_test or not run.algorithm.one_model):
        names += ["attack/success_rate"]
    names += ["client/failed"] * (run.on_client_failure == "drop")
    names += ["time/fit_s", "time/round_s", "time/processor_s", "client_<id>/train_loss"]
    if schedule := run.evaluator.server.schedule:
        names += ["time/simulated_s", *schedule.policy.metrics]
    return [*names, *_metrics_by_client(run, score), *(name for each in run.callbacks for name in each.metrics(run))]


def _global_metrics(run: FederatedRun, score: Score) -> list[str]:
    """Return the names of the global model's metrics."""
    if not (run.algorithm.one_model and run.data.has_global_test):
        return []
    few_shot = ["acc", "loss", "acc_interval"] if run.data.data.evaluate else []
    shared = few_shot or list(score.values)
    uncalibrated = [name for name in shared if isinstance(run.algorithm, Calibrates) and name != "loss"]
    return [*(f"global/{name}" for name in shared), *(f"global/uncalibrated_{name}" for name in uncalibrated)]


def _client_metrics(run: FederatedRun, score: Score) -> list[str]:
    """Return the names of summaries over the clients' models, and over those of new clients."""
    names: list[str] = []
    if scored := _scored_clients(run):
        names += [*client_summary([score]), *["client/untrained"] * run.evaluation.of_received]
    names += architecture_means({name: [score] for client in scored if (name := run.worker.architecture_of(client))})
    if run.evaluation.client_model == "both" and any(len(shard.test) for shard in run.data.shards):
        names += client_summary([score], "trained_client")
    if any(len(run.data.shard(client).test) for client in run.evaluator.new_clients):
        names += client_summary([score], "new_client")
        names += ["new_client/untrained"] * (not run.evaluator.trains_new_clients)
    return names


def _metrics_by_client(run: FederatedRun, score: Score) -> list[str]:
    """Return the names of the metrics of single clients, with `<id>` if all clients have them."""
    scored = _scored_clients(run)
    ids = ["<id>"] if len(scored) == len(run.data.shards) else scored
    return [client_key(client, name) for client in ids for name in own_metrics({0: score})[0]]


def _scored_clients(run: FederatedRun) -> list[int]:
    """Return the clients whose models are evaluated on their own test samples. Attackers are left out."""
    shards, attackers = run.data.shards, run.evaluator.server.adversary.attackers
    scored = run.evaluator.scored if run.evaluation.of_received else range(len(shards))
    return [client for client in scored if len(shards[client].test) and client not in attackers]


def logged_by_clients(run: FederatedRun, results: Sequence[Result]) -> RoundMetrics:
    """Return the metrics that clients' Lightning callbacks logged during the fits of a round.

    Raises:
        ConfigError: A logged metric has the name of a metric of the run. The message has the first such name.
    """
    logged = logged_metrics(results)
    names = round_metrics(run) if logged else []
    if taken := [key for key in logged.flat() if is_among(key, names)]:
        name = min(taken).partition("/")[2]
        raise ConfigError(f"client_callbacks: a callback logs {name!r}, which is a metric of the run. Rename it.")
    return logged


def is_among(name: str, names: Sequence[str]) -> bool:
    """Whether a metric is one of the given names, in which `<id>` stands for any whole number."""
    return "<id>" not in name and (name in names or _NUMBER.sub("<id>", name) in names)


def is_unknown_client(name: str, clients: int) -> bool:
    """Whether a metric such as `client_7/acc` belongs to a client that does not exist."""
    client = re.match(r"client_([0-9]{1,18})/", name)
    return client is not None and int(client[1]) >= clients


def suggest_metric(name: str, names: Sequence[str], clients: int) -> str:
    """Return a hint for an unknown metric: the most similar name, or all names."""
    if is_unknown_client(name, clients):
        return f"Clients are 0 to {clients - 1}."
    forms = list(dict.fromkeys(_NUMBER.sub("<id>", one) for one in names))  # there may be a name per client
    if _NUMBER.sub("<id>", name) in forms:
        return "Only other clients have it: a client that is not evaluated, or has no test data, has no accuracy."
    near = get_close_matches(re.sub(r"[0-9]+", "<id>", name), forms, 1)
    return suggest(near[0] if near and near[0] != name else None, forms)


def may_add_metrics(run: FederatedRun) -> bool:
    """Whether the run may log metrics whose names are not known before round 1.

    Such metrics come from client callbacks, or from a user's own model, loss terms or round callbacks.
    """
    terms = run.worker.template.terms()
    return (
        is_own(type(run.worker.template))
        or bool(run.worker.client_callbacks)
        or any(group.template.trains_itself for group in run.worker.groups)
        or any(is_own(type(term)) and not term.active for term in terms)  # it may become active in a later round
        or any(
            _defines(callback, "on_round_metrics", "numbers") and not _defines(callback, "metrics")
            for callback in run.callbacks
        )
    )


def _defines(callback: RoundCallback, *methods: str) -> bool:
    """Return whether at least one of a callback's `methods` is defined in a user's own class."""
    return any(is_own(kind) and vars(kind).keys() & set(methods) for kind in type(callback).__mro__)
