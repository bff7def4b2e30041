"""The papers' tables and figures, one YAML each: rows, columns, seeds and the numbers that the paper prints."""
