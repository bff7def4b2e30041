"""The HTML report of many runs."""
