"""--set: settings of the method and, with a section, of all else; nothing is given twice."""

from __future__ import annotations

import pytest

from fedsynth.cli.settings_options import method_settings, set_options, with_set_options
from fedsynth.errors import SettingError


def test_keys_go_to_the_method_or_to_the_section_that_they_name() -> None:
    found = set_options(["mu=0.1", " model.projection = 256", "partition.missing_classes=2"])
    assert found == {"method": {"mu": "0.1"}, "model": {"projection": "256"}, "partition": {"missing_classes": "2"}}
    assert method_settings(["a=b=c"]) == {"a": "b=c"}


@pytest.mark.parametrize("text", ["mu", "=1", "model.=1", "nowhere.x=1", "method.mu=1"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(SettingError, match="--set takes KEY=VALUE"):
        set_options([text])


def test_given_twice() -> None:
    given = {"partition": {"kind": "iid", "alpha": None}, "method": {}}
    assert with_set_options(given, ["partition.alpha=2"]) == {"partition": {"kind": "iid", "alpha": "2"}, "method": {}}
    with pytest.raises(SettingError, match="kind is given twice, by --partition and by --set"):
        with_set_options(given, ["partition.kind=classes"], {"kind": "partition"})
    with pytest.raises(SettingError, match="one of model"):
        method_settings(["model.width=3"])
