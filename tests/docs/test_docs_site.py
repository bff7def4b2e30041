"""The documentation site: links and anchors are valid, documented sessions run, and the site builds."""

import csv
import importlib
import importlib.util
import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from markdown_it import MarkdownIt

import fl_lightning
from fl_lightning.cli.command_line import join_values
from fl_lightning.cli.main import main
from fl_lightning.cli.options import command_parser
from fl_lightning.core.config_files import read_configs

ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").glob("*.md"))
METHODS = sorted((ROOT / "docs" / "methods").glob("*.md"))
RECIPES = sorted((ROOT / "docs" / "recipes").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *DOCS]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))
FENCE = re.compile(r"^ *```(\w*)(?: title=\"(.+?)\")?\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
REDUCED = ["--rounds", "1", "--trainer.max_steps", "1", "--trainer.limit_train_batches", "1", "--logger", "null"]


def anchors(page):
    """Return the anchors that a code host gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    slugs = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
    assert max(Counter(slugs).values()) == 1, f"{page.name}: two headings of one name"
    return slugs


@pytest.fixture
def work_dir(tmp_path, monkeypatch):
    """Change to an empty folder, and forget the modules in it afterwards."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for path in tmp_path.glob("*.py"):
        sys.modules.pop(path.stem, None)


@pytest.mark.parametrize("page", [*PAGES, *METHODS, *RECIPES, *TUTORIALS], ids=lambda page: page.name)
def test_links_and_anchors_are_valid(page):
    for text, target in re.findall(r"\[([^\]]*)\]\(([^)\s]+)\)", FENCE.sub("", page.read_text())):
        assert not re.search(r"\.(md|py|yaml)$", text), f"a title in place of {text}"
        if not target.startswith(("http://", "https://")):
            path, _, anchor = target.partition("#")
            to = (page.parent / path).resolve() if path else page
            assert to.is_file(), target
            assert to.is_relative_to(ROOT), target
            assert not anchor or anchor in anchors(to), target


@pytest.mark.thorough
def test_the_commands_of_getting_started_run(work_dir, capsys):
    """All commands of getting-started.md run, in one folder and in their order."""
    blocks = FENCE.findall((ROOT / "docs" / "getting-started.md").read_text())
    commands = 0
    for language, title, text in blocks:
        if title:
            Path(title).write_text(text)
        elif language in ("bash", "text"):
            for line in text.splitlines():
                if line.startswith("fl-lightning "):
                    run(line)
                    commands += 1
    capsys.readouterr()
    assert commands == 17
    assert Path("report.html").stat().st_size > 1_000_000
    assert len(Path("runs/first/avg-0/metrics.csv").read_text().splitlines()) == 3, (
        "a header, the round, and that of --resume"
    )


def run(line):
    """Run a documented command, reduced to a few steps."""
    words = shlex.split(line)[1:]
    if {"--print_config", "--algorithm.help"} & set(words):
        try:
            code = main(words)
        except SystemExit as end:
            code = end.code
        assert not code, line
        return
    if "--resume" in words:
        words[words.index("--rounds") + 1] = "2"
    elif words[0] == "fit":
        words += REDUCED
    assert main(words) == 0, line


def session(page, monkeypatch):
    """Write a page's files and run its commands in the working folder, in their order."""
    monkeypatch.syspath_prepend(Path.cwd())
    for language, title, text in FENCE.findall((ROOT / "docs" / page).read_text()):
        for path in Path().glob("*.py"):  # a later snippet with the same title extends the file
            monkeypatch.delitem(sys.modules, path.stem, raising=False)
        importlib.invalidate_caches()
        if title:
            with Path(title).open("a") as file:
                file.write(text)
        elif language == "text":
            for line in text.splitlines():
                run(line)


def columns():
    """Return the columns of the metrics.csv of each run below the working folder."""
    return [path.read_text().splitlines()[0].split(",") for path in sorted(Path().glob("runs/*/*/metrics.csv"))]


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.*(many workers|val_dataloader|LeafSpec).*")
def test_your_algorithm_page_runs(work_dir, monkeypatch, capsys):
    session("your-algorithm.md", monkeypatch)
    counts = Counter(name for header in columns() for name in header if name.startswith("client/train_"))
    assert counts["client/train_loss"] == 7
    assert counts["client/train_confidence_penalty"] == 3, "the term alone, and twice the method"
    assert counts["client/train_proximal"] == 1, "added to the method"
    assert counts["client/train_prior_matching"] == counts["client/train_prototype_pull"] == 1
    assert counts["client/train_my_regularizer"] == 1
    runpy.run_path("run_mine.py", run_name="__main__")
    assert Path("runs/mine/final/model.pt").is_file()
    tests = vars(importlib.import_module("test_mine"))
    names = [name for name in tests if name.startswith("test_")]
    assert len(names) == 5
    for name in names:
        arguments = [work_dir / name] if "tmp_path" in tests[name].__code__.co_varnames else []
        tests[name](*arguments)
    capsys.readouterr()


@pytest.mark.thorough
def test_the_best_settings_of_the_sweeps_page_are_compared(work_dir, capsys):
    page = (ROOT / "docs" / "sweeps.md").read_text()
    section = page.partition("### Compare the best setting with FedAvg")[2].partition("\n### ")[0]
    lines = [line for line in section.replace("\\\n", " ").splitlines() if line.startswith("fl-lightning ")]
    sweep, fit = (shlex.split(line)[1:] for line in lines)
    reduced = ["--count", "1", "--set", "rounds=1", "--set", "trainer.max_steps=1", "--set", "logger=null"]
    assert main([*sweep, *reduced]) == 0
    del fit[fit.index("6") - 2 : fit.index("6") + 1]  # two seeds suffice here
    assert main(fit) == 0
    assert re.search(r"^FedSKC +2 .* [+-]\d+\.\d\d ± ", capsys.readouterr().out, re.M)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*")
def test_your_model_page_runs(work_dir, monkeypatch, capsys):
    monkeypatch.syspath_prepend(work_dir)
    blocks = FENCE.findall((ROOT / "docs" / "your-model.md").read_text())
    for name, text in ((title, text) for _, title, text in blocks if title):
        Path(name).write_text(text)
    configs = [text for _, _, text in blocks if text.startswith("model:") and "mynet.Net" in text]
    assert len(configs) == 2
    for text in configs:
        Path("net.yaml").write_text(text)
        run("fl-lightning fit --config digits_fedavg.yaml --config net.yaml --rounds 1")
    commands = [line for _, _, text in blocks for line in text.replace("\\\n", " ").splitlines()]
    commands = [line for line in commands if line.startswith("fl-lightning fit") and "bert." not in line]
    assert len(commands) == 4
    for line in commands:
        run(line)
    runpy.run_path("script.py", run_name="__main__")
    assert sum("client/train_acc" in header for header in columns()) == 3
    capsys.readouterr()


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*")
def test_the_hugging_face_models_of_your_model_page_run(work_dir, monkeypatch, capsys):
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(work_dir)
    page = (ROOT / "docs" / "your-model.md").read_text()
    for _, title, text in FENCE.findall(page):
        if title in ("bert.py", "tokens.py"):
            Path(title).write_text(text)
    runpy.run_path("tokens.py")
    commands = re.findall(r"^fl-lightning fit .*bert\.Bert .*$", page.replace("\\\n", " "), re.M)
    assert len(commands) == 2
    for number, line in enumerate(commands):
        run(f"{line} --run_dir run{number} --trainer.precision 32-true")
        assert main(["test", f"run{number}"]) == 0
    assert main(["export", "run0", "-o", "bert.onnx"]) == 0
    assert "attention_mask int64 (32,), input_ids int64 (32,)" in capsys.readouterr().out


@pytest.mark.thorough
def test_your_metric_page_runs(work_dir, monkeypatch, capsys):
    monkeypatch.syspath_prepend(work_dir)
    snippets = FENCE.findall((ROOT / "docs" / "your-metric.md").read_text())
    for _, title, text in snippets:
        if title.endswith(".py"):
            Path(title).write_text(text)
    metric = importlib.import_module("mine_metric").WorstRecall(num_classes=4)
    metric.update(torch.eye(4)[[0, 1, 1, 2]], torch.tensor([0, 0, 1, 2]))
    assert metric.compute() == 0.5, "class 3 does not occur, half of class 0 is taken for class 1"
    for title in ("mine_metric.py", "spread.py"):
        Path(title).unlink()
    session("your-metric.md", monkeypatch)
    headers = [set(header) for header in columns()]
    for measured in (
        {"global/f1_score", "client/f1_score_mean"},
        {"global/f1_score", "global/auroc_weighted", "client/auroc_weighted_mean"},
        {"global/worst_recall", "client/worst_recall_weighted"},
    ):
        assert any(measured <= header for header in headers), measured
    (folder,) = [path.parent for path in Path().glob("runs/*/*/metrics.csv") if "acc_spread" in path.read_text()]
    header, row = (line.split(",") for line in (folder / "metrics.csv").read_text().splitlines()[:2])
    with (folder / "clients.csv").open(newline="") as file:
        accuracies = [float(line["acc"]) for line in csv.DictReader(file)]
    assert float(row[header.index("client/acc_spread")]) == pytest.approx(max(accuracies) - min(accuracies))
    capsys.readouterr()


def spans():
    """Yield the options in the right-hand columns of coming-from.md, a line for each code span."""
    for line in (ROOT / "docs" / "coming-from.md").read_text().splitlines():
        if line.startswith("| "):
            yield from re.findall(r"`(?:fl-lightning fit )?(--[^`]+)`", line.split(" | ")[1])


@pytest.mark.thorough
def test_options_in_coming_from_exist():
    lines = list(spans())
    assert len(lines) > 50
    parser = command_parser("fit")
    for line in lines:
        words = line if line.startswith("--config") else f"--config digits_fedavg.yaml {line}"
        parser.parse_args(read_configs(join_values("fit", shlex.split(words))).words)


class Read(HTMLParser):
    """Parse an HTML page: its text, the number of each element, the ids and the fetched addresses."""

    ELEMENTS = ("h1", "h2", "h3", "ul", "ol", "li", "table", "tr", "td", "pre", "code", "em", "strong", "img")
    FETCH = ("script", "link", "img", "iframe", "source", "audio", "video", "object", "embed")

    def __init__(self, html, within=None):
        super().__init__()
        self.within, self.inside = within, within is None
        self.counts, self.text, self.ids, self.fetched = Counter(), "", set(), []
        self.feed(html)
        self.text = re.sub(r"[\s¶]+", " ", self.text).strip()

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.inside = self.inside or tag == self.within
        self.ids.add(values.get("id"))
        if tag in self.FETCH:
            self.fetched += [values[name] for name in ("src", "href", "data") if name in values]
        if self.inside and tag in self.ELEMENTS:
            self.counts[tag] += 1

    def handle_endtag(self, tag):
        self.inside = self.inside and tag != self.within

    def handle_data(self, data):
        self.text += data if self.inside else ""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the site. A warning is an error."""
    pytest.importorskip("mkdocstrings", reason="pip install 'fl-lightning[docs]'")
    pytest.importorskip("material", reason="pip install 'fl-lightning[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def built(site, page):
    """Read the site's page of a file, without the file names above snippets."""
    folder = site if page.name == "README.md" else site / page.stem.lower()
    html = (folder / "index.html").read_text()
    return Read(re.sub(r'<span class="filename">.*?</span>', "", html), within="article")


@pytest.mark.thorough
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_reads_in_the_site_as_on_a_code_host(site, page):
    """Dialects of Markdown differ, for example in what is a list."""
    code_host_page = Read(MarkdownIt("commonmark").enable("table").render(page.read_text()))
    site_page = built(site, page)
    assert site_page.counts == code_host_page.counts
    assert site_page.text == code_host_page.text
    assert set(anchors(page)) <= site_page.ids


@pytest.mark.thorough
@pytest.mark.parametrize("page", METHODS, ids=lambda page: page.name)
def test_the_page_of_a_method_has_its_text_and_its_formulas(site, page):
    html = (site / "methods" / page.relative_to(page.parent).stem.replace("index", "") / "index.html").read_text()
    text = FENCE.sub("", page.read_text())
    assert html.count("<math") == len(re.findall(r"\$\$.+?\$\$|\$.+?\$", text, re.DOTALL))
    article = Read(html, within="article")
    assert "$" not in article.text
    assert not re.search(r"\\[A-Za-z(\[]", article.text), "LaTeX"
    for line in re.findall(r"^- \*\*(.+?)\*\*", text, re.MULTILINE):
        assert re.sub("[`$].*", "", line) in article.text
    assert set(anchors(page)) <= article.ids


@pytest.mark.thorough
def test_a_browser_fetches_nothing_from_the_network(site):
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 35
    for page in pages:
        assert not [target for target in Read(page.read_text()).fetched if re.match(r"(https?:)?//", target)], page
    styles = "".join(path.read_text() for path in site.rglob("*.css"))
    assert not re.findall(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//[^)]*", styles)


@pytest.mark.thorough
def test_the_reference_has_all_exported_names(site):
    start = (site / "api" / "index.html").read_text()
    for name in fl_lightning.__all__:
        target = re.search(rf'href="([^"#]+)(#[^"]+)?"[^>]*><code>{name}</code>', start)
        assert target, name
        assert (site / "api" / target[1]).is_dir()
    for module in ("orchestrator", "client.module", "evaluation.evaluation", "core.state_dicts"):
        page = f"fl_lightning.{module}".rpartition(".")[0]
        assert f"fl_lightning.{module}" in Read((site / "api" / page / "index.html").read_text()).ids
    assert Read((site / "api" / "fl_lightning.callbacks" / "index.html").read_text()).ids >= {
        "fl_lightning.callbacks.drift.ClientDrift",
        "fl_lightning.callbacks.base.RoundCallback",
    }


@pytest.fixture(scope="module")
def hooks():
    """Return the module docs/hooks.py."""
    pytest.importorskip("mkdocs")
    pytest.importorskip("griffe")
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("page", "link", "moved"),
    [
        ("index.md", "docs/design.md#words", "design.md#words"),
        ("index.md", "examples/plain_trainer.py", "examples/plain_trainer.py.md"),
        ("running.md", "../CONTRIBUTING.md", "contributing.md"),
        ("index.md", "docs/tutorials/own-data.ipynb", "tutorials/own-data.md"),
        ("tutorials/own-data.md", "own-method.ipynb", "own-method.md"),
        ("tutorials/own-data.md", "../your-data.md", "../your-data.md"),
        ("running.md", "images/a.png", "images/a.png"),
        ("methods/fedper.md", "peers.md#gossip-averaging", "peers.md#gossip-averaging"),
        ("running.md", "#metrics", "#metrics"),
        ("running.md", "https://lightning.ai/docs", "https://lightning.ai/docs"),
    ],
)
def test_links_are_rewritten_for_the_site(page, link, moved, hooks):
    snippet = f"```text\n[a]({link})\n```"
    site_page = SimpleNamespace(file=SimpleNamespace(src_uri=page), is_homepage=False)
    made = hooks.on_page_markdown(f"[a]({link})\n\n{snippet}\n\n[b]({link})\n", site_page)
    assert made == f"[a]({moved})\n\n{snippet}\n\n[b]({moved})\n"


@pytest.mark.thorough
def test_the_reference_imports_names_from_where_they_are(hooks):
    pages = hooks.reference()
    for page in pages.values():
        for package, names in re.findall(r"with `from (\S+) import \.\.\.`: (.+)", page):
            module = importlib.import_module(package)
            assert not [name for name in re.findall(r"`(\w+)`", names) if not hasattr(module, name)], package
    family = pages["api/fl_lightning.algorithms.global_model.md"]
    assert "Import these names from [`fl_lightning.algorithms`](fl_lightning.algorithms.md)." in family
    assert "::: fl_lightning.algorithms.global_model.fedskc.aggregation" in family


def test_pages_of_examples_have_titles(hooks):
    titles = {path.name: hooks.title_of(path) for path in (ROOT / "examples").glob("*.*")}
    assert titles["custom_algorithm.py"] == "Define FairProx"
    assert titles["custom_algorithm.yaml"] == "FairProx on digits"
    assert titles["loss_term_elsewhere.py"] == "Use FedSKC's contrastive loss (LCL) in any LightningModule"
    assert titles["ua_pdfl_figure_4.py"] == "Redraw UA-PDFL's Fig. 4"
    assert len(set(titles.values())) == len(titles)


@pytest.mark.thorough
def test_the_page_of_an_example_has_its_whole_file(site):
    for path in (ROOT / "examples").glob("*.*"):
        html = (site / "examples" / path.name / "index.html").read_text()
        shown = Read(re.search(r"<code>.*?</code>", html, re.DOTALL)[0]).text
        assert shown == re.sub(r"\s+", " ", path.read_text()).strip()


@pytest.mark.thorough
@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_the_page_of_a_tutorial_has_its_cells_and_outputs(site, path):
    html = (site / "tutorials" / path.stem / "index.html").read_text()
    page, cells = Read(html, within="article"), json.loads(path.read_text())["cells"]
    for cell in cells:
        if cell["cell_type"] == "code":
            assert re.sub(r"\s+", " ", "".join(cell["source"])).strip() in page.text
    outputs = [json.dumps(output.get("data", {})) for cell in cells for output in cell.get("outputs", [])]
    assert page.counts["table"] == sum("<table" in output for output in outputs) > 1
    assert page.counts["img"] == sum("image/png" in output for output in outputs) > 1
    assert f'href="../{path.name}"' in html
    assert (site / "tutorials" / path.name).is_file()


@pytest.mark.thorough
def test_a_search_finds_the_guide_before_the_reference(site):
    entries = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    lower = {entry["location"].partition("/")[0] for entry in entries if entry.get("boost", 1) < 1}
    assert lower == {"api", "examples", "papers", "changelog", "contributing", "design", "paper-settings", "results"}


# What a stranger may type, and the page that the search has to show first.
QUESTIONS = {
    "4 GPUs": "scale",
    "use my own dataset": "your-data",
    "csv file": "your-data",
    "out of memory": "performance",
    "dirichlet partition": "scenarios",
    "class imbalance": "scenarios",
    "custom pytorch model": "your-model",
    "lora fine-tuning": "adapters",
    "image segmentation": "segmentation",
    "f1 score": "your-metric",
    "write my own algorithm": "your-algorithm",
    "learning rate schedule": "running",
    "client sampling": "running",
    "multiple seeds": "running",
    "mixed precision": "performance",
    "slurm cluster": "scale",
    "resume a run": "using-a-run",
    "export onnx": "using-a-run",
    "early stopping": "metrics",
    "wandb": "metrics",
    "hyperparameter search": "sweeps",
    "significance test": "comparing",
    "latex table": "comparing",
    "personalized accuracy": "which-accuracy",
    "byzantine attack": "attacks",
    "krum": "robust-aggregation",
    "differential privacy": "privacy",
    "quantization": "compression",
    "stragglers": "time",
    "real devices": "deploy",
    "reproduce paper results": "reproduced",
    "jupyter notebook": "notebook",
    "install": "getting-started",
    "fedprox": "methods/fedprox",
    "how to add my own aggregation function": "your-algorithm",
    "train on multiple gpus": "scale",
    "resume crashed run": "using-a-run",
    "non-iid split dirichlet": "scenarios",
    "plot accuracy curves": "comparing",
    "use huggingface dataset": "your-data",
    "differential privacy epsilon": "privacy",
    "list of personalized federated learning methods": "methods",
    "FedProx mu": "methods/fedprox",
    "slurm job array": "scale",
    "load trained model for inference": "using-a-run",
    "statistical significance of differences": "comparing",
    "tensorboard logging": "metrics",
    "stragglers slow clients": "time",
    "hyperparameter search optuna": "sweeps",
    "how to cite": "recipes/cite",
    "fraction of clients per round": "running",
    "LoRA fine-tuning LLM": "adapters",
    "out of memory many clients": "performance",
}


@pytest.mark.thorough
def test_a_search_finds_the_page_for_a_question_first(site):
    node = shutil.which("node") or pytest.skip("needs Node.js, which runs the search as a browser does")
    script = ROOT / "tests" / "helpers" / "site_search.js"
    command = [node, str(script), str(site), json.dumps(list(QUESTIONS))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert not done.stderr, "the search failed on a question"
    assert {question: pages[0] for question, pages in json.loads(done.stdout).items() if pages} == QUESTIONS


def luminance(color):
    """Return the relative luminance of a color `#rrggbb` (WCAG 2.1)."""
    parts = [int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize(
    ("scheme", "background", "code"), [("default", "#ffffff", "#f5f5f5"), ("slate", "#1e2129", "#272a35")]
)
def test_the_colors_of_the_site_have_a_contrast_of_4_5(scheme, background, code):
    """The backgrounds are those of the theme."""
    styles = (ROOT / "docs" / "site.css").read_text()
    rules = re.findall(rf'\[data-md-color-scheme="{scheme}"\] \{{(.*?)\}}', styles, re.DOTALL)
    colors = {name: color for rule in rules for name, color in re.findall(r"--md-([\w-]+): (#\w{6});", rule)}
    colors = {name: color for name, color in colors.items() if not name.startswith("primary")}  # behind white text
    assert {"typeset-a-color", "accent-fg-color"} <= colors.keys()
    for color in colors.values():
        for behind in (background, code):
            darker, lighter = sorted([luminance(color), luminance(behind)])
            assert (lighter + 0.05) / (darker + 0.05) >= 4.5, color


@pytest.mark.thorough
@pytest.mark.parametrize("path", sorted((ROOT / "papers").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_papers_page_has_its_table(site, path):
    table = yaml.safe_load(path.read_text())
    html = (site / "papers" / table["paper"] / "index.html").read_text()
    _, _, rest = html.partition(f'>{table["title"]}<a class="headerlink"')
    section, *_ = re.split(r"<h2|</article>", rest)
    assert f"fl-lightning reproduce {path.stem}\n" in section
    cells = re.findall(r"<td>(.*?)</td>", section)
    flat = [value for values in table["paper_values"].values() for value in values]
    if any(value is not None for value in flat):
        width = len(table["columns"]) + 1
        assert cells[::width] == list(table["rows"])
        numbers = [cell.split("\xa0±\xa0") for number, cell in enumerate(cells) if number % width]
        assert [[None] if cell == ["-"] else [float(part) for part in cell] for cell in numbers] == [
            value if isinstance(value, list) else [value] for value in flat
        ]
    else:
        assert not cells
    first = path.read_text().splitlines()[0].removeprefix("# ")
    section_text = Read(f"<h2>{section}").text
    assert first in section_text
    for claim in table.get("claims", []):
        columns = claim.get("columns", table["columns"])
        where = "" if set(columns) == set(table["columns"]) else f", in {'; '.join(columns)}"
        assert f"{claim['better']} > {claim['than']}{where} " in f"{section_text} "


def test_the_navigation_has_every_page():
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2].partition("\n\n")[0])
    sections = [pages for entry in nav for pages in entry.values() if isinstance(pages, list)]
    listed = [[page for entry in pages if isinstance(entry, dict) for page in entry.values()] for pages in sections]
    assert {page.name for page in DOCS} <= set().union(*listed)
    assert max(map(len, listed)) <= 10, "a group that nobody reads"
