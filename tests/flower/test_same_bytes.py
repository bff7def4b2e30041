"""Clients on their own machines give the bytes of the sequential engine, for every method."""

import pytest
from compressors import name_of
from experiments import experiment, same_bytes, untimed
from flower_grid import flower, remote_experiment  # noqa: F401
from methods import METHODS, elements

from fl_lightning import QSGD, Float16, RandomK, SignSGD, TopK
from fl_lightning.core.errors import ConfigError
from fl_lightning.evaluation.evaluation import Evaluation

pytestmark = pytest.mark.usefixtures("flower", "one_thread")

REFUSED = ("CCVR", "received")
"""They need the clients' data on the server, or the global test set on the clients' machines."""

FAST = ("SCAFFOLD", "UAPDFL")
CASES = [
    name if name in FAST else pytest.param(name, marks=pytest.mark.thorough) for name in METHODS if name not in REFUSED
]


def both(tmp_path, name, **options):
    method, own = METHODS[name]
    alone = experiment(tmp_path / "alone", method(), rounds=2, **own | options)
    alone.fit()
    remote, grid = remote_experiment(tmp_path / "remote", alone, method, folder=tmp_path, rounds=2, **own | options)
    remote.fit()
    return alone, remote, grid


@pytest.mark.parametrize("name", CASES)
def test_same_bytes(tmp_path, name):
    alone, remote, _ = both(tmp_path, name)
    assert all(same_bytes(alone.state[part], remote.state[part]) for part in alone.state)
    assert untimed(alone.csv.rows) == untimed(remote.csv.rows)
    newest = [max(run.run_dir.glob("checkpoints/*/state.pt")) for run in (alone, remote)]
    assert elements(newest[0]) == elements(newest[1])
    assert alone.record.run.algorithm.one_model == (remote.run_dir / "final" / "model.pt").exists()


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("compressor", [TopK(keep=0.1), RandomK(keep=0.1), QSGD(), SignSGD(), Float16()], ids=name_of)
def test_compressed_messages_have_the_same_bytes(tmp_path, compressor):
    options = {"compression": compressor, "download_compression": QSGD(levels=1000)}
    alone, remote, _ = both(tmp_path, "FedAvg", **options)
    assert same_bytes(alone.state["model"], remote.state["model"])
    assert untimed(alone.csv.rows) == untimed(remote.csv.rows)
    assert not any(remote.memory[client] for client in remote.memory)  # residuals stay on the clients' machines


@pytest.mark.parametrize(("name", "key"), [("CCVR", "algorithm"), ("received", "evaluation.personal_on_global")])
def test_what_needs_the_data_elsewhere_is_refused_before_a_file_is_written(tmp_path, name, key):
    with pytest.raises(ConfigError, match=f"^{key}: "):
        both(tmp_path, name)
    assert not (tmp_path / "remote").exists()


def test_only_the_public_section_of_client_state_reaches_the_server(tmp_path):
    alone, remote, _ = both(tmp_path, "UAPDFL")
    public = alone.algorithm.public
    assert {*alone.memory[0]} > {public}
    assert all({*remote.memory[client]} == {public} for client in remote.memory)


@pytest.mark.thorough
def test_received_models_are_evaluated_on_the_clients_machines(tmp_path):
    evaluation = Evaluation(client_model="received")
    alone, remote, _ = both(tmp_path, "FedAvg", evaluation=evaluation)
    for one, other in zip(untimed(alone.csv.rows), untimed(remote.csv.rows), strict=True):
        assert one == pytest.approx(other, rel=1e-5)


def test_without_a_global_test_set_only_clients_are_evaluated(tmp_path):
    alone = experiment(tmp_path / "alone", rounds=1)
    alone.fit()
    method = METHODS["FedAvg"][0]
    remote, _ = remote_experiment(tmp_path / "remote", alone, method, folder=tmp_path, test=False, rounds=1)
    remote.fit()
    own = {key: value for key, value in untimed(alone.csv.rows)[0].items() if not key.startswith("global/")}
    assert untimed(remote.csv.rows)[0] == own


def test_the_server_has_no_sample_of_a_client(tmp_path):
    _, remote, _ = both(tmp_path, "FedAvg")
    assert remote.data.data.x_train.untyped_storage().nbytes() == 4
    assert not remote.data.data.x_train.any()
    with pytest.raises(ConfigError, match="client 0: "):
        remote.client_module(0)
    header = (remote.run_dir / "partition.csv").read_text().splitlines()[0]
    assert header == "client,split,samples"


def test_a_run_is_tested_without_the_clients_machines(tmp_path):
    _, remote, _ = both(tmp_path, "SCAFFOLD")
    last = remote.csv.rows[-1]
    assert remote.test() == {"round": 2, **{key: last[key] for key in ("global/acc", "global/loss")}}
    remote.worker.data.has_test = False
    with pytest.raises(ConfigError, match="test samples"):
        remote.test()
