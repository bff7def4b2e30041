"""The report's page in a real, headless Chromium: what it draws is compared with what was written into the runs."""

import os
import shutil
from contextlib import contextmanager

import numpy as np
import pytest
from run_folders import write_counts, write_image, write_run

from fl_lightning.analysis.html_report.report import write_report
from fl_lightning.runs.axis_labels import axis_label
from fl_lightning.runs.search import open_runs

playwright = pytest.importorskip("playwright.sync_api", reason="pip install 'fl-lightning[browser]'")
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
CHROMIUM = os.environ.get("FL_LIGHTNING_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(not CHROMIUM, reason="no Chromium on the PATH; FL_LIGHTNING_CHROMIUM may name one"),
]

ROUNDS, CLIENTS = 60, 7
ALPHA, BETA = "FedAlpha", "FedBeta"
SEEDS = {ALPHA: (0, 1, 2), BETA: (0, 1)}
SECTIONS = ["summary", "accuracy", "loss", "clients", "partition", "weights", "drift", "other", "cost"]
SECTIONS += ["images", "settings", "left-out"]
HOSTILE = '<img src=x onerror="pwned=1"><script>pwned=1</script>&lt;b&gt; <b>b</b> %{y} $x$ </script>'


def figures(method, seed):
    """Return the columns of a run's metrics.csv, and `(rounds, clients)` accuracies."""
    random = np.random.default_rng([seed, len(method)])
    accuracy = 0.1 + 0.8 * np.linspace(0, 1, ROUNDS) ** (0.5 + 0.1 * len(method)) + 0.02 * random.random(ROUNDS)
    up = random.integers(1000, 2000, ROUNDS)
    metrics = {
        "global/acc": [None, *accuracy[1:].tolist()],
        "client/acc_mean": (accuracy / 2).tolist(),
        "global/loss": (3 - 2 * accuracy).tolist(),
        "comm/total_bytes": np.cumsum(up).tolist(),
        "time/round_s": random.random(ROUNDS).tolist(),
        "drift/cosine_mean": (accuracy - 0.5).tolist(),
        "clusters/count": [3] * ROUNDS,
    }
    return metrics, accuracy[:, None] * random.random((ROUNDS, CLIENTS))


def write_method(folder, method, seed):
    metrics, own = figures(method, seed)
    lines = {"round": np.repeat(np.arange(1, ROUNDS + 1), CLIENTS), "client": np.tile(np.arange(CLIENTS), ROUNDS)}
    lines |= {name: own.ravel() for name in ("acc", "weight", "drift_cosine")}
    config = {"algorithm": method, "seed": seed, "scenario": {"clients": CLIENTS}}
    run = write_run(folder, config, metrics, clients={name: column.tolist() for name, column in lines.items()})
    write_counts(run, np.arange(CLIENTS * 3).reshape(CLIENTS, 3) + seed)
    write_image(run / "figures" / "drift" / "round-60.png", np.full((40, 60, 3), 40 * seed))


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Return a page of five runs in two groups, with content in every section."""
    folder = tmp_path_factory.mktemp("report")
    for method, seeds in SEEDS.items():
        for seed in seeds:
            write_method(folder / f"{method}-{seed}", method, seed)
    (folder / "FedBeta-1" / "partition.csv").write_text("damaged")
    write_report(open_runs(folder), folder / "page.html")
    return folder / "page.html"


@pytest.fixture(scope="module")
def browser():
    root = ["--no-sandbox"] if os.geteuid() == 0 else []
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--disable-gpu", *root])
        yield chromium
        chromium.close()


@contextmanager
def opened(browser, path, **how):
    """Open the page in a tab. Messages, errors and requests of the page fail the test."""
    context = browser.new_context(**{"viewport": {"width": 1200, "height": 900}, **how})
    context.set_default_timeout(60_000)
    tab = context.new_page()
    said, fetched = [], []
    tab.on("console", lambda message: said.append(message.text))
    tab.on("pageerror", lambda error: said.append(str(error)))
    tab.on("request", lambda request: fetched.append(request.url))
    tab.goto(path.as_uri())
    tab.wait_for_selector("html[data-drawn]")
    yield tab
    assert said == []
    assert [url[:60] for url in fetched if not url.startswith(("data:", "blob:"))] == [path.as_uri()[:60]]
    context.close()


@pytest.fixture(scope="module")
def one_tab(browser, report):
    with opened(browser, report) as tab:
        yield tab


@pytest.fixture
def tab(one_tab):
    """Return the shared tab with all controls reset; a tab for each test would take half a minute more."""
    one_tab.select_option("#axis", "round")
    one_tab.select_option("#band", "range")
    one_tab.locator("#smoothing").fill("0")
    for switch in ("#logx", "#logy"):
        one_tab.set_checked(switch, False)
    for button in one_tab.locator("#legend button[aria-pressed=false]").all():
        button.click()
    for select in one_tab.locator("main select").all():
        select.select_option(index=0)
    return one_tab


def drawn(tab, place):
    """Return the traces of a plot, as Plotly holds them."""
    keys = ["x", "y", "text", "name", "fill", "line", "marker"]
    pick = f"plot => plot.data.map(trace => Object.fromEntries({keys}.map(key => [key, trace[key]])))"
    return tab.locator(place).evaluate(pick)


def lines(tab, place="#accuracy .plot"):
    """Return a plot's lines by group: `(x, y)`."""
    return {each["name"]: (each["x"], each["y"]) for each in drawn(tab, place) if each["fill"] is None}


def bands(tab, place="#accuracy .plot"):
    """Return the lower and upper ends of the bands, in the order of the groups."""
    found = []
    for each in drawn(tab, place):
        if each["fill"] == "toself":
            half = len(each["x"]) // 2
            assert each["x"][:half] == each["x"][half:][::-1]
            found.append((each["y"][half:][::-1], each["y"][:half]))
    return found


def column(method, name):
    """Return `(seeds, rounds)` values of one metric, NaN where it is blank."""
    return np.array([figures(method, seed)[0][name] for seed in SEEDS[method]], dtype=float)


def close(values, expected):
    np.testing.assert_allclose(np.array(values, dtype=float), expected, rtol=2e-4, atol=1e-6)


# --- what is drawn ---


def test_every_section_is_there_and_draws(tab):
    assert tab.evaluate("[...document.querySelectorAll('section')].map(section => section.id)") == SECTIONS
    counted = {
        place: tab.locator(f"{place} .scatterlayer .trace").count()
        for place in ("#accuracy", "#loss", "#other", "#cost")
    }
    assert counted == dict.fromkeys(counted, 4)  # a line and a band for each of two groups
    for place in ("#clients", "#weights", "#drift"):
        assert tab.locator(f"{place} .plot.fan .scatterlayer .trace").count() == 3
        assert tab.locator(f"{place} .plot.points .boxlayer .trace").count() == 2
        assert tab.locator(f"{place} .plot.points .boxlayer path.point").count() == 5 * CLIENTS
    assert tab.locator("#partition .scatterlayer path.point").count() == 3 * CLIENTS - 1  # a client lacks a class
    assert tab.locator("#images img").count() == 5
    assert tab.locator("#images img").evaluate_all("all => all.every(one => one.naturalWidth === 60)")
    assert tab.locator("#left-out li").all_inner_texts() == [
        "FedBeta-1/partition.csv: it does not begin with client, split and a column per class"
    ]


def test_lines_are_means_over_seeds_and_bands_their_range(tab):
    found = lines(tab)
    assert list(found) == [ALPHA, BETA]
    for (method, (x, y)), (low, high) in zip(found.items(), bands(tab), strict=True):
        accuracy = column(method, "global/acc")[:, 1:]
        assert x == list(range(2, ROUNDS + 1))
        close(y, accuracy.mean(axis=0))
        close(low, accuracy.min(axis=0))
        close(high, accuracy.max(axis=0))


def test_hovering_shows_the_values(tab):
    tab.locator("#accuracy .plot").scroll_into_view_if_needed()
    tab.evaluate("Plotly.Fx.hover(document.querySelector('#accuracy .plot'), [{curveNumber: 1, pointNumber: 8}])")
    said = tab.locator("#accuracy .hoverlayer").text_content()
    accuracy = column(ALPHA, "global/acc")[:, 9]
    assert ALPHA in said
    assert f"{accuracy.mean():.4f}"[:5] in said
    assert "round 10, 3 runs" in said


def test_another_metric_can_be_chosen(tab):
    choice = tab.locator("#accuracy select")
    assert choice.locator("option").all_inner_texts() == ["global/acc", "client/acc_mean"]
    choice.select_option("client/acc_mean")
    close(lines(tab)[BETA][1], column(BETA, "client/acc_mean").mean(axis=0))


def test_clients_spread_as_they_were_measured(tab):
    _, own = figures(ALPHA, 0)
    outer, inner = bands(tab, "#clients .plot.fan")
    close(outer[0], own.min(axis=1))
    close(outer[1], own.max(axis=1))
    close(inner[0], np.quantile(own, 0.1, axis=1))
    close(inner[1], np.quantile(own, 0.9, axis=1))
    close(lines(tab, "#clients .plot.fan")["FedAlpha-0"][1], np.median(own, axis=1))
    boxes = drawn(tab, "#clients .plot.points")
    for box, (method, seeds) in zip(boxes, SEEDS.items(), strict=True):
        close(box["x"], np.concatenate([figures(method, seed)[1][-1] for seed in seeds]))
    assert boxes[1]["text"][CLIENTS + 2] == "client 2, round 60, FedBeta-1"
    tab.locator("#clients select").last.select_option("FedBeta-1")
    close(lines(tab, "#clients .plot.fan")["FedBeta-1"][1], np.median(figures(BETA, 1)[1], axis=1))


def test_bubbles_show_the_partition(tab):
    choice = tab.locator("#partition select")
    assert choice.locator("option").all_inner_texts() == ["FedAlpha-0 and 1 more", "FedAlpha-1", "FedAlpha-2"]
    (bubbles,) = drawn(tab, "#partition .plot")
    held = dict(zip(zip(bubbles["x"], bubbles["y"], strict=True), bubbles["marker"]["size"], strict=True))
    assert held == {(i // 3, i % 3): i for i in range(1, 3 * CLIENTS)}
    choice.select_option(index=2)
    (bubbles,) = drawn(tab, "#partition .plot")
    assert bubbles["marker"]["size"] == [i + 2 for i in range(3 * CLIENTS)]


def test_settings_are_shown(tab):
    cells = tab.locator("#settings > .scroll tr").evaluate_all(
        "rows => rows.map(row => [...row.children].map(cell => cell.textContent))"
    )
    assert cells == [["differs", ALPHA, BETA], ["algorithm", ALPHA, BETA], ["seed", "0, 1, 2", "0, 1"]]
    details = tab.locator("#settings details").nth(4)
    details.locator("summary").click()
    details.locator("td").first.wait_for()
    keys = dict(
        zip(details.locator("tbody th").all_inner_texts(), details.locator("td").all_inner_texts(), strict=True)
    )
    assert keys == {"algorithm": BETA, "seed": "1", "scenario.clients": str(CLIENTS)}


def test_an_image_opens_and_closes(tab):
    tab.locator("#images summary").click()
    tab.locator("#images img").nth(1).click()
    assert tab.locator("dialog img").get_attribute("src") == tab.locator("#images img").nth(1).get_attribute("src")
    assert tab.locator("dialog").is_visible()
    tab.locator("dialog").click()
    assert not tab.locator("dialog").is_visible()


def test_a_figure_can_be_saved_as_an_image(tab):
    tab.locator("#accuracy .plot").hover()
    buttons = tab.locator("#accuracy .modebar-btn")
    assert buttons.count() == 6  # none of Plotly's that lead to another site
    with tab.expect_download() as saved:
        buttons.first.click()
    assert saved.value.suggested_filename == "accuracy.svg"
    image = saved.value.path().read_text()
    assert image.startswith("<svg")
    assert "Test accuracy" in image


# --- screen readers, keyboard and contrast ---


def test_figures_are_images_with_names_and_their_values_in_tables(tab):
    for place in tab.locator(".plot").all():
        image, *others = place.locator("svg.main-svg").all()
        assert image.get_attribute("role") == "img"
        assert image.get_attribute("aria-label").endswith("The values are in the table that follows.")
        assert {other.get_attribute("aria-hidden") for other in others} == {"true"}
    assert tab.locator(".plot + details.values").count() == tab.locator(".plot").count()
    name = tab.locator("#accuracy svg.main-svg").first.get_attribute("aria-label")
    assert name.startswith("Test accuracy by round: means over the runs of FedAlpha, FedBeta")


def table_of(tab, place):
    """Open the table below a figure, and return its rows."""
    details = tab.locator(f"{place} + details.values")
    if details.get_attribute("open") is None:
        details.locator("summary").click()
    details.locator("td").first.wait_for()
    return details.locator("tr").evaluate_all(
        "rows => rows.map(row => [...row.children].map(cell => cell.textContent))"
    )


def test_the_table_of_curves_has_their_means(tab):
    head, *body = table_of(tab, "#accuracy .plot")
    assert head == ["round", ALPHA, BETA]
    assert len(body) == 12
    assert body[-1][0] == str(ROUNDS)
    for place, method in ((1, ALPHA), (2, BETA)):
        means = column(method, "global/acc").mean(axis=0)
        expected = [means[int(row[0]) - 1] for row in body]
        assert [float(row[place]) for row in body] == pytest.approx(expected, abs=1e-4)  # four digits are shown
    tab.locator("#accuracy select").select_option("client/acc_mean")  # an open table follows the figure
    (*_, last) = table_of(tab, "#accuracy .plot")
    expected = [column(method, "client/acc_mean")[:, -1].mean() for method in SEEDS]
    assert list(map(float, last[1:])) == pytest.approx(expected, abs=1e-4)


def test_the_tables_of_clients_and_partitions_have_their_values(tab):
    _, own = figures(ALPHA, 0)
    head, *body = table_of(tab, "#clients .plot.fan")
    assert head == ["round", "lowest", "10 %", "median", "90 %", "highest"]
    rough = {"rel": 1e-3}  # four digits are shown
    assert list(map(float, body[-1][1:])) == pytest.approx(np.quantile(own[-1], [0, 0.1, 0.5, 0.9, 1]), **rough)
    _, first, _ = table_of(tab, "#clients .plot.points")
    values = np.concatenate([figures(ALPHA, seed)[1][-1] for seed in SEEDS[ALPHA]])
    assert first[:2] == [ALPHA, str(3 * CLIENTS)]
    assert list(map(float, first[2:])) == pytest.approx([values.min(), np.median(values), values.max()], **rough)
    _, *body = table_of(tab, "#partition .plot")
    assert body == [[str(k), *(str(3 * k + j) for j in range(3))] for k in range(CLIENTS)]


def test_the_sizes_of_bubbles_have_a_legend(tab):
    largest = 3 * CLIENTS - 1 + 2  # of all partitions; the first one, which is drawn, has up to 20 samples
    assert tab.locator("#partition .sizes span").all_inner_texts() == [f"{n} samples" for n in (largest, 6, 1)]
    width = "all => all.map(one => one.getBoundingClientRect().width)"
    sides = np.array(tab.locator("#partition .sizes i").evaluate_all(width))
    assert (sides / sides[0]).tolist() == pytest.approx(np.sqrt([1, 6 / largest, 1 / largest]).tolist(), rel=0.02)
    drawn_sides = tab.locator("#partition path.point").evaluate_all(width)
    assert max(drawn_sides) == pytest.approx(sides[0] * np.sqrt((largest - 2) / largest), abs=0.6)


def test_the_keyboard_reaches_wide_tables_and_opens_images(tab):
    for scroll in tab.locator(".scroll").all():
        assert (scroll.get_attribute("role"), scroll.get_attribute("tabindex")) == ("region", "0")
        assert scroll.get_attribute("aria-label")
    assert tab.locator("th:not([scope])").count() == 0
    tab.locator("#images details").evaluate("details => { details.open = true }")
    tab.locator("#images figure button").first.focus()
    tab.keyboard.press("Enter")
    assert tab.locator("dialog").is_visible()
    tab.keyboard.press("Escape")
    assert not tab.locator("dialog").is_visible()


CONTRAST = """
() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgb = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = (colour) => rgb(colour).slice(0, 3).map((part) => part / 255)
    .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4))
    .reduce((sum, part, i) => sum + part * [0.2126, 0.7152, 0.0722][i], 0);
  const ratio = (one, other) => {
    const [low, high] = [light(one), light(other)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const ground = (element) => {
    for (let each = element; each; each = each.parentElement) {
      const colour = getComputedStyle(each).backgroundColor;
      if (rgb(colour)[3]) return colour;
    }
    return "white";
  };
  const texts = [...document.querySelectorAll("h1, h2, p, th, td, button, label, summary, option, figcaption, li")];
  const lines = [...document.querySelectorAll("svg.swatch line")];
  return {
    text: Math.min(...texts.map((one) => ratio(getComputedStyle(one).color, ground(one)))),
    labels: Math.min(...[...document.querySelectorAll("svg text")].map((one) =>
      ratio(getComputedStyle(one).fill, ground(one.closest("section"))))),
    lines: Math.min(...lines.map((one) => ratio(one.getAttribute("stroke"), ground(one.closest("button, section"))))),
  };
}
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_and_lines_have_contrast(browser, tmp_path, scheme):
    for i in range(8):
        write_run(tmp_path / str(i), {"algorithm": f"Method{i}"}, {"global/acc": [0.1 * i, 1.0]}, finished=i > 0)
    write_report(open_runs(tmp_path), tmp_path / "page.html")
    with opened(browser, tmp_path / "page.html", color_scheme=scheme) as tab:
        tab.locator("#legend button").nth(1).click()  # hidden groups are readable, too
        found = tab.evaluate(CONTRAST)
    assert found["text"] >= 4.5
    assert found["labels"] >= 4.5
    assert found["lines"] >= 2.7  # 3 on the page; the buttons of the legend are a little darker


# --- switches ---


@pytest.mark.parametrize("against", ["bytes", "seconds"])
def test_curves_are_drawn_against_bytes_and_seconds(tab, against):
    tab.select_option("#axis", against)
    for method, (x, y) in lines(tab).items():
        seconds = np.cumsum(column(method, "time/round_s"), axis=1)
        expected = column(method, "comm/total_bytes") if against == "bytes" else seconds
        close(x, expected[:, 1:].mean(axis=0))
        close(y, column(method, "global/acc")[:, 1:].mean(axis=0))
    own = figures(ALPHA, 0)[0]
    expected = own["comm/total_bytes"] if against == "bytes" else np.cumsum(own["time/round_s"])
    close(lines(tab, "#clients .plot.fan")["FedAlpha-0"][0], expected)
    title = "document.querySelector('#accuracy .plot').layout.xaxis.title.text"
    assert tab.evaluate(title) == {"bytes": "Total communication (bytes)", "seconds": "Wall-clock time (s)"}[against]


def test_smoothing_is_an_exponential_mean_of_each_seed(tab):
    tab.locator("#smoothing").fill("0.8")
    for (method, (_, y)), (low, high) in zip(lines(tab).items(), bands(tab), strict=True):
        accuracy = column(method, "global/acc")[:, 1:]
        ages = np.subtract.outer(np.arange(ROUNDS - 1), np.arange(ROUNDS - 1))
        weights = np.where(ages >= 0, 0.8 ** ages.clip(0), 0)
        smooth = accuracy @ (weights / weights.sum(axis=1, keepdims=True)).T
        close(y, smooth.mean(axis=0))
        close(low, smooth.min(axis=0))
        close(high, smooth.max(axis=0))
    assert tab.locator("#controls output").inner_text() == "0.8"


def test_the_band_may_be_a_standard_deviation_or_none(tab):
    tab.select_option("#band", "std")
    for method, (low, high) in zip(SEEDS, bands(tab), strict=True):
        accuracy = column(method, "global/acc")[:, 1:]
        close(low, accuracy.mean(axis=0) - accuracy.std(axis=0, ddof=1))
        close(high, accuracy.mean(axis=0) + accuracy.std(axis=0, ddof=1))
    tab.select_option("#band", "none")
    assert bands(tab) == []
    assert list(lines(tab)) == [ALPHA, BETA]


def test_axes_may_be_logarithmic(tab):
    kinds = "document.querySelector('{} .plot')._fullLayout.{}axis.type"
    places = ("#accuracy", "#drift", "#clients")
    assert [tab.evaluate(kinds.format(place, axis)) for place in places for axis in "xy"] == ["linear"] * 6
    tab.check("#logy")
    assert [tab.evaluate(kinds.format(place, axis)) for place in places for axis in "xy"] == ["linear", "log"] * 3
    below, _ = bands(tab, "#drift .plot >> nth=0")[0]
    assert min(below) > 0
    assert len(below) < ROUNDS
    tab.check("#logx")
    tab.uncheck("#logy")
    assert [tab.evaluate(kinds.format(place, axis)) for place in places for axis in "xy"] == ["log", "linear"] * 3


def test_a_click_on_the_legend_hides_a_group_everywhere(tab):
    first, second = tab.locator("#legend button").all()
    before = {place: drawn(tab, place) for place in ("#accuracy .plot", "#clients .plot.points")}
    first.click()
    assert first.get_attribute("aria-pressed") == "false"
    for place in ("#accuracy", "#loss", "#drift .plot >> nth=0", "#other", "#cost"):
        assert list(lines(tab, place if "plot" in place else f"{place} .plot")) == [BETA]
    for place in ("#clients", "#weights", "#drift"):
        assert [each["name"] for each in drawn(tab, f"{place} .plot.points")] == [BETA]
        assert list(lines(tab, f"{place} .plot.fan")) == ["FedBeta-0"]
    assert tab.locator("#summary tbody tr:visible").count() == 1
    assert tab.locator("#images figure:not([hidden])").count() == 2
    second.click()
    assert drawn(tab, "#accuracy .plot") == drawn(tab, "#clients .plot.fan") == []
    first.click()
    second.click()
    assert before == {place: drawn(tab, place) for place in before}


def test_a_double_click_on_the_legend_shows_one_group_or_all(tab):
    second = tab.locator("#legend button").nth(1)
    second.dblclick()
    assert list(lines(tab)) == [BETA]
    second.dblclick()
    assert list(lines(tab)) == [ALPHA, BETA]


# --- looks ---


def brightness(tab, what, where):
    colour = tab.evaluate(f"getComputedStyle(document.querySelector('{where}')).{what}")
    return sum(int(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(",")) / 765


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_follow_the_system_and_the_button(browser, report, scheme):
    with opened(browser, report, color_scheme=scheme) as tab:
        seen = []
        for _ in range(4):
            words = brightness(tab, "fill", "#accuracy .xtick text")
            assert abs(words - brightness(tab, "backgroundColor", "body")) > 0.5
            seen.append("dark" if words > 0.5 else "light")
            tab.click("#theme")
        assert seen == [scheme, "light", "dark", scheme]
        other = {"light": "dark", "dark": "light"}[scheme]
        tab.click("#theme")
        tab.click("#theme")
        tab.emulate_media(color_scheme=other)
        assert tab.inner_text("#theme") == "Theme: auto"
        assert (brightness(tab, "fill", "#accuracy .xtick text") > 0.5) == (other == "dark")


def test_a_phone_needs_no_scrolling_sideways(browser, report):
    viewport = {"width": 390, "height": 844}
    with opened(browser, report, viewport=viewport, is_mobile=True, has_touch=True) as tab:
        assert tab.evaluate("[innerWidth, document.documentElement.scrollWidth]") == [390, 390]
        widths = tab.locator(".plot .main-svg").evaluate_all("all => all.map(one => one.getBoundingClientRect().width)")
        assert max(widths) <= 390
        assert tab.evaluate("document.querySelector('#accuracy .plot')._fullLayout.dragmode") is False
        tab.locator("#legend button").first.tap()
        assert list(lines(tab)) == [BETA]


def test_the_summary_shows_the_rounds_to_an_accuracy_without_scrolling(browser, tmp_path):
    names = ("client/acc_mean", "client/acc_weighted", "personal_on_global/acc_mean")
    metrics = {name: [0.3, 0.9] for name in names}
    for i in range(6):
        config = {"algorithm": f"Method{i % 2}", "seed": i, "evaluation": {"target_accuracies": [0.5, 0.8, 0.85]}}
        write_run(tmp_path / str(i), config, metrics | {"global/acc": [0.2, 0.9 + 0.0123 * i]})
    write_report(open_runs(tmp_path), tmp_path / "page.html")
    with opened(browser, tmp_path / "page.html", viewport={"width": 1400, "height": 900}) as tab:
        edge = tab.locator("#summary .scroll").evaluate("scroll => scroll.getBoundingClientRect().right")
        box = tab.locator("#summary thead th", has_text="R_0.85").bounding_box()
        assert box["x"] + box["width"] <= edge


def test_no_column_is_cut_at_1440_pixels(browser, tmp_path):
    names = ("client/acc_mean", "client/acc_weighted", "new_client/acc_mean")
    for i in range(18):
        config = {"algorithm": ["FedAvg", "FedSKC", "Ditto"][i % 3], "seed": i // 6, "optimizer": {"lr": 0.1 * (i % 6)}}
        config["evaluation"] = {"target_accuracies": [0.5, 0.8]}
        accuracy = 0.8 + 0.0123 * i
        write_run(tmp_path / str(i), config, {name: [0.2, accuracy] for name in ("global/acc", *names)})
    write_report(open_runs(tmp_path), tmp_path / "page.html", reference={"algorithm": "FedAvg", "lr": 0.0})
    with opened(browser, tmp_path / "page.html", viewport={"width": 1440, "height": 900}) as tab:
        assert tab.locator("#summary thead th").count() == 16
        assert tab.locator(".scroll").evaluate_all("all => all.map(one => one.scrollWidth - one.clientWidth)") == [0, 0]


def test_a_phone_shows_the_whole_legend_of_runs_with_long_names(browser, tmp_path):
    for i in range(15):
        config = {"algorithm": f"Method{i}", "optimizer": {"class_path": "SGD", "init_args": {"lr": 0.1 * i}}}
        run = write_run(tmp_path / f"{i}-{'long' * 20}", config, {"global/acc": [0.2, 0.9]})
        write_counts(run, np.eye(2, dtype=int) + i)
    write_report(open_runs(tmp_path), tmp_path / "page.html")
    with opened(browser, tmp_path / "page.html", viewport={"width": 390, "height": 844}, is_mobile=True) as tab:
        legend = tab.locator("#legend").evaluate("one => [one.scrollHeight - one.clientHeight, one.scrollWidth]")
        assert legend[0] == 0
        assert legend[1] <= 390
        assert tab.evaluate("[innerWidth, document.documentElement.scrollWidth]") == [390, 390]


def test_groups_beyond_the_colours_differ_in_their_dashes(browser, tmp_path):
    for i in range(20):
        write_run(tmp_path / f"{i:02}", {"algorithm": f"Method{i:02}"}, {"global/acc": [0.1 * i, 1.0]})
    write_report(open_runs(tmp_path), tmp_path / "page.html")
    with opened(browser, tmp_path / "page.html") as tab:
        looks = [(each["line"]["color"], each["line"]["dash"]) for each in drawn(tab, "#accuracy .plot")]
        assert len(looks) == len(set(looks)) == 20
        assert len({colour for colour, _ in looks}) == 8
        assert sum(dash == "solid" for _, dash in looks) == 8


def test_sections_without_data_are_left_out(browser, tmp_path):
    write_run(tmp_path / "a", {}, {"global/loss": [1.0, 0.5]})
    write_report(open_runs(tmp_path), tmp_path / "page.html")
    with opened(browser, tmp_path / "page.html") as tab:
        assert tab.evaluate("[...document.querySelectorAll('section')].map(section => section.id)") == [
            "summary",
            "loss",
            "settings",
        ]
        assert tab.locator("#axis option:disabled").all_inner_texts() == ["bytes", "seconds"]
        assert list(lines(tab, "#loss .plot")) == ["a"]


# --- safety ---


def test_hostile_text_is_shown_as_text(browser, tmp_path):
    name = HOSTILE.replace("/", "|")
    lines_of = {"round": [1, 1], "client": [0, 1], "acc": [0.25, 0.5], HOSTILE: [0.5, 0.75]}
    for i, seed in enumerate((0, 1)):
        config = {"algorithm": HOSTILE + str(i), HOSTILE: HOSTILE, "seed": seed}
        run = write_run(tmp_path / f"{name}{i}", config, {"global/acc": [0.5], HOSTILE: [0.5]}, clients=lines_of)
        write_counts(run, np.eye(2, dtype=int) + i)
        write_image(run / "figures" / name / "round-1.png", np.zeros((9, 9, 3)))
    write_report(open_runs(tmp_path), tmp_path / "page.html")
    with opened(browser, tmp_path / "page.html") as tab:
        tab.locator("#settings details summary").first.click()
        for select in tab.locator("main select").all():
            select.select_option(index=select.locator("option").count() - 1)
        tab.evaluate("Plotly.Fx.hover(document.querySelector('#accuracy .plot'), [{curveNumber: 0, pointNumber: 0}])")
        hovered = tab.locator("#accuracy .hoverlayer").text_content()
        assert hovered.count("<img src=x onerror") == 1
        tab.locator("#clients .plot.points path.point").first.hover(force=True)
        assert "<img src=x onerror" in tab.locator("#clients .plot.points .hoverlayer").text_content()
        assert tab.evaluate("window.pwned") is None
        assert tab.locator("img[src=x]").count() == 0
        assert tab.locator("main script, main b").count() == 0
        assert tab.evaluate("document.scripts.length") == 4  # data, Plotly's as it travels and as it runs, the page's
        assert tab.locator("#legend button").first.inner_text() == HOSTILE + "0"
        assert tab.locator("#settings td").first.text_content() == HOSTILE + "0"
        assert axis_label(HOSTILE) == tab.locator("#other .ytitle").text_content()


def test_foreign_scripts_do_not_run_and_nothing_is_fetched(browser, report, tmp_path):
    text = report.read_text()
    tampered = tmp_path / "page.html"
    attack = "<script>window.pwned=1</script><img src='x' onerror='window.pwned=1'>"
    tampered.write_text(text.replace("<main></main>", f"{attack}<main></main>"))
    tab = browser.new_page()
    tab.goto(tampered.as_uri())
    tab.wait_for_selector("html[data-drawn]", timeout=60_000)
    assert tab.evaluate("window.pwned") is None
    assert tab.evaluate("fetch('https://example.org').then(() => 'sent', () => 'refused')") == "refused"
    tab.evaluate("new Promise(done => { setTimeout('window.pwned = 1'); setTimeout(done, 100) })")
    assert tab.evaluate("window.pwned") is None
    tab.close()


def test_without_plotly_the_page_says_so(browser, report, tmp_path):
    broken = tmp_path / "page.html"
    text = report.read_text()
    start = text.index('id="plotly">') + len('id="plotly">')
    broken.write_text(text[:start] + text[text.index("</script>", start) :])
    tab = browser.new_page()
    tab.goto(broken.as_uri())
    tab.wait_for_selector("#trouble:visible", timeout=60_000)
    assert "cannot be drawn" in tab.inner_text("#trouble")
    tab.close()
