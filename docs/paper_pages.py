"""Make a page of the site for each paper, with its experiments and tables, from configs/ and papers/.

MkDocs calls `on_files`.
"""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from fl_lightning.analysis.study.paper_table import PaperTable, PaperValue, read_table
from fl_lightning.core.config_files import config_path, shipped

ROOT = Path(__file__).parent.parent
PAPERS = {  # prefix of its files, which is also the name of its method's page: title
    "fedskc": "FedSKC",
    "feddw": "FedDW",
    "fedsiam_da": "FedSiam-DA",
    "cwfedavg": "cwFedAVG",
    "ua_pdfl": "UA-PDFL",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each paper."""
    for paper in PAPERS:
        files.append(File.generated(config, f"papers/{paper}.md", content=page(paper)))
    return files


def page(paper: str) -> str:
    """Return the page of a paper."""
    name = PAPERS[paper]
    configs = [Path(config_path(name)) for name in shipped("configs") if f"_{paper}" in name]
    sections = [section(path) for path in sorted((ROOT / "papers").glob(f"{paper}_*.yaml"))]
    return "\n".join(
        [
            f"# {name}",
            "",
            f"This page lists the experiments and tables of {name}. Related pages:",
            "",
            f"- [the method](../methods/{paper}.md), with our choices where the paper is silent;",
            "- [what the paper does not state](../papers.md#what-the-papers-do-not-state-and-what-is-used-instead);",
            "- where the paper [contradicts itself](../papers.md#where-a-paper-contradicts-itself);",
            "- [results of running a table](../reproduced.md#one-small-table-of-each-paper).",
            "",
            "## Experiments",
            "",
            "`fl-lightning fit --config NAME` runs one. Add `--algorithm NAME` to run a baseline of the paper with",
            "the hyper-parameters that the paper gives it.",
            "",
            "| config | experiment |",
            "|---|---|",
            *(f"| `{path.name}` | {' '.join(leading_comments(path)[:1])} |" for path in configs),
            *sections,
        ]
    )


def section(path: Path) -> str:
    """Return the section of a table: its description, the command, the paper's numbers and claims."""
    table, (what, *more) = read_table(str(path)), leading_comments(path)
    claims = [f"- {claim.better} > {claim.than}{describe_columns(table, claim.columns)}" for claim in table.claims]
    unit = "percent" if table.unit == "percent" else "rounds (fewer are better)"
    described = f"The paper's numbers, in {unit}. We compare `{table.metric}` over {len(table.seeds)} seeds with them."
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
            *([described, "", *number_table(table)] if table.paper_values else ["The paper prints no numbers."]),
            *(["", "Claims:", "", *claims] if claims else []),
        ]
    )


def number_table(table: PaperTable) -> list[str]:
    """Return the paper's numbers as a Markdown table."""
    lines = [f"| | {' | '.join(table.columns)} |", "|---" * (len(table.columns) + 1) + "|"]
    for row in table.rows:
        cells = (cell(table.paper_values.get((column, row))) for column in table.columns)
        lines.append(f"| {row} | {' | '.join(cells)} |")
    return lines


def cell(value: PaperValue | None) -> str:
    """Return a number as the paper prints it."""
    if value is None:
        return "-"
    return f"{value.mean:g}" if value.std is None else f"{value.mean:g}\xa0±\xa0{value.std:g}"


def describe_columns(table: PaperTable, columns: tuple[str, ...]) -> str:
    """Return the columns of a claim; empty if it is about all columns."""
    return "" if set(columns) == set(table.columns) else f", in {'; '.join(columns)}"


def leading_comments(path: Path) -> list[str]:
    """Return the comment lines at the start of a file."""
    lines = path.read_text().splitlines()
    end = next(number for number, line in enumerate(lines) if not line.startswith("#"))
    return [line.removeprefix("#").strip() for line in lines[:end]]
