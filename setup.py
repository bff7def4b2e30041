"""Make the page that the package index shows: the README with absolute links. The rest is in pyproject.toml."""

import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
LINK = re.compile(r"(!?)(\[[^\]]*\])\((?![a-z]+:|#)([^)]+)\)")


def absolute_links(text: str, source: str) -> str:
    """Return Markdown whose relative links lead to the files at an address, and images to the raw files."""

    def absolute(link: re.Match[str]) -> str:
        image, label, path = link.groups()
        return f"{image}{label}({source}/{'raw' if image else 'blob'}/main/{path})"

    return LINK.sub(absolute, text)


if __name__ == "__main__":
    source = re.search('^Source = "(.+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M)[1]
    readme = absolute_links((ROOT / "README.md").read_text(encoding="utf-8"), source)
    setup(long_description=readme, long_description_content_type="text/markdown")
