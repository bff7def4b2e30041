"""Shipped experiments, one YAML each; `fl-lightning list configs` names them."""
