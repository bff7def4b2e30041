"""Private methods with clients on their own machines: epsilon is reported, and the noise is not that of the seed."""

import pytest
from experiments import experiment, same_bytes
from flower_grid import flower, remote_experiment  # noqa: F401

from fl_lightning.algorithms import FedAvg, PoissonSampling, PrivateMean
from fl_lightning.client.dp_sgd import DPSGD
from fl_lightning.core.errors import ConfigError

pytest.importorskip("opacus")
pytestmark = [
    pytest.mark.usefixtures("flower", "one_thread"),
    pytest.mark.filterwarnings("ignore:algorithm.aggregator. only the global model is private"),
]

MEAN = {"min_clients": 0, "clients_per_round": 3}


def private_mean():
    return FedAvg(aggregator=PrivateMean(clip=0.5, noise=1.0, delta=1e-3))


CASES = {
    "dp_sgd": (FedAvg, lambda: {"dp_sgd": DPSGD(noise=2.0)}, "privacy/record_epsilon"),
    "PrivateMean": (private_mean, lambda: MEAN | {"client_sampler": PoissonSampling()}, "privacy/epsilon"),
}


@pytest.mark.parametrize("name", CASES)
def test_epsilon_is_that_of_the_simulation_and_the_noise_is_not(tmp_path, name):
    method, options, column = CASES[name]
    alone = experiment(tmp_path / "alone", method(), rounds=2, **options())
    alone.fit()
    first, second = (
        remote_experiment(tmp_path / part, alone, method, folder=tmp_path / part, rounds=2, **options())[0]
        for part in ("first", "second")
    )
    for run in (first, second):
        run.fit()
        assert run.csv.rows[-1][column] == pytest.approx(alone.csv.rows[-1][column], rel=1e-12)
        assert run.csv.rows[-1][column] > 0
    models = [run.state["model"] for run in (alone, first, second)]
    assert not any(same_bytes(one, other) for one, other in zip(models, models[1:] + models[:1], strict=True))


@pytest.mark.parametrize(
    ("name", "changed", "key"),
    [("dp_sgd", {"compile": True}, "compile"), ("PrivateMean", {"min_clients": 1}, "min_clients")],
)
def test_refused_options_are_refused_before_a_file_is_written(tmp_path, name, changed, key):
    method, options, _ = CASES[name]
    alone = experiment(tmp_path / "alone", rounds=2)
    alone.check()
    remote, _ = remote_experiment(tmp_path / "run", alone, method, folder=tmp_path, rounds=2, **options() | changed)
    with pytest.raises(ConfigError, match=rf"^{key}"):
        remote.fit()
    assert not (tmp_path / "run").exists()
