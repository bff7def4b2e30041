"""`fl-lightning plot` and `plot_runs`: figures of groups of runs."""

import re
import shutil
from statistics import mean, stdev
from typing import get_args

import numpy as np
import pytest
from commands import run
from matplotlib import rc_context
from matplotlib.colors import to_hex
from matplotlib.image import imread
from run_folders import CONFIG, changed, write_counts, write_run

from fl_lightning import plot_runs
from fl_lightning.analysis import figures
from fl_lightning.cli.options import FIGURE_WIDTHS
from fl_lightning.core.errors import ConfigError
from fl_lightning.runs.figure_style import WIDTHS
from fl_lightning.runs.search import open_runs

ACCS = {"FedAvg": [0.25, 0.5], "FedDW": [0.5, 0.75], "FedSKC": [0.75, 0.625]}
"""Accuracies of the first seed at alpha 0.1; other runs have somewhat lower ones."""
RANKED = ["FedDW", "FedSKC", "FedAvg"]


def counts_of(alpha, seed):
    return np.arange(8).reshape(4, 2) + int(10 * alpha) + 100 * seed


def write(folder, algorithm="FedAvg", alpha=0.1, seed=0, shift=0.0, accs=None, **options):
    config = changed(algorithm=f"fl_lightning.algorithms.{algorithm}", arguments={}, alpha=alpha, seed=seed)
    rows = [
        {"round": i, "global/acc": acc - shift, "client/acc_mean": acc - shift, "comm/total_bytes": 1e6 * i}
        for i, acc in enumerate(accs or ACCS[algorithm], 1)
    ]
    clients = [{"round": i, "client": k, "acc": i / 4 - k / 100 - shift} for i in (1, 2) for k in range(4)]
    run_dir = write_run(folder / f"{algorithm}-{alpha}-{seed}", config, rows, clients=clients, **options)
    write_counts(run_dir, counts_of(alpha, seed))
    return run_dir


@pytest.fixture
def study(tmp_path):
    """Return a folder of three methods with two alphas and two seeds."""
    for algorithm in ACCS:
        for alpha in (0.1, 0.5):
            for seed in (0, 1):
                write(tmp_path, algorithm, alpha, seed, shift=seed / 10 + alpha / 100)
    return tmp_path


def finals(algorithm, alpha):
    return [ACCS[algorithm][-1] - seed / 10 - alpha / 100 for seed in (0, 1)]


def legend_of(figure):
    return [text.get_text() for text in figure.legends[0].texts]


def legend_colours(figure):
    handles = figure.legends[0].legend_handles
    colours = [getattr(one, "get_facecolor", getattr(one, "get_color", None))() for one in handles]
    return dict(zip(legend_of(figure), map(to_hex, colours), strict=True))


# --- Kinds ---


def test_curves_are_means_with_a_band_and_ranked_by_the_final_value(study):
    figure = plot_runs(open_runs(study, {"alpha": 0.1}), by=["algorithm"], percent=True)
    (axes,) = figure.axes
    assert legend_of(figure) == RANKED
    colours = legend_colours(figure)
    for line, band in zip(axes.lines, axes.collections, strict=True):
        name = next(name for name in ACCS if colours[name] == line.get_color() == to_hex(band.get_facecolor()))
        middle = [100 * (acc - 0.001 - 0.05) for acc in ACCS[name]]
        assert line.get_ydata() == pytest.approx(middle)
        low, high = band.get_datalim(axes.transData).intervaly
        assert [low, high] == pytest.approx([min(middle) - 50**0.5, max(middle) + 50**0.5])  # 10 between two seeds
    assert (axes.get_xlabel(), axes.get_ylabel(), axes.get_title()) == ("Communication rounds", "Test accuracy (%)", "")
    (note,) = figure.notes
    assert re.fullmatch(r"global/acc: mean .*band: .* \(n - 1\)\.", note)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("by", [(), ["algorithm"], ["algorithm", "alpha"]])
def test_across_gives_each_value_its_own_axes_with_the_same_styles(study, by):
    for seed in (0, 1):
        shutil.rmtree(study / f"FedAvg-0.5-{seed}")
    figure = plot_runs(open_runs(study), x="bytes", by=by, across="alpha", width="text")
    assert [axes.get_title() for axes in figure.axes] == ["alpha=0.1", "alpha=0.5"]
    assert legend_of(figure) == RANKED
    first, second = ([(line.get_color(), line.get_marker()) for line in axes.lines] for axes in figure.axes)
    assert first[1:] == second  # without FedAvg
    assert figure.axes[1].lines[0].get_xdata().tolist() == [1, 2]  # MB
    assert figure.get_figwidth() == 6.75


def test_a_setting_that_a_group_does_not_have_is_said_in_words(tmp_path):
    for arguments in ({"late": "drop"}, None):
        policy = {"class_path": "fl_lightning.scheduling.Deadline", "init_args": arguments} if arguments else None
        config = changed(algorithm="fl_lightning.algorithms.FedAvg", arguments={}) | {"round_policy": policy}
        rows = [{"round": i, "global/acc": i / 4} for i in (1, 2)]
        write_run(tmp_path / str(bool(arguments)), config, rows)
    labels = legend_of(plot_runs(open_runs(tmp_path), by=["late"]))
    assert sorted(labels) == ["late=drop", "no late"]
    panels = plot_runs(open_runs(tmp_path), by=["algorithm"], across="late").axes
    assert sorted(axes.get_title() for axes in panels) == ["late=drop", "no late"]


def test_many_panels_are_in_rows_and_named_by_the_method_alone(study):
    figure = plot_runs(open_runs(study), across="algorithm")
    assert [axes.get_title() for axes in figure.axes] == list(ACCS)
    assert [axes.get_ylabel() for axes in figure.axes] == ["Test accuracy", "", "Test accuracy"]
    assert legend_of(figure) == ["alpha=0.1", "alpha=0.5"]


def test_runs_of_other_lengths_and_without_the_metric_are_noted(study):
    write(study, "FedAvg", seed=2, accs=[0.1, 0.2, 0.3])
    config = changed(algorithm="fl_lightning.algorithms.Local", arguments={})
    write_run(study / "local", config, {"client/acc_mean": [0.55]})
    figure = plot_runs(open_runs(study, {"alpha": 0.1}), by=["algorithm"])
    rounds, seeds, metric = figure.notes[1:]
    assert rounds.startswith("FedAvg: runs of 2 to 3 rounds")
    assert seeds.startswith("seeds: 0, 1, 2; ")
    assert metric.startswith("no global/acc in Local: ")
    assert "client/acc_mean" in metric
    assert sorted(legend_of(figure)) == sorted(RANKED)
    assert "Local" in legend_of(plot_runs(open_runs(study), y="client/acc_mean", by=["algorithm"]))


def test_bars_have_the_means_and_deviations_of_compare(study):
    figure = plot_runs(open_runs(study, {"alpha": 0.5}), "bars", by=["algorithm"])
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_xticklabels()] == RANKED
    bars = {round(bar.get_x() + bar.get_width() / 2): bar.get_height() for bar in axes.patches}
    assert bars == pytest.approx({i: mean(finals(name, 0.5)) for i, name in enumerate(RANKED)})
    ends = [container.errorbar.lines[2][0].get_segments()[0][:, 1] for container in axes.containers[1::2]]
    assert [high - low for low, high in ends] == pytest.approx([2 * stdev(finals(name, 0.5)) for name in RANKED])
    assert axes.get_ylim()[0] == 0
    assert not figure.legends


def test_bars_of_several_values_are_clusters(study):
    figure = plot_runs(open_runs(study), "bars", across="alpha", percent=True)
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["alpha=0.1", "alpha=0.5"]
    assert legend_of(figure) == RANKED
    centres = [bar.get_x() + bar.get_width() / 2 for bar in axes.patches]
    assert centres == pytest.approx([i + shift for i in (0, 1) for shift in (-0.8 / 3, 0, 0.8 / 3)])
    heights = [100 * mean(finals(name, alpha)) for alpha in (0.1, 0.5) for name in RANKED]
    assert [bar.get_height() for bar in axes.patches] == pytest.approx(heights)
    assert len({bar.get_hatch() for bar in axes.patches}) == 3
    colours = legend_colours(figure)
    assert [to_hex(bar.get_facecolor()) for bar in axes.patches] == 2 * [colours[name] for name in RANKED]
    for seed in (0, 1):
        shutil.rmtree(study / f"FedDW-0.5-{seed}")
    assert len(plot_runs(open_runs(study), "bars", across="alpha").axes[0].patches) == 5


def test_one_seed_has_neither_band_nor_error_bar(study):
    runs = open_runs(study, {"seed": 0, "alpha": 0.1})
    curves, bars = plot_runs(runs), plot_runs(runs, "bars")
    assert not curves.axes[0].collections
    assert len(bars.axes[0].containers) == 3  # no error bars
    for figure in (curves, bars):
        (note,) = figure.notes
        assert re.fullmatch("global/acc.*: one run .*", note)


def test_clients_are_those_of_the_last_round_of_all_seeds(study):
    figure = plot_runs(open_runs(study, {"alpha": 0.1}), "clients", by=["algorithm"])
    (axes,) = figure.axes
    expected = sorted(0.5 - k / 100 - seed / 10 - 0.001 for seed in (0, 1) for k in range(4))
    for points in axes.collections:
        assert sorted(points.get_offsets()[:, 1]) == pytest.approx(expected)
    medians = [line.get_ydata()[0] for line in axes.lines if line.get_color() == "black" and line.get_zorder() > 2]
    assert np.median(expected) in [pytest.approx(value) for value in medians]
    assert [label.get_text() for label in axes.get_xticklabels()] == RANKED
    assert axes.get_ylabel() == "Client test accuracy"
    clusters = plot_runs(open_runs(study), "clients", across="alpha").axes[0]
    assert len(clusters.collections) == 6


def test_few_of_many_clients_are_points(study, monkeypatch):
    monkeypatch.setattr(figures, "MOST_POINTS", 3)
    (axes,) = plot_runs(open_runs(study), "clients", by=["algorithm"]).axes
    assert {len(points.get_offsets()) for points in axes.collections} == {3}


def test_groups_without_values_of_clients_have_no_box(study):
    for run_dir in study.glob("FedDW-*"):
        (run_dir / "clients.csv").write_text("round,client,acc\n1,0,\n")
    (axes,) = plot_runs(open_runs(study), "clients", by=["algorithm"]).axes
    assert len(axes.collections) == 2


def test_partition_bubbles(study):
    figure = plot_runs(open_runs(study, {"seed": 0}), "partition", across="alpha")
    assert [axes.get_title() for axes in figure.axes] == ["alpha=0.1", "alpha=0.5"]
    figure.draw_without_rendering()
    largest = counts_of(0.5, 0).max()
    for axes, alpha in zip(figure.axes, (0.1, 0.5), strict=True):  # one scale
        (bubbles,) = axes.collections
        counts = counts_of(alpha, 0)
        sizes = dict(zip(map(tuple, bubbles.get_offsets().tolist()), bubbles.get_sizes(), strict=True))
        area = max(figure.axes[1].collections[0].get_sizes())
        ratios = {place: size / area for place, size in sizes.items()}
        assert ratios == pytest.approx({(k, j): counts[k, j] / largest for k in range(4) for j in range(2)})
        cell = np.abs(axes.transData.transform([1, 1]) - axes.transData.transform([0, 0])).min() * 72 / figure.dpi
        assert 0.7 * cell < area**0.5 < 1.1 * cell  # the largest bubble nearly fills its cell
    assert legend_of(figure) == ["12", "3", "1 samples"]
    shown = [handle.get_markersize() ** 2 for handle in figure.legends[0].legend_handles]
    assert shown == pytest.approx([area, area * 3 / 12, area / 12])
    (note,) = figure.notes
    assert note.endswith(" 8, 12.")


@pytest.mark.parametrize("clients", [200, 3])
def test_the_legend_of_a_partition_is_inside_the_figure(tmp_path, clients):
    write_counts(write(tmp_path), np.full((clients, 2), 1_234_567))
    figure = plot_runs(open_runs(tmp_path), "partition")
    figure.draw_without_rendering()
    box = figure.legends[0].get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.width
    assert figure.axes[0].bbox.y1 < box.y0 + 1
    assert box.y1 <= figure.bbox.height


def test_heat_maps_of_partitions_have_one_scale(tmp_path):
    for alpha, count in ((0.1, 1), (0.5, 7)):
        write_counts(write(tmp_path, alpha=alpha), np.full((201, 2), count))
    figure = plot_runs(open_runs(tmp_path), "partition", across="alpha", width="text")
    assert [axes.images[0].get_clim() for axes in figure.axes[:2]] == [(0, 7), (0, 7)]


def test_partition_of_many_clients_is_a_heat_map(tmp_path):
    write_counts(write(tmp_path), np.ones((201, 2), int))
    figure = plot_runs(open_runs(tmp_path), "partition")
    assert figure.axes[0].get_title() == "mean samples of 201 clients"


@pytest.mark.parametrize("words", [[], ["--across", "alpha"], ["--where", "algorithm=FedAvg"]])
def test_the_fix_for_several_partitions_works(study, words, monkeypatch):
    monkeypatch.chdir(study)
    command = ["plot", ".", "--kind", "partition", "-o", "a.pdf", *words]
    code, _, err = run(*command)
    assert code == 2
    assert "kind: the runs have " in err
    fix = re.search(r"Add --where (.*)\.$", err.strip())[1].split()
    before = command.index("--where") + 1 if "--where" in command else len(command)
    command[before:before] = fix if "--where" in command else ["--where", *fix]
    assert run(*command).code == 0


def test_the_fix_for_by_and_across_of_one_key_works(study):
    found = open_runs(study)
    with pytest.raises(ConfigError, match=r"Use --by algorithm\.$"):
        plot_runs(found, by=["alpha"], across="alpha")
    assert legend_of(plot_runs(found, by=["algorithm"], across="alpha")) == RANKED
    one_method = open_runs(study, {"algorithm": "FedAvg"})
    with pytest.raises(ConfigError, match=r"Leave out --by\.$"):
        plot_runs(one_method, by=["alpha"], across="alpha")
    assert len(plot_runs(one_method, across="alpha").axes) == 2


# --- Colours ---


def test_the_colour_is_that_of_the_method_in_all_figures(study):
    """Line styles and hatches are those of the second setting."""
    figure = plot_runs(open_runs(study), width="text")
    lines = dict(zip(legend_of(figure), figure.legends[0].legend_handles, strict=True))
    assert lines.keys() == {f"{name} alpha={alpha}" for name in ACCS for alpha in (0.1, 0.5)}
    colours = {label: line.get_color() for label, line in lines.items()}
    assert all(colours[f"{name} alpha=0.1"] == colours[f"{name} alpha=0.5"] for name in ACCS)
    assert len({*colours.values()}) == 3
    dashes = {label.split()[1]: line.get_linestyle() for label, line in lines.items()}
    assert all(line.get_linestyle() == dashes[label.split()[1]] for label, line in lines.items())
    assert len({*dashes.values()}) == 2
    for names in (["FedSKC", "FedAvg"], ["FedDW", "FedSKC"], ["FedSKC"]):
        runs = [run for name in names for run in open_runs(study, {"algorithm": name, "alpha": 0.1})]
        for axes in (plot_runs(runs, kind).axes[0] for kind in ("curves", "bars")):
            drawn = [line.get_color() for line in axes.lines if line.get_label()[0] != "_" or not axes.patches]
            found = {to_hex(bar.get_facecolor()) for bar in axes.patches} or {*map(to_hex, drawn)}
            assert found == {to_hex(colours[f"{name} alpha=0.1"]) for name in names}


def test_runs_that_did_not_finish_are_noted(tmp_path):
    write(tmp_path, "FedAvg", finished=False)
    write(tmp_path, "FedDW")
    for kind in ("curves", "bars", "clients"):
        notes = plot_runs(open_runs(tmp_path), kind).notes
        assert f"not finished: {tmp_path / 'FedAvg-0.1-0'}." in notes


# --- Sizes and fonts ---


@pytest.mark.parametrize(
    ("width", "inches"),
    [
        *(("column", 3.25), ("text", 6.75), ("neurips", 5.5), ("icml-column", 3.25), ("icml-text", 6.75)),
        *(("ieee-column", 3.5), ("ieee-text", 7.16), ("nature-column", 89 / 25.4), ("nature-text", 183 / 25.4)),
        (4, 4),
    ],
)
def test_widths_have_the_names_of_venues(study, width, inches):
    figure = plot_runs(open_runs(study, {"alpha": 0.1}), "bars", by=["algorithm"], width=width)
    assert figure.get_figwidth() == pytest.approx(inches)


def test_the_command_knows_all_widths():
    assert [*WIDTHS] == [*get_args(FIGURE_WIDTHS)]


@pytest.mark.parametrize("kind", ["curves", "bars", "clients", "partition"])
def test_a_figure_has_the_font_and_size_of_the_document(study, kind):
    runs = open_runs(study, {"alpha": 0.1, "seed": 0})
    figure = plot_runs(runs, kind, width="neurips", font="serif", font_size=10)
    with rc_context({"font.family": "monospace"}):
        figure.draw_without_rendering()
    (axes,) = figure.axes
    label, tick = axes.xaxis.label if kind in ("curves", "partition") else axes.yaxis.label, axes.get_xticklabels()[0]
    assert (label.get_fontsize(), tick.get_fontsize()) == (10, 9)
    assert {text.get_fontfamily()[0] for text in (label, tick)} == {"STIXGeneral"}
    for legend in figure.legends:
        assert {text.get_fontsize() for text in legend.texts} == {9}
        assert legend.get_window_extent().y0 >= axes.bbox.y1 - 1
        assert legend.get_window_extent().y1 <= figure.bbox.height


@pytest.mark.parametrize("kind", ["curves", "bars", "clients"])
def test_the_y_axis_has_the_given_limits(study, kind):
    figure = plot_runs(open_runs(study), kind, across="alpha", percent=True, y_limits=(20, 90))
    assert {axes.get_ylim() for axes in figure.axes} == {(20, 90)}


@pytest.mark.parametrize("kind", ["curves", "bars", "clients"])
def test_a_long_label_of_the_y_axis_is_wrapped(study, kind):
    options = {} if kind == "clients" else {"y": "client/acc_mean"}
    figure = plot_runs(open_runs(study), kind, font_size=14, percent=True, **options)
    figure.draw_without_rendering()
    box = figure.axes[0].yaxis.label.get_window_extent()
    assert (box.y0 >= 0, box.y1 <= figure.bbox.height) == (True, True)


def test_runs_with_a_validation_split_have_a_validation_accuracy(tmp_path):
    config = CONFIG | {"scenario": {"validation_share": 0.2}}
    write_run(tmp_path / "a", config, {"global/acc": [0.5, 0.75]})
    assert plot_runs(open_runs(tmp_path)).axes[0].get_ylabel() == "Validation accuracy"
    assert open_runs(tmp_path)[0].plot().axes[0].get_ylabel() == "Validation accuracy"


# --- The command ---


@pytest.mark.thorough
def test_files_have_the_format_of_their_ending_and_the_same_bytes_each_time(study):
    words = ["plot", study, "--where", "alpha=0.1", "--by", "algorithm", "--width", "5", "-o"]
    code, out, err = run(*words, study / "a.pdf")
    assert (code, err) == (0, "")
    assert out == f"wrote {study / 'a.pdf'}: 5.00 x 2.57 inches\nglobal/acc: mean over seeds; band: ± standard " + (
        "deviation (n - 1).\n"
    )
    starts = {"a.pdf": b"%PDF", "a.svg": b"<?xml", "a.png": b"\x89PNG"}
    for name, start in starts.items():
        assert run(*words, study / name).code == 0
        first = (study / name).read_bytes()
        assert run(*words, study / name).code == 0  # its own figure is replaced
        assert (study / name).read_bytes() == first
        assert first.startswith(start)
    assert imread(study / "a.png").shape[1] == 5 * 300
    pdf = (study / "a.pdf").read_bytes()
    assert re.search(rb"/FontFile2 \d+ 0 R", pdf)
    assert b"/Type3" not in pdf


@pytest.mark.filterwarnings("always")
def test_unfinished_runs_are_drawn_on_request(tmp_path):
    write(tmp_path, "FedAvg", finished=False)
    write(tmp_path, "FedDW")
    words = ["plot", tmp_path, "-o", tmp_path / "a.svg"]
    assert "not finished, left out (--unfinished" in run(*words).err
    alone = (tmp_path / "a.svg").read_bytes()
    code, _, err = run(*words, "--unfinished")
    assert (code, err) == (0, "")
    assert (tmp_path / "a.svg").read_bytes() != alone


@pytest.mark.fast_cases(8)
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-o", "figure"], "-o: 'figure' does not end with .pdf, .svg, .png. Name a file, such as figure.pdf."),
        (["-o", "theirs.pdf"], "-o: theirs.pdf exists and is not from `fl-lightning plot`. Name another file"),
        (["-o", "folder.pdf"], "-o: folder.pdf cannot be replaced"),
        (["-o", "theirs.pdf/a.pdf"], "-o: theirs.pdf/a.pdf cannot be"),
        (["--kind", "pie"], "kind: got 'pie', expected curves | bars | clients | partition"),
        (["--width", "page"], "width: got 'page', expected float | column | text | neurips"),
        (["--width", "0.5"], "width: 0.5 is outside [1, 50]"),
        (["--font", "DejaVu Sanz"], "font: 'DejaVu Sanz' is not installed. Did you mean DejaVu Sans?"),
        (["--font_size", "1"], "font_size: 1.0 is outside [4, 24]"),
        (["--y_limits", "90", "20"], "y_limits: 90 20 is no range."),
        (["--kind", "partition", "--y_limits", "0", "1"], "y_limits: a figure of kind partition does not use it."),
        (["--y", "globl/acc"], "y: no run has 'globl/acc'. Available: client/acc_mean, comm/total_bytes, global/acc"),
        (["--kind", "clients", "--y", "global/acc"], "y: no clients.csv has 'global/acc'. Available: acc."),
        (["--x", "seconds"], "x: seconds were not recorded, time/round_s is missing in metrics.csv. Use x round."),
        (["--kind", "bars", "--x", "bytes"], "x: a figure of kind bars does not use it. Leave it out."),
        (["--kind", "partition", "--percent"], "percent: a figure of kind partition does not use it. Leave it out."),
        (["--kind", "partition", "--y", "acc"], "y: a figure of kind partition does not use it. Leave it out."),
        (["--y", "comm/total_bytes", "--percent"], "percent: comm/total_bytes is no fraction: one value is 1e+06."),
        (["--by", "alpha", "--across", "alpha"], "--across: scenario.partition.alpha is the only key of --by"),
        (["--across", ""], "--across: the name of the setting is empty"),
        (["--by", "algorithm", "--across", ""], "--across: the name of the setting is empty"),
        (["--across", "seed"], "--across: seed is no key in which these groups differ. Available: algorithm"),
        (["--by", "algoritm"], "--by: no run has a setting 'algoritm'. Did you mean algorithm?"),
    ],
)
def test_a_wrong_option_is_one_line(words, message, study, monkeypatch):
    monkeypatch.chdir(study)
    (study / "theirs.pdf").write_text("%PDF a paper")
    (study / "folder.pdf").mkdir()
    code, out, err = run("plot", study, *words)
    assert (code, out) == (2, "")
    assert err.startswith("fl-lightning: error: ")
    assert message in err
    assert err.count("\n") == 1
    assert not (study / "figure.pdf").exists()
    assert (study / "theirs.pdf").read_text() == "%PDF a paper"


def test_what_python_code_can_get_wrong(study):
    runs = open_runs(study)
    with pytest.raises(ConfigError, match=r"^kind: 'pie' .*curves, bars, clients, partition"):
        plot_runs(runs, "pie")
    (runs[0].run_dir / "partition.csv").unlink()
    with pytest.raises(ConfigError, match=r"partition.csv cannot be read"):
        plot_runs(runs[:1], "partition")
    gaps = [[0.5, None], [None, 0.5]]
    for seed, accs in enumerate(gaps):
        rows = [{"round": i, **({"global/acc": acc} if acc else {})} for i, acc in enumerate(accs, 1)]
        write_run(study / "gaps" / str(seed), CONFIG | {"seed": seed}, rows)
    with pytest.raises(ConfigError, match=r"^y: global/acc "):
        plot_runs(open_runs(study / "gaps"))
