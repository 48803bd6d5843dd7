"""Settings chosen by a private selection, and on public images: the table of docs/sweeps.md.

Digits of one data owner, and DP-FedAvg of a linear model by one of nine settings (three clips, three
learning rates). The owner either selects privately within ε, or takes the settings that were best on
public images (`public`: the first 200 test images, with ε for the one run), or composes one run of
every setting within ε (`all`), or takes one setting at random (`random`). The accuracy is that of the
handed-over model on the other test images.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import torch

from fedsynth import RunSettings, load_dataset, resolve
from fedsynth.experiments import read_sweep, select_privately
from fedsynth.experiments.selection import result_folder
from fedsynth.privacy.accounting import Merged, calibrate_noise_multiplier, epsilon_of
from fedsynth.privacy.accounting import Totals
from fedsynth.results.saved_model import load_model
from fedsynth.simulation.simulate import simulate
from library.grid import Cell, Grid, Row

DELTA = 1e-5
PUBLIC = 200
LAWS = {"poisson": ("poisson", 0.0), "logarithmic": ("negative-binomial", 0.0)}
CLIPS, RATES = (0.1, 1.0, 10.0), (0.01, 0.1, 1.0)
