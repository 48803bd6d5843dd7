"""Feature maps: fixed functions from an image's pixels to a vector.

A feature map does not depend on private data, and all its constants are public. `feature_map.py`
defines `FeatureMap`, and `registry.py` lists the maps by name.
"""

from __future__ import annotations

from fedsynth.features.feature_map import FeatureMap as FeatureMap
from fedsynth.features.public_statistics import measured_map as measured_map
from fedsynth.features.public_statistics import normalised_map as normalised_map
from fedsynth.features.registry import feature_map as feature_map
from fedsynth.features.registry import feature_names as feature_names
from fedsynth.features.registry import register_features as register_features
from fedsynth.features.registry import register_file as register_file
