"""Exports of synthetic sets, and tools for the recipients of a set."""
