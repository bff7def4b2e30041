"""A page of the site for each paper: its experiments, and its tables with its own numbers, from configs/ and papers/.

A hook of MkDocs, which calls `on_files`.
"""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from fl_lightning.analysis.paper_table import PaperTable, PaperValue, read_table

ROOT = Path(__file__).parent.parent
PAPERS = {  # the beginning of its files' names, and where its method is told about
    "fedskc": ("FedSKC", "fedskc"),
    "feddw": ("FedDW", "feddw"),
    "fedsiam_da": ("FedSiam-DA", "fedsiam-da"),
    "cwfedavg": ("cwFedAVG", "cwfedavg-and-wdr"),
    "ua_pdfl": ("UA-PDFL", "ua-pdfl-and-peers-without-a-server"),
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages."""
    for paper in PAPERS:
        files.append(File.generated(config, f"papers/{paper}.md", content=page(paper)))
    return files


def page(paper: str) -> str:
    """All that is here of a paper."""
    name, anchor = PAPERS[paper]
    configs = sorted((ROOT / "configs").glob(f"*_{paper}*.yaml"))
    sections = [section(path) for path in sorted((ROOT / "papers").glob(f"{paper}_*.yaml"))]
    return "\n".join(
        [
            f"# {name}",
            "",
            f"[The method](../algorithms.md#{anchor}), with what was chosen where the paper is silent; where its",
            "[experiments are silent](../papers.md#where-a-paper-is-silent-and-what-stands-in-its-place) or",
            "[contradict themselves](../papers.md#where-a-paper-contradicts-itself); and",
            "[what came of running a table](../reproduced.md#one-table-of-each-paper-small).",
            "",
            "## Experiments",
            "",
            "`fl-lightning fit --config NAME` runs one, and `--algorithm NAME` after it a method that the paper",
            "compares with, with the hyper-parameters that the paper gives it.",
            "",
            "| config | what |",
            "|---|---|",
            *(f"| `{path.name}` | {' '.join(remarks(path)[:1])} |" for path in configs),
            *sections,
        ]
    )


def section(path: Path) -> str:
    """A table: what it is, the command, the paper's numbers and its claims."""
    table, (what, *more) = read_table(str(path)), remarks(path)
    claims = [f"- {claim.better} > {claim.than}{where(table, claim.columns)}" for claim in table.claims]
    unit = "percent" if table.unit == "percent" else "rounds, of which fewer are better"
    told = f"What the paper prints, in {unit}; ours is `{table.metric}` over {len(table.seeds)} seeds."
    return "\n".join(
        [
            f"\n## {table.title}",
            "",
            what,
            "",
            " ".join(more),
            "",
            "```text",
            f"fl-lightning reproduce {table.name}",
            "```",
            "",
            *([told, "", *numbers(table)] if table.paper_values else ["The paper prints no numbers."]),
            *(["", "Claims:", "", *claims] if claims else []),
        ]
    )


def numbers(table: PaperTable) -> list[str]:
    """The paper's numbers, a line a row."""
    lines = [f"| | {' | '.join(table.columns)} |", "|---" * (len(table.columns) + 1) + "|"]
    for row in table.rows:
        cells = (cell(table.paper_values.get((column, row))) for column in table.columns)
        lines.append(f"| {row} | {' | '.join(cells)} |")
    return lines


def cell(value: PaperValue | None) -> str:
    """A number as the paper prints it, in one line."""
    if value is None:
        return "-"
    return f"{value.mean:g}" if value.std is None else f"{value.mean:g}\xa0±\xa0{value.std:g}"


def where(table: PaperTable, columns: tuple[str, ...]) -> str:
    """In which columns a claim is made, unless it is in all."""
    return "" if set(columns) == set(table.columns) else f", in {'; '.join(columns)}"


def remarks(path: Path) -> list[str]:
    """The comments that a file begins with, a line each."""
    lines = path.read_text().splitlines()
    end = next(number for number, line in enumerate(lines) if not line.startswith("#"))
    return [line.removeprefix("#").strip() for line in lines[:end]]
