"""The membership attack succeeds on a model that has memorised its samples, and its epsilon is below the accounted."""

from functools import partial

import numpy as np
import pytest
import torch
from experiments import digits, experiment, finished, same_bytes, untimed

from fl_lightning import ConfigError
from fl_lightning.algorithms import Local
from fl_lightning.attacks import Canaries
from fl_lightning.callbacks import MembershipAudit
from fl_lightning.callbacks.membership_audit import log_odds, selected
from fl_lightning.client.dp_sgd import DPSGD
from fl_lightning.data import IID, Scenario
from fl_lightning.data.datasets import Dataset, LoadedData
from fl_lightning.models import MLP

SAMPLES = 240


class Noise(Dataset):
    """Random inputs with random labels, which can only be memorised."""

    def load(self):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(2 * SAMPLES, 40, generator=generator)
        y = torch.randint(4, (2 * SAMPLES,), generator=generator)
        same = partial(torch.Tensor.float)
        return LoadedData(x[:SAMPLES], y[:SAMPLES], x[SAMPLES:], y[SAMPLES:], 4, same)


OPTIONS = {
    "scenario": Scenario(Noise(), IID(), 2),
    "model": partial(MLP, hidden=(128,)),
    "optimizer": partial(torch.optim.SGD, lr=0.3),
    "batch_size": 16,
    "rounds": 2,
    "clients_per_round": 2,
    "trainer": {"accelerator": "cpu", "max_epochs": 12},
}


def test_a_memorised_model_is_attacked_with_success(tmp_path):
    run = finished(tmp_path, **OPTIONS | {"rounds": 4}, callbacks=[MembershipAudit(references=2)])
    *others, last = run.csv.rows
    assert not any(name.startswith("audit/") for row in others for name in row)
    for attack in ("loss", "lira"):
        assert last[f"audit/{attack}_auc"] > 0.9
        assert last[f"audit/{attack}_advantage"] > 0.6
        assert last[f"audit/{attack}_epsilon"] > 1.0


def test_with_noise_the_attack_stays_below_the_accounted_epsilon(tmp_path):
    pytest.importorskip("opacus")
    options = OPTIONS | {"dp_sgd": DPSGD(noise=2.0), "trainer": {"accelerator": "cpu", "max_epochs": 1}}
    run = finished(tmp_path, **options, callbacks=[MembershipAudit(references=2)])
    last = run.csv.rows[-1]
    for attack in ("loss", "lira"):
        assert last[f"audit/{attack}_auc"] < 0.65
        assert last[f"audit/{attack}_epsilon"] < last["privacy/record_epsilon"]


CANARIES = {"callbacks": [MembershipAudit(references=0)], "adversary": Canaries(clients=[0, 1], share=0.8)}


def test_a_model_that_memorises_its_canaries_is_found_out(tmp_path):
    run = finished(tmp_path, **OPTIONS | {"rounds": 4}, **CANARIES)
    last = run.csv.rows[-1]
    assert last["audit/canary_accuracy"] > 0.9
    assert last["audit/canary_epsilon"] > 1.5
    (audit,) = CANARIES["callbacks"]
    assert {*audit.metrics(run)} == {name for name in last if name.startswith("audit/")}
    trained = torch.cat([shard.train for shard in run.data.shards])
    attack = run.adversary
    clean = sum(len(shard.train) for shard in OPTIONS["scenario"].build(0).shards)
    assert len(trained) == clean - int((~attack.included).sum())
    members, _ = audit.scores(run)["loss"]
    assert len(members) == len(np.setdiff1d(trained, attack.rows))


def test_with_noise_the_bound_of_canaries_is_below_the_accounted_epsilon(tmp_path):
    pytest.importorskip("opacus")
    options = OPTIONS | {"dp_sgd": DPSGD(noise=2.0), "trainer": {"accelerator": "cpu", "max_epochs": 1}}
    last = finished(tmp_path, **options, **CANARIES).csv.rows[-1]
    assert last["audit/canary_accuracy"] < 0.65
    assert last["audit/canary_epsilon"] < last["privacy/record_epsilon"]


def test_too_few_canaries_are_refused(tmp_path):
    options = OPTIONS | CANARIES | {"adversary": Canaries(clients=[0], share=0.01)}
    with pytest.raises(ConfigError, match=r"^callbacks: MembershipAudit: .*canaries"):
        experiment(tmp_path, **options).check()


def test_the_audit_changes_no_results_and_can_be_repeated(tmp_path):
    audit = [MembershipAudit(every=1, references=1, epochs=1)]
    options = OPTIONS | {"trainer": {"accelerator": "cpu", "max_epochs": 1}}
    runs = [finished(tmp_path / str(i), **options, callbacks=each) for i, each in enumerate((audit, [], audit))]
    assert same_bytes(runs[0].state["model"], runs[1].state["model"])
    assert untimed(runs[0].csv.rows) == untimed(runs[2].csv.rows)
    assert all("audit/lira_auc" in row for row in runs[0].csv.rows)


def test_attacked_samples_are_members_and_samples_of_the_test_set(tmp_path):
    audit = MembershipAudit(samples=50, references=0)
    run = finished(tmp_path, **OPTIONS | {"rounds": 1}, callbacks=[audit])
    module = run.evaluator.global_module(1).eval()
    data = run.data.data
    with torch.no_grad():
        train = log_odds(module(data.x_train), data.y_train).double().numpy()
        test = log_odds(module(data.x_test), data.y_test).double().numpy()
    ((members, others),) = audit.scores(run).values()
    assert len(members) == len(others) == 50
    for scores, every in ((members, train), (others, test)):
        distance = np.abs(scores[:, None] - every).min(axis=1)
        assert distance.max() < 1e-4


def test_log_odds_are_those_of_the_probability_of_the_class():
    logits, y = torch.randn(9, 5, dtype=torch.float64), torch.arange(9) % 5
    p = logits.softmax(dim=1)[torch.arange(9), y]
    torch.testing.assert_close(log_odds(logits, y), (p / (1 - p)).log())


def test_selected_samples_are_those_at_the_indices():
    x = torch.arange(10.0)
    batches = [(x[:4], x[:4].long()), (x[4:8], x[4:8].long()), (x[8:], x[8:].long())]
    found = selected(batches, torch.tensor([9, 1, 3, 5]))
    assert torch.cat([each for each, _ in found]).tolist() == [1, 3, 5, 9]
    assert all(torch.equal(own.long(), y) for own, y in found)


@pytest.mark.parametrize(
    "options",
    [{"every": 0}, {"samples": 1}, {"references": -1}, {"epochs": 0}, {"confidence": 1.0}],
    ids=lambda options: next(iter(options)),
)
def test_bad_options(options):
    with pytest.raises(ConfigError, match=rf"^callbacks: MembershipAudit.{next(iter(options))}: "):
        MembershipAudit(**options)


def test_a_method_without_a_global_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"^callbacks: MembershipAudit: Local"):
        experiment(tmp_path, Local(), scenario=digits(4), clients_per_round=4, callbacks=[MembershipAudit()]).check()
