"""Each included config parses, describes itself, and has only keys that exist."""

import re
import shlex
from functools import cache
from pathlib import Path

import pytest
import yaml

from fl_lightning.cli.experiment import experiment_parser, plain_config, use_recorded_paths
from fl_lightning.cli.main import main
from fl_lightning.core.config import flatten
from fl_lightning.core.config_files import config_path, derived_configs, shipped

ROOT = Path(__file__).parents[2]
CONFIGS = [Path(config_path(name)) for name in shipped("configs")]

# The settings that a paper has in all of its experiments, by keys of the resolved config.
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

# The datasets in the tables of each paper, by method and setting.
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

pytestmark = pytest.mark.usefixtures("empty_folder")


@pytest.fixture
def empty_folder(tmp_path, monkeypatch):
    """Change to an empty folder, so that names of configs refer to the package."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(params=CONFIGS, ids=lambda path: path.stem)
def config(request):
    return request.param


parser = cache(experiment_parser)


@cache
def resolved(name, overrides=""):
    """Return the complete config of `fit`."""
    given = parser().parse_args(["--config", config_path(name), *shlex.split(overrides)])
    return plain_config(given, parser())


def keys(config):
    """Return the resolved config by dotted keys, with the path of a class under the key of the class."""
    found = flatten(resolved(config))
    return found | dict(class_paths(resolved(config)))


def class_paths(value, prefix=""):
    """Yield the dotted key and the path of each class in a config."""
    if isinstance(value, dict):
        if "class_path" in value:
            yield prefix, value["class_path"]
        for name, inner in value.items():
            yield from class_paths(inner, prefix if name == "init_args" else f"{prefix}.{name}".lstrip("."))


def options_in_comments(config):
    """Return the options in comments such as `# --key value: Table 1, row 2.`"""
    return re.findall(r"^# (--.+?): .+[.]$", config.read_text(), re.M)


def plain(name):
    """Return the name of a method in lower case and without hyphens."""
    return re.sub(r"[-_]", "", name).lower()


def class_name(value):
    """Return the name of a class that is written as `MLP` or as `class_path: MLP`."""
    return (value["class_path"] if isinstance(value, dict) else value).rpartition(".")[2]


def leaves(value, path=()):
    """Yield the path and the value of each key of a config that has no keys below it."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for index, inner in enumerate(value):
            yield from leaves(inner, (*path, index))
    else:
        yield path, value


@pytest.mark.parametrize(("method", "datasets"), EXPERIMENTS.items(), ids=EXPERIMENTS)
def test_each_dataset_of_a_paper_has_a_config(method, datasets):
    assert {f"{dataset}_{method}.yaml" for dataset in datasets} <= {path.name for path in CONFIGS}


@pytest.mark.parametrize("page", ["README.md", "docs/getting-started.md", "docs/running.md"])
def test_a_config_that_a_page_runs_is_a_file(page):
    named = {*re.findall(r"--config[ =]([a-z0-9_]+)(?:\.yaml)?(?=\s)", (ROOT / page).read_text())}
    assert named
    assert not {f"{name}.yaml" for name in named} & derived_configs().keys()


def test_digits_with_fedskc_is_digits_with_fedavg_and_another_method():
    """The README runs this file. Before it was a file, it was derived in this way."""
    derived = (ROOT / "configs" / "digits_fedavg.yaml").read_text().replace("FedAvg", "FedSKC")
    assert yaml.safe_load((ROOT / "configs" / "digits_fedskc.yaml").read_text()) == yaml.safe_load(derived)


def test_the_list_says_which_configs_are_no_files(capsys):
    assert main(["list", "configs"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()[1:]}
    derived = {name for name, line in lines.items() if "No file of its own: digits_fedavg.yaml" in line}
    assert (
        derived == derived_configs().keys() == lines.keys() - {path.name for path in (ROOT / "configs").glob("*.yaml")}
    )
    assert lines["digits_ccvr.yaml"].endswith("digits_fedavg.yaml with --algorithm CCVR.")


def test_each_method_has_a_config_on_digits():
    methods = {class_name(yaml.safe_load(path.read_text())["algorithm"]) for path in CONFIGS}
    on_digits = [path for path in CONFIGS if path.name.startswith("digits_")]
    assert methods >= PAPERS.keys()
    assert {class_name(yaml.safe_load(path.read_text())["algorithm"]) for path in on_digits} == methods


@pytest.mark.parametrize("name", ["digits_fedavg.yaml", "cifar100_feddw_practical.yaml"])
def test_print_config_prints_the_resolved_config(name, capsys):
    with pytest.raises(SystemExit) as end:
        main(["fit", "--config", name, "--print_config"])
    assert end.value.code in (0, None)
    out, err = capsys.readouterr()
    assert err == ""
    printed = use_recorded_paths(yaml.safe_load(out))  # the printed config has short class paths
    assert {key: value for key, value in printed.items() if key in resolved(name)} == resolved(name)


@pytest.mark.fast_cases(7)
@pytest.mark.parametrize("name", [path.name for path in CONFIGS if not path.name.startswith("digits_")])
def test_a_config_has_the_numbers_of_its_paper(name):
    """Configs of FedAvg have the settings of various papers and are not checked."""
    method = class_name(resolved(name)["algorithm"])
    paper = PAPERS[method] if method != "FedAvg" else {}
    resolved_keys = keys(name)
    assert {key: resolved_keys.get(key, "missing") for key in paper} == paper


@pytest.mark.parametrize(
    ("config", "alpha", "per_round", "rounds", "batch"),
    [
        (f"{dataset}_feddw_{setting}.yaml", *split, *((10, 512) if dataset == "imdb" else (50, 128)))
        for dataset in ("mnist", "cifar10", "cifar100", "imdb")
        for setting, split in {"practical": (0.5, None), "pathological": (0.1, 5)}.items()
    ],
)
def test_feddw_settings_differ_as_in_the_paper(config, alpha, per_round, rounds, batch):
    resolved_keys = keys(config)
    assert resolved_keys["scenario.partition.alpha"] == alpha
    assert (resolved_keys["clients_per_round"], resolved_keys["rounds"], resolved_keys["batch_size"]) == (
        per_round,
        rounds,
        batch,
    )
    assert resolved_keys["algorithm.mu"] == (10 if config.startswith("cifar100") else 0.1)
    assert resolved_keys["model.head.mapping"] == ([128, 128] if config.startswith("imdb") else [256, 128])


@pytest.mark.parametrize("overrides", ["", "--scenario.partition Pathological"])
def test_fedavg_on_agnews_differs_from_cwfedavg_only_in_the_method(overrides):
    one, other = (resolved(f"agnews_{method}.yaml", overrides) for method in ("fedavg", "cwfedavg"))
    assert one["evaluation"]["client_model"] == "received"
    assert {key for key in one if one[key] != other[key]} == {"algorithm"}


@pytest.mark.fast_cases(15)
def test_the_options_in_comments_change_the_config(config):
    """Each option parses and changes the config."""
    assert len(options_in_comments(config)) == config.read_text().count("# --")
    for override in options_in_comments(config):
        assert resolved(config.name, override) != resolved(config.name), override


@pytest.mark.fast_cases(34)
def test_a_config_parses_and_all_its_keys_are_used(config):
    """No key of the file is dropped, renamed or replaced by a default."""
    written, resolved_keys = yaml.safe_load(config.read_text()), resolved(config.name)
    written.pop("baselines", None)  # used only with --algorithm: test_baselines.py
    for path, value in leaves(written):
        found = resolved_keys
        for key in path:
            available = range(len(found)) if isinstance(found, list) else found
            assert key in available, f"{path} is not in the resolved config"
            found = found[key]
        if isinstance(found, dict) or path[-1] == "class_path":
            found, value = class_name(found), class_name(value)
        elif isinstance(found, list):  # it may be of classes
            found = [class_name(one) if isinstance(one, dict) else one for one in found]
        assert found == value, path


def test_the_first_line_describes_the_config(config):
    first = config.read_text().splitlines()[0]
    assert re.fullmatch(r"# \S.{20,}[.]", first)
    assert plain(class_name(yaml.safe_load(config.read_text())["algorithm"])) in plain(first.split(" on ")[0])


def test_the_file_name_has_the_dataset_and_the_method(config):
    """The name has `_lt` for a long tail, and may end in a setting. Case and underscores do not matter."""
    written = yaml.safe_load(config.read_text())
    dataset = class_name(written["scenario"]["dataset"]).lower() + ("_lt" if "long_tail" in written["scenario"] else "")
    method = re.fullmatch(rf"{dataset}_(.+?)(_practical|_pathological|_mixed)?", config.stem)
    assert method is not None
    assert plain(method[1]) == plain(class_name(written["algorithm"]))


def test_a_config_is_complete_and_independent_of_the_machine(config):
    """The file has all main keys, no key of a single run and no absolute path."""
    written = yaml.safe_load(config.read_text())
    assert {"scenario", "model", "algorithm", "rounds"} <= written.keys()
    assert not {"run_dir", "resume", "config"} & written.keys()
    assert not [value for _, value in leaves(written) if isinstance(value, str) and Path(value).is_absolute()]
