"""Every shipped config parses, says what it is, and holds no key that is not there."""

import re
import shlex
from functools import cache
from pathlib import Path

import pytest
import yaml

from fl_lightning.cli.experiment import experiment_parser, plain_config, use_recorded_paths
from fl_lightning.cli.main import main
from fl_lightning.core.config import config_path, flatten, shipped

CONFIGS = [Path(config_path(name)) for name in shipped("configs")]

# What the papers say of all of a method's experiments, by the keys of the resolved config.
PAPERS = {
    "FedSKC": {
        "rounds": 200,
        "scenario.clients": 20,
        "clients_per_round": 8,
        "batch_size": 64,
        "trainer.max_epochs": 10,
        "optimizer": "torch.optim.SGD",
        "optimizer.lr": 0.01,
        "optimizer.momentum": 0.0,
        "scenario.partition.alpha": 0.2,
        "algorithm.tau": 0.08,
        "algorithm.similar_clients": 1,
        "algorithm.beta": 0.95,
    },
    "FedDW": {
        "scenario.clients": 10,
        "trainer.max_epochs": 5,
        "optimizer": "torch.optim.Adam",
        "optimizer.lr": 0.001,
        "model.head.classifier": "bias_free",
        "model.head.hidden": [],
    },
    "FedSiamDA": {
        "scenario.partition.alpha": 0.5,
        "batch_size": 64,
        "trainer.max_epochs": 5,
        "optimizer": "torch.optim.SGD",
        "optimizer.lr": 0.1,
        "optimizer.momentum": 0.9,
        "optimizer.weight_decay": 1e-5,
        "model": "fl_lightning.models.ResNet50",
        "model.head.projection": 256,
        "algorithm.mu": 0.1,
        "algorithm.stop_gradient": True,
        "algorithm.aggregation": "dual",
    },
    "CwFedAvg": {
        "rounds": 1000,
        "scenario.clients": 20,
        "clients_per_round": None,
        "scenario.local_test": 0.25,
        "batch_size": 10,
        "trainer.max_epochs": 1,
        "optimizer": "torch.optim.SGD",
        "optimizer.lr": 0.001,
        "evaluation.client_model": "received",
    },
    "UAPDFL": {
        "rounds": 150,
        "scenario.clients": 30,
        "clients_per_round": None,
        "batch_size": 50,
        "optimizer": "torch.optim.SGD",
        "optimizer.lr": 0.05,
        "optimizer.momentum": 0.5,
        "round_lr_scheduler": "torch.optim.lr_scheduler.ExponentialLR",
        "round_lr_scheduler.gamma": 0.95,
        "algorithm.n_com": 5,
        "model": "fl_lightning.models.CNN4",
    },
}

# Every dataset, and setting, of each paper's tables.
EXPERIMENTS = {
    "fedskc": ("cifar10", "cifar100", "cifar10_lt", "cifar100_lt", "emnist", "fc100"),
    "feddw_practical": ("mnist", "cifar10", "cifar100", "imdb"),
    "feddw_pathological": ("mnist", "cifar10", "cifar100", "imdb"),
    "fedsiam_da": ("cifar10", "cifar100", "tinyimagenet"),
    "cwfedavg_practical": ("mnist", "cifar10", "cifar100"),
    "cwfedavg": ("agnews",),
    "cwfedavg_pathological": ("mnist", "cifar10", "cifar100"),
    "ua_pdfl": ("cifar10", "cifar100", "svhn", "pathmnist"),
}

pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A working folder that holds no config, so that names are those of the package."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(params=CONFIGS, ids=lambda path: path.stem)
def config(request):
    return request.param


parser = cache(experiment_parser)


@cache
def resolved(name, overrides=""):
    """The config as `fit` takes it."""
    given = parser().parse_args(["--config", config_path(name), *shlex.split(overrides)])
    return plain_config(given, parser())


def keys(config):
    """The resolved config by dotted keys as on the command line; the key of a class has its path."""
    found = flatten(resolved(config))
    return found | dict(class_paths(resolved(config)))


def class_paths(value, prefix=""):
    if isinstance(value, dict):
        if "class_path" in value:
            yield prefix, value["class_path"]
        for name, inner in value.items():
            yield from class_paths(inner, prefix if name == "init_args" else f"{prefix}.{name}".lstrip("."))


def other_rows(config):
    """Overrides that a config's comments name: `# --key value: which row of the paper that is.`"""
    return re.findall(r"^# (--.+?): .+[.]$", config.read_text(), re.M)


def plain(name):
    """A method's name without case and hyphens."""
    return re.sub(r"[-_]", "", name).lower()


def class_name(value):
    """The class in either way of writing it: `MLP`, or `class_path: MLP`."""
    return (value["class_path"] if isinstance(value, dict) else value).rpartition(".")[2]


def leaves(value, path=()):
    """Every key that holds a value, with the value; a bare class name is a class path without arguments."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for index, inner in enumerate(value):
            yield from leaves(inner, (*path, index))
    else:
        yield path, value


def test_some_are_shipped():
    assert {"digits_fedavg.yaml", "digits_fedskc.yaml"} <= {path.name for path in CONFIGS}


@pytest.mark.parametrize(("method", "datasets"), EXPERIMENTS.items(), ids=EXPERIMENTS)
def test_each_data_set_of_a_paper_has_one(method, datasets):
    assert {f"{dataset}_{method}.yaml" for dataset in datasets} <= {path.name for path in CONFIGS}


def test_each_method_has_a_twin_on_digits():
    methods = {class_name(yaml.safe_load(path.read_text())["algorithm"]) for path in CONFIGS}
    on_digits = [path for path in CONFIGS if path.name.startswith("digits_")]
    assert methods >= PAPERS.keys()
    assert {class_name(yaml.safe_load(path.read_text())["algorithm"]) for path in on_digits} == methods


@pytest.mark.parametrize("name", ["digits_fedavg.yaml", "cifar100_feddw_practical.yaml"])
def test_it_is_printed_as_it_is_taken(name, capsys):
    with pytest.raises(SystemExit) as end:
        main(["fit", "--config", name, "--print_config"])
    assert end.value.code in (0, None)
    out, err = capsys.readouterr()
    assert err == ""
    printed = use_recorded_paths(yaml.safe_load(out))  # which names what the top has by its shortest path
    assert {key: value for key, value in printed.items() if key in resolved(name)} == resolved(name)


@pytest.mark.fast_cases(7)
@pytest.mark.parametrize("name", [path.name for path in CONFIGS if not path.name.startswith("digits_")])
def test_it_has_the_papers_own_numbers(name):
    """FedAvg's configs are of several papers' settings, and no paper's of the five."""
    method = class_name(resolved(name)["algorithm"])
    paper = PAPERS[method] if method != "FedAvg" else {}
    taken = keys(name)
    assert {key: taken.get(key, "missing") for key in paper} == paper


@pytest.mark.parametrize(
    ("config", "alpha", "per_round", "rounds", "batch"),
    [
        (f"{dataset}_feddw_{setting}.yaml", *split, *((10, 512) if dataset == "imdb" else (50, 128)))
        for dataset in ("mnist", "cifar10", "cifar100", "imdb")
        for setting, split in {"practical": (0.5, None), "pathological": (0.1, 5)}.items()
    ],
)
def test_feddw_settings_differ_as_in_the_paper(config, alpha, per_round, rounds, batch):
    taken = keys(config)
    assert taken["scenario.partition.alpha"] == alpha
    assert (taken["clients_per_round"], taken["rounds"], taken["batch_size"]) == (per_round, rounds, batch)
    assert taken["algorithm.mu"] == (10 if config.startswith("cifar100") else 0.1)
    assert taken["model.head.mapping"] == ([128, 128] if config.startswith("imdb") else [256, 128])


@pytest.mark.parametrize("overrides", ["", "--scenario.partition Pathological"])
def test_cwfedavgs_fedavg_differs_in_the_method_alone(overrides):
    one, other = (resolved(f"agnews_{method}.yaml", overrides) for method in ("fedavg", "cwfedavg"))
    assert one["evaluation"]["client_model"] == "received"
    assert {key for key in one if one[key] != other[key]} == {"algorithm"}


@pytest.mark.fast_cases(15)
def test_what_a_comment_calls_another_row_is_an_override(config):
    """It parses, and it changes something."""
    assert len(other_rows(config)) == config.read_text().count("# --")
    for override in other_rows(config):
        assert resolved(config.name, override) != resolved(config.name), override


@pytest.mark.fast_cases(34)
def test_it_parses_and_each_of_its_keys_counts(config):
    """What the file says is what the run gets: no key is dropped, renamed or overruled by a default."""
    written, taken = yaml.safe_load(config.read_text()), resolved(config.name)
    written.pop("baselines", None)  # they count where --algorithm names one: test_baselines.py
    for path, value in leaves(written):
        found = taken
        for key in path:
            there = range(len(found)) if isinstance(found, list) else found
            assert key in there, f"{path} is not in the resolved config"
            found = found[key]
        if isinstance(found, dict) or path[-1] == "class_path":
            found, value = class_name(found), class_name(value)
        assert found == value, path


def test_its_first_line_describes_it(config):
    first = config.read_text().splitlines()[0]
    assert re.fullmatch(r"# \S.{20,}[.]", first)
    assert plain(class_name(yaml.safe_load(config.read_text())["algorithm"])) in plain(first.split(" on ")[0])


def test_its_name_is_of_the_dataset_and_the_algorithm(config):
    """A long tail is `_lt`; a setting may follow the method's name, which is told without case and underscores."""
    written = yaml.safe_load(config.read_text())
    dataset = class_name(written["scenario"]["dataset"]).lower() + ("_lt" if "long_tail" in written["scenario"] else "")
    method = re.fullmatch(rf"{dataset}_(.+?)(_practical|_pathological)?", config.stem)
    assert method is not None
    assert plain(method[1]) == plain(class_name(written["algorithm"]))


def test_its_experiment_is_all_in_the_file(config):
    """Seed, data and method are said or default; nothing ties the config to one machine or one run."""
    written = yaml.safe_load(config.read_text())
    assert {"scenario", "model", "algorithm", "rounds"} <= written.keys()
    assert not {"run_dir", "resume", "config"} & written.keys()
    assert not [value for _, value in leaves(written) if isinstance(value, str) and Path(value).is_absolute()]
