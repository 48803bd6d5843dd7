"""Settings as a run folder has them, which an earlier version may have left."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedsynth.core.method import Method
from fedsynth.errors import UnknownNameError
from fedsynth.methods import method_class


def as_recorded(
    sections: Mapping[str, Mapping[str, Any]], own_method: type[Method] | None = None
) -> dict[str, dict[str, Any]]:
    """The sections of a folder's config.toml, with what its method did before settings came that
    the file does not say (`Method.later`).

    Args:
        sections: as they were read.
        own_method: the class of a method that is not the package's.

    >>> sections = as_recorded({"run": {"method": "fedstats"}, "method": {"logit_noise": 0.9}})
    >>> sections["method"]["whitening"], sections["method"]["logit_noise"]
    ('no', 0.9)
    """
    found = {name: dict(values) for name, values in sections.items()}
    method = own_method
    if method is None:
        try:
            method = method_class(str(found.get("run", {}).get("method")))
        except UnknownNameError:
            return found  # whoever resolves them says so
    if method.later:
        found["method"] = {**method.later, **found.get("method", {})}
    return found
