"""Names of files in a run folder, which `run_folder.py` describes. Reading them imports no torch."""

CONFIG = "config.toml"
SUMMARY = "summary.json"
METRICS = "metrics.jsonl"
MODEL = "model.safetensors"
HIDDEN = "simulation_only/rounds.jsonl"
# A run's name and the settings that were agreed with the clients, only of a run over a network.
SERVED = "run.json"
# Locked while a process writes into the folder, or into folders below it.
LOCK = ".lock"
# The end of the folder's name while the run lasts.
INCOMPLETE = ".incomplete"
