"""Find the correct name for a misspelled one."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches


def fold(name: str) -> str:
    """Return a name in lower case without `_`, `-` and `.yaml`, to compare names."""
    return re.sub(r"[-_]", "", name.removesuffix(".yaml").casefold())


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the one of `names` that is most similar to a name, ignoring case, `_` and `-`; None if no name is similar.

    Example:
        >>> nearest("fed_skc", ["FedAvg", "FedSKC"])
        'FedSKC'
        >>> nearest("digits_fedsck", ["digits_fedavg.yaml", "digits_fedskc.yaml"])
        'digits_fedskc.yaml'
    """
    folded: dict[str, str] = {}
    for one in names:
        folded.setdefault(fold(one), one)
    near = [fold(name)] if fold(name) in folded else get_close_matches(fold(name), folded, 1)
    return folded[near[0]] if near else None


def suggest(near: str | None, choices: Iterable[str]) -> str:
    """Return the sentence of an error message that suggests the most similar name (`near`) or lists all names."""
    return f"Did you mean {near}?" if near else f"Available: {', '.join(choices) or 'none'}."


def match_case(name: str, names: Iterable[str]) -> str:
    """Return the entry of `names` that equals a name except for case, `_` and `-`; the name itself if not found.

    A name that is in `names`, or that several entries match, is returned unchanged.
    """
    known = set(names)
    alike = [one for one in known if fold(one) == fold(name)]
    return alike[0] if len(alike) == 1 and name not in known else name
