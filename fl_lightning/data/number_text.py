"""Numbers, dates and lists that a table holds as text, such as `1,5`, `$12.50` or `31.12.2026`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

CURRENCY = r"$¢£¥\u20a0-\u20cf"
AROUND = rf"[\s'\"\u2019()~\u2248\u200b\ufeff+\-\u2010-\u2015\u2212%‰°{CURRENCY}]*"
"""Matches what may stand before and after a number: signs, quotes, percent signs, currencies."""

NUMBER = re.compile(
    rf"{AROUND}(?P<currency>[^\W\d_]{{1,3}}\.?(?=[\s{CURRENCY}]))?{AROUND}"
    r"(?P<whole>\d{1,3}(?P<mark>[\s.,'\u2019_])(?:\d{2,3}(?P=mark))*\d{3}|\d+|(?=[.,]\d))(?:[.,]\d*)?"
    rf"(?:[eEdD][+-]?\d+)?{AROUND}(?P<unit>[^\W\d_]\D{{0,15}})?"
)
"""Matches a text that holds one number, possibly with separators of thousands, a sign, a currency and a unit."""

RATIO_OR_DURATION = re.compile(
    r"0[xX][0-9a-fA-F]+|\d+/\d+|(?:\d+(?:[.,]\d+)?\s?(?:days?|d|hours?|hrs?|h|minutes?|mins?|m|seconds?|secs?|s)\s?){2,}"
)
"""Matches a number in base 16, such as `0x1F`, a ratio, such as `120/80`, or a duration, such as `1h30m`."""

LIST = re.compile(r"\[.*\]|\{.*\}", re.DOTALL)
"""Matches a list or a dictionary, as JSON or Python writes it."""

MONTH = (
    r"(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?"
    r"|nov(?:ember)?|dec(?:ember)?)\.?"
)
DAY = r"\d{1,2}(?:st|nd|rd|th)?"

DATE = re.compile(
    r"(?:\d{4}([-/.])\d{1,2}\1\d{1,2}|\d{1,2}([-/.])\d{1,2}\2(?:\d{2}){1,2})(?:[T\s].*)?"
    rf"|(?:[a-z]{{3,9}},?\s)?(?:{DAY}[\s.-]{{1,2}}{MONTH}|{MONTH}\s{DAY})(?:,?[\s-]\d{{2,4}})?(?:,?\s.*)?"
    rf"|\d{{4}}[\s/-]{MONTH}[\s/-]{DAY}"
    r"|(?:[^\W\d_]{2,10},?\s)?\d{1,2}\.?\s(?:de\s)?[^\W\d_]{3,10}\.?,?\s(?:de\s)?\d{4}"
    r"|\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?:\s?[ap]\.?m\.?)?",
    re.IGNORECASE,
)
"""Matches a date, with the month in digits, in English, or in any language before a year, or a time of day."""

LONGEST = 40
"""Number of characters above which a text is only compared with `LIST`."""

FEW_WITH_LETTERS = 20
"""Maximum number of different texts with letters, such as `4 years`, that count as categories, not as numbers."""


class NumberFormat(NamedTuple):
    """How numbers are written in a table.

    Attributes:
        decimal: The character before the fraction.
        thousands: The character between groups of digits; None if there is none.
    """

    decimal: str = "."
    thousands: str | None = None

    def parse(self, texts: pd.Series) -> pd.Series:
        """Convert texts to numbers. A text that is not a number in this format becomes NaN.

        Example:
            >>> import pandas as pd
            >>> NumberFormat(",", ".").parse(pd.Series(["1.234,5", "-7", "1.2"])).tolist()
            [1234.5, -7.0, nan]
        """
        import pandas as pd

        texts = texts.astype(str).str.strip()
        if self.thousands:
            mark = {" ": r"\s", "'": "['\u2019]"}.get(self.thousands, re.escape(self.thousands))
            grouped = texts.str.match(rf"[+-]?[1-9]\d{{0,2}}(?:{mark}\d{{2,3}})*?{mark}\d{{3}}(?!\d|{mark})")
            texts = texts.where(~grouped, texts.str.replace(mark, "", regex=True))
        if self.decimal != ".":
            texts = texts.where(~texts.str.contains(".", regex=False), "")  # "1.5" is no number in this format
            texts = texts.str.replace(self.decimal, ".", regex=False)
        return pd.to_numeric(texts, errors="coerce")


def is_number(text: str) -> bool:
    """Return whether `float` can read a text."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def written_numbers(texts: pd.Series) -> tuple[str, np.ndarray] | None:
    """Return what most texts of a column hold (`lists`, `dates` or `numbers`) and their mask; None for other texts.

    Numbers with letters or `/` count only if there are many different ones: `2 years` and `4 years` can be categories.
    """
    counts = texts.value_counts()
    many = len(counts) > FEW_WITH_LETTERS

    def is_number(text: str) -> bool:
        if many and RATIO_OR_DURATION.fullmatch(text):
            return True
        found = NUMBER.fullmatch(text)
        if found is None or re.match(r"0\d", found["whole"]):  # 01 is a code
            return False
        return many or not (found["currency"] or found["unit"])

    for what, matches in (("lists", LIST.fullmatch), ("dates", DATE.fullmatch), ("numbers", is_number)):
        found = [text for text in counts.index if (len(text) <= LONGEST or what == "lists") and matches(text)]
        if 2 * counts[found].sum() > len(texts):
            return what, texts.isin(found).to_numpy()
    return None
