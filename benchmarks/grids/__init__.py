"""Grids of runs, each in a file of the name of its rows: `GRID`."""
