"""The examples in docstrings are correct."""

import doctest
import pkgutil
from importlib import import_module

import pytest

import fl_lightning
import fl_lightning.callbacks

MODULES = ["fl_lightning", "fl_lightning.callbacks"]
for package in (fl_lightning, fl_lightning.callbacks):
    MODULES += [module.name for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
MODULES = [name for name in MODULES if not name.endswith(".__main__")]  # importing it runs the command line


@pytest.mark.fast_cases(73)
@pytest.mark.parametrize("name", sorted(set(MODULES)))
def test_the_examples_in_docstrings_are_correct(name: str) -> None:
    assert doctest.testmod(import_module(name)).failed == 0


def test_doctest_finds_the_examples() -> None:
    finder = doctest.DocTestFinder()
    assert sum(len(test.examples) for test in finder.find(import_module("fl_lightning.core.message"))) >= 3
