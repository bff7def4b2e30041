"""Runs that are interrupted or killed resume to the same bytes."""

import os
import signal
from functools import partial
from pathlib import Path

import pytest
import yaml
from experiments import ONE_EPOCH, experiment, in_two_parts, same_bytes, untimed
from killed_runs import FIRST_ROUND, FIVE, command_line, survive_kills
from methods import CLASSES

from fl_lightning.algorithms import UAPDFL, CwFedAvg, FedAvg, FedDW, FedSiamDA, FedSKC
from fl_lightning.callbacks import EarlyStopping, RoundCallback
from fl_lightning.core.config_files import shipped, shipped_text
from fl_lightning.core.errors import Interrupted
from fl_lightning.engines import Engine
from fl_lightning.models import MLP, Head

FORKS = pytest.mark.filterwarnings("ignore:.*fork")  # Python 3.12 warns of threads
SIAMESE = partial(MLP, hidden=(16,), head=Head(projection=16, prediction=16))


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    "method",
    [FedSKC, FedDW, FedSiamDA, CwFedAvg, lambda: UAPDFL(n_com=2), lambda: FedAvg(buffers="local")],
    ids=[*FIVE, "local buffers"],
)
def test_a_run_in_two_parts_equals_a_run_in_one(tmp_path, method):
    options = {"checkpoint_every": 2, "model": SIAMESE, "trainer": ONE_EPOCH}
    whole, rest = in_two_parts(tmp_path, method, 3, rounds=4, **options)
    assert same_bytes(whole.state["model"], rest.state["model"])
    assert untimed(whole.csv.rows) == untimed(rest.csv.rows)
    model = Path("final") / "model.pt"
    assert (tmp_path / "whole" / model).read_bytes() == (tmp_path / "parts" / model).read_bytes()


@pytest.mark.filterwarnings("ignore:callbacks. EarlyStopping.mode")  # the wrong mode, so that it stops soon
def test_early_stopping_state_survives_a_resume(tmp_path):
    def run(name, rounds, resume=False):
        callbacks = [EarlyStopping(monitor="global/loss", mode="max", patience=4)]
        run = experiment(tmp_path / name, rounds=rounds, callbacks=callbacks, trainer=ONE_EPOCH)
        run.fit(resume=resume)
        return run.round

    last = run("whole", 12)
    assert 4 < last < 12
    assert run("parts", 3) == 3
    assert run("parts", 12, resume=True) == last
    assert run("parts", 12, resume=True) == last  # of a run that is over


class Interrupter(Engine):
    """Send this process a signal in the middle of a round."""

    def __init__(self, round, signum):
        self.round, self.signum = round, signum

    def run(self, worker, tasks, done):
        for task in tasks:
            result = worker.run(task)
            if task.round == self.round and task.fit:
                signal.raise_signal(self.signum)
                self.round = None
            done(result)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("signum", "config", "fix"),
    [
        (signal.SIGINT, None, "FederatedOrchestrator(..., run_dir='{}').fit(resume=True)"),
        (signal.SIGTERM, {"rounds": 4}, "fl-lightning fit --resume {}"),
    ],
)
def test_signal_ends_the_run_after_the_client_and_it_can_be_resumed(tmp_path, signum, config, fix):
    options = {"rounds": 4, "checkpoint_every": 10, "trainer": ONE_EPOCH}
    whole = experiment(tmp_path / "whole", FedSKC(), **options)
    whole.fit()
    handler = signal.getsignal(signum)
    stopped = experiment(tmp_path / "parts", FedSKC(), engine=Interrupter(3, signum), **options)
    with pytest.raises(Interrupted) as stop:
        stopped.fit(config=config)
    fix = fix.format(tmp_path / "parts")
    assert str(stop.value) == f"stopped by {signum.name} after round 2 of 4; resume it with: {fix}"
    assert stop.value.exit_code == 128 + signum
    assert signal.getsignal(signum) == handler
    assert stopped.checkpoints.rounds() == [2, 0]
    rest = experiment(tmp_path / "parts", FedSKC(), **options)
    rest.fit(resume=True, config=config)
    assert same_bytes(whole.state["model"], rest.state["model"])
    assert untimed(whole.csv.rows) == untimed(rest.csv.rows)


class Kill(RoundCallback):
    """Kill this process in the middle of round 3."""

    def on_client_end(self, run, result):
        if run.round == 2:
            os.kill(os.getpid(), signal.SIGKILL)


@FORKS
def test_a_killed_run_resumes_to_the_same_bytes(tmp_path):
    options = {"rounds": 4, "trainer": ONE_EPOCH}
    whole = experiment(tmp_path / "whole", FedSKC(), **options)
    whole.fit()
    child = os.fork()
    if not child:
        try:
            experiment(tmp_path / "killed", FedSKC(), callbacks=[Kill()], **options).fit()
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    rest = experiment(tmp_path / "killed", FedSKC(), **options)
    rest.fit(resume=True)
    assert same_bytes(whole.state["model"], rest.state["model"])
    assert untimed(whole.csv.rows) == untimed(rest.csv.rows)


@pytest.mark.thorough
def test_a_killed_command_resumes_to_the_same_bytes(tmp_path):
    survive_kills(command_line("fedsiam_da", "--rounds", "3"), tmp_path, 1)


STATEFUL = {
    "CenteredClipping": [
        *("--algorithm.aggregator=CenteredClipping", "--algorithm.aggregator.tau=1"),
        *("--adversary=GaussianNoise", "--adversary.clients=0.3"),
    ],
    "residuals": ["--compression=TopK", "--compression.keep=0.05", "--download_compression=QSGD"],
    "PrivateMean": [
        *("--client_sampler=PoissonSampling", "--clients_per_round=5", "--min_clients=0"),
        *("--algorithm.aggregator=PrivateMean", "--algorithm.aggregator.noise=0.5"),
        *("--algorithm.aggregator.quantile=0.5", "--algorithm.aggregator.delta=0.001"),
    ],
    "dp_sgd": ["--dp_sgd.clip=1", "--dp_sgd.noise=1", "--clients_per_round=5"],
    "AFL": ["--algorithm=AFL", "--clients_per_round=5"],
}


@pytest.mark.thorough
@FORKS
@pytest.mark.filterwarnings("ignore:algorithm.aggregator. only the global model:UserWarning")
@pytest.mark.parametrize("part", STATEFUL)
def test_killed_run_keeps_what_attacks_privacy_and_compression_remember(tmp_path, part):
    """It is killed after round 1, so there is a state: of the rule, the clients, the clip, or the accountant."""
    if part in {"PrivateMean", "dp_sgd"}:
        pytest.importorskip("opacus")
    words = command_line("fedavg", "--rounds", "4", *STATEFUL[part])
    survive_kills(words, tmp_path, 1, begun=FIRST_ROUND, fork=True)


@pytest.mark.slow
@FORKS
@pytest.mark.parametrize("method", [method for method in FIVE if method != "fedsiam_da"])  # which cannot be stacked
def test_killed_stacked_run_resumes_to_the_same_bytes(tmp_path, method):
    survive_kills([*command_line(method), "--engine", "stacked"], tmp_path, 1, fork=True)


@pytest.mark.slow
@pytest.mark.parametrize("method", FIVE)
def test_twenty_of_twenty_killed_runs_resume_to_the_same_bytes(tmp_path, method):
    survive_kills(command_line(method), tmp_path, 20)


@pytest.mark.slow
@FORKS
@pytest.mark.parametrize("name", [name for name in CLASSES if name != "Algorithm"])
def test_every_method_survives_a_kill(tmp_path, name):
    """Each method uses its own digits config."""
    own = {}
    for config in shipped("configs"):
        if config.startswith("digits_"):
            algorithm = yaml.safe_load(shipped_text(config, "configs"))["algorithm"]
            own[algorithm if isinstance(algorithm, str) else algorithm["class_path"]] = Path(config).stem[7:]
    survive_kills(command_line(own[name], "--rounds", "4"), tmp_path, 1, fork=True)
