"""Make a page of the site for each notebook in docs/tutorials, with the outputs that are stored in it.

MkDocs calls `on_files`. `python docs/run_tutorials.py` runs the notebooks and stores their outputs.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

TUTORIALS = Path(__file__).parent / "tutorials"
FRAME_STYLE = re.compile(r'<style scoped>.*?</style>| border="1" class="dataframe"', re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each notebook. The notebook itself is beside it."""
    for path in sorted(TUTORIALS.glob("*.ipynb")):
        files.append(File.generated(config, f"tutorials/{path.stem}.md", content=page(path)))
    return files


def page(path: Path) -> str:
    """Return a notebook as Markdown."""
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        parts.append(f"```python\n{source}\n```" if cell["cell_type"] == "code" else source)
        parts += map(output, cell.get("outputs", []))
    return "\n\n".join([*parts, f'<a href="../{path.name}" download>Download this notebook</a>'])


def output(shown: dict[str, Any]) -> str:
    """Return an output of a cell: a table or an image as HTML, anything else as text."""
    data = {kind: "".join(content) for kind, content in shown.get("data", {}).items()}
    if "<table" in data.get("text/html", ""):
        return f"<div>{FRAME_STYLE.sub('', data['text/html'])}</div>"
    if "image/png" in data:
        return (
            f'<div><img alt="Output of the cell above" src="data:image/png;base64,{data["image/png"].strip()}"></div>'
        )
    return f"```text\n{(data.get('text/plain') or ''.join(shown['text'])).rstrip()}\n```"
