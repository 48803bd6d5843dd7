"""Checks before a private run that the contribution of an example depends only on that example.

User code that violates this is refused. If only the last bits of a contribution change, each pass
of the run has one record, and the check is repeated. Bits that change nevertheless are refused on a
CPU, and cause a warning on a GPU.

The check is a trial on public random images, with the initial weights of the run. It can find a
fault, but it cannot prove that there is none.

The trial runs a client's step with a client view of random images (`TrialClientView`). Whenever the
step releases a sum, the view computes the values of the images as the step does, with the batch
lengths of the run (the "pass lengths" of `fedsynth.privacy.passes`). It computes them again at
other positions and among other images (`dependence_in_step`). The step of user code then runs a
second time, among other images. Its values of the same images must be those of the first time. No
client's ledger is charged, and the step receives seeded noise.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from fedsynth.config.settings import RunSettings
from fedsynth.core.capabilities import OwnNetwork, VaryingReleases, exchange_of
from fedsynth.core.client import PrivateClientView, chunk
from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message, ModelParameters
from fedsynth.core.method import ClientState
from fedsynth.data.images import ImageData, to_stored
from fedsynth.errors import FedsynthError, SettingError, one_line
from fedsynth.federation.privacy_plan import PrivacyPlan
from fedsynth.federation.server import Server
from fedsynth.methods import is_own_method
from fedsynth.privacy.batch_independence import (
    ADVICE,
    AMONG_OTHERS,
    STATE,
    Dependence,
    GlobalGenerators,
    StepInputs,
    dependence_in_step,
    network_dependence,
)
from fedsynth.privacy.dpsgd import gradient_dependence
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.mechanisms import BudgetEnforcer, GaussianSumMechanism, Released
from fedsynth.privacy.passes import Prepare, Sample, Units, Values, passes_of
from fedsynth.privacy.plans import EXCHANGES, FIRST, ReleaseBudget, ReleasePlan, charge_round
from fedsynth.privacy.products import Products
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.privacy.reachable_state import ReachableState
from fedsynth.seeding import numpy_generator, torch_generator

# The number of records in a trial of this package's code. Its tests examine the code further.
RECORDS = 32

# The seed of the records in the second run of a step.
OTHER_SEED = 10
MIN_RECORDS = 8
INSERTED = 3
# The maximum number of coordinates of all records' vectors in one release of a trial.
MAX_NUMBERS = 2**27
# The standard deviation of the noise that a trial adds to the initial weights. Without noise, the
# zeros and ones among the weights would make products exact in every kernel.
WEIGHT_NOISE = 0.01


ADDS = "adds vectors to a mechanism without a function of its client view"


class _LastReleaseError(Exception):
    """Raised during a trial to end the step after the last release that the trial needs."""


class _TriedMechanism(GaussianSumMechanism):
    """A mechanism of a trial, which finds a step that adds vectors without its client view."""

    trial: StepTrial

    def _open_sums(self, sample: Sample | None) -> NoReturn:
        self.trial.finding = ADDS
        raise _LastReleaseError


class TrialClientView(PrivateClientView):
    """One client of public random images, whose releases try the values that a step computes.

    Args:
        trial: the trial.
        budget: the charged releases of an exchange.
        ends: whether the trial ends the step after the last release.
    """

    def __init__(
        self, trial: StepTrial, budget: ReleaseBudget[GaussianSumMechanism], *, ends: bool
    ) -> None:
        self._trial = trial
        self._budget = budget
        self._ends = ends
        trial.releases_left = sum(plan.steps for plan in budget.plans)
        self._show(*trial.inputs.draw(0, trial.inputs.length))

    def _show(self, x: Tensor, labels: Tensor) -> None:
        """Replaces the client's images."""
        context = self._trial.context
        key = x.cpu().numpy().tobytes(), labels.numpy().tobytes()
        data = self._trial.image_cache.get(key)
        if data is None:
            data = ImageData(to_stored(x, context.spec), labels, context.spec)
        if not self._trial.thorough:  # whose features are then computed once
            self._trial.image_cache[key] = data
        super().__init__(
            [self._trial.client],
            data,
            [torch.arange(len(labels))],
            [self._budget],
            nominal_size=context.nominal_size,
            network=context.architecture,
            isolated=context.isolated,
        )

    def _sums(
        self,
        mechanisms: Sequence[GaussianSumMechanism],
        units: Sequence[Units],
        count: int,
        prepare: Prepare,
    ) -> list[Released]:
        """Lets the trial compare values, and releases noise that is the same in each run.

        Raises:
            _LastReleaseError: this was the last release of the main exchange. A trial omits the
                computations on the releases, because they are slow and can fail on random images.
        """
        if not mechanisms[0].steps_left:
            raise _LastReleaseError
        grad_mode = torch.is_grad_enabled()

        def values(x: Tensor, labels: Tensor) -> Tensor:
            self._show(x, labels)
            sample = Sample(torch.arange(len(x)))
            vectors: list[Tensor] = []
            with torch.set_grad_enabled(grad_mode):
                compute = prepare([sample])
                for parts in passes_of([sample], count):
                    vectors += map(_vectors, compute(parts))
            return torch.cat(vectors)

        self._trial.compare(values)
        self._trial.releases_left -= 1
        if self._ends and not self._trial.releases_left:
            raise _LastReleaseError
        if self._trial.thorough:  # other calls than in the other run, so that their state differs
            inputs = self._trial.inputs
            values(*inputs.draw(14 if self._trial.repeats else 4, inputs.length))
        mechanisms[0].sample(0)
        return [mechanisms[0].release()]


def _vectors(values: Values) -> Tensor:
    """Returns the vectors of records, or the factors of which the vectors are products."""
    if isinstance(values, Products):
        factors = [value for value in vars(values).values() if isinstance(value, Tensor)]
        return torch.cat(factors, dim=1)
    return values[0]


class StepTrial:
    """Runs one client's step, and compares the values of each record.

    Args:
        plan: the privacy plan of the run, which may be without σ.
        context: the context of the round. The trial uses its device.
        client: the index of the client.
        thorough: True for user code. The trial then has as many records as a step of the run, makes
            two releases in each of two runs, and checks for random draws and state. Otherwise, it
            has few records, one release and one run.

    Attributes:
        finding: a description of the fault, if values differ by more than rounding. Otherwise an
            empty string.
        moved: True if a value differs at all, even by one bit.
        opaque: the types of objects whose state could not be compared, in a trial of user code.
        inputs: the random records.
        repeats: True in the second run of the step.
        releases_left: the number of releases until the step of the exchange ends.
        image_cache: the images of a trial of this package's code, by their content.
    """

    def __init__(
        self, plan: PrivacyPlan, context: RoundContext, client: int, *, thorough: bool
    ) -> None:
        self.finding = ""
        self.moved = False
        self.opaque: set[str] = set()
        self.client = client
        self.repeats = False
        self.releases_left = 0
        self.image_cache: dict[tuple[bytes, bytes], ImageData] = {}
        self.thorough = thorough
        privacy = replace(plan.privacy, noise_multiplier=plan.privacy.noise_multiplier or 1.0)
        noise = replace(plan, privacy=privacy).noise
        self.context = replace(context, privacy=privacy, noise=noise)
        self._method = plan.run.method
        self._plans = []
        for release in plan.client_plans(client, self.context):
            steps = min(release.steps, 2 if thorough else 1)
            self._plans.append(replace(release, steps=steps, shares=1, addends=None))
        records = records_of_step(self._plans, context)
        self.inputs = StepInputs(
            context.spec.image_shape,
            context.device,
            length=records if thorough else min(RECORDS, records),
            classes=context.spec.classes,
            precision=context.precision,
        )
        self._values: list[Tensor] = []
        self._expected: list[Tensor] = []
        with GlobalGenerators(context.device) as generators:
            self._take_step()
            if thorough and not self.finding:
                state = ReachableState.of(self._method, context.architecture)
                self.opaque = state.opaque
                generators.rewind()
                self.repeats = True
                self._expected, self._values = self._values, []
                self._take_step()
                change = ReachableState.of(self._method, context.architecture).change_since(state)
                if change:
                    self.finding = self.finding or f"{STATE} ({change} changes)"
        self._values.clear()

    def _take_step(self) -> None:
        context = self.context
        server = Server.begun(self._method, context)
        client_state: ClientState = {}
        for exchange in EXCHANGES:
            message = server.request(exchange, context)
            if message is None:
                continue
            budget = charge_round(
                self._plans,
                context.round,
                1.0,  # more noise could hide the values in later releases
                BudgetEnforcer(Ledger("public images")),
                SecretGenerator(test_only=numpy_generator(0, "noise of a trial")),
                exchange=exchange,
                make_mechanism=self._mechanism,
            )
            clients = TrialClientView(self, budget, ends=exchange != FIRST)
            step = exchange_of(self._method, exchange).client_step
            try:
                [(_, client_state)] = step(_disturbed(message), clients, [client_state], context)
            except _LastReleaseError:
                if self.finding:
                    return
            except Exception:
                if self.finding:  # which must not be lost
                    return
                raise

    def _mechanism(self, *charged: Any) -> GaussianSumMechanism:
        mechanism = _TriedMechanism(*charged)
        mechanism.trial = self
        return mechanism

    def compare(self, values: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Compares the values of records in one release, or with those of the first run."""
        expected = None
        if self.repeats:
            if not self._expected:
                self._report(Dependence(AMONG_OTHERS))  # it makes other releases
            expected = self._expected.pop(0)
        inputs = replace(self.inputs, seed=OTHER_SEED) if self.repeats else self.inputs
        result = dependence_in_step(values, inputs, thorough=self.thorough)
        self._values.append(result.values)
        self._report(result)
        if expected is not None:
            self._report(dependence_in_step(values, self.inputs, expected, thorough=True))

    def _report(self, result: Dependence) -> None:
        self.moved = self.moved or result.moved > 0
        self.finding = self.finding or result.fault
        if self.finding:
            raise _LastReleaseError


def records_of_step(plans: Sequence[ReleasePlan], context: RoundContext) -> int:
    """Returns the number of random records for a trial of user code.

    It is about the number of records in a step of the run. It is limited by memory and by the
    number of records that are computed at once (`fedsynth.privacy.passes`).
    """
    expected = max(1.0, context.nominal_size * max(release.sample_rate for release in plans))
    widest = max(release.dimension // release.groups for release in plans)
    likely = expected + 4 * math.sqrt(expected)
    pass_length = min(chunk(context.device), math.isqrt(int(128 * expected)))
    longest = min(pass_length + INSERTED, MAX_NUMBERS // widest)
    return max(MIN_RECORDS, min(math.ceil(likely), longest))


def _disturbed(message: Message) -> Message:
    """Adds random noise to the weights in a request, so that rounding errors can be seen."""
    if not isinstance(message, ModelParameters):
        return message
    draws = torch_generator(0, "weights of a trial")
    parameters = {}
    for name, value in message.parameters.items():
        parameters[name] = value
        if value.is_floating_point():
            noise = WEIGHT_NOISE * torch.randn(value.shape, generator=draws)
            parameters[name] = value + noise.to(value)
    return replace(message, parameters=parameters)


MOVED = "The position of an example in a batch changes the last bits of its vector on this machine"
ISOLATED = f"{MOVED}. Examples are therefore computed one at a time, which is slower"
NOT_HELD = f"{MOVED}. Epsilon may not hold against a server that crafts weights"
FASTER = "Use a multiple of 8 as model.width, and images of even height and width"
NOT_TRIED = "The test of the independence of examples could not run: "
NOT_COMPARED = "The state of these objects in user code could not be compared: "


@dataclass(frozen=True)
class StepCheck:
    """The result of the check before a private run.

    Args:
        warnings: warnings for the privacy report, one sentence or two each.
        isolated: whether each pass of the run must have only one record.
    """

    warnings: list[str] = field(default_factory=list)
    isolated: bool = False


def check_private_steps(
    settings: RunSettings, context: RoundContext, client: int | None = None
) -> StepCheck:
    """Refuses user code whose result for one example depends on other examples.

    Args:
        settings: the settings of the run. Runs without a privacy guarantee are not checked.
        context: the public context of round 1. The trial uses its device.
        client: the index of the client whose step is tried. None tries one client of each
            architecture.

    Raises:
        SettingError: a fault was found. The message names the setting that selects the code. Or the
            last bits of a vector depend on its position although each pass has one record.
    """
    if settings.privacy is None:
        return StepCheck()
    plan = PrivacyPlan.checked(settings, context)
    own_model = settings.runs_own_model
    trains = any(item.mechanism == "dp-sgd" for item in plan.plans)
    if own_model and (trains or plan.facts.guaranteed):
        _refuse_dependent_model(settings, context, trains=trains)
    if not plan.facts.guaranteed:
        return StepCheck()
    clients = _clients_of_each_architecture(context) if client is None else [client]
    try:
        trials = _trials(plan, context, clients)
        findings = list(filter(None, (trial.finding for trial in trials)))
        if findings and settings.own_code:
            raise _refused(settings, findings[0], own_model=own_model)
        isolated = None
        if any(trial.moved for trial in trials):
            isolated = _trials(plan, replace(context, isolated=True), clients)
    except SettingError:
        raise
    except Exception as error:  # a step can raise any on random images: nothing was tried then
        reason = (str(error) or type(error).__name__).splitlines()[0]
        return StepCheck([f"{NOT_TRIED}{reason:.200}."])
    opaque = sorted({kind for trial in trials for kind in trial.opaque})
    warnings = [f"{NOT_COMPARED}{', '.join(opaque)}."] if opaque else []
    if isolated is None:
        return StepCheck(warnings)
    return _isolated(settings, context, isolated, warnings)


def _refuse_dependent_model(settings: RunSettings, context: RoundContext, *, trains: bool) -> None:
    """Refuses a custom model whose outputs, or gradients if DP-SGD trains it, mix examples."""
    inputs = StepInputs(
        context.spec.image_shape,
        context.device,
        bounds=(-3.0, 3.0),  # of normalised images
        classes=context.spec.classes,
    )
    for architecture in context.client_architectures or (context.architecture,):
        network = copy.deepcopy(architecture).to(context.device)
        try:
            dependence = network_dependence(network, inputs, trains=trains)
            if trains and not dependence:
                dependence = gradient_dependence(network, inputs)
        except FedsynthError:
            raise
        except Exception as error:
            raise _refused_model(
                settings, f"cannot take random images: {one_line(error)}"
            ) from error
        if dependence:
            reason = f"{dependence}, so the influence of one example is not bounded. {ADVICE}"
            raise _refused_model(settings, reason)


def _refused_model(settings: RunSettings, reason: str) -> SettingError:
    return SettingError("model", "name", reason, value=settings.model.name)


def _isolated(
    settings: RunSettings, context: RoundContext, trials: list[StepTrial], warnings: list[str]
) -> StepCheck:
    """Decides about a run whose passes must have one record each.

    Raises:
        SettingError: bits depend on positions even then, on a CPU.
    """
    is_stable = not any(trial.moved for trial in trials)
    if not is_stable and context.device.type == "cpu":
        raise SettingError("run", "device", f"cannot compute private steps. {NOT_HELD}. {FASTER}")
    text = ISOLATED if is_stable else NOT_HELD
    on_features = isinstance(settings.method, OwnNetwork) or settings.model.features
    warning = f"{text}." if on_features else f"{text}. {FASTER}."
    return StepCheck([*warnings, warning], isolated=is_stable)


def _refused(settings: RunSettings, finding: str, *, own_model: bool) -> SettingError:
    setting = ("model", "name") if own_model else ("method", "features")
    if is_own_method(settings.method):
        setting = ("run", "method")
    code = " and ".join(settings.own_code)
    reason = f"cannot be private, because a client's step with {code} {finding}. {ADVICE}"
    return SettingError(*setting, reason)


def _trials(plan: PrivacyPlan, context: RoundContext, clients: list[int]) -> list[StepTrial]:
    method = plan.run.method
    rounds = {1}
    if is_own_method(method):
        rounds.add(min(2, plan.run.rounds))
    if isinstance(method, VaryingReleases):  # the first round with each kind of step
        kinds = {plan.round_plans(number): number for number in range(plan.run.rounds, 0, -1)}
        rounds.update(kinds.values())
    trials = []
    for client in clients:
        for number in sorted(rounds):
            of_round = replace(context, round=number)
            trials.append(StepTrial(plan, of_round, client, thorough=bool(plan.run.own_code)))
    return trials


def _clients_of_each_architecture(context: RoundContext) -> list[int]:
    """Returns, for each model architecture in the run, the index of one client that uses it."""
    first_clients: dict[str, int] = {}
    for number, network in enumerate(context.client_architectures or (context.architecture,)):
        first_clients.setdefault(str(network), number)
    return list(first_clients.values())
