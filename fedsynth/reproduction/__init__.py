"""Reproduction of the papers' tables: published numbers, presets, runs of single cells, and
comparisons.

presets.py     a table's cells and settings, read from tables/*.toml and published_results.csv
rows.py        finished runs as JSON lines, and the published metrics of a run
runs.py        runs cells, or a fraction of their work, within a time budget, and resumes
comparison.py  published and reproduced numbers: within, above, below
"""
