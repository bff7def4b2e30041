"""Typeset the formulas of the site as MathML, which browsers show without a script or a font from the network.

Formulas are LaTeX between `$` or, on lines of their own, `$$`, as on code hosts. The Markdown extension
`pymdownx.arithmatex` finds them, and MkDocs calls `on_page_content`.
"""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.+?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(content: str, **_: Any) -> str:
    """Replace the formulas of a page by MathML."""
    return FORMULA.sub(lambda found: mathml(html.unescape(found[2]), display=found[1] == "div"), content)


def mathml(latex: str, display: bool) -> str:
    """Return a formula as MathML.

    Args:
        latex: The formula.
        display: Whether it is on lines of its own.

    Raises:
        ValueError: The formula has a command or an environment that is not known.
    """
    shown = convert(" ".join(latex.split()), display="block" if display else "inline")
    if unknown := re.search(r"\\[a-zA-Z]+", shown):
        raise ValueError(f"{unknown[0]} in the formula {latex} is not known")
    return f'<div class="formula">{shown}</div>' if display else shown
