"""Reads and writes the results of runs: folders, checkpoints, verification, export, tables and
plots.
"""
