"""A privacy guard for NVFlare jobs that do not use fedsynth. Sites install it as a filter.

The site names the filter for tasks and for results in its `local/privacy.json`, so that every job
at the site passes it unchanged:

    {"scopes": [{"name": "guarded",
                 "task_data_filters": [
                     {"path": PATH, "args": {"folder": FOLDER}, "direction": "in"}],
                 "task_result_filters": [
                     {"path": PATH, "args": {"folder": FOLDER}, "direction": "out"}]}],
     "default_scope": "guarded"}

PATH is `fedsynth.deployment.nvflare_filter.GuardFilter`, and FOLDER contains guard.toml
(`fedsynth.privacy.guard`). The client's name is the site's.

Every result is rebuilt from checked parts. Weights, or their differences, pass the guard. Metrics
are the nominal values of guard.toml. Results of other kinds are refused. All failures of a job have
the same code, since a job could state records by the choice of a code. Federated events, such as
those of NVFlare's SummaryWriter, pass no filter, so they are switched off. A site's logs pass none
either, so a site that sends them to the server gets no task.
"""

from __future__ import annotations

from contextlib import suppress
from copy import deepcopy
from typing import Any

from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.dxo_filter import DXOFilter
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

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Stores a task's data, or makes a task's result private.

        A refused result is replaced by an error code, and the site's log has the reason.

        Raises:
            MessageError: the site sends logs to the server. NVFlare then refuses the task.
        """
        if fl_ctx.get_prop(FLContextKey.FILTER_DIRECTION) == FilterKey.IN:
            if is_log_streaming_allowed(fl_ctx):
                raise MessageError(
                    "the site sends logs of jobs to the server, which pass no guard. Set "
                    '"allow_log_streaming": false in local/resources.json'
                ).with_code("guard.logs")
            fl_ctx.set_prop(RECEIVED, _copy(shareable), private=True, sticky=False)
            fl_ctx.get_engine().get_widget(WidgetID.FED_EVENT_RUNNER).ready = False
            return shareable
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
