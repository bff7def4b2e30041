"""Baselines of a config: `--algorithm NAME` adds the baseline's settings."""

import importlib
import inspect
from pathlib import Path

import pytest
import torch
import yaml
from commands import rows, run

from fl_lightning.algorithms import MOON, ModelContrast
from fl_lightning.analysis.baselines import expand_baseline, merge_baselines
from fl_lightning.cli.command_line import read_command_line
from fl_lightning.cli.commands.fit import expand
from fl_lightning.cli.experiment import experiment_parser, plain_config
from fl_lightning.cli.main import main
from fl_lightning.core.config_files import read_configs

CONFIGS = Path(__file__).parents[2] / "configs"
WITH_BASELINES = {
    path: yaml.safe_load(path.read_text())["baselines"]
    for path in sorted(CONFIGS.glob("*.yaml"))
    if "\nbaselines:" in path.read_text()
}

RESET = "--algorithm=fl_lightning.algorithms.Algorithm"

TINY = """# tiny
rounds: 1
scenario: {dataset: Digits, partition: IID, clients: 3}
model: {class_path: MLP, init_args: {hidden: [8]}}
algorithm: {class_path: FedSKC, init_args: {tau: 0.5}}
trainer: {accelerator: cpu}
logger: null
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("more").mkdir()
    Path("more/baselines.yaml").write_text(
        "FedProx: {algorithm.mu: 0.1, model.hidden: [7]}\nUniform: {algorithm: FedAvg, algorithm.weighting: uniform}\n"
    )
    Path("table.yaml").write_text(
        TINY + "baselines: [more/baselines.yaml, {FedProx: {algorithm.mu: 0.5}, Plain: {algorithm: FedAvg}}]\n"
    )
    return tmp_path


def expanded(*words):
    return expand_baseline(read_configs(["fit", *words])).words[1:]


def test_a_baseline_is_replaced_by_its_options(here):
    prox = [RESET, "--algorithm=FedProx", "--algorithm.mu=0.5", "--model.hidden=[7]"]
    uniform = [RESET, "--algorithm=FedAvg", "--algorithm.weighting=uniform"]
    config = "--config=table.yaml"
    assert expanded(config, "--algorithm=FedProx", "--rounds=2") == [config, *prox, "--rounds=2"]
    assert expanded("--algorithm=MOON", "--algorithm=FedProx", config) == ["--algorithm=MOON", *prox, config]
    assert expanded(config, "--algorithm=Uniform") == [config, *uniform]
    assert expanded(config, "--algorithm=Plain") == [config, RESET, "--algorithm=FedAvg"]


def test_options_of_the_command_line_override_a_baseline(here):
    Path("mine.yaml").write_text("baselines: {Long: {algorithm: FedAvgM, rounds: 75, seed: 3}}\n")
    config = ["--config=table.yaml", "--config=mine.yaml"]
    long = [RESET, "--algorithm=FedAvgM", "--seed=3"]
    assert expanded(*config, "--rounds=2", "--algorithm=Long") == [*config, "--rounds=2", *long]
    first = "--algorithm=MOON"  # a later algorithm replaces an earlier one, also that of a baseline
    assert expanded(*config, first, "--rounds=2", "--algorithm=Long") == [*config, first, "--rounds=2", *long]


@pytest.mark.parametrize("words", [["--algorithm=FedSKC"], ["--algorithm.mu=3"], [], ["--algorithm"]])
def test_a_line_without_a_baseline_does_not_change(here, words):
    assert expanded("--config=table.yaml", *words) == ["--config=table.yaml", *words]
    assert expanded(*words) == words


def test_later_configs_add_to_the_baselines(here):
    Path("mine.yaml").write_text("baselines: {FedProx: {algorithm.mu: 9, seed: 3}}\n")
    words = expanded("--config=table.yaml", "--config=mine.yaml", "--algorithm=FedProx")
    assert words[2:] == [RESET, "--algorithm=FedProx", "--algorithm.mu=9", "--model.hidden=[7]", "--seed=3"]
    own = ["--config=table.yaml", "--config=mine.yaml", "--algorithm=FedSKC"]
    assert expanded(*own) == own  # FedSKC is still the configs' own algorithm


@pytest.mark.thorough
def test_a_run_of_a_baseline_can_be_resumed(here):
    code, _, err = run("fit", "--config", "table.yaml", "--algorithm", "FedProx", "--run_dir", "run")
    assert (code, err) == (0, "")
    config = yaml.safe_load(Path("run/config.yaml").read_text())
    assert config["algorithm"]["class_path"].endswith("FedProx")
    assert config["algorithm"]["init_args"]["mu"] == 0.5
    assert config["model"]["init_args"]["hidden"] == [7]
    assert "baselines" not in config
    assert run("fit", "--resume", "run", "--rounds", "2")[0] == 0
    assert len(rows(Path("run"))) == 2
    code, _, err = run("fit", "--config", "table.yaml", "--algorithm", "FedProx", "--resume", "run", "--rounds", "2")
    assert (code, err) == (0, "")


def algorithm_of(*words):
    """Return the algorithm of a command line."""
    parser = experiment_parser()
    return plain_config(parser.parse_args(expand(read_command_line("fit", words)).words), parser)["algorithm"]


def test_another_algorithm_starts_from_its_own_defaults(here):
    """FedSKC and MOON both have `tau`. Only options that all algorithms share keep the config's values."""
    Path("own.yaml").write_text(TINY.replace("{tau: 0.5}", "{tau: 0.01, buffers: drop}"))
    for words in (["--algorithm", "MOON"], ["--algorithm=fl_lightning.algorithms.MOON"]):
        options = algorithm_of("--config", "own.yaml", *words)["init_args"]
        assert (options["tau"], options["buffers"]) == (MOON().loss_terms[0].tau, "drop")
    for words, tau in ((["FedSKC", "--algorithm.beta", "0.5"], 0.01), (["MOON", "--algorithm.tau", "2"], 2)):
        assert algorithm_of("--config", "own.yaml", "--algorithm", *words)["init_args"]["tau"] == tau


@pytest.mark.parametrize(
    ("baselines", "message"),
    [
        ("nowhere.yaml", "baselines: nowhere.yaml does not exist. Give the path relative to the config's own folder"),
        ("broken.yaml", "baselines: broken.yaml is no readable YAML: line 1: while parsing"),
        ("7", "baselines: odd.yaml needs lines `NAME: {key: value, ...}`"),
        ("{FedProx: 3}", "baselines: odd.yaml needs lines `NAME: {key: value, ...}`"),
    ],
)
def test_bad_baselines_are_reported(here, baselines, message):
    Path("broken.yaml").write_text("FedProx: {")
    Path("odd.yaml").write_text(TINY + f"baselines: {baselines}\n")
    code, _, err = run("fit", "--config", "odd.yaml", "--algorithm", "FedProx")
    assert code == 2
    assert err.startswith(f"fl-lightning: error: {message}")
    assert err.count("\n") == 1


def shipped():
    """Yield each shipped baseline, with the first config that has it."""
    tables = {}
    for path, named in WITH_BASELINES.items():
        tables.setdefault(repr(named), (path, named))
    for path, named in tables.values():
        names = {}
        for part in named if isinstance(named, list) else [named]:
            names |= yaml.safe_load((CONFIGS / part).read_text()) if isinstance(part, str) else part
        yield from (pytest.param(path.name, name, id=f"{path.stem}-{name}") for name in names)


@pytest.fixture(scope="module")
def parser():
    return experiment_parser()


def baselines_of(config):
    return merge_baselines({}, yaml.safe_load((CONFIGS / config).read_text())["baselines"], CONFIGS / config)


@pytest.mark.fast_cases(8)
@pytest.mark.parametrize(("config", "name"), list(shipped()))
def test_every_baseline_of_a_shipped_config_parses(parser, config, name):
    """A baseline does not take over options of the config's own method with the same name."""
    words = expand_baseline(read_configs([f"--config={config}", f"--algorithm={name}"])).words
    parsed = parser.parse_args(words).algorithm
    package, _, method = parsed.class_path.rpartition(".")
    assert package.startswith("fl_lightning")
    if method != yaml.safe_load((CONFIGS / config).read_text())["algorithm"]["class_path"]:
        parameters = inspect.signature(getattr(importlib.import_module(package), method)).parameters
        options = {key: plain(value) for key, value in parsed.init_args.items() if key != "loss_terms"}
        named = {key.removeprefix("algorithm.") for key in baselines_of(config)[name]}
        changed = {key for key, value in options.items() if value != plain(parameters[key].default)}
        assert changed <= named


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("name", ["FedBABU", "FedRep", "FedPer", "MOON", "MOON+DW"])
@pytest.mark.parametrize("config", sorted(path.name for path in CONFIGS.glob("*_feddw_practical.yaml")))
def test_methods_with_parts_of_the_network_have_the_last_layer_in_feddws_tables(parser, config, name):
    """As in FedDW's code: the mapping layers before it are shared and trained, and MOON compares their outputs."""
    words = expand_baseline(read_configs([f"--config={config}", f"--algorithm={name}"])).words
    made = parser.instantiate(parser.parse_args(words))
    shape = (1, 28, 28) if "mnist" in config else (3, 32, 32) if "cifar" in config else (200,)
    network = made.model(in_shape=shape, num_classes=10)
    parts = named_layers(name, made.algorithm)
    *_, last = (child for child in network.modules() if isinstance(child, torch.nn.Linear))
    assert isinstance(network.head[-1], torch.nn.Linear)
    assert {id(p) for key, p in network.named_parameters() if key.startswith(parts)} == {*map(id, last.parameters())}


def named_layers(name, method):
    """Return the names of the layers that a baseline treats differently."""
    if name.startswith("MOON"):
        (layer,) = (term.layer for term in method.loss_terms if isinstance(term, ModelContrast))
        return (layer,)
    return method.frozen if name == "FedBABU" else method.personal


def plain(value):
    return list(value) if isinstance(value, tuple) else value


PARTS = """
algorithm:
  class_path: FedProx
  init_args:
    loss_terms: [{class_path: ModelContrast}, NotTrueDistillation]
    aggregator: {class_path: ServerMomentum, init_args: {beta: 0.5}}
"""
DROPPED = {
    "FedAvg": [],
    "FedNova": [
        "algorithm.aggregator: FedNova does not have this option, so the config's value is dropped (ServerMomentum)"
    ],
    "own_parts.Own": [
        "algorithm.loss_terms: Own does not have this option, so the config's value is dropped "
        "(ModelContrast, NotTrueDistillation)",
        "algorithm.aggregator: Own does not have this option, so the config's value is dropped (ServerMomentum)",
    ],
}


@pytest.fixture
def parts(tmp_path, monkeypatch):
    """Enter a folder with a config that sets loss terms and an aggregator, and a method that has neither option."""
    (tmp_path / "parts.yaml").write_text(PARTS)
    own = "class Own(Algorithm):\n    def __init__(self) -> None:\n        super().__init__()\n"
    (tmp_path / "own_parts.py").write_text(f"from fl_lightning import Algorithm\n\n\n{own}")
    monkeypatch.chdir(tmp_path)
    return ["fit", "--config", "digits_fedavg.yaml", "--config", "parts.yaml"]


prints_warnings = pytest.mark.filterwarnings("default:algorithm")


@prints_warnings
@pytest.mark.parametrize("name", DROPPED)
def test_options_of_the_config_that_the_algorithm_does_not_have_are_named(name, parts, capsys):
    assert main([*parts, "--algorithm", name, "--fast"]) == 0
    assert warnings_in(capsys) == DROPPED[name]


@pytest.mark.thorough
@prints_warnings
def test_a_multirun_names_the_dropped_options(parts, capsys):
    reduced = ["--rounds", "1", "--trainer.max_steps", "1", "--logger", "null"]
    assert main([*parts, *reduced, "--multirun", "algorithm=FedNova"]) == 0
    assert warnings_in(capsys) == DROPPED["FedNova"]


def test_an_option_that_a_later_config_resets_is_not_dropped(parts, capsys):
    Path("reset.yaml").write_text("algorithm: {class_path: FedProx, init_args: {aggregator: null, loss_terms: []}}\n")
    assert main([*parts, "--config", "reset.yaml", "--algorithm", "own_parts.Own", "--fast"]) == 0
    assert warnings_in(capsys) == []


def warnings_in(capsys):
    start = "fl-lightning: warning: "
    return [line.removeprefix(start) for line in capsys.readouterr().err.splitlines() if line.startswith(start)]
