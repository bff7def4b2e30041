"""The commands and configs in the README and the docs run, and the files that they name exist."""

import importlib
import re
import shlex
from pathlib import Path

import pytest
import yaml

from fl_lightning.cli.catalogue import BASES, classes, classes_of
from fl_lightning.cli.main import main

ROOT = Path(__file__).parents[2]
DOCS = [path for folder in ("docs", "docs/methods") for path in sorted((ROOT / folder).glob("*.md"))]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]

OWN_TESTS = (
    "adapters.md",
    "attacks.md",
    "domains.md",
    "your-data.md",
    "segmentation.md",
    "time.md",
    "private-training.md",
    "language-models.md",
    "privacy.md",
    "clients-that-differ.md",
)


def blocks(language):
    for page in PAGES:
        # The snippets of these pages share files, and have tests of their own.
        if page.name in OWN_TESTS:
            continue
        for block in re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.S):
            yield page.name, block


def commands():
    for page, block in blocks("bash"):
        for line in block.replace("\\\n", " ").splitlines():
            command = line.split("&&")[-1].strip()
            if command.startswith("fl-lightning "):
                yield pytest.param(command, id=f"{page}: {command}")


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("command", list(commands()))
def test_a_documented_command_runs(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command)[1:]
    reads_only = {"--help", "--print_config", "--algorithm.help"} & set(words)
    if words[0] == "fit" and not reads_only:
        words += ["--rounds", "1", "--trainer.max_steps", "1", "--trainer.limit_train_batches", "1", "--logger", "null"]
    if words[0] == "sweep":
        words += ["--count", "1", "--set", "rounds=1", "--set", "trainer.max_steps=1", "--set", "logger=null"]
    if "parts/test" in words:  # which the command before it writes
        Path("parts/test").mkdir(parents=True)
    try:
        code = main(words)
    except SystemExit as end:
        assert reads_only
        code = end.code
    assert code in (0, None)
    out, err = capsys.readouterr()
    assert out
    assert not err


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("snippet", [pytest.param(block, id=page) for page, block in blocks("yaml")])
def test_documented_yaml_is_a_config(snippet, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert yaml.safe_load(snippet)
    Path("own.yaml").write_text(snippet)
    reduced = ["--rounds", "1", "--trainer.max_epochs", "1", "--trainer.limit_train_batches", "1", "--logger", "null"]
    assert main(["fit", "--config", "digits_fedavg.yaml", "--config", "own.yaml", *reduced]) == 0


def test_the_files_that_the_design_names_exist():
    paths = re.findall(r"`((?:[a-z_]+/)+[a-z_]+(?:\.py|/))`", (ROOT / "docs" / "design.md").read_text())
    assert len(paths) > 40
    assert not [path for path in paths if not ((ROOT / "fl_lightning" / path).exists() or (ROOT / path).exists())]


def test_the_table_of_loops_has_a_rounding_error_for_every_method():
    text = (ROOT / "docs" / "correctness.md").read_text()
    rows = re.findall(r"^\| \[(\w+)\]\(.+\) \| .+ \| (\S+) \| `(\w+\.py)` \|$", text, re.M)
    assert {name for name, *_ in rows} == {kind.__name__ for kind in classes("algorithms")}, "run: python docs/loops.py"
    assert all(float(difference) < 1e-12 for _, difference, _ in rows)
    assert all((ROOT / "tests" / "algorithms" / test).is_file() for *_, test in rows)


def test_no_example_is_called_like_a_class_that_a_config_can_name():
    """In a process that knows both, such as a notebook, the short name in a config would be ambiguous."""
    texts = [path.read_text() for path in (*PAGES, *sorted((ROOT / "docs" / "recipes").glob("*.md")))]
    examples = {name for text in texts for name in re.findall(r"^ *class (\w+)", text, re.M)}
    assert "MyFedDyn" in examples
    assert not examples & {name for kind in BASES for name in classes_of(kind)}


def test_figures_of_stored_numbers_agree_with_the_tables_of_their_pages(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    stored = importlib.import_module("stored_figures")
    page = (ROOT / "docs" / "compression.md").read_text()
    last = {line.get_label(): line.get_ydata()[-1] for line in stored.compression().axes[0].lines}
    ends = [float(found) for found in re.findall(r"^\| (?!`(?:QSGD|RandomK)).+? \| ([\d.]+) ± [\d.]+ \|", page, re.M)]
    assert sorted(last.values()) == pytest.approx(sorted(ends), abs=0.006)
    untuned, tuned = (line.get_xdata().tolist() for line in stored.ranks().axes[0].lines)
    assert len(tuned) == len(untuned) == 10
    assert (tuned[-1], untuned[-1]) == (1.67, 1.67), "FedDyn is the best, with and without tuning"
