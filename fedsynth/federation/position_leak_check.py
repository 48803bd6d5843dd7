"""Checks, before a private run, that a client's sum depends on an example only through that
example: refuses user code that violates this, and warns where the last bits do.

The check is a trial on public random images, at the run's first weights. A finding is a fault; no
finding is not a proof.
"""

from __future__ import annotations

from dataclasses import replace

from fedsynth.config.settings import RunSettings
from fedsynth.core.context import RoundContext
from fedsynth.data.images import ImageData
from fedsynth.errors import FedsynthError, SettingError
from fedsynth.federation.privacy_plan import PrivacyPlan
from fedsynth.federation.step_trial import StepTrial
from fedsynth.methods import is_own_method
from fedsynth.models.own import refuse_dependence
from fedsynth.models.registry import is_own_model
from fedsynth.privacy.batch_independence import ADVICE
from fedsynth.privacy.errors import PrivacyError

UNTRIED = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
    FedsynthError,
    MemoryError,
    PrivacyError,
)
"""Exceptions that a step can raise on random images: nothing was tried then."""
MOVED = (
    "On the machine that tested it, the bits of an example's vector depend on its position "
    "among other examples. Epsilon may not hold against a server that crafts weights "
    "(docs/threat-model.md, malicious servers)"
)
NOT_TRIED = "The test whether an example's vector depends on other examples failed: "


def check_private_steps(
    settings: RunSettings, context: RoundContext, client: int | None = None
) -> list[str]:
    """Refuses user code whose result for an example depends on more than that example.

    Args:
        settings: of the run; without a guarantee nothing is tried.
        context: public, of round 1; its device is tried.
        client: the client whose step is tried; None: one client of each architecture.

    Returns:
        Warnings for the report, a sentence each.

    Raises:
        SettingError: names the model or the method.
    """
    if settings.privacy is None:
        return []
    plan = PrivacyPlan.checked(settings, context)
    if not plan.facts.guaranteed:
        return []
    own_model = settings.method.model_sees_data and is_own_model(settings.model)
    if own_model:
        trained = any(item.mechanism == "dp-sgd" for item in plan.plans)
        refuse_dependence(
            settings.model.name,
            context.architecture,
            context.spec.image_shape,
            context.device,
            training=trained,
        )
    try:
        trials = _trials(plan, context, _of_each_kind(context) if client is None else [client])
    except SettingError:
        raise
    except UNTRIED as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        return [f"{NOT_TRIED}{why:.200}."]
    finding = next((item.finding for item in trials if item.finding), "")
    if finding and settings.own_code:
        setting = ("model", "name") if own_model else ("method", "features")
        if is_own_method(settings.method):
            setting = ("run", "method")
        raise SettingError(
            *setting,
            f"cannot be private: a client's step with {' and '.join(settings.own_code)} "
            f"{finding}, so the influence of one example is not bounded: {ADVICE}",
        )
    if not any(item.moved for item in trials):
        return []
    if not settings.method.takes_model or settings.model.features:
        return [f"{MOVED}."]
    return [f"{MOVED}: use a multiple of 8 as model.width, and images of even height and width."]


def _trials(plan: PrivacyPlan, context: RoundContext, clients: list[int]) -> list[StepTrial]:
    thorough = bool(plan.run.own_code)
    method = plan.run.method
    differ = not method.same_releases_every_round or is_own_method(method)
    rounds = range(1, 1 + min(plan.run.rounds, 2 if differ else 1))
    images: dict[tuple[int, int], ImageData] = {}
    return [
        StepTrial(plan, replace(context, round=number), client, images, thorough=thorough)
        for client in clients
        for number in rounds
    ]


def _of_each_kind(context: RoundContext) -> list[int]:
    """Returns the index of one client of each architecture."""
    first_clients: dict[str, int] = {}
    for number, network in enumerate(context.client_architectures or (context.architecture,)):
        first_clients.setdefault(str(network), number)
    return list(first_clients.values())
