"""The names of the files in a run folder. `run_folder.py` describes the files.

Importing this module does not import torch.
"""

CONFIG = "config.toml"
SUMMARY = "summary.json"
METRICS = "metrics.jsonl"
MODEL = "model.safetensors"
HIDDEN = "simulation_only/rounds.jsonl"
# A run's name and the settings that were agreed with the clients, only of a run over a network.
SERVED = "run.json"
# The server's ledger, which has only the hash of the files of a run over a network.
SERVER_LEDGER = "ledger/server.jsonl"
# Locked while a process writes into the folder, or into folders below it.
LOCK = ".lock"
# The end of the folder's name while the run lasts.
INCOMPLETE = ".incomplete"
