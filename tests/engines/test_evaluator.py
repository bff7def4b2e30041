"""Clients who would be scored with one model are scored in common batches: the same as one by one, and nobody else."""

import inspect
import math
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from experiments import NormMLP, experiment, untested
from methods import FEW_QUICK, METHODS
from torch import Tensor, nn
from torch.nn import functional as F

from fl_lightning.algorithms import Aggregator, Algorithm, CwFedAvg, FedAvg, FedPer, FedSiamDA, WeightedMean
from fl_lightning.core.objectives import Classification, MultiLabel, Regression
from fl_lightning.core.task import Tasks
from fl_lightning.engines import Engine, SequentialEngine, Task
from fl_lightning.engines.evaluator import evaluate_clients, sends_one_model
from fl_lightning.evaluation.evaluation import Evaluation, evaluate, evaluate_each
from fl_lightning.evaluation.extra_metrics import measures_of
from fl_lightning.models import MLP, Backbone, Head

ALGORITHM, AGGREGATOR = Algorithm.capabilities["starts_alike"], Aggregator.capabilities["sends_one_model"]
METRICS = ["AUROC", "F1Score", "MulticlassCalibrationError"]

# The others send each client its own, do something to what they are sent, or keep the model themselves.
TOGETHER = {
    "AFL",
    "CCVR",
    "FedAdagrad",
    "FedAdam",
    "FedAT",
    "FedAsync",
    "FedAvg",
    "FedAvgM",
    "FedBuff",
    "FedDGGA",
    "FedDistill",
    "FedDistillPlus",
    "FedDyn",
    "FedDyn with clipping",
    "FedGen",
    "FedLC",
    "FedNTD",
    "FedPer",
    "FedProx",
    "FedRCL",
    "FedSKC",
    "FedSiamDA",
    "FedUV",
    "FedYogi",
    "LGFedAvg",
    "FedSKC with ProtoNet",
    "Local",
    "MOON",
    "ProtoNet",
    "QFFL",
    "dropped buffers",
    "kept optimizer",
    "local buffers",
    "received",
    "schedules",
    "uniform",
}


class Watched(SequentialEngine):
    """One after another; notes whose tasks it is given."""

    def __init__(self) -> None:
        super().__init__(local_loop=False)
        self.given: list[int] = []

    def run(self, worker: Any, tasks: Any, done: Any) -> None:
        def noted() -> Any:
            for task in tasks:
                self.given.append(task.client)
                yield task

        super().run(worker, Tasks(tasks.clients, noted(), tasks.fit), done)


def after(tmp_path: Any, algorithm: Any, rounds: int = 2, **options: Any) -> Any:
    """A short run in which half of the clients have taken part."""
    short = {"trainer": {"accelerator": "cpu", "max_epochs": 1}, "clients_per_round": 3, "rounds": rounds}
    run = experiment(tmp_path, algorithm, **short | options)
    run.fit()
    return run


def tasks_of(run: Any, clients: Any = None) -> list[Task]:
    """What scores the models that clients would start the next round from."""
    clients = range(run.clients) if clients is None else clients
    downloads = zip(clients, run.server.downloads(run.round + 1, clients), strict=True)
    options = {"fit": False, "upload": False, "evaluate": True}
    return [Task(run.round, k, download, run.memory.get(k, {}), **options) for k, download in downloads]


def evaluated(engine: Engine, run: Any, clients: Any = None) -> list[Any]:
    clients = range(run.clients) if clients is None else clients
    return list(evaluate_clients(engine, run.worker, clients, run.memory, lambda some: iter(tasks_of(run, some))))


def one_by_one(run: Any) -> dict[int, Any]:
    return {task.client: run.worker.run(task) for task in tasks_of(run)}


def assert_same(results: Any, expected: dict[int, Any]) -> None:
    """The same results, their numbers to rounding; what is counted, to the bit."""
    results = {result.client: result for result in results}
    assert results.keys() == expected.keys()
    for client, result in results.items():
        other = expected[client]
        assert (result.failure, result.upload, result.losses) == (None, None, {})
        assert result.download_bytes == other.download_bytes
        assert result.local.n == other.local.n
        assert result.local.values.keys() == other.local.values.keys()
        assert result.local.values == pytest.approx(other.local.values, rel=1e-5, abs=1e-7)
        for name in ("acc", "f1_score"):
            assert result.local.values.get(name) == other.local.values.get(name)


# --- Every method ---


@pytest.mark.parametrize("name", METHODS)
def test_which_methods_send_one_model_is_known(name: str) -> None:
    method, _ = METHODS[name]
    assert sends_one_model(SimpleNamespace(algorithm=method())) == (name in TOGETHER)


@pytest.mark.thorough
@pytest.mark.parametrize("name", FEW_QUICK)
def test_together_is_one_by_one(tmp_path: Any, name: str) -> None:
    method, options = METHODS[name]
    scoring = {} if "evaluation" in options else {"evaluation": Evaluation(metrics=METRICS)}
    run = after(tmp_path, method(), **scoring | options)
    engine = Watched()
    results = evaluated(engine, run)
    keeping = {k for k in range(run.clients) if run.memory.get(k, {}).get("personal")}
    assert len(keeping) < run.clients or not run.algorithm.server
    assert sorted(engine.given) == (sorted(keeping) if name in TOGETHER else list(range(run.clients)))
    assert [result.client for result in results] == list(range(run.clients))
    assert_same(results, one_by_one(run))


@pytest.mark.filterwarnings("ignore:.* contain initial weights")
@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("algorithm", [FedAvg, partial(FedPer, personal=["head"])])
def test_a_run_has_the_figures_of_one_by_one(tmp_path: Any, algorithm: Any) -> None:
    run = after(tmp_path, algorithm(), evaluation=Evaluation("received", metrics=METRICS))
    means: dict[str, list[float]] = {}
    for result in one_by_one(run).values():
        for name, value in result.local.values.items():
            means.setdefault(name, []).append(value)
    row = run.csv.rows[-1]
    assert {f"client/{name}_mean" for name in means} >= {"client/acc_mean", "client/auroc_mean"}
    for name, values in means.items():
        assert row[f"client/{name}_mean"] == pytest.approx(math.fsum(values) / len(values), rel=1e-5)
    assert run.test().items() >= {k: v for k, v in row.items() if k.startswith("client/acc")}.items()


# --- In common batches ---


class Counting(MLP):
    """Notes how large the batches are that it sees in eval mode."""

    seen: ClassVar[list[int]] = []

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            self.seen.append(len(x))
        return super().forward(x)


def test_batches_are_full_and_the_module_is_built_once(tmp_path: Any, monkeypatch: Any) -> None:
    run = after(tmp_path, FedAvg(), model=partial(Counting, hidden=(4,)))
    run.worker.client_data.eval_batch_size = 50
    samples = sum(len(shard.test) for shard in run.data.shards)
    assert samples > 300
    built = []
    build = run.worker.modules.build
    monkeypatch.setattr(run.worker.modules, "build", lambda *blank: built.append(1) or build(*blank))
    Counting.seen.clear()
    results = evaluated(engine := Watched(), run)
    assert Counting.seen[:5] == [8, 2, 2, 2, 2]
    assert Counting.seen[5:] == [50] * (samples // 50) + [samples % 50]
    assert (len(built), len(results), engine.given) == (1, run.clients, [])
    assert max(map(len, (shard.test for shard in run.data.shards))) > 50  # some are in three batches


def test_a_client_without_test_samples_has_no_score(tmp_path: Any) -> None:
    run = after(tmp_path, FedAvg())
    run.data.shards = untested(run.data, (0, 3, 5))
    results = evaluated(Watched(), run)
    assert [results[k].local is None for k in range(6)] == [True, False, False, True, False, True]
    expected = one_by_one(run)
    assert expected[0].local is None
    assert_same([results[k] for k in (1, 2, 4)], {k: expected[k] for k in (1, 2, 4)})
    run.data.shards = untested(run.data, range(6))
    assert [result.local for result in evaluated(Watched(), run)] == [None] * 6


@pytest.mark.parametrize("sizes", [(23,), (5, 0, 18), (0, 1, 1, 21, 0), (8, 8, 7)])
@pytest.mark.parametrize("batch", [1, 4, 8, 23])
@pytest.mark.parametrize(
    ("objective", "metrics"),
    [(Classification(), METRICS), (MultiLabel(), ["AUROC"]), (Regression(), ["R2Score", "PearsonCorrCoef"])],
    ids=lambda value: type(value).__name__,
)
def test_each_of_several_sets_has_its_own_score(sizes: Any, batch: int, objective: Any, metrics: Any) -> None:
    outputs = torch.randn(23, 3)
    if isinstance(objective, Classification):
        y = torch.randint(3, (23,))
    else:
        y = (torch.rand(23, 3) > 0.5).float() if isinstance(objective, MultiLabel) else torch.randn(23, 3)
    measures = measures_of(metrics, objective, 3) if min(size for size in sizes if size) > 1 else []
    batches = zip(outputs.split(batch), y.split(batch), strict=True)
    scores = evaluate_each(nn.Identity(), batches, sizes, objective, measures)
    for x, own, score in zip(outputs.split(sizes), y.split(sizes), scores, strict=True):
        if not len(x):
            assert score is None
            continue
        expected = evaluate(nn.Identity(), [(x, own)], objective, measures)
        assert score is not None
        assert (score.n, list(score.values)) == (expected.n, list(expected.values))
        assert score.values == pytest.approx(expected.values, rel=1e-5, abs=1e-6)


# --- One by one, where there is a reason ---


def overriding(base: type, name: str) -> type:
    """A class with a method of its own that does what it would."""
    inherited = getattr(base, name)
    return type(f"Own{name}", (base,), {name: lambda self, *args, **options: inherited(self, *args, **options)})


@pytest.mark.thorough
@pytest.mark.parametrize("name", [*ALGORITHM, *AGGREGATOR])
def test_a_method_that_may_send_different_models_is_scored_one_by_one(tmp_path: Any, name: str) -> None:
    aggregates = name in AGGREGATOR
    method = FedAvg(aggregator=overriding(WeightedMean, name)()) if aggregates else overriding(FedAvg, name)()
    run = after(tmp_path, method, rounds=1)
    assert evaluated(engine := Watched(), run) == list(one_by_one(run).values())
    assert engine.given == list(range(6))


def test_whatever_is_called_from_a_download_to_a_score_is_looked_at(tmp_path: Any) -> None:
    called = set()

    def noting(base: type, kind: type) -> Any:
        def noted(self: Any, name: str) -> Any:
            called.add((base, name))
            return object.__getattribute__(self, name)

        return type("Noting", (kind,), {"__getattribute__": noted})

    aggregator = noting(Aggregator, WeightedMean)()
    run = after(tmp_path, noting(Algorithm, FedAvg)(aggregator=aggregator), rounds=1)
    called.clear()
    one_by_one(run)
    methods = {name for base, name in called if inspect.isfunction(vars(base).get(name))}
    methods -= {"training_samples", "_own"}  # scores do not depend on them
    assert methods | {"client_module", "prepare", "prepare_network"} == {*ALGORITHM, *AGGREGATOR}


class Batchwise(Backbone):
    """BatchNorm that keeps no statistics."""

    def __init__(self, in_shape: tuple[int, ...], num_classes: int) -> None:
        norm = nn.BatchNorm1d(8, track_running_stats=False)
        super().__init__(nn.Sequential(nn.Flatten(), nn.Linear(64, 8), norm), nn.Linear(8, num_classes), 8)


class Restless(NormMLP):
    """Dropout that never ends."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.dropout(self.encoder(x), 0.01, training=True))


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [Batchwise, Restless])
def test_a_network_whose_outputs_are_not_a_samples_own_is_scored_one_by_one(tmp_path: Any, kind: Any) -> None:
    run = after(tmp_path, FedAvg(), rounds=1, model=kind)
    results = evaluated(engine := Watched(), run)
    assert str([r.local for r in results]) == str([r.local for r in one_by_one(run).values()])
    assert engine.given == list(range(6))


@pytest.mark.parametrize(
    ("method", "model"),
    [(FedAvg, NormMLP), (FedSiamDA, partial(MLP, hidden=(16,), head=Head(projection=16, prediction=16)))],
    ids=["BatchNorm and dropout", "states of loss terms"],
)
def test_layers_and_states_that_do_not_prevent_common_batches(tmp_path: Any, method: Any, model: Any) -> None:
    run = after(tmp_path, method(), model=model)
    assert_same(evaluated(engine := Watched(), run), one_by_one(run))
    assert not engine.given


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interruption_is_the_whole_runs_and_an_exit_a_clients(tmp_path: Any, monkeypatch: Any, error: Any) -> None:
    run = after(tmp_path, FedAvg(), rounds=1)
    scores, calls = run.worker.scorer.local_scores, iter([error])

    def once(*args: Any) -> Any:
        for kind in calls:
            raise kind
        return scores(*args)

    monkeypatch.setattr(run.worker.scorer, "local_scores", once)
    if error is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            evaluated(Watched(), run)
    else:
        assert_same(evaluated(Watched(), run), one_by_one(run))


@pytest.mark.parametrize("algorithm", [CwFedAvg, partial(FedPer, personal=["head"])])
def test_tasks_are_made_one_at_a_time_and_only_those_that_are_needed(tmp_path: Any, algorithm: Any) -> None:
    """A task is on its way before the next is made. Of clients with the same model, only the first needs one."""
    run = after(tmp_path, algorithm(), rounds=1)
    events = []

    class Noting(Engine):
        def run(self, worker: Any, tasks: Any, done: Any) -> None:
            for task in tasks:
                events.append(("given", task.client))
                done(worker.run(task))

    def making(clients: Any) -> Any:
        for client in clients:
            events.append(("made", client))
            yield from tasks_of(run, [client])

    results = evaluate_clients(Noting(), run.worker, range(6), run.memory, making)
    assert [result.client for result in results] == list(range(6))
    alone = [client for client in range(6) if algorithm is CwFedAvg or run.memory.get(client)]
    together = [client for client in range(6) if client not in alone]
    expected = [("made", client) for client in together[:1]]
    assert events == expected + [(what, client) for client in alone for what in ("made", "given")]
    assert len(together) == 3 * (algorithm is not CwFedAvg)
