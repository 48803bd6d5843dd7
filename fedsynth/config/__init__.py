"""The settings of a run: their types, default values, TOML files, and the checks before a run."""
