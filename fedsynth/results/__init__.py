"""Results of runs: folders, checkpoints, verification, export, tables, curves and pages."""
