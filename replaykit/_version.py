"""The version of the package, read from nowhere: it is the source of truth for manifests."""

__version__ = "0.1.0"
