"""Curves over seeds, and the figures of one run."""

import io
import re

import numpy as np
import pytest
from matplotlib import rc_context
from matplotlib.image import imread
from run_folders import ROUNDS, write_run

from fl_lightning.core.errors import ConfigError
from fl_lightning.runs.curves import mean_curve, x_values
from fl_lightning.runs.figure_style import FILES, figure_style
from fl_lightning.runs.paper_figure import Curve, add_legend, draw_curves, paper_figure
from fl_lightning.runs.reader import open_run_folder
from fl_lightning.runs.styles import LINE_STYLES, MARKERS, numbered_styles


def rounds_of(accs, sent=10, seconds=2):
    """Return rounds with these accuracies, and None for a round without evaluation."""
    rows = [
        {"round": i, "comm/total_bytes": sent * i, "time/round_s": seconds, "acc": acc} for i, acc in enumerate(accs, 1)
    ]
    return [{name: value for name, value in row.items() if value is not None} for row in rows]


def drawn(figure, form="svg"):
    figure.savefig(content := io.BytesIO(), format=form, metadata={"Date": None} if form == "svg" else {})
    return content.getvalue()


# --- Numbers ---


@pytest.mark.parametrize(("x", "expected"), [("round", [1, 3]), ("bytes", [15, 45]), ("seconds", [3, 9])])
def test_curve_has_mean_and_deviation_over_the_rounds_of_all_runs(x, expected):
    runs = [rounds_of([0.1, 0.2, 0.6, 0.7]), rounds_of([0.3, None, 0.2], sent=20, seconds=4), ROUNDS]
    curve = mean_curve(runs, "acc", x)
    np.testing.assert_allclose(curve.x, expected)
    np.testing.assert_allclose(curve.mean, [0.2, 0.4])
    np.testing.assert_allclose(curve.std, [0.02**0.5, 0.08**0.5])  # n - 1
    assert curve.rounds == (3, 4)
    np.testing.assert_allclose(mean_curve(runs, "acc", x, percent=True).std, [100 * 0.02**0.5, 100 * 0.08**0.5])


def test_a_single_run_has_no_deviation_and_no_common_round_no_curve():
    assert mean_curve([rounds_of([0.5])], "acc").std is None
    assert mean_curve([rounds_of([None, 0.5]), rounds_of([0.5, None])], "acc") is None
    assert mean_curve([], "acc") is None
    assert x_values(ROUNDS, "seconds") == [0.5, 0.75, 1.75]


def test_infinite_values_are_gaps():
    curve = mean_curve([rounds_of([float("inf"), 0.5])], "acc", percent=True)
    np.testing.assert_array_equal(curve.mean, [np.nan, 50])


@pytest.mark.parametrize(
    ("accs", "options", "message"),
    [
        ([0.5, 1.5], {"percent": True}, "^percent: acc .* 1.5"),
        ([0.5], {"x": "bytes"}, "^x: bytes .* comm/total_bytes "),
    ],
)
def test_what_cannot_be_drawn_is_refused(accs, options, message):
    rows = [{name: value for name, value in row.items() if "comm" not in name} for row in rounds_of(accs)]
    with pytest.raises(ConfigError, match=message):
        mean_curve([rows], "acc", **options)


# --- Figures ---


def test_a_run_plots_the_models_accuracies(tmp_path):
    rows = [row | {"client/acc_mean": 0.5, "global/loss": 2.0} for row in ROUNDS]
    run = open_run_folder(write_run(tmp_path / "run", None, rows))  # from Python without a config
    figure = run.plot(percent=True)
    (axes,) = figure.axes
    assert [line.get_xydata().tolist() for line in axes.lines] == [[[1, 25], [3, 75]], [[1, 50], [2, 50], [3, 50]]]
    assert [text.get_text() for text in figure.legends[0].texts] == ["global acc", "client acc"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("Communication rounds", "Test accuracy (%)")
    assert run.plot("global/acc", "global/loss").axes[0].get_ylabel() == ""
    (axes,) = run.plot("global/loss", x="seconds", width=5).axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("Wall-clock time (s)", "Test loss")
    assert axes.figure.get_figwidth() == 5
    assert not axes.figure.legends
    for wrong, message in [({"width": "page"}, "width: 'page' is unknown"), ({"width": 0.5}, r"outside \[1, 50\]")]:
        with pytest.raises(ConfigError, match=message):
            run.plot(**wrong)
    with pytest.raises(ConfigError, match="metrics: no run has 'acc'"):
        run.plot("acc")


def test_a_metric_whose_name_ends_like_a_column_has_its_own_curve_and_label(tmp_path):
    labels = {
        "client/auroc_weighted": "client auroc, weighted",
        "client/auroc_weighted_mean": "client auroc_weighted",
        "new_client/auroc_weighted_weighted": "new client auroc_weighted, weighted",
        "global/auroc_weighted": "global auroc_weighted",
        "global/auroc_mean": "global auroc_mean",
    }
    rows = [row | {name: i / 10 for i, name in enumerate(labels)} for row in ROUNDS]
    figure = open_run_folder(write_run(tmp_path / "run", None, rows)).plot(*labels)
    assert [line.get_ydata()[0] for line in figure.axes[0].lines] == [0, 0.1, 0.2, 0.3, 0.4]
    assert {text.get_text() for text in figure.legends[0].texts} == set(labels.values())


def test_files_embed_their_fonts_and_do_not_depend_on_where_they_are_saved(tmp_path):
    run = open_run_folder(write_run(tmp_path / "run"))
    figure = run.plot()
    pdf = drawn(figure, "pdf")
    assert re.search(rb"/FontFile2 \d+ 0 R", pdf)
    assert b"/Type3" not in pdf
    svg = drawn(run.plot())  # a script that sets no style
    with rc_context(figure_style()):
        assert drawn(run.plot()) == svg
    (axes,) = figure.axes
    assert {label.get_fontsize() for label in axes.get_xticklabels()} == {7}
    assert imread(io.BytesIO(figure._repr_png_())).shape[1] == int(3.25 * 150)
    assert imread(io.BytesIO(drawn(figure, "png"))).shape[1] == 3.25 * FILES["savefig.dpi"]


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("count", [1, 5, 29])
def test_legend_is_read_line_by_line_and_fits_the_width(count):
    names = [f"method{'x' * (i % 4)} {i}" for i in range(count)]
    curve = Curve(np.array([1.0]), np.array([0.5]), None, (1, 1))
    with rc_context(figure_style()):
        figure, places = paper_figure("column")
        lines = draw_curves(places, [dict.fromkeys(names, curve)], numbered_styles(names), "round")
        add_legend(figure, lines)
    figure.draw_without_rendering()
    (legend,) = figure.legends
    boxes = {text.get_text(): text.get_window_extent() for text in legend.texts}
    assert sorted(boxes, key=lambda name: (-round(boxes[name].y1), boxes[name].x0)) == names
    assert all(box.x0 >= 0 and box.x1 <= figure.bbox.width for box in boxes.values())
    assert places[0].get_window_extent().height > 1.3 * figure.dpi
    styles = {(line.get_linestyle(), line.get_marker()) for line in lines.values()}
    assert len(styles) == min(count, len(LINE_STYLES) * len(MARKERS))  # told apart in greyscale


NAMES = ["$\\frac$", "_hidden", "a\nb", "x" * 300, "é\x1b[31m\udcff"]


def test_any_name_is_drawn_as_text():
    curve = Curve(np.array([1.0, 2.0]), np.array([0.5, np.nan]), np.array([0.1, np.nan]), (2, 2))
    with rc_context(figure_style()):
        figure, places = paper_figure("column")
        add_legend(figure, draw_curves(places, [dict.fromkeys(NAMES, curve)], numbered_styles(NAMES), "round"))
    assert drawn(figure)
    shown = {text.get_text() for text in figure.legends[0].texts}
    assert shown == {
        "$\\frac$",
        "_hidden",
        "a b",
        f"{'x' * 39}…",
        "é\N{REPLACEMENT CHARACTER}[31m\N{REPLACEMENT CHARACTER}",
    }


@pytest.mark.parametrize(
    ("x", "largest", "label", "place"),
    [
        ("bytes", 3.2e9, "Total communication (GB)", 3.2),
        ("bytes", 999, "Total communication (B)", 999),
        ("bytes", 0, "Total communication (B)", 0),
        ("seconds", 90, "Wall-clock time (min)", 1.5),
        ("seconds", 7200, "Wall-clock time (h)", 2),
        ("round", 7200, "Communication rounds", 7200),
    ],
)
def test_x_axis_has_a_unit_of_its_size(x, largest, label, place):
    _, places = paper_figure("text")
    curve = Curve(np.array([largest]), np.array([0.5]), None, (1, 1))
    draw_curves(places, [{"a": curve}], numbered_styles(["a"]), x)
    assert places[0].get_xlabel() == label
    assert places[0].lines[0].get_xdata().tolist() == [place]
