"""The README's figures and comparison come from the commands that it shows."""

import re
import shlex
from pathlib import Path

import pytest
from commands import run

from fl_lightning.cli import catalogue

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_readme_is_short_and_counts_the_methods():
    assert len(README.split()) < 950
    assert f"| [methods included](docs/methods/index.md) | {len(catalogue.classes_of('algorithms'))} |" in README


@pytest.mark.parametrize(
    ("name", "pattern", "shown"),
    [("license", '^license = "(.+)"', "{}"), ("python", '^requires-python = ">=(.+)"', "{}+")],
)
def test_a_badge_shows_the_value_of_the_package(name, pattern, shown):
    value = shown.format(re.search(pattern, (ROOT / "pyproject.toml").read_text(), re.M)[1])
    badge = (ROOT / "docs" / "images" / f"badge_{name}.svg").read_text()
    assert f"![{name}: {value}](docs/images/badge_{name}.svg)" in README
    assert re.findall(r"<text [^>]+>([^<]+)", badge) == [name, value]


@pytest.mark.thorough
def test_the_commands_of_the_first_result_run_in_their_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```text\n(fl-lightning fit .*?--out runs/first\n.*?)```", README, re.S)
    reduced = ["--rounds", "1", "--trainer.max_steps", "1", "--logger", "null"]
    outputs = []
    for line in block.replace("--seeds 0 1 2", "--seeds 0 1").splitlines():
        for command in line.split(" && "):
            words = shlex.split(command)[1:]
            done = run(*words, *(reduced if words[0] == "fit" else []))
            assert done.code == 0, f"{command}\n{done.err}"
            outputs.append(done.out)
    shown = re.search(r"```text\n(algorithm  seeds .*?)```", README, re.S)[1]
    assert [line.split()[0] for line in shown.splitlines()[2:]] == ["FedAvg", "Ditto", "Local"]
    assert shown.split()[:5] == outputs[1].split()[:5] == ["algorithm", "seeds", "last", "best", "to"]
    assert (tmp_path / "accuracy.svg").exists()
    assert (tmp_path / "partition.svg").exists()
    assert {"li2021ditto", "mcmahan2017communication"} <= set(re.findall(r"\{(\w+),$", outputs[-1], re.M))


@pytest.mark.thorough
def test_the_method_of_the_readme_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("my_method.py").write_text(re.search(r"```python\n(.*?)```", README, re.S)[1])
    words = "fit --config digits_fedavg --algorithm my_method.MyMethod --rounds 1 --trainer.max_steps 1 --logger null"
    assert run(*words.split()).code == 0
