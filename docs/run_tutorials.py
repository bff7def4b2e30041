"""Run the tutorials in docs/tutorials with Jupyter and store their outputs: `python docs/run_tutorials.py [NAME ...]`.

Needs `pip install -e '.[docs,test]'`. Run it after you change a notebook, or code whose outputs the notebooks show.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from nbclient import NotebookClient

TUTORIALS = Path(__file__).parent / "tutorials"
ENVIRONMENT = os.environ | {
    "PYTHONWARNINGS": "ignore:IProgress not found"
}  # a package's progress bars, which are not used


def run(path: Path) -> None:
    """Run a notebook in an empty folder, and store it with its outputs."""
    notebook = nbformat.read(path, as_version=4)
    with TemporaryDirectory() as folder:
        NotebookClient(notebook, record_timing=False, resources={"metadata": {"path": folder}}).execute(env=ENVIRONMENT)
    notebook.metadata = {"kernelspec": notebook.metadata.kernelspec, "language_info": {"name": "python"}}
    nbformat.write(notebook, path)


if __name__ == "__main__":
    for name in sys.argv[1:] or sorted(path.stem for path in TUTORIALS.glob("*.ipynb")):
        run(TUTORIALS / f"{name}.ipynb")
        print(f"ran {name}: {(TUTORIALS / f'{name}.ipynb').stat().st_size / 1e3:.0f} kB")
