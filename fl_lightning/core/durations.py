"""Durations as text."""

from __future__ import annotations

import math


def format_duration(seconds: float) -> str:
    """Return a duration rounded up: in seconds below a minute, in minutes below an hour, else in hours and minutes."""
    minutes = math.ceil(seconds / 60)
    if seconds <= 59:
        return f"{math.ceil(seconds)} s"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"
