"""The pages of methods: each has one, with what the code says about it, and its formulas can be typeset."""

import importlib
import inspect
import re
import shlex
from html import unescape
from pathlib import Path
from xml.etree import ElementTree

import pytest

from fl_lightning.cli.catalogue import classes
from fl_lightning.cli.main import main
from fl_lightning.core.references import sources
from fl_lightning.runs.styles import COLOURS, DARK_COLOURS

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "methods"
ABOUT_SEVERAL = {"index.md", "combining.md"}
PAGES = sorted(path for path in FOLDER.glob("*.md") if path.name not in ABOUT_SEVERAL)
METHODS = classes("algorithms")
COMMON = ("loss_terms", "aggregator", "buffers")
SVG = "{http://www.w3.org/2000/svg}"
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
FORMULA = re.compile(r"\$\$(.+?)\$\$|\$(.+?)\$", re.DOTALL)


@pytest.fixture
def reference(monkeypatch):
    """Return the module docs/reference.py."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    return importlib.import_module("reference")


def test_every_method_has_a_page_and_every_page_a_method(reference):
    assert {reference.page_of(kind) for kind in METHODS} == {path.name for path in PAGES}
    assert {kind for path in PAGES for kind in reference.on_page(path.name)} == set(METHODS)


@pytest.mark.parametrize("name", sorted(ABOUT_SEVERAL))
def test_stored_tables_match_the_code(reference, name, tmp_path):
    text = (FOLDER / name).read_text()
    assert reference.filled(FOLDER / name) == text, "run: python docs/reference.py"
    stale = tmp_path / name
    stale.write_text(re.sub(r"^\| \[?\w.+\|$", "| old |", text, flags=re.MULTILINE))
    assert reference.filled(stale) == text


def test_the_overview_says_what_methods_send_keep_and_need(reference):
    columns, _, *lines = reference.overview().splitlines()
    names = columns.strip("| ").split(" | ")
    assert len(lines) == len(METHODS)
    rows = {}
    for line in lines:
        method, *cells = (cell.strip() for cell in re.split(r" \|", line.removeprefix("|"))[:-1])
        rows[re.findall(r"\w+", method)[0]] = dict(zip(names[1:], cells, strict=True))
    assert {name: rows["SCAFFOLD"][name] for name in names[1:] if name != "what it does"} == {
        "family": "global model",
        "year": "2020",
        "sends": "`model + 4 * P + 8`",
        "a client keeps": "its control variate",
        "models": "global",
        "classes": "",
        "engines": "all",
    }
    assert rows["Local"] | {"what it does": ""} == {
        "family": "personalized",
        "year": "",
        "what it does": "",
        "sends": "`0`",
        "a client keeps": "its model",
        "models": "per client",
        "classes": "",
        "engines": "all",
    }
    models = ("FedBN", "Ditto", "IFCA", "PeerAlgorithm", "FedSALoRA", "FedIT")
    assert [rows[name]["models"] for name in models] == [
        *("per client", "global, per client", "per cluster", "global, per client", "per client", "global")
    ]
    assert [rows[name]["classes"] for name in ("FedProto", "FedNTD", "FedProx")] == ["needed", "needed", ""]
    assert [rows[name]["engines"] for name in ("Ditto", "FedRep")] == ["not stacked", "all"]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_page_gets_its_generated_parts(reference, path):
    pytest.importorskip("mkdocs")
    made = importlib.import_module("method_pages").with_generated_parts(path.read_text(), path.name)
    title, text = path.read_text().split("\n", 1)
    assert made.startswith(f"{title}\n\n")
    assert text.strip() in made
    for kind in reference.on_page(path.name):
        section = made.partition(f"\n## Options of {kind.__name__}\n")[2].partition("\n## ")[0]
        own = [name for name in inspect.signature(kind).parameters if name not in COMMON]
        assert all(f"| `{name}` | `" in section for name in own)
        assert all(f"`{name}`" in section.partition("Tuned over: ")[2] for name in kind.search_space)
        assert all(formula in made for formula in reference.bytes_of(kind))
        for paper in sources(kind.__name__):
            assert f"]({paper.url})" in made
            assert f"{{{paper.key}," in made
        assert "\n## On the digits\n" in made
        command = reference.command(kind)
        assert command in made if command else "adapters.yaml" in made


@pytest.mark.fast_cases(2)
@pytest.mark.thorough
@pytest.mark.parametrize("kind", METHODS, ids=lambda kind: kind.__name__)
def test_the_command_of_a_method_runs(reference, kind, tmp_path, monkeypatch, capsys):
    command = reference.command(kind)
    if command is None:
        assert kind.family() == "adapters", "tests/pretrained/test_adapters_page.py runs these"
        return
    monkeypatch.chdir(tmp_path)
    assert main([*shlex.split(command)[1:], "--fast"]) == 0, capsys.readouterr().err
    assert not capsys.readouterr().err


# --- Curves ---


@pytest.fixture
def curves(reference):
    """Return the module docs/curve_figures.py."""
    return importlib.import_module("curve_figures")


def test_every_method_has_a_curve_or_a_reason(curves):
    content = curves.load()
    missing = {kind for kind in METHODS if kind.__name__ not in content["curves"]}
    assert missing == {kind for kind in METHODS if kind.family() in curves.NO_CURVE}, "run: docs/method_curves.py"
    assert content["curves"].keys() <= {kind.__name__ for kind in METHODS}
    assert all(f"{reason}." in curves.figures([kind])[0] for kind in missing for reason in curves.NO_CURVE.values())


def test_the_curves_have_all_rounds_of_the_command(reference):
    stored = importlib.import_module("method_curves")
    rounds = int(re.findall(r"--rounds (\d+)", stored.OPTIONS)[0])
    assert stored.commands().keys() == stored.load()["curves"].keys()
    for metrics in stored.load()["curves"].values():
        assert set(stored.METRICS[1:]) <= metrics.keys() <= set(stored.METRICS)
        assert all(len(values) == rounds and all(0 <= value <= 1 for value in values) for values in metrics.values())


def test_curves_of_other_options_are_measured_again(reference, monkeypatch, tmp_path):
    stored = importlib.import_module("method_curves")
    monkeypatch.setattr(stored, "FILE", tmp_path / "curves.json")
    stored.store({"options": stored.OPTIONS, "date": "2026-01-01", "curves": {"FedAvg": {"global/acc": [0.1, 0.25]}}})
    assert '"global/acc": [0.1, 0.25]' in stored.FILE.read_text()
    assert stored.load()["curves"] == {"FedAvg": {"global/acc": [0.1, 0.25]}}
    monkeypatch.setattr(stored, "OPTIONS", "--rounds 2")
    assert stored.load()["curves"] == {}


@pytest.mark.parametrize(
    ("page", "labels", "lines"),
    [
        ("fedprox.md", ["Test accuracy"], ["FedProx", "FedAvg"]),
        ("fedavg.md", ["Test accuracy"], ["FedAvg"]),
        ("ditto.md", ["Test accuracy (client mean)"], ["Ditto", "FedAvg", "Local"]),
        ("local.md", ["Test accuracy (client mean)"], ["Local", "FedAvg"]),
    ],
)
def test_a_figure_shows_the_methods_of_a_page_and_those_to_compare_with(reference, curves, page, labels, lines):
    (drawn,) = curves.figures(reference.on_page(page))
    (svg,) = ElementTree.fromstring(drawn)
    texts = [element.text for element in svg.iter(f"{SVG}text")]
    assert [text for text in texts if text in lines] == lines
    assert {*labels, "Communication rounds"} <= {*texts}
    title = svg.find(f"{SVG}title")
    assert title is not None
    assert svg.get("role") == "img"
    assert svg.get("aria-label") == title.text
    assert all(name in title.text for name in (*labels, *lines))
    assert "\n" not in drawn
    assert "<style" not in drawn, "it would apply to the whole page"


def test_the_clients_models_of_a_figure_are_those_of_the_config(reference, curves):
    kinds = {kind.__name__: kind for kind in METHODS}
    assert [curves.metric_of(kinds[name]) for name in ("FedProx", "Ditto", "FedAMP")] == [
        *("global/acc", "client/acc_mean", "trained_client/acc_mean")
    ]


def test_a_figure_has_the_colours_of_the_page(curves):
    drawn = "".join(
        curves.figures(METHODS[:1]) + curves.figures([kind for kind in METHODS if kind.__name__ == "Ditto"])
    )
    assert not re.search(r"#000000|DejaVu|(fill|stroke): #(ffffff|dddddd)", drawn)
    styles = (ROOT / "docs" / "site.css").read_text()
    pairs = [(light, dark) for light, dark in zip(COLOURS, DARK_COLOURS, strict=True) if light != dark]
    for light, dark in pairs:
        assert re.findall(rf"--curve-{light[1:]}: (#\w+)", styles) == [light, dark]


# --- Formulas ---


@pytest.fixture
def mathematics(monkeypatch):
    """Return the module docs/mathematics.py."""
    pytest.importorskip("latex2mathml", reason="pip install 'fl-lightning[docs]'")
    monkeypatch.syspath_prepend(ROOT / "docs")
    return importlib.import_module("mathematics")


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.md")), ids=lambda path: path.stem)
def test_every_formula_can_be_typeset(mathematics, path):
    found = FORMULA.findall(FENCE.sub("", path.read_text()))
    assert found or path.stem in ("local", "index")
    for display, inline in found:
        made = mathematics.mathml(display or inline, display=bool(display))
        assert f'display="{"block" if display else "inline"}"' in made
        assert "\\" not in unescape(made)


def test_formulas_become_mathml(mathematics):
    content = r'<p>a <span class="arithmatex">\(\frac{1}{2} &lt; x\)</span></p><div class="arithmatex">\[y^2\]</div>'
    made = mathematics.on_page_content(content)
    assert "<mfrac><mn>1</mn><mn>2</mn></mfrac><mo>&#x0003C;</mo><mi>x</mi>" in re.sub("</?mrow>", "", made)
    assert '<div class="formula"><math' in made
    assert made.count("<math") == 2
    assert "arithmatex" not in made


def test_a_formula_that_cannot_be_typeset_is_an_error(mathematics):
    with pytest.raises(ValueError, match="unknown"):
        mathematics.mathml(r"\frac{1}{2} + \unknown{x}", display=False)
