"""A privacy guard for NVFlare jobs that do not use fedsynth. Sites install it as a filter.

The site names the filter for tasks and for results in its `local/privacy.json`, so that every job
at the site passes it unchanged. As a component, it also switches off federated events, such as
those of NVFlare's SummaryWriter, which pass no filter:

    {"scopes": [{"name": "guarded",
                 "task_data_filters": [
                     {"path": PATH, "args": {"folder": FOLDER}, "direction": "inout"}],
                 "task_result_filters": [
                     {"path": PATH, "args": {"folder": FOLDER}, "direction": "out"}]}],
     "components": [{"id": "guard", "path": PATH, "args": {"folder": FOLDER}}],
     "default_scope": "guarded"}

PATH is `fedsynth.deployment.nvflare_filter.GuardFilter`, and FOLDER contains guard.toml
(`fedsynth.privacy.guard`). The client's name is the site's.

Every result is rebuilt from checked parts. Weights, or their differences, pass the guard. Metrics
are the nominal values of guard.toml. Results of other kinds are refused. So are tasks that a job
sends from the site to other sites, such as the results of swarm learning. A site's logs pass no
filter, so a site that sends them to the server gets no task.
"""

from __future__ import annotations

from contextlib import suppress
from copy import deepcopy
from typing import Any

from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.dxo_filter import DXOFilter
from nvflare.apis.event_type import EventType
from nvflare.apis.filter import FilterChainType, FilterContextKey
from nvflare.apis.fl_constant import FilterKey, FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.logging.constants import is_log_streaming_allowed
from nvflare.widgets.widget import WidgetID

from fedsynth.errors import FedsynthError, MessageError
from fedsynth.privacy.guard import UpdateGuard

RECEIVED = "__fedsynth_received__"  # the property of a task's context with its task data
# The headers of a result that are those of the task.
HEADERS = (AppConstants.START_ROUND, AppConstants.CURRENT_ROUND, AppConstants.NUM_ROUNDS)


class GuardFilter(DXOFilter):  # type: ignore[misc]  # NVFlare is not type-checked
    """A filter that makes a site's results private before they are sent.

    Args:
        folder: the folder with guard.toml.
    """

    def __init__(self, folder: str) -> None:
        super().__init__(supported_data_kinds=None, data_kinds_to_filter=None)
        self.folder = folder

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Switches federated events off before a job starts.

        NVFlare calls this method if the filter is also a component.
        """
        if event_type == EventType.ABOUT_TO_START_RUN:
            _event_runner(fl_ctx).fire_and_forget_request = _dropped

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Stores a task's data, or makes a task's result private.

        A refused result is replaced by an error code, and the job's log at the site has the reason.

        Raises:
            MessageError: the site sends logs or federated events to the server, or the task is sent
                to other sites. NVFlare then refuses the task.
        """
        if fl_ctx.get_prop(FLContextKey.FILTER_DIRECTION) == FilterKey.IN:
            _check_channels(fl_ctx)
            fl_ctx.set_prop(RECEIVED, _copy(shareable), private=True, sticky=False)
            return shareable
        if self.get_prop(FilterContextKey.CHAIN_TYPE) == FilterChainType.TASK_DATA_CHAIN:
            # only an error stops it: NVFlare sends the task as it was, whatever a filter returns
            raise MessageError(
                "the job sends a task from this site to other sites, which passes no guard. Use a "
                "job whose tasks come from the server"
            ).with_code("guard.peer")
        if shareable.get_return_code(ReturnCode.OK) != ReturnCode.OK:
            return make_reply(ReturnCode.EXECUTION_EXCEPTION)
        try:
            task = fl_ctx.get_prop(RECEIVED)
            if task is None:
                raise MessageError(
                    "the guard received a task's result, but not the task. Add the filter to "
                    "task_data_filters"
                ).with_code("guard.task")
            result = self.process_dxo(_dxo(shareable), task, fl_ctx).to_shareable()
        except FedsynthError as error:
            self.log_error(fl_ctx, str(error))
            return make_reply(ReturnCode.TASK_RESULT_FILTER_ERROR)
        for header in HEADERS:
            result.set_header(header, task.get_header(header))
        return result

    def process_dxo(self, dxo: DXO, shareable: Shareable, fl_ctx: FLContext) -> DXO:
        """Makes a result private, and returns the data that are sent instead.

        Args:
            dxo: the job's result.
            shareable: the task, as it was received.
            fl_ctx: the context of the task.

        Raises:
            BudgetExceededError: the budget is spent.
            PrivacyError: the arrays differ from those of the task.
            MessageError: the task or the result is of another kind.
        """
        guard = UpdateGuard(self.folder, fl_ctx.get_identity_name())
        if dxo.data_kind == DataKind.METRICS:
            return DXO(DataKind.METRICS, guard.nominal)
        if dxo.data_kind not in (DataKind.WEIGHTS, DataKind.WEIGHT_DIFF):
            raise _wrong_kind(f"data of kind {dxo.data_kind}")
        task = fl_ctx.get_prop(FLContextKey.TASK_NAME)
        request = (fl_ctx.get_job_id(), task, *map(shareable.get_header, HEADERS))
        difference = dxo.data_kind == DataKind.WEIGHT_DIFF
        received = _dxo(shareable).data
        arrays = guard.protect(request, received, dxo.data, difference=difference)
        meta: dict[str, Any] = guard.nominal
        if meta:
            meta[MetaKey.INITIAL_METRICS] = guard.nominal
        return DXO(dxo.data_kind, arrays, meta)


def _event_runner(fl_ctx: FLContext) -> Any:
    return fl_ctx.get_engine().get_widget(WidgetID.FED_EVENT_RUNNER)


def _dropped(*_: Any, **__: Any) -> None:
    """Takes the place of the method that sends federated events."""


def _check_channels(fl_ctx: FLContext) -> None:
    """Checks that all that a site sends for a job passes the guard.

    Raises:
        MessageError: the site sends logs or federated events, or its privacy.json lacks a filter.
    """
    scope = fl_ctx.get_prop(FLContextKey.SCOPE_OBJECT)  # none in NVFlare's simulator
    for name in ("task_data_filters", "task_result_filters"):
        filters = getattr(scope, name)[FilterKey.OUT] if scope else []
        if scope and not any(isinstance(entry, GuardFilter) for entry in filters):
            raise MessageError(
                f'{name} in local/privacy.json have no guard in the direction "out". Copy '
                "privacy.json from docs/guard.md"
            ).with_code("guard.filters")
    if is_log_streaming_allowed(fl_ctx):
        raise MessageError(
            "the site sends logs of jobs to the server, which pass no guard. Set "
            '"allow_log_streaming": false in local/resources.json'
        ).with_code("guard.logs")
    if _event_runner(fl_ctx).fire_and_forget_request is not _dropped:
        raise MessageError(
            "the site sends federated events of jobs to the server, which pass no guard. Add the "
            "guard to components in local/privacy.json"
        ).with_code("guard.events")


def _copy(task: Shareable) -> Shareable:
    """Copies a task's data for the guard, because a job may change the task's arrays in place."""
    copy = Shareable()
    with suppress(ValueError):  # a task without data
        dxo = from_shareable(task)
        copy = DXO(dxo.data_kind, deepcopy(dxo.data)).to_shareable()
    for header in HEADERS:
        copy.set_header(header, task.get_header(header))
    return copy


def _dxo(shareable: Shareable) -> DXO:
    try:
        return from_shareable(shareable)
    except ValueError:
        raise _wrong_kind("no DXO") from None


def _wrong_kind(kind: str) -> MessageError:
    return MessageError(
        "the guard supports tasks with weights, and results with weights, weight differences or "
        f"metrics, but got {kind}. Remove the task from the job"
    ).with_code("guard.kind")
