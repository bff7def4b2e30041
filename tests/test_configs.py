"""Every shipped config parses, says what it is, and holds no key that is not there."""

import re
from pathlib import Path

import pytest
import yaml

from fl_lightning.cli import main

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))

pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A working folder that holds no config, so that names are those of the package."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(params=CONFIGS, ids=lambda path: path.stem)
def config(request):
    return request.param


def resolved(name, capsys):
    """The config as `fit` takes it."""
    with pytest.raises(SystemExit) as end:
        main(["fit", "--config", name, "--print_config"])
    assert end.value.code in (0, None)
    out, err = capsys.readouterr()
    assert err == ""
    return yaml.safe_load(out)


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


def test_it_parses_and_each_of_its_keys_counts(config, capsys):
    """What the file says is what the run gets: no key is dropped, renamed or overruled by a default."""
    written, taken = yaml.safe_load(config.read_text()), resolved(config.name, capsys)
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
    algorithm = class_name(yaml.safe_load(config.read_text())["algorithm"])
    assert algorithm in first


def test_its_name_is_of_the_dataset_and_the_algorithm(config):
    """The dataset may carry a suffix, such as `lt` for a long tail; so may the algorithm."""
    written = yaml.safe_load(config.read_text())
    dataset = class_name(written["scenario"]["dataset"]).lower()
    algorithm = class_name(written["algorithm"]).lower()
    assert re.fullmatch(rf"{dataset}[a-z0-9]*_{algorithm}(_[a-z0-9_]+)?", config.stem)


def test_its_experiment_is_all_in_the_file(config):
    """Seed, data and method are said or default; nothing ties the config to one machine or one run."""
    written = yaml.safe_load(config.read_text())
    assert {"scenario", "model", "algorithm", "rounds"} <= written.keys()
    assert not {"run_dir", "resume", "config"} & written.keys()
    assert not [value for _, value in leaves(written) if isinstance(value, str) and Path(value).is_absolute()]
