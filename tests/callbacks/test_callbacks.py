"""Communication, early stopping, checkpointing and progress."""

from types import SimpleNamespace

import pytest
from experiments import ONE_EPOCH, experiment, same_bytes, untimed

import fl_lightning
from fl_lightning.callbacks import Checkpointing, CommunicationMeter, EarlyStopping, RoundCallback, RoundProgress
from fl_lightning.core.errors import ConfigError
from fl_lightning.evaluation.evaluation import Evaluation
from fl_lightning.evaluation.round_metrics import RoundMetrics


def test_communication_meter_counts_all_messages_and_is_resumed(tmp_path):
    run = experiment(tmp_path, rounds=2, trainer=ONE_EPOCH)
    sizes = []

    def record_size(method):
        def call(*args):
            message = method(*args)
            sizes.append(message.nbytes)
            return message

        return call

    run.algorithm.download = record_size(run.algorithm.download)
    run.algorithm.upload = record_size(run.algorithm.upload)
    run.fit()
    assert run.csv.rows[-1]["comm/total_bytes"] == sum(sizes)
    assert sum(run.csv.rows[0][f"comm/{way}_bytes"] for way in ("up", "down")) == sum(sizes[:8])
    rest = experiment(tmp_path, rounds=3, trainer=ONE_EPOCH)
    rest.fit(resume=True)
    assert rest.csv.rows[-1]["comm/total_bytes"] == sum(sizes) * 3 / 2


EVALUATED = SimpleNamespace(evaluation=Evaluation(), round=1, rounds=9)
"""Stands for a run in an evaluated round."""


def test_early_stopping_leaves_out_rounds_that_are_not_evaluated(tmp_path):
    watcher = EarlyStopping("client/train_loss", patience=1, min_delta=99)
    run = experiment(tmp_path, rounds=9, evaluate_every=2, trainer=ONE_EPOCH, callbacks=[watcher])
    run.fit()
    assert [round for round, row in enumerate(run.csv.rows, 1) if "global/acc" in row] == [2, 4]
    assert (run.round, watcher.best) == (4, -run.csv.rows[1]["client/train_loss"])


@pytest.mark.parametrize(
    ("mode", "patience", "min_delta", "values", "stops_after"),
    [
        ("max", 2, 0.0, [0.1, 0.3, 0.3, 0.2, 0.9], 4),
        ("min", 1, 0.0, [3.0, 2.0, 2.5], 3),
        ("max", 2, 0.1, [0.1, 0.15, 0.19, 0.9], 3),
        ("max", 3, 0.0, [0.1, 0.2, 0.1, 0.3, 0.2, 0.2], None),
    ],
)
def test_early_stopping_counts_evaluations_without_improvement(mode, patience, min_delta, values, stops_after):
    callback = EarlyStopping("global/acc", mode, patience, min_delta)
    stopped = None
    for round, value in enumerate(values, start=1):
        callback.on_round_metrics(EVALUATED, RoundMetrics({"global/acc": value}))
        without = RoundMetrics({"client/train_loss": 0.0})  # a round without the metric does not count
        callback.on_round_metrics(EVALUATED, without)
        if callback.stops and stopped is None:
            stopped = round
    assert stopped == stops_after


def test_of_the_packages_callbacks_only_early_stopping_may_stop_a_run():
    """`compare` and `--multirun` rely on it: they read configs, and do not import the classes."""
    kinds = [getattr(fl_lightning.callbacks, name) for name in fl_lightning.callbacks.__all__]
    assert [kind for kind in kinds if kind.stops is not RoundCallback.stops] == [EarlyStopping]


def test_two_callbacks_of_one_class_have_separate_states(tmp_path):
    def callbacks():
        return [EarlyStopping("global/acc", patience=9), EarlyStopping("global/loss", "min", patience=9)]

    first = experiment(tmp_path, rounds=1, trainer=ONE_EPOCH, callbacks=callbacks())
    first.fit()
    again = experiment(tmp_path, rounds=1, callbacks=callbacks())
    again.load()
    states = [[c.state_dict() for c in run.callbacks if isinstance(c, EarlyStopping)] for run in (first, again)]
    assert states[0] == states[1]
    assert states[0][0]["best"] != states[0][1]["best"]


def test_callbacks_that_were_in_another_run_start_anew(tmp_path):
    kept = Checkpointing(monitor="global/acc")
    callbacks = [EarlyStopping(patience=1, min_delta=0.9), CommunicationMeter(), kept]
    first, second = (experiment(tmp_path / name, callbacks=callbacks, rounds=4) for name in "ab")
    first.fit()
    state = kept.state_dict()
    second.fit()
    assert 0 < first.round < 4
    assert untimed(first.csv.rows) == untimed(second.csv.rows)
    assert kept.state_dict() == state


def test_a_default_metric_is_chosen_anew_for_each_run(tmp_path):
    stopping = EarlyStopping()
    experiment(tmp_path / "a", callbacks=[stopping]).check()
    stopping.monitor = "global/loss"
    experiment(tmp_path / "b", callbacks=[stopping]).check()
    assert stopping.mode == "min"


@pytest.mark.thorough
def test_run_that_fails_in_a_callback_can_be_resumed(tmp_path):
    class Breaks(RoundCallback):
        def on_round_metrics(self, run, metrics):
            if run.round == 3:
                raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        experiment(tmp_path / "parts", rounds=4, checkpoint_every=9, callbacks=[Breaks()]).fit()
    rest = experiment(tmp_path / "parts", rounds=4)
    rest.fit(resume=True)
    whole = experiment(tmp_path / "whole", rounds=4)
    whole.fit()
    assert same_bytes(rest.state["model"], whole.state["model"])
    assert untimed(rest.csv.rows) == untimed(whole.csv.rows)


@pytest.mark.parametrize(
    ("mode", "every", "scores", "kept"),
    [
        ("max", 1, [5, 9, 9, 3, 2, 4], [6, 5, 2]),  # of equal rounds the first is the best
        ("min", 1, [5, 1, 1, 3, 2, 4], [6, 5, 2]),
        ("max", 2, [5, 6, 9, 3, 4], [5, 4, 2]),  # round 3 has no checkpoint
    ],
)
@pytest.mark.fast_cases(1)
def test_the_newest_checkpoints_and_the_best_are_kept(tmp_path, mode, every, scores, kept):
    keeper = Checkpointing(every, keep_last=2, monitor="score", mode=mode)
    assert scored_run(tmp_path, scores, keeper).checkpoints.rounds() == kept


class Scores(RoundCallback):
    def __init__(self, scores):
        self.scores = scores

    def on_round_metrics(self, run, metrics):
        metrics["score"] = self.scores[run.round - 1]


def scored_run(run_dir, scores, keeper):
    run = experiment(run_dir, rounds=len(scores), callbacks=[Scores(scores), keeper], trainer=ONE_EPOCH)
    run.fit()
    return run


@pytest.mark.parametrize(("seconds", "kept"), [(0.0, [6, 5, 4, 3, 2, 1]), (1e9, [6, 3, 1])])
def test_short_rounds_share_a_checkpoint_except_the_best_and_the_last(tmp_path, monkeypatch, seconds, kept):
    monkeypatch.setattr("fl_lightning.callbacks.checkpointing.SECONDS", seconds)
    run = scored_run(tmp_path / "run", [5, 4, 9, 9, 2, 4], Checkpointing(keep_last=9, monitor="score", mode="max"))
    assert run.checkpoints.rounds()[: len(kept)] == kept
    assert run.checkpoints.read(6).state["callbacks"]["Checkpointing"] == {"best": 9.0, "best_round": 3}


@pytest.mark.parametrize(("is_remote", "expected"), [(True, [1, 2, 3]), (False, [1])])
def test_each_round_has_a_checkpoint_if_the_data_are_on_the_clients_machines(monkeypatch, is_remote, expected):
    monkeypatch.setattr("fl_lightning.callbacks.checkpointing.SECONDS", 1e9)
    saved = []
    run = SimpleNamespace(is_over=False, data=SimpleNamespace(is_remote=is_remote))
    run.save_checkpoint = lambda keep: saved.append(run.round)
    keeper = Checkpointing(monitor="score")
    for run.round in (1, 2, 3):
        keeper.on_round_end(run, RoundMetrics())
    assert saved == expected


@pytest.mark.parametrize("key", ["every", "keep_last"])
def test_checkpoint_options_below_one_are_refused(key):
    with pytest.raises(ConfigError, match=f"callbacks: Checkpointing.{key}: 0 is below 1"):
        Checkpointing(**{key: 0})


def test_default_callbacks_are_added_unless_given(tmp_path):
    given = [Checkpointing(every=3), CommunicationMeter()]
    run = experiment(tmp_path, callbacks=given)
    for kind in (Checkpointing, CommunicationMeter, RoundProgress):
        assert sum(isinstance(callback, kind) for callback in run.callbacks) == 1
    assert run.callbacks[-1] is given[0]
