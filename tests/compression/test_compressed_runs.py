"""Runs with compressed messages: bytes, accuracy, engines, resume, refused methods."""

import json

import pytest
import torch
from compressors import name_of
from experiments import (
    ONE_EPOCH,
    NormMLP,
    digits,
    experiment,
    finished,
    in_two_parts,
    record_rounds,
    same_bytes,
    untimed,
)
from methods import METHODS, assert_same_run
from torch import nn

from fl_lightning import (
    QSGD,
    ClientFailure,
    ConfigError,
    Float16,
    GaussianNoise,
    LossTerm,
    RandomK,
    SignFlip,
    SignSGD,
    TopK,
)
from fl_lightning.algorithms import FedAvg, WeightedMean
from fl_lightning.callbacks import RoundCallback, UnitDivergence
from fl_lightning.cli.main import main
from fl_lightning.compression.codec import COMPRESSED, RESIDUAL
from fl_lightning.engines import ProcessesEngine
from fl_lightning.evaluation.evaluation import Evaluation

SMALL = {"trainer": ONE_EPOCH, "rounds": 2}
ALL = [TopK(keep=0.1), RandomK(keep=0.1), QSGD(levels=7), SignSGD(), Float16()]


class Uploads(RoundCallback):
    """Keep the uploads as they are sent."""

    def __init__(self):
        self.messages = []

    def on_client_end(self, run, result):
        self.messages.append(result.upload)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("compressor", ALL, ids=name_of)
def test_the_counted_bytes_are_those_of_the_formula(tmp_path, compressor):
    seen = Uploads()
    down = Float16()
    run = finished(tmp_path, compression=compressor, download_compression=down, callbacks=[seen], **SMALL)
    size = sum(p.numel() for p in run.worker.template.backbone.parameters())
    for row in run.csv.rows:
        assert row["comm/up_bytes"] == 4 * (compressor.nbytes(size) + 8)
        assert row["comm/down_bytes"] == 4 * down.nbytes(size)
    assert all(message.sections.keys() == {COMPRESSED} for message in seen.messages)


def test_batch_norm_statistics_are_averaged_without_compression(tmp_path):
    seen = Uploads()
    run = finished(tmp_path, model=NormMLP, compression=TopK(keep=0.1), callbacks=[seen], rounds=1, trainer=ONE_EPOCH)
    means = [message.section("model")["encoder.2.running_mean"].double() for message in seen.messages]
    names = [name for name in run.state["model"] if name.split(".")[-1] in ("running_mean", "running_var")]
    assert seen.messages[0].section("model").keys() == {*names, "encoder.2.num_batches_tracked"}
    counts = torch.tensor([message.numbers["n_samples"] for message in seen.messages], dtype=torch.float64)
    expected = (torch.stack(means) * counts[:, None]).sum(dim=0) / counts.sum()
    assert torch.allclose(run.state["model"]["encoder.2.running_mean"].double(), expected, rtol=1e-6)


def test_keeping_all_entries_is_fedavg_except_for_rounding(tmp_path):
    dense = finished(tmp_path / "dense", rounds=1, trainer=ONE_EPOCH)
    whole = finished(tmp_path / "whole", rounds=1, trainer=ONE_EPOCH, compression=TopK(keep=1.0))
    for name, value in dense.state["model"].items():
        assert torch.allclose(whole.state["model"][name], value, rtol=0, atol=2**-23)


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [({"compression": TopK(keep=1.0)}, 1e-9), ({"download_compression": QSGD(levels=2**20)}, 1e-3)],
)
def test_precise_compression_in_float64_is_fedavg_except_for_rounding(tmp_path, options, tolerance):
    double = {"trainer": {**ONE_EPOCH, "precision": "64-true"}, "rounds": 2}
    dense, run = finished(tmp_path / "dense", **double), finished(tmp_path / "run", **double, **options)
    for name, value in dense.state["model"].items():
        assert run.state["model"][name].dtype == value.dtype == torch.float64
        assert torch.allclose(run.state["model"][name], value, rtol=0, atol=tolerance)


def test_residuals_are_client_state_only_with_feedback(tmp_path):
    kept = finished(tmp_path / "kept", compression=TopK(keep=0.1), **SMALL)
    plain = finished(tmp_path / "plain", compression=TopK(keep=0.1, feedback=False), **SMALL)
    trained = {client for client in range(6) if kept.memory.get(client, {})}
    assert trained
    assert all(kept.memory[client].keys() == {RESIDUAL} for client in trained)
    assert not any(plain.memory.get(client, {}) for client in range(6))


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("store", ["memory", "disk"])
@pytest.mark.parametrize("compressor", [TopK(keep=0.1), RandomK(keep=0.1), QSGD(levels=3)], ids=name_of)
def test_a_run_in_two_parts_equals_a_run_in_one(tmp_path, compressor, store):
    options = {"trainer": ONE_EPOCH, "compression": compressor, "download_compression": QSGD(), "client_store": store}
    assert_same_run(*in_two_parts(tmp_path, FedAvg, 2, rounds=4, **options))


@pytest.mark.thorough
def test_another_compression_is_refused_on_resume(tmp_path, capsys):
    words = ["--config", "digits_fedavg.yaml", "--rounds", "1", "--logger", "null", "--trainer.max_epochs", "1"]
    folder = str(tmp_path / "run")
    assert main(["fit", *words, "--run_dir", folder, "--compression", "TopK", "--compression.keep", "0.1"]) == 0
    capsys.readouterr()
    assert main(["fit", "--resume", folder, "--rounds", "2", "--compression.keep", "0.2"]) == 2
    assert "compression.keep (0.1 -> 0.2)" in capsys.readouterr().err


@pytest.mark.thorough
@pytest.mark.parametrize("compressor", ALL, ids=name_of)
def test_processes_give_the_same_bytes(tmp_path, compressor):
    options = {**SMALL, "compression": compressor, "download_compression": Float16()}
    one = finished(tmp_path / "one", **options)
    many = finished(tmp_path / "many", engine=ProcessesEngine(workers=2), **options)
    assert_same_run(one, many)


@pytest.mark.thorough
def test_ray_gives_the_same_bytes(tmp_path):
    pytest.importorskip("ray")
    options = {**SMALL, "compression": TopK(keep=0.1), "download_compression": Float16()}
    assert_same_run(finished(tmp_path / "one", **options), finished(tmp_path / "ray", engine="ray", **options))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("compressor", [TopK(keep=0.1), SignSGD()], ids=name_of)
def test_the_stacked_engine_gives_the_same_weights(tmp_path, compressor):
    options = {"trainer": ONE_EPOCH, "rounds": 1, "compression": compressor}
    one = finished(tmp_path / "one", **options)
    stacked = finished(tmp_path / "stacked", engine="stacked", **options)
    for name, value in one.state["model"].items():
        assert torch.allclose(stacked.state["model"][name], value, rtol=0, atol=1e-10)


def test_received_models_are_those_after_decompression(tmp_path):
    seen = []

    class Starts(LossTerm):
        """See the weights that the clients start from."""

        name = "starts"

        def begin(self, module):
            seen.append({name: value.clone() for name, value in module.backbone.state_dict().items()})

        def forward(self, step):
            return step.logits.sum() * 0

    run = finished(tmp_path, FedAvg(loss_terms=[Starts()]), rounds=1, trainer=ONE_EPOCH, download_compression=Float16())
    initial = run.worker.template.backbone.state_dict()
    half = {name: value.half().float() for name, value in initial.items()}
    assert len(seen) > 4
    assert all(same_bytes(one, half) for one in seen[-4:])
    assert not same_bytes(initial, half)


@pytest.mark.thorough
def test_received_models_are_evaluated_after_decompression(tmp_path):
    evaluation = Evaluation(client_model="received")
    options = {**SMALL, "evaluation": evaluation, "batch_size": 32}
    compressors = {"dense": None, "exact": QSGD(levels=1, bucket=1), "coarse": QSGD(levels=1, bucket=None)}
    runs = [finished(tmp_path / name, download_compression=one, **options) for name, one in compressors.items()]
    dense, exact, coarse = (untimed(run.csv.rows)[-1]["client/loss_mean"] for run in runs)
    assert exact == dense
    assert coarse > dense + 0.01


@pytest.mark.thorough
def test_figures_of_trained_models_see_dense_weights(tmp_path):
    run = finished(tmp_path, compression=TopK(keep=1.0), callbacks=[UnitDivergence()], **SMALL)
    dense = finished(tmp_path / "dense", callbacks=[UnitDivergence()], **SMALL)
    names = [name for name in dense.csv.rows[-1] if "divergence" in name]
    assert names or (run.run_dir / "figures").exists()
    for name in names:
        assert run.csv.rows[-1][name] == pytest.approx(dense.csv.rows[-1][name], rel=1e-3)


def test_new_clients_receive_compressed_models(tmp_path):
    scenario = digits(6)
    scenario.held_out_clients = 2
    run = finished(tmp_path, scenario=scenario, clients_per_round=2, download_compression=Float16(), **SMALL)
    assert "new_client/acc_mean" in run.csv.rows[-1]


class Doubling(nn.Module):
    """A network whose weight becomes NaN in its first step."""

    def __init__(self, in_shape, num_classes):
        super().__init__()
        self.layer = nn.Linear(64, num_classes)
        self.unused = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        if self.training and torch.is_grad_enabled():
            self.unused.data.fill_(float("nan"))
        return self.layer(x.flatten(1))


@pytest.mark.parametrize("compressor", [None, TopK(keep=0.01), RandomK(keep=0.01)], ids=name_of)
def test_nan_in_an_upload_is_the_clients_failure(tmp_path, compressor):
    run = experiment(tmp_path, model=Doubling, compression=compressor, **SMALL)
    with pytest.raises(ClientFailure, match=r"client \d, round 1: .*unused.* is NaN or Inf"):
        run.fit()


def test_no_compression_changes_nothing(tmp_path):
    one = finished(tmp_path / "one", **SMALL)
    two = finished(tmp_path / "two", compression=None, download_compression=None, **SMALL)
    assert_same_run(one, two)
    assert not any(two.memory.get(client, {}) for client in range(6))


# --- Methods ---------------------------------------------------------------------------------------------------------

NO_WEIGHTS = ("APPLE", "CriticalFL", "FedAMP", "FedDistill", "FedFomo", "FedGH", "FedKD", "FedProto", "FedTGP")
REFUSED = (*NO_WEIGHTS, "HeurFedAMP", "IFCA", "Local")
REFUSED_DOWN = (*REFUSED, "FLoRA with ranks", "FlexLoRA with ranks")
QUICK = ("SCAFFOLD", "APPLE", "UAPDFL", "FedPer", "FedGH", "IFCA")
EVERY = [name if name in QUICK else pytest.param(name, marks=pytest.mark.thorough) for name in METHODS]


@pytest.mark.parametrize("name", EVERY)
def test_each_method_trains_or_is_refused_by_name(tmp_path, name):
    method, options = METHODS[name]
    compressors = {"compression": TopK(keep=0.1), "download_compression": Float16()}
    for key, names in (("compression", REFUSED), ("download_compression", REFUSED_DOWN)):
        algorithm = method()
        if not algorithm.server or name in names:
            run = experiment(tmp_path, algorithm, **options | SMALL | {key: compressors.pop(key)})
            with pytest.raises(ConfigError, match=rf"^{key}: {type(algorithm).__name__} "):
                run.check()
    if compressors:
        row, dense = (
            untimed(finished(tmp_path / str(len(more)), method(), **options | SMALL | more).csv.rows)[0]
            for more in (compressors, {})
        )
        assert ("compression" in compressors) == (row["comm/up_bytes"] < dense["comm/up_bytes"])
        assert ("download_compression" in compressors) == (row["comm/down_bytes"] < dense["comm/down_bytes"])
        assert row.keys() == dense.keys()


@pytest.mark.parametrize("compressor", [TopK(), RandomK(), SignSGD()], ids=name_of)
def test_compressors_that_need_residuals_are_refused_for_downloads(tmp_path, compressor):
    with pytest.raises(ConfigError, match=f"^download_compression: {type(compressor).__name__} "):
        experiment(tmp_path, download_compression=compressor).check()


# --- Feedback --------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_top_k_with_feedback_reaches_fedavg_and_without_it_does_not(tmp_path):
    """Run the first seed of the table in docs/compression.md, without evaluation before the last round."""
    words = ["--rounds", "200", "--trainer.max_epochs", "1", "--evaluation.every", "200", "--logger", "null"]

    def accuracy(name, *options):
        folder = tmp_path / name
        assert main(["fit", "--config", "digits_fedavg.yaml", *words, "--run_dir", str(folder), *options]) == 0
        return json.loads((folder / "final" / "summary.json").read_text())["global/acc_last"]

    dense, kept = accuracy("dense"), accuracy("kept", "--compression", "TopK")
    lost = accuracy("lost", "--compression", "TopK", "--compression.feedback", "false")
    assert kept > dense - 0.01
    assert lost < dense - 0.01


def test_what_attackers_send_is_compressed_too(tmp_path, monkeypatch):
    """The server gets no more entries of an attacker's update than of an honest client's."""
    changed = []
    fold = WeightedMean.fold

    def watch(aggregator, folded, upload):
        model, received = upload.message.section("model"), upload.received
        changed.append((upload.client, sum(int((model[name] != w).sum()) for name, w in received.items())))
        fold(aggregator, folded, upload)

    monkeypatch.setattr(WeightedMean, "fold", watch)
    run = finished(tmp_path, FedAvg(), adversary=GaussianNoise(clients=[0, 1]), compression=TopK(keep=0.1))
    size = sum(value.numel() for value in run.state["model"].values())
    assert {client for client, _ in changed} & {0, 1}
    assert max(count for _, count in changed) <= round(0.1 * size)


def test_attackers_receive_compressed_weights(tmp_path):
    """The attack is their reversed change of the weights that they have received."""
    attack = SignFlip(clients=[0])
    run = experiment(tmp_path, FedAvg(), adversary=attack, download_compression=QSGD(levels=7), clients_per_round=None)
    rounds = record_rounds(run)
    run.fit()
    assert len(rounds) == 3
    for before, uploads, _ in rounds:
        received = uploads[1].received
        assert not same_bytes(dict(received), dict(before["model"]))
        assert same_bytes(dict(uploads[0].received), dict(received))
    assert [row["attack/participants"] for row in run.csv.rows] == [1, 1, 1]


def test_an_attackers_update_that_overflows_in_its_compressed_form_is_dropped(tmp_path):
    attack = GaussianNoise(clients=[0], std=1e6)
    with pytest.warns(UserWarning, match="client 0"):
        run = finished(tmp_path, FedAvg(), adversary=attack, compression=Float16(), clients_per_round=None)
    assert [row["attack/dropped"] for row in run.csv.rows] == [1, 1, 1]
    assert all(bool(value.isfinite().all()) for value in run.state["model"].values())
