"""Checks before a private run that an example's contribution depends only on that example.

User code that violates the rule is refused. If only the last bits of a contribution change, each
pass of the run has one record, and the check is repeated. Bits that change nevertheless are refused
on a CPU, and cause a warning on a GPU.

The check is a trial on public random images, with the initial weights of the run. It can find a
fault, but it cannot prove that there is none.

The trial runs a client's step with a client view of random images (`TrialClientView`), and with the
request of a later round if that has more fields (`Method.later_request`). Whenever the
step releases a sum, the view computes the values of the images as the step does, with the batch
lengths of the run (the "pass lengths" of `fedsynth.privacy.passes`). It computes them again at
other positions and among other images (`dependence_in_step`). The step of user code then runs a
second time, among other images. Its values of the same images must be those of the first time. No
client's ledger is charged, and the step receives seeded noise.

The uploads of a user's method must have the weight 1 or 0, and its `TrainsLocally.combine` is tried
once, so that a mistake in it costs no budget. A user's method is also tried in round 2, with the
client's state after round 1, if the step ends with the releases of the trial. If a simulation
computes several clients together, two are tried in one pass, and their values must equal the values
from separate passes. A step of user code that raises before its last release is refused, because
nothing was tried then.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
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
from fedsynth.methods.shared.local import TrainsLocally
from fedsynth.privacy.batch_independence import (
    ADVICE,
    AMONG_OTHERS,
    MIXES,
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
from fedsynth.privacy.plans import EXCHANGES, MAIN, ReleaseBudget, ReleasePlan, charge_round
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


# Mistakes in code, whatever the images are. A missing key or index may be due to random images.
_MISTAKES = (AttributeError, ImportError, NameError, TypeError)


# Users' methods may give their private uploads other weights.
WEIGHT = "uploads a model with the weight {:g}, which must be 1, or 0 of a dropped straggler"


class _LastReleaseError(Exception):
    """Raised to end a step after the last release that its trial needs."""


class _TriedMechanism(GaussianSumMechanism):
    """A mechanism for trials. It detects steps that bypass the client view's functions."""

    trial: StepTrial

    def _open_sums(self, sample: Sample | None) -> NoReturn:
        self.trial.finding = ADDS
        raise _LastReleaseError


class TrialClientView(PrivateClientView):
    """A client view of public random images that checks the values computed by a step.

    All clients have the same images. In a pass with two clients' records, the first pixel of each
    image decides whose record it is. A client whose records are computed separately is tried only
    if it is the first.

    Args:
        trial: the trial.
        budgets: for each client, the charged releases of an exchange.
        ends: whether the trial ends the step after the last release.
    """

    def __init__(
        self,
        trial: StepTrial,
        budgets: Sequence[ReleaseBudget[GaussianSumMechanism]],
        *,
        ends: bool,
    ) -> None:
        self._trial = trial
        self._budgets = budgets
        self._ends = ends
        self.ids = tuple(trial.clients)
        trial.releases_left = sum(plan.steps for plan in budgets[0].plans)
        self._show(*trial.inputs_of_run.draw(0, trial.inputs.length))

    def _show(self, x: Tensor, labels: Tensor) -> None:
        """Replaces the clients' images."""
        context = self._trial.context
        key = x.cpu().numpy().tobytes(), labels.numpy().tobytes()
        data = self._trial.image_cache.get(key)
        if data is None:
            data = ImageData(to_stored(x, context.spec), labels, context.spec)
        if not self._trial.thorough:  # whose features are then computed once
            self._trial.image_cache[key] = data
        super().__init__(
            self.ids,
            data,
            [torch.arange(len(labels))] * len(self.ids),
            self._budgets,
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
        """Checks the values of all records, and returns noise instead of noisy sums.

        The noise is the same in each run of the step.

        Raises:
            _LastReleaseError: this was the last release of the main exchange. A trial omits the
                computations on the releases, because they are slow and can fail on random images.
        """
        if not mechanisms[0].steps_left:
            raise _LastReleaseError
        grad_mode = torch.is_grad_enabled()

        def values(x: Tensor, labels: Tensor, *, by_client: bool = False) -> Tensor:
            """Computes the records' vectors, for all clients together or one at a time."""
            self._show(x, labels)
            owners = (1000 * x.flatten(1)[:, 0]).long().cpu() % len(mechanisms)
            vectors: list[Tensor] = []
            order: list[Tensor] = []
            for client in range(len(mechanisms)) if by_client else [None]:
                samples = []
                for number in range(len(mechanisms)):
                    chosen = (owners == number) & (client in (None, number))
                    samples.append(Sample(chosen.nonzero().flatten()))
                order += [sample.records for sample in samples]
                with torch.set_grad_enabled(grad_mode):
                    compute = prepare(samples)
                    for parts in passes_of(samples, count):
                        vectors += map(_vectors, compute(parts))
            return torch.cat(vectors)[torch.cat(order).argsort().to(vectors[0].device)]

        if mechanisms[0].owner in (None, self._trial.clients[0]):
            self._trial.compare(values, len(mechanisms))
            self._trial.releases_left -= 1
            if self._ends and not self._trial.releases_left:
                raise _LastReleaseError
            # other calls than in the other run, so that their state differs
            if self._trial.thorough:
                inputs = self._trial.inputs
                values(*inputs.draw(14 if self._trial.repeats else 4, inputs.length))
        for mechanism in mechanisms:
            mechanism.sample(0)
        return [mechanism.release() for mechanism in mechanisms]


def _vectors(values: Values) -> Tensor:
    """Returns the records' vectors. If they are products, returns their factors instead."""
    return values.compared() if isinstance(values, Products) else values[0]


class StepTrial:
    """Runs a client's step, and checks that other records do not change a record's values.

    Args:
        plan: the privacy plan of the run, which may be without σ.
        context: the context of the round. The trial uses its device.
        clients: the index of the client, or of two clients whose step is computed together.
        states: the states of these clients before the step, in its first and in its second run.
        finishes: whether the step is run to its end, for the clients' later states and the server's
            step.
        thorough: True for user code. The trial then has as many records as a step of the run, makes
            two releases in each of two runs, and checks for random draws and state. Otherwise, it
            has few records, one release and one run.

    Attributes:
        finding: a description of the fault, if values differ by more than rounding. Otherwise an
            empty string.
        moved: True if a value differs at all, even by one bit.
        opaque: the types of objects whose state could not be compared, in a trial of user code.
        inputs: the random records.
        states: the states of the clients after each run. If a run did not end, those before it.
        repeats: True in the second run of the step.
        releases_left: the number of releases until the step of the exchange ends.
        image_cache: the images of a trial of this package's code, by their content.
    """

    def __init__(
        self,
        plan: PrivacyPlan,
        context: RoundContext,
        clients: Sequence[int],
        states: Sequence[Sequence[ClientState]],
        *,
        finishes: bool,
        thorough: bool,
    ) -> None:
        self.finding = ""
        self.moved = False
        self.opaque: set[str] = set()
        self.clients = clients
        self.repeats = False
        self.releases_left = 0
        self.image_cache: dict[tuple[bytes, bytes], ImageData] = {}
        self.thorough = thorough
        self._finishes = finishes
        privacy = replace(plan.privacy, noise_multiplier=plan.privacy.noise_multiplier or 1.0)
        noise = replace(plan, privacy=privacy).noise
        self.context = replace(context, privacy=privacy, noise=noise)
        self._method = plan.run.method
        self._plans = []
        for release in plan.client_plans(clients[0], self.context):
            steps = min(release.steps, 2 if thorough else 1)
            self._plans.append(replace(release, steps=steps, shares=1, addends=None))
        records = records_of_step(self._plans, context)
        self.inputs = StepInputs(
            context.spec.image_shape,
            context.device,
            length=records if thorough else min(RECORDS, records),
            classes=context.spec.classes,
            label_shape=context.spec.label_shape,
            precision=context.precision,
        )
        self._values: list[Tensor] = []
        self._expected: list[Tensor] = []
        with GlobalGenerators(context.device) as generators:
            self.states = [self._take_step(states[0])]
            if thorough and not self.finding:
                state = ReachableState.of(self._method, context.architecture)
                self.opaque = state.opaque
                generators.rewind()
                self.repeats = True
                self._expected, self._values = self._values, []
                self.states.append(self._take_step(states[1]))
                change = ReachableState.of(self._method, context.architecture).change_since(state)
                if change:
                    self.finding = self.finding or f"{STATE} ({change} changes)"
        self._values.clear()

    @property
    def inputs_of_run(self) -> StepInputs:
        """The random records on which the step is tested."""
        return replace(self.inputs, seed=OTHER_SEED) if self.repeats else self.inputs

    def _take_step(self, states: Sequence[ClientState]) -> Sequence[ClientState]:
        """Runs the step once, and returns the clients' resulting states."""
        context = self.context
        server = Server.begun(self._method, context)
        for exchange in EXCHANGES:
            message = server.request(exchange, context)
            if message is None:
                continue
            if exchange == MAIN:
                message = self._method.later_request(message, context)
            budgets = [self._budget(exchange, number) for number in range(len(self.clients))]
            ends = exchange == MAIN and not self._finishes
            clients = TrialClientView(self, budgets, ends=ends)
            step = exchange_of(self._method, exchange).client_step
            try:
                results = step(_disturbed(message), clients, states, context)
                states = [state for _, state in results]
                if not ends:
                    self._combine(server, exchange, [reply for reply, _ in results])
            except _LastReleaseError:
                if self.finding:
                    return states
            except Exception as error:
                if self.finding:  # which must not be lost
                    return states
                # after the last release, what the step does with random images may fail
                is_mistake = isinstance(error, _MISTAKES)
                if exchange == MAIN and not self.releases_left and not is_mistake:
                    return states
                error.add_note(f"in the {exchange} exchange of round {context.round}")
                raise
        return states

    def _combine(self, server: Server, exchange: str, replies: Sequence[Message]) -> None:
        """Tries what the server of a user's method does with the uploads, to find mistakes in it.

        `TrainsLocally.combine` runs once, with as many uploads as there are clients. Errors that
        may be due to the random images are ignored. Server steps of other methods may be long.
        """
        weights = {reply.weight for reply in replies if isinstance(reply, ModelParameters)}
        if wrong := weights.difference({0.0, 1.0}):
            self.finding = self.finding or WEIGHT.format(min(wrong))
        combines = type(self._method).server_step is TrainsLocally.server_step
        if exchange != MAIN or self.repeats or self.context.round > 1 or not combines:
            return
        try:
            uploads = dict.fromkeys(range(self.context.clients), replies[0])
            server.receive(exchange, uploads, self.context)
        except _MISTAKES as error:
            error.add_note("in the server's step")
            raise
        except Exception:  # such as numbers that are not finite
            pass

    def _budget(self, exchange: str, number: int) -> ReleaseBudget[GaussianSumMechanism]:
        return charge_round(
            self._plans,
            self.context.round,
            1.0,  # more noise could hide the values in later releases
            BudgetEnforcer(Ledger("public images")),
            SecretGenerator(test_only=numpy_generator(number, "noise of a trial")),
            exchange=exchange,
            make_mechanism=self._mechanism,
        )

    def _mechanism(self, *charged: Any) -> GaussianSumMechanism:
        mechanism = _TriedMechanism(*charged)
        mechanism.trial = self
        return mechanism

    def compare(self, values: Callable[..., Tensor], clients: int) -> None:
        """Checks that records have the same values at all positions and in all runs of the step.

        Args:
            values: computes the values of records. With `by_client`, it computes those of
                each client separately.
            clients: the number of clients whose records are computed together.
        """
        expected = None
        if self.repeats:
            if not self._expected:
                self._report(Dependence(AMONG_OTHERS))  # it makes other releases
            expected = self._expected.pop(0)
        result = dependence_in_step(values, self.inputs_of_run, thorough=self.thorough)
        self._values.append(result.values)
        self._report(result)
        if clients > 1:
            by_client = partial(values, by_client=True)
            self._report(
                dependence_in_step(
                    by_client, self.inputs_of_run, result.values, fault=MIXES, thorough=True
                )
            )
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
    """Adds random noise to a request's weights, so that rounding errors become visible."""
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
RAISED = (
    "A trial calls it with random images before the run. Compute a value for every image and label "
    "of the data set's shape"
)
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
    groups = [[client]] if client is not None else []
    try:
        if client is None:
            first_clients = _clients_of_each_architecture(context)
            groups = [_with_partner(plan, context, number) for number in first_clients]
        trials = _trials(plan, context, groups)
        findings = list(filter(None, (trial.finding for trial in trials)))
        if findings and settings.own_code:
            raise _refused(settings, findings[0], ADVICE, own_model=own_model)
        isolated = None
        if any(trial.moved for trial in trials):
            isolated = _trials(plan, replace(context, isolated=True), groups)
    except SettingError:
        raise
    except Exception as error:  # nothing was tried then
        if settings.own_code:
            place = " ".join(getattr(error, "__notes__", ()))
            finding = f"raised {type(error).__name__}: {one_line(error)} {place}".rstrip()
            raise _refused(settings, finding, RAISED, own_model=own_model) from error
        reason = (str(error) or type(error).__name__).splitlines()[0]
        return StepCheck([f"{NOT_TRIED}{reason:.200}."])
    opaque = sorted({kind for trial in trials for kind in trial.opaque})
    warnings = [f"{NOT_COMPARED}{', '.join(opaque)}."] if opaque else []
    if isolated is None:
        return StepCheck(warnings)
    return _isolated(settings, context, isolated, warnings)


def _refuse_dependent_model(settings: RunSettings, context: RoundContext, *, trains: bool) -> None:
    """Refuses a custom model if its outputs or its DP-SGD gradients mix examples."""
    tokens = context.spec.vocabulary
    inputs = StepInputs(
        context.spec.image_shape,
        context.device,
        bounds=(0.0, tokens - 1.0) if tokens else (-3.0, 3.0),  # of tokens, of normalised images
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
    """Returns the check's result, given trials with one record per pass.

    Raises:
        SettingError: bits depend on positions even in these trials, on a CPU.
    """
    is_stable = not any(trial.moved for trial in trials)
    if not is_stable and context.device.type == "cpu":
        reason = (
            "cannot compute private steps: an example's vector changes with its position in a "
            f"batch. {FASTER}"
        )
        raise SettingError("run", "device", reason, value=settings.device)
    text = ISOLATED if is_stable else NOT_HELD
    on_features = isinstance(settings.method, OwnNetwork) or settings.model.features
    warning = f"{text}." if on_features else f"{text}. {FASTER}."
    return StepCheck([*warnings, warning], isolated=is_stable)


def _refused(settings: RunSettings, finding: str, advice: str, *, own_model: bool) -> SettingError:
    setting = ("model", "name") if own_model else ("method", "features")
    if is_own_method(settings.method):
        setting = ("run", "method")
    code = " and ".join(settings.own_code)
    reason = f"cannot be private, because a client's step with {code} {finding}. {advice}"
    return SettingError(*setting, reason)


def _trials(
    plan: PrivacyPlan, context: RoundContext, groups: Sequence[Sequence[int]]
) -> list[StepTrial]:
    method, own_method = plan.run.method, is_own_method(plan.run.method)
    tried = {1}
    if own_method:
        tried.update((min(2, plan.run.rounds), plan.run.rounds))
    if isinstance(method, VaryingReleases):  # the first round with each kind of step
        kinds = {plan.round_plans(number): number for number in range(plan.run.rounds, 0, -1)}
        tried.update(kinds.values())
    rounds = sorted(tried)
    trials = []
    for group in groups:
        states: Sequence[Sequence[ClientState]] = [[{}] * len(group)] * 2
        for number in rounds:
            trial = StepTrial(
                plan,
                replace(context, round=number),
                group,
                states,
                finishes=own_method,
                thorough=bool(plan.run.own_code),
            )
            trials.append(trial)
            if trial.finding:
                break
            if own_method:
                states = trial.states
    return trials


def _with_partner(plan: PrivacyPlan, context: RoundContext, client: int) -> list[int]:
    """Returns a client, and a second client if both may be computed in one pass.

    Only a user's method can treat the clients in a pass differently.
    """
    method = plan.run.method
    if is_own_method(method) and method.client_bytes(context) is not None:
        plans = plan.client_plans(client, context)
        for partner in range(context.clients):
            if partner != client and plan.client_plans(partner, context) == plans:
                return [client, partner]
    return [client]


def _clients_of_each_architecture(context: RoundContext) -> list[int]:
    """Returns, for each model architecture in the run, the index of one client that uses it."""
    first_clients: dict[str, int] = {}
    for number, network in enumerate(context.client_architectures or (context.architecture,)):
        first_clients.setdefault(str(network), number)
    return list(first_clients.values())
