"""The version of the package. Manifests take the version from this module."""

__version__ = "0.1.0"
