"""The page for the package index, and the list of the public API."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import yaml

import fl_lightning
from fl_lightning.cli import catalogue
from fl_lightning.cli.commands import COMMANDS
from fl_lightning.cli.options import options_of
from fl_lightning.cli.unknown_names import COMMAND_LINE_OPTIONS, NOT_IN_CONFIGS
from fl_lightning.core.references import PACKAGE, read_references

ROOT = Path(__file__).parents[2]
PROJECT = (ROOT / "pyproject.toml").read_text()
STABILITY = (ROOT / "docs" / "stability.md").read_text()


def setup_script():
    spec = importlib.util.spec_from_file_location("setup_script", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_citation_file_is_complete():
    """The keys that version 1.2.0 of the format requires, and values that agree with the package's."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == fl_lightning.__version__
    assert f'license = "{citation["license"]}"' in PROJECT
    reference = read_references()[PACKAGE]
    assert reference.title == citation["title"]
    assert reference.authors == tuple(author["name"] for author in citation["authors"])


def test_the_version_is_the_same_everywhere():
    assert f'version = "{fl_lightning.__version__}"' in PROJECT


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib")
def test_the_metadata_name_typing_and_the_tested_versions():
    import tomllib

    project = tomllib.loads(PROJECT)["project"]
    assert "Typing :: Typed" in project["classifiers"]
    assert all(url.startswith("https://example.org/") for url in project["urls"].values())  # placeholders, as it says
    oldest = project["requires-python"].removeprefix(">=")
    assert f"Programming Language :: Python :: {oldest}" in project["classifiers"]


def test_links_are_absolute_where_the_index_shows_the_readme():
    script = setup_script()
    text = "[a](docs/a.md#b) ![i](docs/i.svg) [w](https://x.org/y) [h](#here) [f](LICENSE)"
    assert script.absolute_links(text, "https://s") == (
        "[a](https://s/blob/main/docs/a.md#b) ![i](https://s/raw/main/docs/i.svg) [w](https://x.org/y) [h](#here) "
        "[f](https://s/blob/main/LICENSE)"
    )
    page = script.absolute_links((ROOT / "README.md").read_text(), "https://s")
    links = re.findall(r"\]\(([^)]+)\)", page)
    assert len(links) > 30
    assert all(re.match("https?://|#", link) for link in links)


def listed(heading):
    """Return the words of the text block under a heading of the page on stability."""
    return re.search(rf"^## {heading}\n.*?```text\n(.*?)```", STABILITY, re.M | re.S)[1].split()


def test_the_public_api_is_listed():
    """No name, key or command appears or goes unnoticed. `fl-lightning list` has the classes of configs."""
    classes = {name for kind in catalogue.BASES for name in catalogue.classes_of(kind)}
    knowledge = {name for name, home in fl_lightning.HOMES.items() if home == "algorithms"} - classes
    bases = {base.rpartition(".")[2] for base, _, _ in catalogue.BASES.values()}
    stable = set(fl_lightning.__all__) - classes - knowledge | bases | {"SharedKnowledge", "State"}
    assert listed("Python") == sorted(stable, key=str.lower)
    keys = {key.partition(".")[0] for key, one in options_of("fit").items() if "flags" in one}
    assert listed("Config keys") == sorted(keys - NOT_IN_CONFIGS - set(COMMAND_LINE_OPTIONS))
    assert listed("Commands") == sorted(COMMANDS)
