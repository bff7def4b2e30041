"""W&B sweep files."""
