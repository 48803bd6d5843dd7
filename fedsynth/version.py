"""The version of fedsynth. The package, the wheel and the reports read the version from here."""

__version__ = "0.1.0"
