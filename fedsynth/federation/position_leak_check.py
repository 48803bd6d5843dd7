"""A check before a private run: the contribution of an example must depend only on that example.
User code that violates this is refused. If only the last bits of a result differ, the check warns.

The check is a trial on public random images, at the run's first weights. A finding is a fault; no
finding is not a proof.
"""

from __future__ import annotations

from dataclasses import replace

from fedsynth.config.settings import RunSettings
from fedsynth.core.context import RoundContext
from fedsynth.errors import SettingError
from fedsynth.federation.privacy_plan import PrivacyPlan
from fedsynth.federation.step_trial import StepTrial
from fedsynth.methods import is_own_method
from fedsynth.models.own import refuse_dependence
from fedsynth.models.registry import is_own_model
from fedsynth.privacy.batch_independence import ADVICE

MOVED = (
    "On the machine that tested it, the bits of an example's vector depend on its position "
    "among other examples. Epsilon may not hold against a server that crafts weights "
    "(docs/threat-model.md, malicious servers)"
)
NOT_TRIED = "The test whether an example's vector depends on other examples failed: "


def check_private_steps(
    settings: RunSettings, context: RoundContext, client: int | None = None
) -> list[str]:
    """Refuses user code whose result for one example depends on other examples.

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
    clients = _clients_of_each_architecture(context) if client is None else [client]
    try:
        trials = _trials(plan, context, clients)
    except SettingError:
        raise
    except Exception as error:  # a step can raise any on random images: nothing was tried then
        reason = (str(error) or type(error).__name__).splitlines()[0]
        return [f"{NOT_TRIED}{reason:.200}."]
    findings = list(filter(None, (trial.finding for trial in trials)))
    if findings and settings.own_code:
        setting = ("method", "features")
        if own_model:
            setting = ("model", "name")
        if is_own_method(settings.method):
            setting = ("run", "method")
        raise SettingError(
            *setting,
            f"cannot be private: a client's step with {' and '.join(settings.own_code)} "
            f"{findings[0]}, so the influence of one example is not bounded: {ADVICE}",
        )
    if not any(trial.moved for trial in trials):
        return []
    if not settings.method.takes_model or settings.model.features:
        return [f"{MOVED}."]
    return [f"{MOVED}: use a multiple of 8 as model.width, and images of even height and width."]


def _trials(plan: PrivacyPlan, context: RoundContext, clients: list[int]) -> list[StepTrial]:
    method = plan.run.method
    rounds = [1]
    if plan.run.rounds > 1 and (not method.same_releases_every_round or is_own_method(method)):
        rounds = [1, 2]
    trials = []
    for client in clients:
        for number in rounds:
            of_round = replace(context, round=number)
            trials.append(StepTrial(plan, of_round, client, thorough=bool(plan.run.own_code)))
    return trials


def _clients_of_each_architecture(context: RoundContext) -> list[int]:
    """Returns the index of one client for each architecture."""
    first_clients: dict[str, int] = {}
    for number, network in enumerate(context.client_architectures or (context.architecture,)):
        first_clients.setdefault(str(network), number)
    return list(first_clients.values())
