"""Checks before a private run that the contribution of an example depends only on that example.

User code that violates this is refused. If only the last bits of a contribution change, each pass
of the run has one record, and the check is repeated. Bits that change nevertheless are refused on a
CPU, and cause a warning on a GPU.

The check is a trial on public random images, with the initial weights of the run. It can find a
fault, but it cannot prove that there is none.

The trial computes a client's step several times. First it uses some records. Then it uses the same
records at different positions, among additional records, and unchanged. The contribution of a
record must be the same each time. The step uses the batch lengths of the run (the "pass lengths" of
`fedsynth.privacy.passes`). No client's ledger is charged and no noise is added.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedsynth.config.settings import RunSettings
from fedsynth.core.capabilities import OwnNetwork, VaryingReleases, exchange_of
from fedsynth.core.client import PrivateClientView, chunk
from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message, ModelParameters
from fedsynth.core.method import ClientState
from fedsynth.data.images import ImageData, to_stored
from fedsynth.errors import SettingError
from fedsynth.federation.privacy_plan import PrivacyPlan
from fedsynth.federation.server import Server
from fedsynth.methods import is_own_method
from fedsynth.models.own import refuse_dependence
from fedsynth.privacy.batch_independence import (
    ADVICE,
    AMONG_OTHERS,
    DRAWS,
    KEEPS_STATE,
    STATE,
    GlobalGenerators,
    OperationWatch,
    StepInputs,
    rounding,
)
from fedsynth.privacy.dpsgd import gradient_dependence
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.mechanisms import BudgetEnforcer, GaussianSumMechanism, Released
from fedsynth.privacy.passes import Sample
from fedsynth.privacy.plans import EXCHANGES, FIRST, ReleasePlan, charge_round
from fedsynth.privacy.products import Products
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.privacy.reachable_state import ReachableState
from fedsynth.privacy.releases import RECORD, USER
from fedsynth.seeding import numpy_generator, torch_generator

# The number of records in a trial of this package's code. Its tests examine the code further.
RECORDS = 32

MIN_RECORDS = 8
INSERTED = 3
# The maximum number of coordinates of all records' vectors in one release of a trial.
MAX_NUMBERS = 2**27
# The standard deviation of the noise that a trial adds to the initial weights. Without noise, the
# zeros and ones among the weights would make products exact in every kernel.
WEIGHT_NOISE = 0.01


class _LastReleaseError(Exception):
    """Raised during a trial to end the step after the last release that the trial needs."""


@dataclass(frozen=True)
class _Run:
    """The input of one of the runs of a step that a trial compares.

    Args:
        order: the positions of the client's records among the trial's images.
        same: True for each record of the first run whose image is the same in this run.
        finding: the fault that is reported if the vectors of these records differ.
        fill: the value to which uninitialised memory is set.
    """

    order: Tensor
    same: Tensor
    finding: str
    fill: float = 0.0


class StepTrial:
    """Computes one client's step several times, and compares the contributions of each record.

    Args:
        plan: the privacy plan of the run, which may be without σ.
        context: the context of the round. The trial uses its device.
        client: the index of the client.
        thorough: True for user code. The trial then has as many records as a step of the run, makes
            two releases, and checks for random draws. Otherwise, it has few records and one
            release.

    Attributes:
        finding: a description of the fault, if contributions differ by more than rounding.
            Otherwise an empty string.
        moved: True if a contribution differs at all, even by one bit.
        opaque: the types of objects whose state could not be compared, in a trial of user code.
    """

    def __init__(
        self, plan: PrivacyPlan, context: RoundContext, client: int, *, thorough: bool
    ) -> None:
        self.finding = ""
        self.moved = False
        self.opaque: set[str] = set()
        self.thorough = thorough
        self._sigma = plan.privacy.noise_multiplier or 1.0
        self._privacy = replace(plan.privacy, noise_multiplier=self._sigma)
        noise = replace(plan, privacy=self._privacy).noise
        self._context = replace(context, privacy=self._privacy, noise=noise)
        self._method = plan.run.method
        self._client = client
        self._plans = []
        releases = 2 if thorough else 1
        for release in plan.client_plans(client, self._context):
            steps = min(release.steps, releases)
            self._plans.append(replace(release, steps=steps, shares=1, addends=None))
        self.records = records_of_step(self._plans, context)
        if not thorough:
            self.records = min(RECORDS, self.records)
        self._rows: dict[tuple[int, int], Tensor] = {}
        self._released: dict[tuple[int, int], Released] = {}
        self._watch: OperationWatch | None = None
        self._active = ExitStack()
        with GlobalGenerators(context.device) as self._generators:
            states = []
            for run in self._runs():
                self._take_step(run, self._images(run.order).to(context.device))
                if thorough:
                    states.append(ReachableState.of(self._method, context.architecture))
        self._rows.clear()
        if thorough:
            self.opaque = states[0].opaque
            change = states[-1].change_since(states[0])
            if change and not self.finding:
                self.finding = f"{STATE} ({change} changes)"

    def _runs(self) -> list[_Run]:
        records = torch.arange(self.records)
        inserted = self.records + torch.arange(INSERTED)
        even = records % 2 == 0
        replaced = torch.where(even, records, self.records + INSERTED + records)
        every = torch.ones_like(even)
        runs = [
            _Run(records, every, ""),
            _Run(torch.cat([inserted[:1], records]), every, AMONG_OTHERS),
            _Run(torch.cat([inserted, replaced]), even, AMONG_OTHERS),
        ]
        if not self.thorough:
            return runs
        few = records % 8 == 0
        for image in inserted[:2]:  # white, black: so that every mean or extreme of a batch occurs
            runs.append(_Run(torch.where(few, records, image), few, AMONG_OTHERS))
        runs.append(_Run(records, every, KEEPS_STATE, fill=1.0))
        return runs

    def _images(self, order: Tensor) -> ImageData:
        """Returns the random images of a trial.

        The images that replace records or are inserted among the records are white, black, or a mix
        of both.
        """
        spec = self._context.spec
        draws = torch_generator(0, "images of a trial")
        count = 2 * self.records + INSERTED
        images = torch.randint(0, 256, (count, *spec.image_shape), generator=draws)
        extreme = images[self.records :]
        extreme[0::3] = 255
        extreme[1::3] = 0
        extreme[2::3] = 255 * (extreme[2::3] > 127)
        labels = torch.randint(0, spec.classes, (count,), generator=draws)
        users = torch.zeros(count, dtype=torch.int64)
        users[order] = torch.arange(len(order))  # users are summed in the order of their indices
        return ImageData(to_stored(images / 255, spec), labels, spec, groups=users)

    def _take_step(self, run: _Run, data: ImageData) -> None:
        self._run = run
        context = self._context
        self._generators.rewind()
        server = Server.begun(self._method, context)
        client_state: ClientState = {}
        self._num_mechanisms = 0
        users = data.groups if self._privacy.unit == USER else None
        for exchange in EXCHANGES:
            message = server.request(exchange, context)
            if message is None:
                continue
            self._exchange = exchange
            self._releases_left = 0
            budget = charge_round(
                self._plans,
                context.round,
                self._sigma,
                BudgetEnforcer(Ledger("public images"), unit=self._privacy.unit or RECORD),
                _NoDraws(test_only=numpy_generator(0, "no noise of a trial")),
                exchange=exchange,
                make_mechanism=partial(TriedSums, self),
            )
            clients = PrivateClientView(
                [self._client],
                data,
                [run.order],
                [budget],
                nominal_size=context.nominal_size,
                users=users,
                network=context.architecture,
                isolated=context.isolated,
            )
            step = exchange_of(self._method, exchange).client_step
            try:
                [(_, client_state)] = step(_disturbed(message), clients, [client_state], context)
            except _LastReleaseError:
                pass
            finally:
                self._unwatch()

    # ------------------------------------------------------------------ called by the mechanisms

    def next_number(self, releases: int) -> int:
        """Registers a new mechanism with this number of releases, and returns its number."""
        self._num_mechanisms += 1
        self._releases_left += releases
        return self._num_mechanisms

    def watch(self) -> None:
        """Begins to watch for random draws, in a trial of user code.

        Between `sample` and `release`, a step computes only the vectors of records. A draw at that
        time therefore influences these vectors.
        """
        if self.thorough:
            self._position = self._generators.position()
            self._watch = self._active.enter_context(OperationWatch(self._run.fill))

    def _unwatch(self) -> None:
        if self._watch is not None:
            self._active.close()
            if self._watch.draws or self._generators.position() != self._position:
                self.finding = DRAWS
            self._watch = None

    def compare(self, key: tuple[int, int], records: Tensor, rows: Tensor) -> None:
        """Stores the vectors of records in the first run, and compares later runs with the first.

        Args:
            key: the number of the mechanisms, and the number of releases that it has left.
            records: the positions of the records among the client's records.
            rows: the vectors of these records, [N, D].
        """
        rows = rows.detach().nan_to_num(0.0, 0.0, 0.0)  # as in the mechanism
        numbers = self._run.order[records]
        if not self._run.finding:
            if key not in self._rows:
                self._rows[key] = rows.new_zeros(self.records, rows.shape[1])
            self._rows[key][numbers.to(rows.device)] = rows
            return
        compared = numbers < self.records
        compared[compared.clone()] = self._run.same[numbers[compared]]
        first = self._rows.get(key)
        if first is None or first.shape[1:] != rows.shape[1:]:
            self.finding = self._run.finding  # its releases have another shape
            return
        expected = first[numbers[compared].to(rows.device)]
        vectors = rows[compared.to(rows.device)]
        if torch.equal(expected, vectors):
            return
        self.moved = True
        difference = float((expected - vectors).abs().max())
        if difference > rounding(rows.device, self._context.precision) * float(first.abs().max()):
            self.finding = self.finding or self._run.finding

    def released(self, key: tuple[int, int], sums: Released) -> Released:
        """Returns the sums that the first run released, in every run.

        The weights in the later releases of a step are then the same in every run.

        Raises:
            _LastReleaseError: this was the last release of the main exchange. A trial omits the
                computations on the releases, because they are slow and can fail on random images.
        """
        self._unwatch()
        self._releases_left -= 1
        if self._exchange != FIRST and not self._releases_left:
            raise _LastReleaseError
        return Released(self._released.setdefault(key, sums).clone())


class _NoDraws(SecretGenerator):
    """A generator of a trial, which samples all records and whose noise is zero."""

    def normal(
        self, shape: tuple[int, ...], standard_deviation: float, device: torch.device | str = "cpu"
    ) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64, device=device)

    def poisson_sample(self, records: int, sample_rate: float) -> Tensor:
        return torch.arange(records)


class TriedSums(GaussianSumMechanism):
    """A mechanism whose sums are compared by a trial.

    The trial compares the vectors of the records before they are added.

    Args:
        trial: the trial.
        charged: the arguments of `GaussianSumMechanism`.
    """

    def __init__(self, trial: StepTrial, *charged: Any) -> None:
        super().__init__(*charged)
        self._trial = trial
        self._number = trial.next_number(self.steps_left)

    @property
    def _key(self) -> tuple[int, int]:
        return self._number, self.steps_left

    def sample(self, units: int) -> Tensor:
        """Starts a step, and returns the indices of all privacy units instead of a sample."""
        if not self.steps_left:
            raise _LastReleaseError
        sampled = super().sample(units)
        self._at = 0
        self._trial.watch()
        return sampled

    def add(self, rows_ND: Tensor, groups_N: Tensor, sample: Sample | None = None) -> None:
        """Lets the trial compare the vectors, and then adds the vectors to the sums."""
        self._trial.compare(self._key, self._records(len(rows_ND), sample), rows_ND)
        super().add(rows_ND, groups_N, sample)

    def add_products(self, products: Products, sample: Sample | None = None) -> None:
        """Lets the trial compare the factors of the records' vectors, and then adds the vectors.

        The vectors are added as in `GaussianSumMechanism.add_products`.
        """
        factors = [value.double() for value in vars(products).values() if isinstance(value, Tensor)]
        records = self._records(len(products), sample)
        self._trial.compare(self._key, records, torch.cat(factors, dim=1))
        super().add_products(products, sample)

    def _records(self, count: int, sample: Sample | None) -> Tensor:
        first = self._at
        self._at += count
        if sample is None:
            return torch.arange(first, self._at)
        return sample.records

    def release(self) -> Released:
        """Ends the step, and returns the sums that the first run of the trial released."""
        key = self._key
        return self._trial.released(key, super().release())


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
    if not plan.facts.guaranteed:
        return StepCheck()
    own_model = settings.runs_own_model
    if own_model:
        if any(item.mechanism == "dp-sgd" for item in plan.plans):
            _check_gradients(settings, context)  # the plan has tried its forward passes
        else:
            shape, device = context.spec.image_shape, context.device
            name = settings.model.name
            refuse_dependence(name, context.architecture, shape, device, training=False)
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


def _check_gradients(settings: RunSettings, context: RoundContext) -> None:
    """Refuses a custom model whose backward pass mixes the examples of a batch."""
    inputs = StepInputs(
        context.spec.image_shape,
        context.device,
        length=RECORDS,
        bounds=(-3.0, 3.0),  # of normalised images
        classes=context.spec.classes,
    )
    for network in context.client_architectures or (context.architecture,):
        on_device = copy.deepcopy(network).to(context.device)
        if dependence := gradient_dependence(on_device, inputs):
            reason = f"cannot be private, because in training it {dependence}. {ADVICE}"
            raise SettingError("model", "name", reason, value=settings.model.name)


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
    rounds = [1]
    if plan.run.rounds > 1 and (isinstance(method, VaryingReleases) or is_own_method(method)):
        rounds = [1, 2]
    trials = []
    for client in clients:
        for number in rounds:
            of_round = replace(context, round=number)
            trials.append(StepTrial(plan, of_round, client, thorough=bool(plan.run.own_code)))
    return trials


def _clients_of_each_architecture(context: RoundContext) -> list[int]:
    """Returns, for each model architecture in the run, the index of one client that uses it."""
    first_clients: dict[str, int] = {}
    for number, network in enumerate(context.client_architectures or (context.architecture,)):
        first_clients.setdefault(str(network), number)
    return list(first_clients.values())
