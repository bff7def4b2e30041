"""Names of compressors in the ids of tests."""

from dataclasses import fields


def name_of(compressor):
    """Return a compressor's name and options as text, the same in every process."""
    if compressor is None:
        return "none"
    options = [f"{one.name}={getattr(compressor, one.name)}" for one in fields(compressor)]
    return "-".join([type(compressor).__name__, *options])
