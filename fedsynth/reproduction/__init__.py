"""The papers' tables: published numbers, a preset for each table, runs of their cells, comparisons.

published.py     the published numbers (published_results.csv) and the meaning of their words
presets.py       a table's settings, each with its source, and its cells
preset_files.py  reads them from tables/*.toml; `load_preset`
measures.py      a published metric, from a run's metrics
scaling.py       a cell with a fraction of its work
rows.py          finished runs as JSON lines
runs.py          runs cells within a time budget, and resumes
comparison.py    published and reproduced numbers: within, above, below
"""
