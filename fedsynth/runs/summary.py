"""The part of a run's summary.json that `fedsynth runs` shows, with types and ranges: the file may
come from anybody."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=0, lt=2**63)]


class _Part(BaseModel):
    """What else stands there is left out; a key may be missing."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class Local(_Part):
    """Of the clients' own test splits."""

    amp: float
    wlp: float


class Promise(_Part):
    epsilon: float | None = None


class Summary(_Part):
    method: str | None = None
    dataset: str | None = None
    rounds: Count | None = None
    test_accuracy: float | None = None
    local: Local | None = None
    generator: dict[str, int | float] | None = None
    differential_privacy: Promise | None = None
    upload_bytes: Count | None = None
    seconds: float | None = None
