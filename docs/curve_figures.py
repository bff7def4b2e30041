"""Draw docs/methods/curves.json for the pages of methods, as SVG with real text, for light and dark pages."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from io import StringIO
from typing import Any

import reference
import yaml
from matplotlib import rc_context
from method_curves import load

from fl_lightning.algorithms import Algorithm
from fl_lightning.core.config_files import shipped_text
from fl_lightning.core.names import join_names
from fl_lightning.runs.axis_labels import axis_label
from fl_lightning.runs.curves import Curve, mean_curve
from fl_lightning.runs.figure_style import figure_style
from fl_lightning.runs.paper_figure import PaperFigure, add_legend, draw_curves, paper_figure
from fl_lightning.runs.styles import COLOURS, DARK_COLOURS, Style, method_colours

BASELINE, ALONE = "FedAvg", "Local"
NO_CURVE = {"adapters": "the method needs a model with adapters"}
"""The reason why the methods of a family have no curve."""
GREY = "#767676"
"""The colour of the methods that others are compared with. It has a contrast of at least 3 on both backgrounds."""
REPLACED = {
    "#000000": "currentColor",
    "#dddddd": "var(--md-default-fg-color--lightest)",
    "'DejaVu Sans'": "sans-serif",
    **{light: f"var(--curve-{light[1:]})" for light, dark in zip(COLOURS, DARK_COLOURS, strict=True) if light != dark},
}
"""Texts of a figure's SVG file, and their replacements on a page with light and dark colours (site.css)."""

REMOVED = re.compile(r"<metadata>.*?</metadata>|<!--.*?-->|<style.*?</style>|(?<=<g) id=\"[\w.]+\"", re.DOTALL)
"""Parts of an SVG file that a page does not need, and styles, which would apply to the whole page."""


def metric_of(kind: type[Algorithm]) -> str:
    """Return the metric to draw for a method: that of the global model, or of the models that its config names."""
    if kind.family() == "global_model":
        return "global/acc"
    config = yaml.safe_load(shipped_text(str(reference.config_of(kind)), "configs"))
    received = config.get("evaluation", {}).get("client_model") == "received"
    return "client/acc_mean" if received else "trained_client/acc_mean"


def figures(kinds: Sequence[type[Algorithm]]) -> list[str]:
    """Return the figures of a page's methods as HTML, one for each metric; or the reason why there is none."""
    families = {kind.family() for kind in kinds}
    if reasons := [NO_CURVE[family] for family in families if family in NO_CURVE]:
        return [f"There is no curve on the digits: {reasons[0]}."]
    shown: dict[str, list[str]] = {}
    for kind in kinds:
        shown.setdefault(metric_of(kind), []).append(kind.__name__)
    return [figure(metric, names) for metric, names in shown.items()]


def figure(metric: str, names: Sequence[str]) -> str:
    """Return a figure of some methods' curves as HTML, with those of FedAvg and, for clients' models, Local in grey."""
    stored = load()["curves"]
    others = [name for name in (BASELINE, *([ALONE] * (metric != "global/acc"))) if name not in names]
    curves = {name: curve_of(stored[name], metric) for name in (*names, *others)}
    ends = [f"{name} {curve.mean[0]:.0%} to {curve.mean[-1]:.0%}" for name, curve in curves.items()]
    label = f"{axis_label(metric)} of {join_names(curves)} over {len(curves[names[0]].x)} rounds: {', '.join(ends)}."
    return f'<figure class="curve">{inline_svg(draw(curves, names, metric), label)}</figure>'


def curve_of(metrics: Mapping[str, Sequence[float]], metric: str) -> Curve:
    """Return the curve of a metric, given all metrics of a method by round."""
    curve = mean_curve([[{"round": i, metric: value} for i, value in enumerate(metrics[metric], 1)]], metric)
    assert curve
    return curve


def draw(curves: Mapping[str, Curve], names: Sequence[str], metric: str) -> PaperFigure:
    """Draw curves by name, those of other methods than `names` in grey, in the figure style of papers."""
    colours = method_colours(names)
    styles = {name: Style(colours.get(name, 0), i, i, 0) for i, name in enumerate(curves)}
    with rc_context(figure_style()):
        drawn, places = paper_figure("column")
        lines: dict[str, Any] = draw_curves(places, [curves], styles, "round")
        for name in lines.keys() - set(names):
            lines[name].set(color=GREY, zorder=1.5)  # below the others
        places[0].set(ylabel=axis_label(metric), ylim=(0, 1))
        add_legend(drawn, lines)
    return drawn


def inline_svg(drawn: PaperFigure, label: str) -> str:
    """Return a figure as an SVG element on one line, which fits its column and has a label for screen readers."""
    with rc_context({"svg.fonttype": "none"}):
        drawn.savefig(file := StringIO(), format="svg", transparent=True, metadata={"Date": None})
    _, box, body = re.split(r"<svg [^>]*viewBox=\"([^\"]+)\"[^>]*>", file.getvalue())
    body = re.sub(REMOVED, "", body)
    for old, new in REPLACED.items():
        body = body.replace(old, new)
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" viewBox="{box}"'
    title = f"<title>{escape(label)}</title>"
    svg = f'{opening} role="img" aria-label="{escape(label)}" fill="currentColor">{title}{body}'
    return re.sub(r"\s*\n\s*", " ", svg).strip()
