"""The papers' tables as things to run: what they publish, a preset for each table, and runs of
their cells beside the published numbers.

    published.py     the published numbers (published_results.csv)
    presets.py       a table's settings, each with its source, and its cells
    preset_files.py  reads them from tables/*.toml, whose format it states
    choice.py        which cell a call means; `load_preset`
    words.py         the csv's words ("dirichlet(0.1)") as settings
    measures.py      a published metric, from a run's rows
    scaling.py       a cell with a part of its work
    estimate.py      how long a cell takes here, from timed steps
    rows.py          finished runs as JSON lines
    runs.py          runs cells, in a time budget, and goes on where a call ended
    verdict.py       published beside reproduced: within, above, below
"""
