"""Simulations of federations on one machine, and functions that create and use synthetic sets.

The package also audits the privacy of runs and distils models from files.
"""
