"""Fixed features: maps from pixels to vectors, with public constants, independent of private data.

`feature_map.py` defines a map and `registry.py` lists the maps by name; each map has its own file.
"""

from __future__ import annotations

from fedsynth.features.feature_map import FeatureMap as FeatureMap
from fedsynth.features.public_statistics import measured_map as measured_map
from fedsynth.features.registry import feature_map as feature_map
from fedsynth.features.registry import feature_names as feature_names
from fedsynth.features.registry import register_features as register_features
from fedsynth.features.registry import register_file as register_file
