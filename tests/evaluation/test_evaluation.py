import math
import random
import re
import statistics
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from experiments import NormMLP, client_series, experiment, same_bytes
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from fl_lightning.algorithms import UAPDFL, CwFedAvg, FedAvg, FedSiamDA, FedSKC, PeerAlgorithm
from fl_lightning.client.loss_term import FitContext
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.message import Message
from fl_lightning.core.seeding import Stream, derive
from fl_lightning.core.task import Score
from fl_lightning.engines import Task
from fl_lightning.evaluation.evaluation import (
    Evaluation,
    client_summary,
    evaluate,
    logged_metrics,
    personal_means,
    train_metrics,
)
from fl_lightning.evaluation.summary import best_and_last, lowest_losses, rounds_to, summarize
from fl_lightning.models import MLP, Head

LOGITS = torch.randn(23, 4, generator=torch.Generator().manual_seed(0)) * 3
TARGETS = torch.randint(0, 4, (23,), generator=torch.Generator().manual_seed(1))


def batches(*sizes: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(LOGITS[: sum(sizes)].split(sizes), TARGETS[: sum(sizes)].split(sizes), strict=True))


def cross_entropy(logits: list[float], target: int) -> float:
    return math.log(sum(math.exp(logit) for logit in logits)) - logits[target]


# --- evaluate ---


@pytest.mark.parametrize("sizes", [(23,), (8, 8, 7), (1, 20, 2)])
def test_a_score_equals_that_of_a_plain_loop_for_any_batches(sizes: tuple[int, ...]) -> None:
    score = evaluate(nn.Identity(), batches(*sizes))
    rows = list(zip(LOGITS.tolist(), TARGETS.tolist(), strict=True))
    assert score.n == 23
    assert score.values["acc"] == sum(logits.index(max(logits)) == target for logits, target in rows) / 23
    assert score.values["loss"] == pytest.approx(statistics.fmean(cross_entropy(*row) for row in rows), rel=1e-6)


def test_the_loss_of_half_precision_logits_is_summed_in_single_precision() -> None:
    logits = LOGITS.bfloat16()
    score = evaluate(nn.Identity(), [(logits, TARGETS)])
    expected = statistics.fmean(map(cross_entropy, logits.double().tolist(), TARGETS.tolist()))
    assert score.values["loss"] == pytest.approx(expected, rel=1e-6)


def test_sums_over_many_batches_keep_their_digits() -> None:
    small, large = (torch.tensor([[gap, 0.0]]) for gap in (1.0, -(2.0**20)))
    target = torch.tensor([0])
    score = evaluate(nn.Identity(), [(large, target), *[(small, target)] * 999])
    each = F.cross_entropy(small, target).item()
    assert score.values["loss"] == pytest.approx(math.fsum([2**20, *[each] * 999]) / 1000, rel=1e-12)
    assert score.values["acc"] == 0.999


@pytest.mark.parametrize("training", [True, False])
def test_the_modules_mode_is_kept(training: bool) -> None:
    module = nn.Sequential(nn.BatchNorm1d(4)).train(training)
    with torch.no_grad():
        score = evaluate(module, batches(23))
        expected = evaluate(nn.Identity(), [(module(LOGITS), TARGETS)])
    assert module.training is training
    assert score == expected


def test_a_module_with_parameters_can_be_evaluated_with_gradients_enabled() -> None:
    module = nn.Linear(4, 4)
    with torch.no_grad():
        expected = evaluate(module, batches(23))
    assert evaluate(module, batches(23)) == expected


def test_no_batch_is_an_error() -> None:
    with pytest.raises(ValueError, match="nothing to evaluate on"):
        evaluate(nn.Identity(), [])


# --- client_summary ---

values = st.fixed_dictionaries({"acc": st.floats(0, 1), "loss": st.floats(0, 10)})
scores = st.builds(Score, n=st.integers(1, 500), values=values)


@given(st.lists(scores, min_size=1, max_size=25))
def test_the_summary_over_clients_equals_that_of_a_plain_loop(clients: list[Score]) -> None:
    accs, sizes = [score.values["acc"] for score in clients], [score.n for score in clients]
    worst = sorted(accs)[: max(1, -(-len(accs) // 10))]
    expected = {
        "client/acc_mean": statistics.fmean(accs),
        "client/acc_weighted": sum(n * acc for n, acc in zip(sizes, accs, strict=True)) / sum(sizes),
        "client/acc_std": statistics.pstdev(accs),
        "client/acc_worst_decile": statistics.fmean(worst),
        "client/loss_mean": statistics.fmean(score.values["loss"] for score in clients),
    }
    assert client_summary(clients) == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize(("clients", "worst"), [(1, 1), (10, 1), (11, 2), (20, 2), (21, 3)])
def test_the_worst_decile_is_rounded_up_to_whole_clients(clients: int, worst: int) -> None:
    ranked = [Score(1, {"acc": k / 32, "loss": 0.0}) for k in reversed(range(clients))]
    assert client_summary(ranked)["client/acc_worst_decile"] == statistics.fmean(k / 32 for k in range(worst))


def test_the_summary_over_no_clients_is_empty() -> None:
    assert client_summary([]) == {}


def test_the_worst_clients_have_the_largest_values_of_an_error() -> None:
    clients = [Score(1, {"mae": float(k), "loss": 0.0}) for k in range(11)]
    assert client_summary(clients)["client/mae_worst_decile"] == 9.5


def test_personal_models_are_averaged_over_those_that_have_a_metric() -> None:
    scores = [Score(5, {"acc": 0.5, "loss": 1.0}), Score(9, {"acc": 0.9, "f1_score": 0.4, "loss": 1.0})]
    assert personal_means(scores) == {
        "personal_on_global/acc_mean": pytest.approx(0.7),
        "personal_on_global/f1_score_mean": 0.4,
    }


def test_a_loss_term_that_a_client_does_not_have_counts_as_zero() -> None:
    clients = [
        SimpleNamespace(losses={"loss": 3.0, "ce": 2.0, "prox": 1.0}),
        SimpleNamespace(losses={"loss": 1.0, "ce": 1.0}),
    ]
    assert train_metrics(clients) == {"client/train_loss": 2.0, "client/train_ce": 1.5, "client/train_prox": 0.5}  # type: ignore[arg-type]


def test_logged_values_are_averaged_over_the_clients_that_logged_them() -> None:
    clients = [SimpleNamespace(client=k, logged=own) for k, own in ((4, {"a": 1.0, "b": 5.0}), (7, {"a": 2.0}))]
    metrics = logged_metrics(clients)  # type: ignore[arg-type]
    assert dict(metrics) == {"client/a": 1.5, "client/b": 5.0}
    assert metrics.clients == {4: {"a": 1.0, "b": 5.0}, 7: {"a": 2.0}}


@pytest.mark.parametrize(("rounds", "due"), [(7, [3, 6, 7]), (6, [3, 6])])
def test_every_nth_and_the_last_round_are_evaluated(rounds: int, due: list[int]) -> None:
    evaluation = Evaluation(every=3)
    assert [round for round in range(1, rounds + 1) if evaluation.is_due(round, rounds)] == due


# --- Over rounds ---

METRICS: list[dict[str, Any]] = [
    {"global/acc": 0.5, "comm/up_bytes": 100},
    {"comm/up_bytes": 100},
    {"global/acc": 0.75, "client/acc_mean": 0.25, "client/acc_weighted": 0.375, "comm/up_bytes": 50},
    {"global/acc": 0.75, "client/acc_mean": 0.125, "client/acc_weighted": 0.5, "comm/up_bytes": 50},
    {"global/acc": 0.625, "comm/up_bytes": 50},
]
ROWS = [{"round": round, "comm/down_bytes": 7, **metrics} for round, metrics in enumerate(METRICS, 1)]


def test_the_best_round_is_the_first_of_equals() -> None:
    found = best_and_last(ROWS, "global/acc")
    assert found == {"last": 0.625, "last10": 0.65625, "best": 0.75, "best_round": 3}


def test_last10_is_the_mean_of_the_last_ten_rounds() -> None:
    rows = [{"round": float(round), "global/acc": float(round**2)} for round in range(1, 13)]
    assert best_and_last(rows, "global/acc")["last10"] == sum(round**2 for round in range(3, 13)) / 10


def test_best_and_last_use_the_rounds_that_have_the_metric() -> None:
    found = best_and_last(ROWS, "client/acc_mean")
    assert found == {"last": 0.125, "last10": 0.1875, "best": 0.25, "best_round": 3}
    assert best_and_last(ROWS, "personal_on_global/acc_mean") == {}


@pytest.mark.parametrize(("target", "round"), [(0.1, 1), (0.5, 1), (0.51, 3), (0.75, 3), (0.76, None), (1.0, None)])
def test_r_acc_is_the_first_round_that_reaches_the_target(target: float, round: int | None) -> None:
    assert rounds_to(ROWS, target) == round


def test_r_acc_of_another_metric() -> None:
    assert rounds_to(ROWS, 0.2, "client/acc_mean") == 3
    assert rounds_to([], 0.2) is None


def test_the_lowest_losses_are_of_the_rounds_that_have_them() -> None:
    found = [{"global/loss": 2.0, "client/train_loss": 1.0}, {"client/train_loss": 3.0}, {"global/loss": 0.5, "x": 0.1}]
    rows = [{"round": n, **row} for n, row in enumerate(found, 1)]
    assert lowest_losses(rows) == {"global/loss_best": 0.5, "client/train_loss_best": 1.0}
    assert lowest_losses([{"round": 1, "client/loss_mean": 0.2}]) == {"client/loss_mean_best": 0.2}
    assert lowest_losses([]) == {}


def test_summary_of_a_run() -> None:
    assert summarize(ROWS, [0.5, 0.7, 0.95]) == {
        "rounds": 5,
        "global/acc_last": 0.625,
        "global/acc_last10": 0.65625,
        "global/acc_best": 0.75,
        "global/acc_best_round": 3,
        "client/acc_mean_last": 0.125,
        "client/acc_mean_last10": 0.1875,
        "client/acc_mean_best": 0.25,
        "client/acc_mean_best_round": 3,
        "client/acc_weighted_last": 0.5,
        "client/acc_weighted_last10": 0.4375,
        "client/acc_weighted_best": 0.5,
        "client/acc_weighted_best_round": 4,
        "R_0.5": 1,
        "R_0.7": 3,
        "R_0.95": None,
        "comm/total_up_bytes": 350,
        "comm/total_down_bytes": 35,
    }


def test_summary_of_a_run_without_rounds() -> None:
    assert summarize([], [0.5]) == {"rounds": 0, "R_0.5": None, "comm/total_up_bytes": 0, "comm/total_down_bytes": 0}


# --- Evaluation ---


@pytest.mark.parametrize("target", [0, 1.001, float("nan")])
def test_targets_outside_0_to_1_are_refused(target: float) -> None:
    expected = f"evaluation.target_accuracies: {target} is outside (0, 1]. Give a fraction, not a percentage."
    with pytest.raises(ConfigError, match=f"^{re.escape(expected)}$"):
        Evaluation(target_accuracies=[0.5, 1.0, target])


# --- What clients receive ---


class Buffered(NormMLP):
    """Network with a buffer that is not in its state dict and that only some clients change."""

    def __init__(self, in_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__(in_shape, num_classes)
        self.register_buffer("shift", torch.zeros(num_classes), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.shift


class PartialDownload(FedAvg):
    """Clients run the module that they receive, and change the tensors that they did not receive."""

    def download(self, state: Any, client: int, rng: Any) -> Any:
        message = super().download(state, client, rng)
        return Message({name: value for name, value in message.tensors.items() if name != "model/head.bias"})

    def receive(self, module: Any, download: Any, memory: Any) -> None:
        super().receive(module, download, memory)
        module(torch.randn(3, 1, 8, 8))  # moves BatchNorm's statistics, as the module is in training mode
        if memory:
            module.backbone.shift[0] = 5.0
            with torch.no_grad():
                module.backbone.head.bias[1] += 3

    def remember(self, module: Any, upload: Any) -> Any:
        return {"own": {"mark": torch.ones(1)}}


SIAMESE = partial(MLP, hidden=(16,), head=Head(projection=16, prediction=16))
RECEIVED = {
    "average": (FedAvg, NormMLP),
    "local": (partial(FedAvg, buffers="local"), NormMLP),
    "drop": (partial(FedAvg, buffers="drop"), NormMLP),
    "partial download": (partial(PartialDownload, buffers="drop"), Buffered),
    "knowledge": (FedSKC, NormMLP),
    "memory": (FedSiamDA, SIAMESE),
    "personal": (CwFedAvg, NormMLP),
    "personal, local": (partial(CwFedAvg, preset="reference"), NormMLP),
    "peers": (partial(PeerAlgorithm, n_com=2), NormMLP),
    "peers, local": (partial(UAPDFL, n_com=2, buffers="local"), NormMLP),
}


def score_in_new_module(run: Any, task: Task) -> tuple[Score, Score]:
    """Return a client's scores on its own test split and on the global test set, in a new module."""
    data, shard = run.data.data, run.data.shards[task.client]
    torch.manual_seed(derive(run.seed, Stream.TRAINING, task.round, task.client))
    module = run.worker.modules.build()
    module.context = FitContext(task.round, class_counts=torch.from_numpy(run.data.class_counts()[task.client]))
    run.algorithm.receive(module, task.download, task.memory)
    with torch.no_grad():
        own = evaluate(module.eval(), [(data.prepare(data.x_train[shard.test]), data.y_train[shard.test])])
        size = run.worker.client_data.eval_batch_size
        return own, evaluate(module, zip(data.prepare(data.x_test).split(size), data.y_test.split(size), strict=True))


@pytest.mark.filterwarnings("ignore:.* contain initial weights")
@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("method", "model"), RECEIVED.values(), ids=RECEIVED)
def test_a_received_model_is_scored_as_in_a_new_module(tmp_path: Any, method: Any, model: Any) -> None:
    """Scores are equal bit for bit, in any order of clients, also for clients that never took part."""
    run = experiment(
        tmp_path,
        method(),
        model=model,
        rounds=2,
        clients_per_round=3,
        trainer={"accelerator": "cpu", "max_epochs": 1},
        evaluation=Evaluation(client_model="received"),
    )
    run.fit()
    run.worker.client_data.eval_batch_size = 128
    assert set(run.server.participants(1)) | set(run.server.participants(2)) < set(range(6))
    tasks = {
        client: Task(2, client, download, run.memory.get(client, {}), 1.0, False, False, True, True)
        for client, download in enumerate(run.server.downloads(3, range(6)))
    }
    expected = {client: score_in_new_module(run, task) for client, task in tasks.items()}
    row, series = run.csv.rows[-1], client_series(tmp_path, 2)
    assert {f"client_{k}/acc": own.values["acc"] for k, (own, _) in expected.items()}.items() <= series.items()
    for name, value in client_summary([own for own, _ in expected.values()]).items():
        assert row[name] == (pytest.approx(value, rel=1e-6) if "loss" in name else value)
    rng = random.Random(0)
    for client in rng.sample(range(6), 6) + rng.sample(range(6), 6):
        result = run.worker.run(tasks[client])
        assert (result.local, result.on_global) == expected[client]


def test_client_module_returns_a_new_module(tmp_path: Any) -> None:
    run = experiment(tmp_path, CwFedAvg(), rounds=1)
    run.fit()
    module = run.client_module(0)
    before = {name: value.clone() for name, value in module.backbone.state_dict().items()}
    run.test()
    assert run.client_module(1) is not module
    assert same_bytes(dict(module.backbone.state_dict()), before)


def test_evaluated_clients_are_drawn_once_by_the_seed() -> None:
    evaluation = Evaluation(max_clients=5)
    chosen = evaluation.chosen(100, seed=1)
    assert list(chosen) == sorted(set(chosen))
    assert len(chosen) == 5
    assert set(chosen) <= set(range(100))
    assert chosen == evaluation.chosen(100, seed=1) != evaluation.chosen(100, seed=2)
    assert list(evaluation.chosen(5, seed=1)) == [*evaluation.chosen(3, seed=1), 3, 4] == list(range(5))
    assert len(Evaluation().chosen(10**5, seed=0)) == 10**5
    with pytest.raises(ConfigError, match=r"^evaluation.max_clients: 0 "):
        Evaluation(max_clients=0)
