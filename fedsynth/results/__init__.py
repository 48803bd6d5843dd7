"""Reads and writes the results of runs.

The modules handle run folders, checkpoints, the verification of reports, exports, tables and plots.
"""
