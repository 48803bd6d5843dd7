"""The version of fedsynth, for the package, the wheel and the reports."""

__version__ = "0.1.0"
