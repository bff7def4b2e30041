"""Expand `fit --multirun KEY=VALUE,VALUE --seeds ...` into one run for each combination of values and seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from fl_lightning.analysis.comparison import compare
from fl_lightning.analysis.run_settings import compared_settings
from fl_lightning.analysis.study.checks import errors_at, require
from fl_lightning.analysis.study.executor import Job
from fl_lightning.analysis.study.folder import folder_name, run_folder
from fl_lightning.core.errors import ConfigError, one_line
from fl_lightning.core.strict_yaml import check_yaml
from fl_lightning.loggers.naming import changes
from fl_lightning.runs.reader import Run

PLACE = "--multirun"
"""Placeholder in a command line. The options of each combination replace it."""

FIXED = {
    "seed": "Use --seeds 0 1 2",
    "run_dir": "Use --out FOLDER",
    "resume": "The same command resumes all its runs",
    "fast": "Use --fast",
    "trust": "Use --trust",
    "print_config": "Leave it out",
}
"""Options of `fit` that cannot have several values, with what to do instead."""


class Combination(NamedTuple):
    """A combination of settings in a multirun: one value for each key that varies.

    Args:
        values: The values as text, by key. Empty if only the seeds differ.
        words: The command line of `fit`, without `fit` and the seed.
    """

    values: Mapping[str, str]
    words: tuple[str, ...]

    @property
    def name(self) -> str:
        """The combination as text, such as `algorithm=FedProx,alpha=0.1`; empty if only the seeds differ."""
        return changes(self.values, {})


def parse_grid(words: Sequence[str]) -> dict[str, list[str]]:
    """Return the values of each key, given words such as `algorithm=FedAvg,FedProx`.

    Raises:
        ConfigError: A word is not of that form, a key or a value is repeated, or a key cannot have several values.
    """
    grid: dict[str, list[str]] = {}
    with errors_at("--multirun"):
        for word in words:
            key, sign, text = word.partition("=")
            require(sign and key, f"{word!r} is not of the form KEY=VALUE,VALUE")
            if key in FIXED:
                raise ConfigError(f"{key} cannot vary here. {FIXED[key]}.")
            require(key not in grid, f"{key} is given twice. List all its values after one {key}=")
            with errors_at(key):
                grid[key] = split_values(key, text)
    return grid


def split_values(key: str, text: str) -> list[str]:
    """Split a list of values at its commas, except at those in brackets, braces and quotes.

    Args:
        key: The key, for a message.
        text: The values, written as in a YAML list without its outer brackets.

    Raises:
        ConfigError: A value is empty or repeated, or the text is no list.

    Example:
        >>> split_values("optimizer.betas", "[0.9, 0.99],[0.8, 0.9]")
        ['[0.9, 0.99]', '[0.8, 0.9]']
        >>> split_values("scenario.dataset.path", "'a,b.csv',c.csv")
        ['a,b.csv', 'c.csv']
    """
    listed = f"[{text}]"
    try:
        check_yaml(listed)
        root: Any = yaml.compose(listed, Loader=yaml.SafeLoader)
    except (ValueError, yaml.YAMLError) as error:
        fix = "Put a value with special characters in quotes."
        raise ConfigError(f"{text!r} is no list of values ({one_line(error)}). {fix}") from error
    values = [
        node.value if isinstance(node, yaml.ScalarNode) else listed[node.start_mark.index : node.end_mark.index]
        for node in root.value
    ]
    valid = values and all(values) and not text.rstrip().endswith(",") and root.end_mark.index == len(listed)
    require(valid, f"a value is missing ({text!r}). Write {key}=VALUE,VALUE")
    for i, value in enumerate(values):
        require(value not in values[:i], f"{value} is given twice. Leave one out")
    return values


def combinations(grid: Mapping[str, Sequence[str]], words: Sequence[str]) -> list[Combination]:
    """Return all combinations of the values of a grid; the last key varies fastest.

    Args:
        grid: The values of each key.
        words: The command line of `fit`. The values replace the word `PLACE`.
    """
    place = words.index(PLACE) if grid else len(words)
    found = []
    for chosen in product(*grid.values()):
        values = dict(zip(grid, chosen, strict=True))
        options = (f"--{key}={value}" for key, value in values.items())
        found.append(Combination(values, (*words[:place], *options, *words[place + 1 :])))
    return found


def multirun_jobs(
    combinations: Sequence[Combination],
    configs: Sequence[Mapping[str, Any]],
    seeds: Sequence[int],
    out: Path,
    reference: Mapping[str, Any] | None = None,
) -> list[list[Job]]:
    """Return the jobs of each combination, one per seed.

    Args:
        combinations: The combinations.
        configs: The resolved config of each combination.
        seeds: The seeds; if empty, that of the config.
        out: The folder of the multirun.
        reference: Settings of the combinations that the others will be compared with.

    Raises:
        ConfigError: Two combinations are the same experiment, or no combination is the reference.
    """
    runs = [Run(out / each.name, dict(config), []) for each, config in zip(combinations, configs, strict=True)]
    settings = [compared_settings(run) for run in runs]
    for i, one in enumerate(settings):
        names = f"{combinations[settings.index(one)].name} and {combinations[i].name}"
        fix = "Leave one out, or put --config before it"
        require(one not in settings[:i], f"--multirun: {names} give the same results. {fix}")
    compare(runs, reference=reference)
    return [
        [
            Job(run_folder(out, folder_name(each.name), seed, one), (*each.words, f"--seed={seed}"))
            for seed in seeds or [config["seed"]]
        ]
        for each, config, one in zip(combinations, configs, settings, strict=True)
    ]
