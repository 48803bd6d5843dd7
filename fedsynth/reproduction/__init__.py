"""Reproduction of the papers' tables: published numbers, presets, runs of single cells, and
comparisons.

presets.py       a table's settings, each with its source, and its cells
preset_files.py  reads presets (tables/*.toml) and published numbers (published_results.csv)
measures.py      a published metric, from a run's metrics
rows.py          finished runs as JSON lines
runs.py          runs cells, or a fraction of their work, within a time budget, and resumes
comparison.py    published and reproduced numbers: within, above, below
"""
