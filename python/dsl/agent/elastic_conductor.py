"""What the head of an elastic job decides: hosts come and go, and the job goes on.

An attempt runs on the hosts that are there, within the job's least and most hosts; the others are spares. A
host that is lost, leaves or comes is a change of membership: the workers are stopped everywhere and started
again on the hosts that are there now, which costs no restart. A worker that fails costs a restart. Ranks
follow the order of the hosts in the hostfile, not the order in which hosts come.
"""

from __future__ import annotations

from dsl._record import replace
from dsl.agent.conductor import FAILURE, FAREWELL_S, Send, Speak, _cause_of
from dsl.agent.gathering import LONGEST_RETRY_S, RETRY_S, STEADY_S, Gathering, is_due
from dsl.control.messages import Bye, Checked, Failing, Hello, Lost, Over, Refused, Said
from dsl.model.job import Notice
from dsl.model.judgement import Report
from dsl.model.progress import OTHER_HOSTS, is_futile
from dsl.report.verdict import absent
from dsl.signals import signal_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from dsl.agent.conductor import _Agent
    from dsl.model.judgement import Judgement


class ElasticConductor(Gathering):
    """Decides for a job whose hosts come and go. Every agent serves a whole host."""

    # ------------------------------------------------------------------ what comes

    def hear(self, place: int, message: object, now_s: float) -> list[object]:
        """What follows from what an agent says."""
        self._now_s = now_s
        agent = self._agents[place]
        if isinstance(message, Hello):
            return self._greet_host(place, message)
        if isinstance(message, Checked):
            agent.checked = message
            return self._hear_checked(place, message)
        if isinstance(message, Said):
            return [Speak(message.notice)]
        if isinstance(message, Failing):
            return self._hear_failing(place, message)
        if isinstance(message, Report):
            return self._hear_report(place, agent, message)
        if isinstance(message, Refused):
            return self._hear_refused(place, message)
        if isinstance(message, Bye):
            agent.has_ended = True
            return self._hear_end(place, "its agent has ended")
        if isinstance(message, Lost):
            is_known = agent.is_gone or agent.has_ended
            agent.is_gone = True
            if is_known:
                return self._finish_if_done()
            return self._hear_end(place, f"it {message.reason}", is_silent=message.is_silent)
        return []

    def starter_ended(self, places: Sequence[int], why: str, now_s: float) -> list[object]:
        """The programs that reach these hosts have ended: agents that have not answered never will."""
        self._now_s = now_s
        orders: list[object] = []
        for place in places:
            if self._agents[place].hello is None and self._hosts[place].is_starting and not self._is_over:
                orders += self._miss(place, why)
        return orders

    def starters_lost(self, why: str, now_s: float) -> list[object]:
        """All programs that reach the hosts have ended: the job ends."""
        self._now_s = now_s
        if self._is_over:
            return []
        if not self._runs:
            self._verdict.append(Notice("critical", f"error: {why}"))
            return self._give_up(FAILURE)
        self._is_abandoned = True
        grace_s = self._job.signals.grace_s
        self._deadline_s = now_s + grace_s + FAREWELL_S
        if not (self._failing or self._user_signal is not None or self._is_preempted):
            self._fault = why
        return self._stop_members(why)

    def wait_is_over(self, now_s: float) -> list[object]:
        """What follows when `deadline_s` has passed."""
        self._now_s = now_s
        if self._is_over:
            return super().wait_is_over(now_s)
        orders: list[object] = []
        if is_due(self._deadline_s, now_s):
            self._deadline_s = None
            for place in [one for one, report in self._members.items() if report is None]:
                orders += self._lose_member(place, "it has not answered any more")
        for place, host in enumerate(self._hosts):
            if is_due(host.due_s, now_s):
                orders += self._try_host(place, host)
        if is_due(self._company_s, now_s):
            self._company_s = None
            orders += self._take_in(is_late=True)
        if is_due(self._refuse_s, now_s):
            self._refuse_s = None
            orders += self._refuse_unfit()
        if is_due(self._pause_s, now_s) or is_due(self._call_s, now_s):
            self._pause_s = None
            orders += self._try_to_begin()
        if is_due(self._waits_s, now_s) and not self._is_over:
            self._waits_s = None
            orders += self._end_waiting()
        return orders

    # ------------------------------------------------------------------ while it runs

    def _to_all(self, message: object) -> list[object]:
        """`Over` goes to every agent, any other message to the agents whose workers run."""
        if isinstance(message, Over):
            return super()._to_all(message)
        return [
            Send(place, message)
            for place, report in self._members.items()
            if report is None and not self._agents[place].is_gone
        ]

    def _stop_others(self, place: int) -> list[object]:
        if self._is_stopping:
            return []
        self._begun_by = place
        return self._stop_members(f"{self.name(place)} has failed", but=place)

    def _hear_failing(self, place: int, message: Failing) -> list[object]:
        if place not in self._members:
            return []
        return super()._hear_failing(place, message)

    def _hear_report(self, place: int, agent: _Agent, report: Report) -> list[object]:  # noqa: ARG002
        meeting = self._meeting
        if meeting is None or report.attempt != meeting.attempt or place not in self._members:
            return []
        self._members[place] = report
        orders: list[object] = []
        asked = self._user_signal is not None or self._is_preempted
        if report.stop_signal is not None and not asked:
            name = signal_name(report.stop_signal)
            orders += self._let_go(place, f"{self.name(place)} has left: {name} received there")
        elif report.survivors:
            orders += self._let_go(place, f"{self.name(place)} is left out: workers would not end there")
        elif report.code and report.rank < 0 and not self._is_stopping and not asked:
            text = f"{self.name(place)} is left out: it has stopped its workers, exit code {report.code}"
            orders += self._let_go(place, text, self._hosts[place].pause_s())
        if report.code:
            orders += self._stop_others(place)
        return [*orders, *self._decide()]

    def _let_go(self, place: int, line: str, retry_s: float = LONGEST_RETRY_S) -> list[object]:
        """A host stops taking part, as its agent has reported."""
        host = self._hosts[place]
        self._gone[place] = line
        self._agents[place].is_gone = True
        host.is_starting, host.due_s, host.problem = False, self._now_s + retry_s, "has left"
        return [Send(place, Over())]

    def _hear_refused(self, place: int, message: Refused) -> list[object]:
        """The agent cannot start its part."""
        if self._is_over:
            return []
        orders = self._find_unfit(place, (message.text,))
        if self._members.get(place, message) is None:
            orders += self._lose_member(place, message.text, code=message.code)
        return orders

    def _hear_end(self, place: int, how: str, *, is_silent: bool = False) -> list[object]:
        """An agent is gone."""
        agent, host = self._agents[place], self._hosts[place]
        agent.is_gone = True
        if self._is_over:
            orders: list[object] = []
            report = self._members.get(place)
            if place in self._members and not agent.has_ended and (report is None or not report.code):
                text = f"{self.name(place)}: {how}: the end of its output may be missing"
                orders.append(Speak(Notice("warning", text)))
            return [*orders, *self._finish_if_done()]
        if host.is_unfit or (host.due_s is not None and not host.is_starting):
            return []  # the agent was told to end
        is_member = place in self._members
        if is_member and self._now_s - host.joined_s >= STEADY_S:
            host.retry_s = RETRY_S
        if is_silent:  # the host does not hear us either, and has to end its workers first
            host.retry_s = max(host.retry_s, self._remote.heartbeat_s)
        loses = is_member and self._members[place] is None
        orders = self._miss(place, f"was lost: {how}", at_once=loses)
        return [*orders, *self._lose_member(place, how)] if loses else orders

    def _lose_member(self, place: int, how: str, code: int = FAILURE) -> list[object]:
        """A host is gone while its workers run."""
        meeting = self._meeting
        assert meeting is not None
        rank = list(self._members).index(place)
        first = sum(meeting.local_world_sizes[:rank])
        ranks = range(first, first + meeting.local_world_sizes[rank])
        self._members[place] = report = self._report_of_lost(place, how, ranks, code)
        if report.rank < 0 and report.absence is not None:
            self._gone[place] = absent(report.absence)
        return [*self._stop_others(place), *self._decide()]

    def _reports(self) -> dict[int, Report]:
        return {place: report for place, report in self._members.items() if report is not None}

    def _decide(self) -> list[object]:
        """When the attempt has ended on every host: start another attempt, or end the job."""
        if self._is_over or not self._members or None in self._members.values():
            return []
        reports = self._reports()
        failed = any(report.code for report in reports.values())
        asked = self._user_signal is not None or self._is_preempted or bool(self._fault)
        if not failed and not asked and not self._regroups:
            self.code = 0
            return self._end()
        judgement = self._judge()
        if asked:
            self._end_with(judgement)
            return self._end()
        if not self._gone and (judgement.causes or not self._regroups):
            return self._end_by_failure(judgement)
        return self._regroup(judgement)

    def _end_by_failure(self, judgement: Judgement) -> list[object]:
        """A worker has failed: start another attempt if restarts are left, or end the job."""
        self._note_attempt(_cause_of(judgement))
        is_futile_ = self._remote.gives_up and is_futile(self._tried)
        if self._restarts >= self._job.max_restarts or is_futile_:
            self._end_with(judgement)
            text = f"{self._restarts + 1} attempts have failed"
            if is_futile_:
                text += " in the same way in their first seconds: the job is given up"
            if self._restarts:
                self._verdict.append(Notice("error", text))
            return self._end()
        self._restarts += 1
        self._reason = "failure"
        said = self._say_restart(judgement, self._pause(OTHER_HOSTS))
        self._leave_attempt()
        return [*said, *self._try_to_begin()]

    def _regroup(self, judgement: Judgement) -> list[object]:
        """The hosts have changed: start another attempt with those that are there. It costs no restart."""
        lost = f"{self._names(sorted(self._gone))} lost" if self._gone else ""
        self._note_attempt(lost)
        if is_futile(self._tried):
            self._end_with(replace(judgement, code=judgement.code or FAILURE))
            text = f"{self._names(sorted(self._gone))} was lost over and over as soon as its workers ran"
            self._verdict.append(Notice("error", f"{text}: the job is given up"))
            return self._end()
        self._pause(OTHER_HOSTS)
        self._reason = "membership"
        said: list[object] = [Speak(Notice("warning", line)) for line in self._gone.values()]
        self._last_lines = tuple(self._gone.values())
        self._leave_attempt()
        return [*said, *self._try_to_begin()]

    def _leave_attempt(self) -> None:
        self._members = {}
        self._failing = {}
        self._is_stopping = self._regroups = False
        self._begun_by = self._company_s = None
