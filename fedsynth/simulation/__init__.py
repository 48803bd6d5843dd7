"""Simulates federations on one machine, and creates and uses synthetic sets.

The package also audits the privacy of runs and distils models from files.
"""
