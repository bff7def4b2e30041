"""Odd values in every key of a config: each is accepted, or refused in one line that names the key."""

import copy
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from commands import TINY, run

from fl_lightning import FederatedOrchestrator
from fl_lightning.cli.commands import fit

CONFIG = yaml.safe_load("""
rounds: 3
clients_per_round: 2
batch_size: 16
seed: 3
optimizer_state: kept
compile: false
channels_last: false
engine: sequential
client_store: memory
on_client_failure: drop
min_clients: 1
log_clients: true
run_dir: run
scenario:
  dataset: Digits
  partition: {class_path: Dirichlet, init_args: {alpha: 0.5, min_samples: 5}}
  clients: 4
  local_test: 0.25
  long_tail: 2.0
  train_samples: 900
model: {class_path: MLP, init_args: {hidden: [8]}}
algorithm:
  class_path: FedAvg
  init_args: {loss_terms: [{class_path: Proximal, init_args: {mu: 0.1}}], buffers: average}
optimizer: {class_path: SGD, init_args: {lr: 0.1, momentum: 0.9}}
lr_scheduler: {class_path: StepLR, init_args: {step_size: 1, gamma: 0.9}}
round_lr_scheduler: {class_path: ExponentialLR, init_args: {gamma: 0.9}}
trainer:
  {accelerator: cpu, devices: 1, precision: 32-true, max_epochs: 1, max_steps: -1, limit_train_batches: 1.0,
   gradient_clip_val: 1.0, gradient_clip_algorithm: norm, accumulate_grad_batches: 1, deterministic: false,
   benchmark: false, detect_anomaly: false}
evaluation: {client_model: trained, personal_on_global: false, target_accuracies: [0.5], max_clients: 3, every: 1}
callbacks: [{class_path: EarlyStopping, init_args: {patience: 3}}]
logger: {class_path: CSVLogger, init_args: {save_dir: logs}}
baselines: {MOON: {algorithm.mu: 1}}
""")

VALUES = {
    "null": None,
    "[]": [],
    "[null]": [None],
    "{}": {},
    "{a: 1}": {"a": 1},
    "''": "",
    "true": True,
    "-1": -1,
    "0": 0,
    "1.5": 1.5,
    "10**18": 10**18,
    "10**400": 10**400,
    ".nan": float("nan"),
    ".inf": float("inf"),
    "-.inf": float("-inf"),
    "a long word": "x" * 5000,
    "escapes": "a\nb\x1b[2Jc\td",
}


def places(node, path=()):
    """Yield the path of each key and list item in a config."""
    for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield (*path, key)
        yield from places(value, (*path, key))


PLACES = list(places(CONFIG))


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working folder, and a `fit` that runs no round."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(FederatedOrchestrator, "fit", lambda *args: SimpleNamespace(summary={}))
    monkeypatch.setattr(fit, "print_results", lambda *args: print("fitted"))


def fit_with(place, name):
    """Run `fit` with one of `VALUES` at a place of the config."""
    config = copy.deepcopy(CONFIG)
    node = config
    for key in place[:-1]:
        node = node[key]
    node[place[-1]] = VALUES[name]
    Path("bad.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    return run("fit", "--config", "bad.yaml")


def check(place, name):
    code, out, err = fit_with(place, name)
    message = f"{'.'.join(map(str, place))} = {name}: {code} {out} {err}"
    if code == 0:
        assert "fitted" in out, message
        return
    assert code == 2, message
    assert re.fullmatch("fl-lightning: error: [^\n]{1,380}\n", err), message
    noise = "object at 0x|functools|Traceback|Namespace\\(|\x1b|not supported between|NoneType"
    assert not re.search(noise, err), message
    names = [str(key) for key in place if key not in ("class_path", "init_args") and not isinstance(key, int)]
    assert re.search(rf"(?<!\w)({re.escape('.'.join(names))}|{names[0]})(?!\w)", err), message


@pytest.mark.thorough
@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("place", PLACES[::3], ids=lambda place: ".".join(map(str, place)))
def test_some_values_in_a_third_of_the_keys(place, here):
    """The slow test below has all keys and values."""
    for name in list(VALUES)[PLACES.index(place) // 3 % 4 :: 4]:
        check(place, name)


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES, ids=lambda place: ".".join(map(str, place)))
def test_any_value_in_any_key_is_accepted_or_refused_in_one_line(place, here):
    for name in VALUES:
        check(place, name)


@pytest.mark.fast_cases(8)
@pytest.mark.parametrize(
    ("place", "name", "message"),
    [
        ("evaluation", "null", "evaluation: it needs lines `key: value`"),
        ("evaluation", "[]", "evaluation: it needs lines `key: value`"),
        ("trainer", "null", "trainer: it needs lines `key: value`"),
        ("rounds", "10**400", "rounds: a number of 401 digits"),
        ("batch_size", "null", "batch_size: null "),
        ("optimizer.init_args.lr", "null", "optimizer.lr: null "),
        ("algorithm.init_args.loss_terms.0.init_args.mu", "null", "algorithm.loss_terms.mu: null "),
        ("model", "null", "model must be given"),
        ("scenario", "null", "scenario.dataset, scenario.partition must be given"),
        ("algorithm", "[]", "algorithm: expected the name of a class"),
        ("lr_scheduler", "{}", "lr_scheduler: expected the name of a class"),
        ("logger", "true", "logger: expected the name of a class"),
        ("callbacks", "{}", "callbacks: got '{}', expected list"),
        ("callbacks", "a long word", f"callbacks: got '{'x' * 57}...', expected list"),
        ("optimizer.class_path", "[]", "optimizer: class_path "),
        ("algorithm.init_args", "''", "algorithm: init_args "),
    ],
)
def test_the_line_says_what_the_key_needs(place, name, message, here):
    code, _, err = fit_with([int(key) if key.isdigit() else key for key in place.split(".")], name)
    assert code == 2
    assert message in err


def test_the_unchanged_config_is_accepted(here):
    Path("good.yaml").write_text(yaml.safe_dump(CONFIG))
    assert run("fit", "--config", "good.yaml")[::2] == (0, "")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["test", "run", "--rounds", "3"], "fl-lightning test has no key 'rounds'"),
        (["list", "--kind", "models"], "fl-lightning list has no key 'kind'"),
        (["fit", "--config", "good.yaml", "--scenario.partition", "Partition"], "scenario.partition: Partition "),
        (["test", "good", "--checkpoint", "²"], "--checkpoint: checkpoint '²' "),
    ],
)
def test_messages_of_other_commands_and_abstract_classes(words, message, here):
    Path("good.yaml").write_text(yaml.safe_dump(CONFIG))
    Path("good").mkdir()
    recorded = {key: value for key, value in CONFIG.items() if key not in ("baselines", "run_dir")}
    Path("good/config.yaml").write_text(yaml.safe_dump(recorded))
    code, _, err = run(*words)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("config: other.yaml", "the config has no key 'config'"),
        ("print_config: true", "the config has no key 'print_config'"),
        ("__path__: /tmp", "the config has no key '__path__'"),
        ("trainer: {__path__: /tmp}", "the config has no key 'trainer.__path__'"),
        ("algorithm: {class_path: FedAvg, init_args: {__path__: x}}", "FedAvg has no key '__path__'"),
    ],
)
def test_a_config_cannot_contain_options_of_the_command_line(tmp_path, monkeypatch, more, message):
    monkeypatch.chdir(tmp_path)
    Path("own.yaml").write_text(yaml.safe_dump(yaml.safe_load(TINY) | yaml.safe_load(more)))
    code, _, err = run("fit", "--config", "own.yaml", "--run_dir", "here")
    assert (code, Path("here").exists()) == (2, False)
    assert message in err
