"""What the weights of a model belong to, and how a file says it, which may come from anybody."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn

from fedsynth.core.method import Method
from fedsynth.data.registry import DatasetSpec
from fedsynth.data.stated_spec import spec_from_json
from fedsynth.errors import OutputError
from fedsynth.features.registry import is_own_features
from fedsynth.federation.terms.resolve import resolve
from fedsynth.federation.terms.settings import RunSettings
from fedsynth.methods import METHODS
from fedsynth.models.registry import (
    MOST_PARAMETERS,
    ModelSettings,
    build_network,
    counted,
    is_own_model,
)


@dataclass(frozen=True)
class OneNetwork:
    """A network by its settings and nothing else.

    Args:
        spec: of the images that it takes.
        model: its settings.
    """

    spec: DatasetSpec
    model: ModelSettings
    teaches = False

    def network(self, seed: int = 0) -> nn.Module:
        """It, untrained, on the CPU."""
        return build_network(self.model, self.spec, seed)

    @property
    def own(self) -> dict[str, str]:
        """What of it comes from outside the package: "model" or "features", and its name."""
        return _own_parts(self.model, (self.model.features,))

    def sections(self) -> dict[str, dict[str, Any]]:
        """The settings that it follows from."""
        return {"model": asdict(self.model)}

    def counted(self) -> int | None:
        """Parameters, without making them; None where only making it tells."""
        return None if self.own or self.model.features else _counted(self.model, self.spec)


@dataclass(frozen=True)
class RunsModel:
    """The network of a run's method, which may stand on a feature map.

    Args:
        spec: of the images that it takes.
        run: the run's settings.
    """

    spec: DatasetSpec
    run: RunSettings

    @property
    def teaches(self) -> bool:
        """Whether it learned from something else than the run's images, and so can label more."""
        return not self.run.method.learns_from_images

    def network(self, seed: int = 0) -> nn.Module:
        """It, untrained, on the CPU."""
        return self.run.method.network(self.run.model, self.spec, seed)

    @property
    def own(self) -> dict[str, str]:
        """What of it comes from outside the package: "model", "features" or "method", and its
        name."""
        method = self.run.method
        model = self.run.model if method.takes_model else ModelSettings()
        named = {} if method.name in METHODS else {"method": method.name}
        return {**_own_parts(model, self.run.feature_names), **named}

    def sections(self) -> dict[str, dict[str, Any]]:
        """Of the settings what the network follows from: no paths, no privacy, no partition."""
        said = self.run.to_mapping()
        name = {"method": self.run.method.name}
        source = said["run"].get("method_source")
        source_too = {} if source is None else {"method_source": source}
        return {
            "run": {**name, **source_too},
            "method": said.get("method", {}),
            "model": said["model"],
        }

    def counted(self) -> int | None:
        """Parameters, without making them; None where only making it tells."""
        plain = self.run.method.takes_model and not self.own and not self.run.feature_names
        return _counted(self.run.model, self.spec) if plain else None


Architecture = OneNetwork | RunsModel


def _own_parts(model: ModelSettings, features: Iterable[str]) -> dict[str, str]:
    found = {"model": model.name} if is_own_model(model) else {}
    for name in features:
        if is_own_features(name):
            found["features"] = name
    return found


def _counted(model: ModelSettings, spec: DatasetSpec) -> int:
    return counted(model, spec.image_shape, spec.classes)


def to_metadata(of: Architecture) -> dict[str, str]:
    """As a file's metadata; `from_metadata` is its inverse."""
    return {
        "settings": json.dumps(of.sections(), sort_keys=True),
        "spec": json.dumps(asdict(replace(of.spec, source="")), sort_keys=True),
    }


def from_metadata(
    said: Mapping[str, str], method: type[Method] | None, parameters: int
) -> Architecture:
    """The architecture that a file states.

    Args:
        said: the file's metadata.
        method: the class of a method that fedsynth does not know by name.
        parameters: numbers in the file, so that nothing larger is made.

    Raises:
        OutputError: one that is far larger than the file.
        FedsynthError, PrivacyError: unsound settings, or names that are not known here.
        KeyError, TypeError, ValueError, AttributeError: no architecture.
    """
    sections = json.loads(said["settings"])
    spec = spec_from_json(json.loads(said["spec"]))
    if math.prod(spec.image_shape) * spec.classes > MOST_PARAMETERS:
        raise OutputError("its images, or their classes, are too many")
    of: Architecture
    if "run" not in sections:
        of = OneNetwork(spec, ModelSettings(**sections["model"]))
    else:
        kept = {name: sections.get(name, {}) for name in ("run", "method", "model")}
        kept["run"] = {k: v for k, v in kept["run"].items() if k in ("method", "method_source")}
        of = RunsModel(spec, resolve(kept, own_method=method, own_data=spec.name))
    count = of.counted()
    if count is not None and count > parameters:
        raise OutputError(f"its network has {count:,} parameters, and the file {parameters:,}")
    return of
