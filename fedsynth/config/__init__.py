"""Settings of a run: validation, defaults, TOML files, and checks before a run."""
