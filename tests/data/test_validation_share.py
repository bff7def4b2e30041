from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import run
from layouts import write_cifar

from fl_lightning import open_run
from fl_lightning.core.errors import ConfigError
from fl_lightning.data import FC100, IID, Arrays, Dirichlet, FederatedData, FewShot, Scenario


@pytest.fixture
def arrays(tmp_path: Path) -> Arrays:
    """Four classes of 100 and a test set of 10 each; every input is its own number."""
    x = np.arange(440, dtype=np.float32)[:, None]
    y = np.arange(440) % 4
    np.savez(tmp_path / "a.npz", x_train=x[:400], y_train=y[:400], x_test=x[400:], y_test=y[400:])
    return Arrays(str(tmp_path / "a.npz"))


def inputs(data: FederatedData, part: str) -> list[set[float]]:
    """Return the inputs of each client's `train` or `test` samples."""
    return [set(data.data.x_train[getattr(shard, part)].flatten().tolist()) for shard in data.shards]


@pytest.mark.parametrize("local_test", [0, 0.25, "official"])
def test_clients_and_the_global_model_are_tested_on_a_share_of_the_training_samples(arrays, local_test) -> None:
    whole, tuning = (
        Scenario(arrays, Dirichlet(0.5), clients=5, local_test=local_test, validation_share=share).build(3)
        for share in (None, 0.2)
    )
    for before, train, test in zip(
        inputs(whole, "train"), inputs(tuning, "train"), inputs(tuning, "test"), strict=True
    ):
        assert train | test == before
        assert not train & test
        assert len(test) == round(0.2 * len(before))
    everything = torch.cat([tuning.data.x_train[shard.test] for shard in tuning.shards]).flatten().tolist()
    assert tuning.data.x_test.flatten().tolist() == everything
    assert torch.equal(tuning.data.y_test, tuning.data.x_test.flatten().long() % 4)


def test_the_share_is_stratified_and_depends_on_the_seed(arrays: Arrays) -> None:
    one, other = (Scenario(arrays, IID(), clients=1, local_test=0, validation_share=0.1).build(seed) for seed in (0, 1))
    assert one.class_counts("test").tolist() == [[10] * 4]
    assert inputs(one, "test") != inputs(other, "test")


def test_a_share_too_small_for_every_client_is_refused(arrays: Arrays) -> None:
    with pytest.raises(ConfigError, match=r"^scenario.validation_share: 0.01 "):
        Scenario(arrays, IID(), clients=40, validation_share=0.01).build(0)


def test_a_dataset_with_a_test_of_its_own_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar(tmp_path, 100, monkeypatch)
    dataset = FC100(str(tmp_path), few_shot=FewShot(shots=1))
    with pytest.raises(ConfigError, match=r"^scenario.validation_share: FC100 .*scenario.dataset.evaluate_on"):
        Scenario(dataset, IID(), clients=2, validation_share=0.2).build(0)
    assert Scenario(dataset, IID(), clients=2).build(0).data.evaluate is not None


@pytest.mark.parametrize("held_out", [None, 1])
def test_the_test_set_of_a_tuned_run_keeps_the_training_samples(arrays: Arrays, held_out: int | None) -> None:
    options = {"clients": 5, "local_test": 0.25, "held_out_clients": held_out}
    whole = Scenario(arrays, Dirichlet(0.5), **options).build(3)
    scenario = Scenario(arrays, Dirichlet(0.5), validation_share=0.2, **options)
    tuning, tested = scenario.build(3), scenario.build(3, test_set=True)
    assert inputs(tested, "train") == inputs(tuning, "train")
    assert inputs(tested, "test") == inputs(whole, "test")
    assert torch.equal(tested.data.x_test, whole.data.x_test)
    for one, train, test in zip(tested.held_out, tuning.held_out, whole.held_out, strict=True):
        assert torch.equal(one.train, train.train)
        assert torch.equal(one.test, test.test)


@pytest.mark.thorough
def test_a_tuned_run_says_on_what_it_is_tested_and_can_be_tested_on_the_test_set(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = ("--config", "digits_fedper", "--rounds", "2", "--logger", "null", "--scenario.validation_share", "0.2")
    fit = run("fit", *options, "--run_dir", "run")
    assert "tested on validation samples" in fit.out
    fitted, again, tested = (
        " ".join(each.out.split()) for each in (fit, run("test", "run"), run("test", "run", "--test_set"))
    )
    for out, whose in ((fitted, "validation samples"), (again, "validation samples"), (tested, "test split")):
        assert f"on its own {whose}" in out
    opened = open_run("run")
    expected = {}
    for name, scenario in (("run", opened.scenario), ("whole", replace(opened.scenario, validation_share=None))):
        data = scenario.build(opened.seed)
        expected[name] = np.mean([accuracy(opened.client_module(k), data, k) for k in range(opened.clients)])
    assert f"client/acc_mean │ {expected['run']:.4f}" in again
    assert f"client/acc_mean │ {expected['whole']:.4f}" in tested
    assert expected["run"] != expected["whole"]


def accuracy(module, data: FederatedData, client: int) -> float:
    """Return the accuracy of a client's model on the client's test samples."""
    test = data.shards[client].test
    with torch.no_grad():
        outputs = module.eval()(data.data.prepare(data.data.x_train[test]))
    return float((outputs.argmax(1) == data.data.y_train[test]).float().mean())
