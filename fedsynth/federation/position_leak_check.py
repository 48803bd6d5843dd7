"""A check before a private run: the contribution of an example must depend only on that example.
User code that violates this is refused. If only the last bits of a result differ, the check warns.

The check is a trial on public random images, at the run's first weights. A finding is a fault; no
finding is not a proof.

The trial runs the client's step several times: with the same records at other positions, among
other records, and unchanged. The contribution of a record must be the same each time. The step uses
the pass lengths of the run. Its series charge nothing and add no noise: they compare their rows
with those of the first run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from fedsynth.config.settings import RunSettings
from fedsynth.core.client import PrivateClientView, chunk
from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message, ModelParameters
from fedsynth.core.method import Memory
from fedsynth.data.images import ImageData
from fedsynth.errors import SettingError
from fedsynth.federation.privacy_plan import PrivacyPlan
from fedsynth.federation.server import Server
from fedsynth.methods import is_own_method
from fedsynth.models.own import refuse_dependence
from fedsynth.models.registry import is_own_model
from fedsynth.privacy.batch_independence import (
    ADVICE,
    AMONG_OTHERS,
    DRAWS,
    KEEPS_STATE,
    GlobalGenerators,
    OperationWatch,
    rounding,
)
from fedsynth.privacy.errors import PrivacyError
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.mechanisms import BudgetEnforcer, GaussianSumMechanism, Released
from fedsynth.privacy.passes import Sample
from fedsynth.privacy.plans import FIRST, PHASES, ReleasePlan, charge_round
from fedsynth.privacy.products import Products
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.privacy.releases import USER, Release
from fedsynth.seeding import numpy_generator, torch_generator

RECORDS = 32
"""The number of records in a trial of the package's own code, which the tests examine further."""
MIN_RECORDS = 8
INSERTED = 3
MAX_NUMBERS = 2**27
"""The maximum of numbers in the rows of one release."""
WEIGHT_NOISE = 0.01
"""The standard deviation of the noise on the first weights: with zeros and identities among them,
products would be exact in every kernel."""


class _SeriesEndedError(Exception):
    """Raised during a trial when a step draws a batch for a release that the trial does not
    simulate, or has made its last release."""


@dataclass(frozen=True)
class _Run:
    """One run of the step during a trial.

    Args:
        order: positions of the client's records among the images.
        same: which of the first run's records have the same image, bool [records].
        finding: the finding if these records' rows differ.
        fill: the value of uninitialised memory.
    """

    order: Tensor
    same: Tensor
    finding: str
    fill: float = 0.0


class StepTrial:
    """Runs the step of one client in one round several times, and compares the contributions of
    each record.

    Args:
        plan: the privacy plan of the run, without σ.
        context: the context of the round. The trial uses its device.
        client: the client's index.
        thorough: for user code: with as many records as a step has, two releases, and a check for
            random draws; otherwise with few records and one release.

    Attributes:
        finding: how rows differ by more than rounding; "": they do not.
        moved: whether a row differs by one bit or more.
    """

    def __init__(
        self, plan: PrivacyPlan, context: RoundContext, client: int, *, thorough: bool
    ) -> None:
        self.finding = ""
        self.moved = False
        self.thorough = thorough
        self._sigma = plan.privacy.noise_multiplier or 1.0
        self._privacy = replace(plan.privacy, noise_multiplier=self._sigma)
        noise = replace(plan, privacy=self._privacy).noise
        self._context = replace(context, privacy=self._privacy, noise=noise)
        self._method = plan.run.method
        self._client = client
        self._plans = []
        releases = 2 if thorough else 1
        for release in self._method.client_plans(
            plan.round_plans(context.round), client, self._context
        ):
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
            for run in self._runs():
                self._take_step(run, self._images(run.order).to(context.device))
        self._rows.clear()

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
        """Returns random images. Inserted images and replacements are white, black, or a mix of
        both."""
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
        return ImageData(images.to(torch.uint8), labels, spec, groups=users)

    def _take_step(self, run: _Run, data: ImageData) -> None:
        self._run = run
        context = self._context
        self._generators.rewind()
        server = Server.begun(self._method, context)
        memory: Memory = {}
        self._num_series = 0
        users = None
        if self._privacy.unit == USER:
            users = data.groups
        for phase in PHASES:
            message = server.request(phase, context)
            if message is None:
                continue
            self._phase = phase
            self._unfinished: set[int] = set()
            allowance = charge_round(
                self._plans,
                context.round,
                self._sigma,
                BudgetEnforcer(
                    Ledger("public images"), self._privacy.delta, None, unit=self._privacy.unit
                ),
                SecretGenerator(test_only=numpy_generator(0, "no noise of a trial")),
                phase=phase,
                make_series=partial(TriedSums, self),
            )
            clients = PrivateClientView(
                [self._client],
                data,
                [run.order],
                [allowance],
                nominal_size=context.nominal_size,
                users=users,
                network=context.architecture,
            )
            step = self._method.first_step if phase == FIRST else self._method.client_step
            try:
                [(_, memory)] = step(_disturbed(message), clients, [memory], context)
            except _SeriesEndedError:
                pass
            finally:
                self._unwatch()

    # ------------------------------------------------------------------ called by the series

    def next_number(self) -> int:
        """Returns the number of a new series of sums."""
        self._num_series += 1
        self._unfinished.add(self._num_series)
        return self._num_series

    def watch(self) -> None:
        """Watches for random draws. Between sampling and release only the rows of records are
        computed, so every draw there is for the records."""
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
        """Stores the rows of the first run, and compares the rows of later runs with them.

        Args:
            key: the series and its release.
            records: positions among the client's records.
            rows: the rows of these records, [N, D].
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

    def released(self, key: tuple[int, int], sums: Tensor) -> Released:
        """Returns the sums of the first run in every run, so that later results do not depend on
        the records.

        Raises:
            _SeriesEndedError: this was the last release of the main exchange. A trial omits the
                computations on releases: they are slow, and can fail on random images.
        """
        self._unwatch()
        number, steps_left = key
        if steps_left == 1:
            self._unfinished.discard(number)
        if self._phase != FIRST and not self._unfinished:
            raise _SeriesEndedError
        return Released(self._released.setdefault(key, Released(sums)).clone())


class TriedSums(GaussianSumMechanism):
    """A noisy-sum mechanism for trials. It passes its rows to the trial, samples all records, and
    adds no noise.

    Args:
        trial: the trial.
        release, groups, guard, secret: see `GaussianSumMechanism`.
    """

    def __init__(
        self,
        trial: StepTrial,
        release: Release,
        groups: int,
        guard: BudgetEnforcer,
        secret: SecretGenerator,
    ) -> None:
        super().__init__(release, groups, guard, secret)
        self._trial = trial
        self._number = trial.next_number()

    @property
    def _key(self) -> tuple[int, int]:
        return self._number, self.steps_left

    def sample(self, units: int) -> Tensor:
        """Returns the indices of all privacy units."""
        if not self.steps_left:
            raise _SeriesEndedError
        self._sums = torch.zeros(self._groups, self._width, dtype=torch.float64)
        self._at = 0
        self._trial.watch()
        return torch.arange(units)

    def add(self, rows_ND: Tensor, groups_N: Tensor, sample: Sample | None = None) -> None:
        """Compares the rows, then adds them as `GaussianSumMechanism` does."""
        self._trial.compare(self._key, self._records(len(rows_ND), sample), rows_ND)
        super().add(rows_ND, groups_N, sample)

    def add_products(self, products: Products, sample: Sample | None = None) -> None:
        """Compares the factors, then adds their products as `GaussianSumMechanism` does."""
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
        """Returns the sums of the first run of the trial."""
        if self._sums is None:
            raise PrivacyError("no step is open. Call sample() before release()")
        self._users.close(self._sums)
        sums = self._sums.float()
        self._sums = None
        key = self._key
        self.steps_left -= 1
        return self._trial.released(key, sums)


def records_of_step(plans: Sequence[ReleasePlan], context: RoundContext) -> int:
    """Returns the number of random records for a trial of user code. It is about the number of
    records in a step, limited by the length of a pass (`fedsynth.privacy.passes`) and by memory."""
    expected = max(1.0, context.nominal_size * max(release.sample_rate for release in plans))
    widest = max(release.dimension // release.groups for release in plans)
    likely = expected + 4 * math.sqrt(expected)
    pass_length = min(chunk(context.device), math.isqrt(int(128 * expected)))
    longest = min(pass_length + INSERTED, MAX_NUMBERS // widest)
    return max(MIN_RECORDS, min(math.ceil(likely), longest))


def _disturbed(message: Message) -> Message:
    """Returns the request with randomly perturbed weights, so that no product is exact."""
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


MOVED = (
    "The position of an example in a batch changes the last bits of its vector on the machine of "
    "this test. Epsilon may not hold against a server that crafts weights (docs/threat-model.md)"
)
NOT_TRIED = "The test of the independence of examples could not run: "


def check_private_steps(
    settings: RunSettings, context: RoundContext, client: int | None = None
) -> list[str]:
    """Refuses user code whose result for one example depends on other examples.

    Args:
        settings: the settings of the run. Runs without a guarantee are not checked.
        context: the public context of round 1. The trial uses its device.
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
            f"cannot be private, because a client's step with {' and '.join(settings.own_code)} "
            f"{findings[0]}. {ADVICE}",
        )
    if not any(trial.moved for trial in trials):
        return []
    if not settings.method.takes_model or settings.model.features:
        return [f"{MOVED}."]
    return [f"{MOVED}. Use a multiple of 8 as model.width, and images of even height and width."]


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
