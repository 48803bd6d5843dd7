#!/usr/bin/env bash
# Makes the pictures of this folder. The plots of FedStats show committed rows:
# `git show 04719c52:benchmarks/fedstats_plots.py`.
set -euo pipefail
for method in feddm fedavg fedsum; do
    fedsynth train --method "$method" --dp-epsilon 8 --rounds 5 --seed 1
done
fedsynth plot runs --by eps --output curves.png  # and a run folder's synthetic.png
fedsynth train --method fedstats --dataset fashion-mnist --dp-epsilon 1 --rounds 16 \
    --set ipc=400 --output garments
