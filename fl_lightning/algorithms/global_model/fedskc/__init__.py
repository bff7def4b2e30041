"""The method FedSKC, one file per part."""
