"""The version, in the one place that the package, its wheel and its reports take it from."""

__version__ = "0.1.0"
