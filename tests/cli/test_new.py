"""`fl-lightning new` writes a project that runs."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from commands import Outcome, contents, run

from fl_lightning.cli.commands.new import TEMPLATES, project_files

DATA = {"images": "Digits", "table": "Table", "text": "TextTable"}
"""The dataset in the config of each kind of data."""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


@pytest.mark.parametrize("data", DATA)
def test_the_config_of_a_new_project_runs(data, here, monkeypatch):
    name = f"fed_{data}"
    outcome = run("new", name, "--data", data)
    assert (outcome.code, outcome.err) == (0, "")
    files = {path.name for path in (here / name).iterdir()}
    assert {f"{name}.py", f"{name}.yaml", f"{name}_sweep.yaml", f"test_{name}.py", "README.md"} <= files
    assert outcome.out.splitlines() == [
        f"wrote {name}/: {', '.join(sorted(files))}",
        f"next: cd {name} && fl-lightning fit --config {name}.yaml",
    ]
    assert not [text for text in contents(here / name).values() if b"my_method" in text or b"MyMethod" in text]
    monkeypatch.chdir(name)
    monkeypatch.delitem(sys.modules, name, raising=False)
    outcome = run("fit", "--config", f"{name}.yaml", "--fast")
    assert (outcome.code, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    assert lines[0] == f"method: Fed{data.capitalize()} with PriorMatching, PowerMean; sends model, class_counts"
    assert lines[1].startswith(f"data: {DATA[data]}, ")


@pytest.mark.thorough
@pytest.mark.parametrize("data", DATA)
def test_a_new_project_passes_its_tests_and_runs_its_readme(data, here, monkeypatch):
    name = f"new_{data}"
    assert run("new", name, "--data", data).code == 0
    monkeypatch.chdir(name)
    sweep = yaml.safe_load(Path(f"{name}_sweep.yaml").read_text())
    sweep["parameters"] = {"algorithm.beta": {"values": [0, 0.1]}}
    Path(f"{name}_sweep.yaml").write_text(yaml.safe_dump(sweep))
    blocks = re.findall(r"```bash\n(.*?)```", Path("README.md").read_text(), re.S)
    commands = [shlex.split(line) for block in blocks for line in block.splitlines()]
    assert [words[0] for words in commands].count("fl-lightning") > 5
    for program, *words in commands:
        if words[:2] == ["fit", "--config"]:
            words += ["--rounds", "1", "--logger", "null"]
        if words[:1] == ["sweep"]:
            words += ["--set", "rounds=1", "--set", "logger=null"]
        outcome = in_this_process(*words) if program == "fl-lightning" else in_a_new_process(program, *words)
        assert outcome.code == 0, f"{words}: {outcome.out}{outcome.err}"
        many = "--multirun" in words or "sweep" in words
        assert many or not outcome.err  # the progress of several runs goes to stderr


def in_this_process(*words):
    """Run a command, which may be a request for help: argparse then ends the program."""
    try:
        return run(*words)
    except SystemExit as end:
        return Outcome(end.code, "", "")


def in_a_new_process(program, *words):
    """Run another program of the environment."""
    ended = subprocess.run([sys.executable, "-m", program, *words], capture_output=True, text=True, check=False)
    return Outcome(ended.returncode, ended.stdout, ended.stderr)


def test_the_readme_names_the_tests_to_change():
    files = project_files("my_method", "images")
    named = re.findall(r"`(test_\w+)`", files["README.md"])
    assert {*named} < {*re.findall(r"^def (test_\w+)", files["test_my_method.py"], re.M)}
    assert len(named) == 4
    assert "--multirun algorithm=FedAvg,my_method.MyMethod --seeds 0 1\n" in files["README.md"]


def test_an_existing_folder_is_refused_and_unchanged(here):
    assert run("new", "fed_new").code == 0
    before = contents(here)
    outcome = run("new", "fed_new", "--data", "table")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.count("\n") == 1
    assert outcome.err.startswith("fl-lightning: error: new: fed_new exists already")
    assert contents(here) == before


MODULE = "cannot be the name of a Python module. Did you mean"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fed-new", f"'fed-new' {MODULE} fed_new?"),
        ("2024 run", f"'2024 run' {MODULE} my_2024_run?"),
        ("class", f"'class' {MODULE} my_class?"),
        ("none", f"'none' {MODULE} my_none?"),
        ("_", f"'_' {MODULE} my_method?"),
        ("methods/fed_new.py", f"'methods/fed_new.py' {MODULE} fed_new_py?"),
        ("torch", "a Python module 'torch' is installed. Choose another name."),
        ("power_mean", "the project has another class PowerMean. Choose another name."),
        ("algorithm", "the project has another class Algorithm. Choose another name."),
    ],
)
def test_a_name_that_does_not_work_is_refused(name, message, here):
    outcome = run("new", name)
    assert (outcome.code, outcome.out, outcome.err) == (2, "", f"fl-lightning: error: new: {message}\n")
    assert not list(here.iterdir())


def test_a_folder_that_cannot_be_written_is_refused(here, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    outcome = run("new", "fed_new")
    assert (outcome.code, outcome.err.count("\n")) == (2, 1)
    assert "new: fed_new cannot be written to: [Errno 28] No space left on device" in outcome.err


def test_names_that_contain_the_templates_name_are_kept():
    files = project_files("A_MyMethod_my_method", "images")
    assert "class AMyMethodMyMethod(Algorithm):" in files["A_MyMethod_my_method.py"]
    assert "class_path: A_MyMethod_my_method.AMyMethodMyMethod\n" in files["A_MyMethod_my_method.yaml"]


def test_each_folder_of_the_templates_is_a_kind_of_data():
    assert {path.name for path in TEMPLATES.iterdir() if path.is_dir() and path.name != "__pycache__"} == {*DATA}
