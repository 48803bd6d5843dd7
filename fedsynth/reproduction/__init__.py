"""Reproduces the tables of published papers, and compares the results with the published numbers.

presets.py     reads the cells and settings of each table
rows.py        stores the results of finished runs, and computes the published metrics from them
runs.py        runs the cells of tables within a time budget
comparison.py  compares published with reproduced numbers
"""
