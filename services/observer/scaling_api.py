"""The autoscaler's reports about groups of instances, on the observer's API: PUT by the autoscaler, GET by people and commands.

They are kept in memory and repeated with each decision. So an observer that stands by keeps them too, and one that was started
again has them after the next decision.
"""

import msgspec
from aiohttp import web

from services.core.group_report import GroupReport
from services.core.times import format_time, now_ms
from services.observer import problems
from services.observer.http import Refused, json_answer, read_query

MAX_GROUPS = 100
KEPT_MS = 86_400_000
"""A group without a report for so long is no longer shown."""
_MAX_NAME = 63


class GroupReports:
    """The newest report of each group; of at most MAX_GROUPS, those that were received last."""

    def __init__(self) -> None:
        self._reports: dict[str, tuple[int, GroupReport]] = {}

    def keep(self, report: GroupReport, now: int) -> None:
        """now: ms, of this process's clock."""
        self._reports.pop(report.group, None)
        self._reports[report.group] = (now, report)
        while len(self._reports) > MAX_GROUPS:
            del self._reports[next(iter(self._reports))]

    def all(self, now: int) -> tuple[GroupReport, ...]:
        """Those of the last day, by name."""
        recent = (report for received, report in self._reports.values() if received > now - KEPT_MS)
        return tuple(sorted(recent, key=lambda report: report.group))


class ScalingApi:
    def __init__(self, reports: GroupReports) -> None:
        self._reports = reports

    def routes(self) -> list[web.RouteDef]:
        return [web.get("/v1/scaling", self.show), web.put("/v1/scaling/{group}", self.keep)]

    async def show(self, request: web.Request) -> web.Response:
        read_query(request, {})
        return json_answer({"groups": list(map(report_json, self._reports.all(now_ms())))})

    async def keep(self, request: web.Request) -> web.Response:
        """Keep the report in place of the group's last one."""
        read_query(request, {})
        if request.content_type != "application/json":  # a page of another origin cannot send it without a preflight
            raise Refused(problems.NOT_JSON, "Send Content-Type: application/json.")
        try:
            report = _REPORT.decode(await request.read())
        except msgspec.MsgspecError as error:
            raise Refused(
                problems.BAD_BODY, "Send an autoscaler's report about a group, as in /openapi.json."
            ) from error
        if report.group != request.match_info["group"] or not 1 <= len(report.group) <= _MAX_NAME:
            raise Refused(problems.BAD_BODY, f"group is the name in the path, of at most {_MAX_NAME} characters.")
        if not 0 <= report.at_ms <= _MAX_TIME_MS:
            raise Refused(problems.BAD_BODY, "at_ms is a number of milliseconds since 1970.")
        self._reports.keep(report, now_ms())
        return json_answer(report_json(report))


def report_json(report: GroupReport) -> dict[str, object]:
    """For a person or a program: the time in RFC 3339."""
    fields: dict[str, object] = msgspec.to_builtins(report)
    return {**fields, "at": format_time(report.at_ms)}


_MAX_TIME_MS = 4_102_444_800_000
"""The year 2100."""
_REPORT = msgspec.json.Decoder(GroupReport)
