"""The conductor of a job: it decides when an attempt begins, when it is stopped, and what follows.

It hears messages of members, signals and times, and answers with orders. It has no clock of its own.

An attempt begins when enough members are ready and no member has a problem that prevents it. The first
failure stops the workers of all members. After the last report another attempt follows, or the job ends:

- A worker that fails costs a restart.
- A member that is lost, leaves or comes is a change of membership. In an elastic job the others start again
  with the members that are there now, which costs no restart. In any other job a lost member ends the job.
"""

from __future__ import annotations

from dsl._record import replace
from dsl.conductor.attempts import (
    FAILURE,
    USAGE,
    Attempt,
    Gathering,
    Restarts,
    meet,
    opening,
    place_of_rank_0,
)
from dsl.conductor.base import BaseConductor
from dsl.conductor.judge import Context, judge
from dsl.conductor.members import LONGEST_RETRY_S, RETRY_S
from dsl.conductor.orders import Send, Speak
from dsl.conductor.terms import objection
from dsl.control.messages import (
    Bye,
    Checked,
    Failing,
    Forward,
    Hello,
    Lost,
    MeetByTorch,
    Preempted,
    Refused,
    Said,
    Stop,
)
from dsl.errors import DslError
from dsl.model.job import Notice
from dsl.model.judgement import Judgement, Report
from dsl.model.outcome import REQUEUE_CODE, EndHung
from dsl.words import end_on_request, signal_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from dsl.conductor.members import Known
    from dsl.conductor.terms import Terms
    from dsl.model.outcome import Hang

COMPANY_S = 5.0
"""A host that comes while workers run waits this long for other starting hosts, to share one restart."""

OWN_NOTICE_S = 1.0
"""A scheduler that tells one host of a preemption tells the others, too. Only after this time we do: no
worker shall get the signal twice."""

STEADY_S = 60.0
"""A host that has taken part for this long is tried again with the shortest delay when it is lost."""

SIGTERM = 15


class Conductor(BaseConductor):
    """Decides for a whole job. Times are `time.monotonic` seconds."""

    def __init__(self, terms: Terms, now_s: float, port_of: Callable[[int], int] | None = None) -> None:
        """``port_of`` chooses the port of an attempt, counted from 0; may raise DslError. None: terms do."""
        super().__init__(terms, now_s)
        self._port_of = port_of
        self._gathering = Gathering(self.roster, now_s)
        self._attempt: Attempt | None = None
        """The attempt whose workers run, or that was the last one when the job ended."""
        command, preempt = terms.job.flavour.command, terms.job.signals.preempt
        self._context = Context(command, preempt_signal=preempt)
        """Why the job is being ended, if it is."""
        self._abandoned = ""
        """Why the programs that reach the members have ended; empty: they run."""
        self._restarts = Restarts(self.roster)
        self._yields = False
        """The members meet by torch's own rendezvous, as soon as no worker runs."""
        self._company_s: float | None = None
        """When the job starts again with new members, even if more hosts are still starting."""
        self._pass_on: tuple[float, Stop] | None = None
        """When we tell members of a preemption that others have heard of, and what we tell."""

    def takes_part(self, place: int) -> bool:
        """Whether a member has a part in the attempt that runs, or was the last; not: it is a spare."""
        return place in self._gathering.members

    @property
    def is_ending(self) -> bool:
        """Whether the job is over, or the user or a scheduler has asked for its end."""
        return self.code is not None or self._context.is_asked

    def _due(self) -> list[float | None]:
        due = super()._due()
        if not self.roster.is_over:
            due += [self._company_s, self._pass_on and self._pass_on[0], *[one.due_s for one in self.roster]]
            due += self._gathering.due() if self._attempt is None else []
        return due

    # ------------------------------------------------------------------ what happens

    def hear(self, place: int, message: object, now_s: float) -> list[object]:
        """What follows from what a member says."""
        self._now_s = now_s
        return [*self._hear(place, self.roster[place], message), *self._try_to_begin()]

    def _hear(self, place: int, one: Known, message: object) -> list[object]:
        if isinstance(message, Hello):
            return self._greet(place, one, message) if self.expects(place) else []
        if isinstance(message, Said):
            return [Speak(message.notice)]
        if isinstance(message, (Bye, Lost)):
            return self._hear_end(place, one, message)
        if not one.is_there or self.roster.is_over:
            return []
        if isinstance(message, Checked):
            return self._hear_checked(place, one, message)
        if isinstance(message, Refused):
            orders = self._find_unfit(place, (message.text,))
            return [*orders, *self._lose(place, message.text, message.code, is_lost=False)]
        attempt = self._attempt
        if not isinstance(message, (Failing, Preempted, Report)) or attempt is None:
            return []
        if not attempt.awaits(place, message.attempt):
            return []
        if isinstance(message, Preempted):
            if self._terms.is_open:
                return []  # this node leaves, and the others go on
            attempt.preempted.add(place)
            return self._hear_preemption(message.signum, there=True)
        if isinstance(message, Report):
            return self._hear_report(attempt, place, message)
        attempt.failing.setdefault(place, message)
        return self._stop_others(attempt, place)

    def starter_ended(self, places: Sequence[int], why: str, now_s: float) -> list[object]:
        """The programs that reach these members have ended: members that have not answered never will."""
        self._now_s = now_s
        orders: list[object] = []
        for place in places:
            one = self.roster[place]
            if one.hello is None and one.status == "starting" and not self.roster.is_over:
                one.is_gone = True
                orders += self.roster.miss(place, why, now_s)
        return [*orders, *self._try_to_begin()]

    def starters_lost(self, why: str, now_s: float) -> list[object]:
        """All programs that reach the members have ended: end the job.

        Members that are still connected get the grace period to end.
        """
        self._now_s = now_s
        if self.roster.is_over:
            return []
        attempt = self._attempt
        if attempt is None:
            if not self._gathering.hopeless():
                return self._give_up(FAILURE, why)
            self._gathering.refuse()
            return self._try_to_begin()
        self._abandoned = why
        self._deadline_s = now_s + self._terms.job.signals.grace_s + self.farewell_s
        if not attempt.failing and not self._context.is_asked:
            self._context = replace(self._context, fault=why)
        return self._stop(attempt, why)

    def signal(self, signum: int, action: str, now_s: float, *, is_key: bool = False) -> list[object]:
        """Act on a signal of the user or a scheduler. ``is_key``: it comes from a key of the terminal."""
        self._now_s = now_s
        if action == "forward":
            return self._to_running(Forward(signum))
        if action == "preempt":
            return self._hear_preemption(signum)
        if action != "stop":
            return []
        if self.roster.is_over:
            return [] if self.roster.is_done else self.cut_output(signum)
        insists = self._context.signum is not None
        if not insists:
            self._context = replace(self._context, signum=signum, is_key=is_key)
        if self._attempt is None:
            return self._end_waiting(128 + signum, end_on_request(signum, is_key=is_key))
        self._attempt.is_stopping = True
        grace_s = 0.0 if insists else self._terms.job.signals.grace_s
        text = f": stopping all hosts (grace {grace_s:g} s, a second signal kills at once)"
        text = f"{signal_name(signum)} received{' again: the grace is over' if insists else text}"
        return [Speak(Notice("info", text)), *self._to_running(Stop(signum, grace_s))]

    def hang(self, hang: Hang, now_s: float) -> list[object]:
        """Act on a hang as the user wishes."""
        self._now_s = now_s
        attempt = self._attempt
        if self.roster.is_over or attempt is None or attempt.is_stopping or attempt.number != hang.attempt:
            return []
        if hang.action != "stop":
            ended = EndHung(hang.attempt, hang.ranks, hang.why)
            return self._to_running(ended) if hang.action == "restart" else []
        self._context = replace(self._context, hang=hang.why)
        attempt.is_stopping = True
        return self._to_running(Stop(SIGTERM, self._terms.job.signals.grace_s))

    def meet_by_torch(self, now_s: float) -> list[object]:
        """Hand the job over to torch's own rendezvous, because a node has come that is under torchrun."""
        self._now_s = now_s
        if self.roster.is_over or self._yields:
            return []
        self._yields, attempt = True, self._attempt
        if attempt is None:
            return self._try_to_begin()
        attempt.regroups = True
        text = "a node under torchrun has come: the nodes meet again, by torch's own rendezvous"
        return [Speak(Notice("info", text)), *self._stop(attempt)]

    def wait_is_over(self, now_s: float) -> list[object]:
        """What follows when `deadline_s` has passed."""
        orders = super().wait_is_over(now_s)
        if self.roster.is_over:
            return orders
        orders += self.roster.try_again(now_s)
        if self._pass_on is not None and self._pass_on[0] <= now_s:
            heard = () if self._attempt is None else self._attempt.preempted
            orders += self._to_running(self._pass_on[1], but=heard)
            self._pass_on = None
        if self._company_s is not None and self._company_s <= now_s:
            self._company_s = None
            orders += self._take_in(is_late=True)
        return [*orders, *self._try_to_begin()]

    # ------------------------------------------------------------------ members come

    def _greet(self, place: int, one: Known, hello: Hello) -> list[object]:
        terms = self._terms
        one.expect(one.due_s if one.status == "starting" else self.roster.answer_by(self._now_s))
        one.hello = hello
        if self.roster.is_over:
            one.is_told = one.is_gone = True
            return [Send(place, self._over())]
        problem = objection(terms, place, hello)
        if terms.assignment is not None:
            if problem:
                return self._find_unfit(place, (problem,))
            return [Send(place, terms.assigned(place))]
        one.host = hello.host
        if problem:
            text = f"{self.roster.name(place)} cannot take part: {problem}"
            self.roster.forget(place)
            return [Send(place, Refused(text, USAGE)), Speak(Notice("warning", text))]
        one.size, one.role, one.order, one.joined_s = hello.workers, hello.role, hello.order, self._now_s
        if terms.is_open and hello.attempts > self._count:  # another conductor was lost
            self._count = hello.attempts
            self._restarts.count, self._restarts.reason = hello.restarts, "membership"
        if not terms.offers:  # else it says next where its rank 0 would listen
            one.status = "ready"
        return []

    def _hear_checked(self, place: int, one: Known, checked: Checked) -> list[object]:
        if one.status != "starting":
            one.checked = checked if self._terms.offers else one.checked
            return []
        one.checked = checked
        if checked.problems:
            return self._find_unfit(place, checked.problems)
        has_news = one.put("ready", None, "")
        one.joined_s = self._now_s
        orders = [Speak(Notice("info", f"{self.roster.name(place)} is there now"))] if has_news else []
        return [*orders, *self._take_in()]

    def _take_in(self, *, is_late: bool = False) -> list[object]:
        """While workers run: stop them if the job can go on with more members.

        ``is_late``: do not wait for starting members any more.
        """
        attempt, roster = self._attempt, self.roster
        if attempt is None or attempt.is_stopping:
            return []
        spares = [place for place in roster.ready() if place not in attempt.reports]
        chosen = roster.choose(self._gathering.members)
        if attempt.ended or chosen is None or len(chosen) <= len(attempt.reports):
            return roster.say_spares(spares)
        if roster.has("starting") and len(chosen) < self._terms.most and not is_late:
            self._company_s = self._company_s or self._now_s + COMPANY_S
            return []
        new = [place for place in chosen if place not in attempt.reports]
        attempt.regroups = True
        has = "has" if len(new) == 1 else "have"
        text = f"{roster.names(new)} {has} come: starting again with all of them"
        return [Speak(Notice("info", text)), *self._stop(attempt)]

    def _find_unfit(self, place: int, problems: Sequence[str]) -> list[object]:
        """Something is wrong at a member. An elastic job ends its agent, and starts it again later."""
        said = self.roster.find_unfit(place, problems, self._now_s)
        orders = self._tell_over(place) if self._terms.is_elastic else []
        return [*orders, *(said if self._count else [])]

    # ------------------------------------------------------------------ an attempt begins

    def _try_to_begin(self) -> list[object]:
        if self._attempt is not None or self.roster.is_over:
            return []
        if self._yields:
            return self._tell_all_over()
        gathering = self._gathering
        chosen, orders = gathering.choose(self._now_s)
        if gathering.refusal:
            return [*orders, *self._give_up(gathering.code, *gathering.refusal, after=self.judgement)]
        return [*orders, *(self._begin_with(chosen) if chosen else [])]

    def _begin_with(self, chosen: tuple[int, ...]) -> list[object]:
        terms, roster, number = self._terms, self.roster, self._count
        try:
            address, port = place_of_rank_0(terms, roster, chosen[0])
            port = port if self._port_of is None else self._port_of(number)
        except DslError as error:
            return self._give_up(error.exit_code, str(error), after=self.judgement)
        orders, errors = ([], []) if number else opening(terms, roster, chosen, port, self.clocks)
        if errors:
            return [*orders, *self._give_up(USAGE, *errors)]
        orders += self._gathering.begin(chosen, is_again=bool(number))
        self._count += 1
        members = [(place, roster[place]) for place in chosen]
        self._attempt = Attempt(number, members, self._now_s)
        meetings = meet(terms, members, number, address, port, self._restarts)
        return [*orders, *[Send(place, message) for place, message in meetings.items()]]

    # ------------------------------------------------------------------ while workers run

    def _hear_preemption(self, signum: int, *, there: bool = False) -> list[object]:
        """A scheduler has announced a preemption: to the command, or ``there``, to the agent of a member."""
        attempt, signals = self._attempt, self._terms.job.signals
        if self.roster.is_over or self._context.signum is not None:
            return []
        self._context = replace(self._context, is_preempted=True)
        if attempt is None:
            return self._end_waiting(REQUEUE_CODE, end_on_request(signum, is_key=False, is_preemption=True))
        if attempt.is_stopping:
            return []
        attempt.is_stopping = True
        grace_s = signals.grace_s if signals.preempt_grace_s is None else signals.preempt_grace_s
        text = f"{signal_name(signum)} received: the workers have {grace_s:g} s to save their work"
        stop = Stop(signum, grace_s)
        if there:
            self._pass_on = (self._now_s + OWN_NOTICE_S, stop)
        return [Speak(Notice("info", text)), *([] if there else self._to_running(stop))]

    def _stop_others(self, attempt: Attempt, place: int) -> list[object]:
        """Stop all workers except those of ``place``, whose agent stops them itself."""
        if attempt.is_stopping:
            return []
        attempt.begun_by, report = place, attempt.reports[place]
        was_asked = report is not None and report.stop_signal is not None
        why = "" if was_asked else f"{self.roster.name(place)} has failed"
        return self._stop(attempt, why, but=(place,))

    def _stop(self, attempt: Attempt, why: str = "", but: Collection[int] = ()) -> list[object]:
        """Stop all workers except those of ``but``. ``why``: the failure that is the reason, if one is."""
        if attempt.is_stopping:
            return []
        attempt.is_stopping = True
        return self._to_running(Stop(SIGTERM, self._terms.job.signals.grace_s, why=why), but)

    def _hear_report(self, attempt: Attempt, place: int, report: Report) -> list[object]:
        attempt.reports[place] = report
        is_stopped = attempt.is_stopping or self._context.is_asked
        why, retry_s, orders = "", LONGEST_RETRY_S, list[object]()
        if report.stop_signal is not None and not self._context.is_asked:
            why = f"has left: {signal_name(report.stop_signal)} received there"
        elif report.survivors:
            why = "is left out: workers would not end there"
        elif report.rank < 0 and report.code and not is_stopped:
            why = f"is left out: it has stopped its workers, exit code {report.code}"
            retry_s = self.roster[place].pause_s()
        if why:
            attempt.left[place] = Notice("warning", f"{self.roster.name(place)} {why}")
        if why and self._terms.is_elastic:
            due_s = self._now_s + retry_s if self._terms.tries_again else None
            self.roster[place].put("missing", due_s, "has left")
            orders += self._tell_over(place)
        if report.code:
            orders += self._stop_others(attempt, place)
        return [*orders, *self._decide()]

    def _hear_end(self, place: int, one: Known, message: Bye | Lost) -> list[object]:
        """A member has said goodbye, or its connection has ended."""
        was_alive, was_there = one.is_alive, one.is_there
        one.has_ended |= isinstance(message, Bye)
        one.is_gone |= isinstance(message, Lost)
        attempt, terms = self._attempt, self._terms
        reason = message.reason if isinstance(message, Lost) else "has ended before its time"
        is_member = attempt is not None and place in attempt.reports
        if self.roster.is_over:
            report = None if attempt is None else attempt.reports.get(place)
            text = f"{self.roster.name(place)} {reason}: the end of its output may be missing"
            is_cut = was_alive and is_member and one.is_gone and not (report and report.code)
            return [*([Speak(Notice("warning", text))] if is_cut else []), *self._dismiss_if_done()]
        if not was_there:
            return []
        if terms.members_come and not self._count:
            text = f"{self.roster.name(place)} has left before the job has begun: it {reason}"
            self.roster.forget(place)
            return [Speak(Notice("info", text))]
        if terms.offers and not is_member:
            text = f"{self.roster.name(place)} has left the job" + f": it {reason}" * (not one.has_ended)
            self.roster.forget(place)
            return [Speak(Notice("info", text))]
        if is_member and self._now_s - one.joined_s >= STEADY_S:
            one.retry_s = RETRY_S
        if isinstance(message, Lost) and message.is_silent:
            # The host does not hear us either, and has to end its workers first.
            one.retry_s = max(one.retry_s, terms.heartbeat_s)
        is_running = attempt is not None and place in attempt.running
        orders = self.roster.miss(place, f"was lost: it {reason}", self._now_s, is_known=is_running)
        if attempt is None and self._count and not terms.is_elastic:  # it waited to start again
            text = f"{self.roster.name(place)} was lost: it {reason}"
            return [Speak(Notice("warning", text)), *self._end()]
        return [*orders, *self._lose(place, f"it {reason}", FAILURE)]

    def _lose(self, place: int, how: str, code: int, *, is_lost: bool = True) -> list[object]:
        """A member cannot go on. If its workers ran, its part of the attempt has failed."""
        attempt = self._attempt
        if self.roster.is_over or attempt is None or place not in attempt.reports:
            return []
        is_elastic = self._terms.is_elastic
        if attempt.reports[place] is not None:
            if is_elastic:
                return []
            text = f"{self.roster.name(place)}: {how}; without it no other attempt can follow"
            attempt.left[place] = notice = Notice("warning", text)
            return [Speak(notice)]
        report = attempt.lose(place, self.roster.name(place), how, code, is_lost=is_lost)
        if report.rank < 0 or not is_elastic:
            attempt.left[place] = report
        return [*self._stop_others(attempt, place), *self._decide()]

    def _lose_silent(self) -> list[object]:
        running = [] if self._attempt is None else self._attempt.running
        return [
            one for place in running for one in self._lose(place, "it has not answered any more", FAILURE)
        ]

    # ------------------------------------------------------------------ after an attempt

    def _decide(self) -> list[object]:
        """When the attempt has ended at every member: start another attempt, or end the job."""
        attempt = self._attempt
        if self.roster.is_over or attempt is None or attempt.running:
            return []
        failed = any(report.code for report in attempt.ended.values())
        is_ending = self._context.is_asked or bool(self._abandoned)
        if not failed and not is_ending and not attempt.regroups:
            self.judgement = None
            return self._end()
        self.judgement = judgement = self._judge(attempt)
        if is_ending:
            return self._end()
        step, text, said = self._restarts.after(attempt, judgement, self._now_s)
        if step.kind != "restart":
            self.judgement = replace(judgement, not_tried=step.why)
            self.notices += [Notice("error", text)] if text else []
            return self._end()
        self._attempt = self._company_s = None
        self._gathering.pause_s = self._now_s + step.wait_s if step.wait_s else None
        return said

    def _judge(self, attempt: Attempt) -> Judgement:
        members = self.roster.judged(attempt.reports)
        context = replace(self._context, begun_by=attempt.begun_by)
        judgement = judge(attempt.ended, members, self.clocks, context)
        judgement = replace(judgement, replaced=self._gathering.replaced)
        if self._abandoned and not judgement.causes and not self._context.is_asked:
            # A member had announced a failure that its report does not confirm.
            return replace(judgement, code=FAILURE, fault=self._abandoned)
        return judgement

    # ------------------------------------------------------------------ the end

    def _give_up(self, code: int, *lines: str, after: Judgement | None = None) -> list[object]:
        """End the job while no worker runs.

        ``lines`` give the reason to the user. ``after`` is the judgement of the last attempt, which the user
        sees, too.
        """
        self.code, self.judgement = code, after
        tells = bool(lines) and self._terms.members_come
        if tells and after is not None:  # their users see it with how the last attempt has ended
            self.judgement = replace(after, code=code, signum=None, not_tried=lines[0])
        if self._count and self._terms.members_come:
            # Without a judgement, another conductor had the last attempt.
            self.judgement = self.judgement or self._judgement(code, lines[0])
            return self._end()
        self.notices += [Notice("critical", f"error: {line}") for line in lines]
        here = [place for place, one in enumerate(self.roster) if one.is_there and tells]
        return [*[Send(place, Refused(lines[0], code)) for place in here], *self._end()]

    def _end_waiting(self, code: int, how: str) -> list[object]:
        """End the job while no worker runs, because somebody has asked for that."""
        missing = self.roster.missing()
        what = f"for {self.roster.names(missing)}" if missing else "to start again"
        return self._give_up(code, after=self._judgement(code, f"{how} while waiting {what}"))

    def _judgement(self, code: int, fault: str) -> Judgement:
        """That of a job which ends for another reason than a failure."""
        return Judgement(code, self._terms.job.flavour.command, fault=fault)

    def _end(self) -> list[object]:
        judgement, orders = self.judgement, list[object]()
        if self.code is None:
            self.code = 0 if judgement is None else judgement.code or FAILURE
        if self._context.is_preempted and self.code == REQUEUE_CODE:
            text = f"the job was preempted, exit code {REQUEUE_CODE}: it can be queued again"
            orders.append(Speak(Notice("info", text)))
        return [*orders, *super()._end()]

    def _over(self) -> object:
        return MeetByTorch(self._restarts.count) if self._yields else super()._over()

    def _to_running(self, message: object, but: Collection[int] = ()) -> list[object]:
        """Send a message to the members whose workers run."""
        running = [] if self.roster.is_over or self._attempt is None else self._attempt.running
        return [Send(place, message) for place in running if place not in but and self.roster[place].is_there]
