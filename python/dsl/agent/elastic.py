"""What an event means for a job whose nodes come and go: a pure function of history, event and membership.

- A worker of ours fails: the group is started again, with the nodes that are there, while restarts are left.
  The nodes agree on the number of restarts. A group that fails again and again at its start waits before each
  further restart.
- A worker of another node fails: ours are stopped, and our node meets the others. Workers that die of that
  are no cause.
- A node has left, or waits: all nodes that are there start again, which costs no restart.
- Workers die of a lost node before other nodes know that it is lost. So if the job may go on with fewer
  nodes, a failure beyond the last restart is in doubt until the other nodes are known to be alive.
- All our workers ended well: our node waits for the others, and joins them if they have to start again.
- A signal to this node ends only this node's part. The others go on, if they are enough.
"""

from __future__ import annotations

from dsl import SignalReceived, Stopping
from dsl._record import Record, replace
from dsl.agent.member import END_ACTIONS, signal_code
from dsl.model.job import Notice
from dsl.model.nodes import MeetingRefused, NodesFinished, NodesMet, PeerFailure
from dsl.model.outcome import AttemptOutcome, MembershipChanged, PatienceOver, exit_code
from dsl.model.progress import OTHER_HOSTS, SAME_HOSTS, after_failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, Literal, TypeAlias

    from dsl.model.outcome import Membership, Tried

    StepKind: TypeAlias = Literal["go_on", "restart", "stop", "end", "meet", "finish", "doubt", "leave"]

DOUBT_S = 25.0
"""A lost node is known within this time: torch's handlers miss three signs of life, one every 5 s."""

LEAVE_S = 5.0
"""A node leaves within this time, unless it says why it stays: other nodes may need its store."""


class History(Record):
    """What is known of the job so far."""

    max_restarts: int
    """How many restarts may be counted."""
    last: AttemptOutcome | None = None
    """The last attempt that has ended."""
    tried: tuple[Tried, ...] = ()
    """What is kept of all ended attempts."""
    restarts: int = 0
    """How many restarts were counted."""
    news: tuple[object, ...] = ()
    """Signals, the loss of the guard, and what is known of other nodes, since the last start and in order."""
    awaits: str = ""
    """What this node waits for while no worker runs, as a `Step.kind`; empty: nothing."""
    gives_up: bool = False
    """No other attempt can begin."""


class Step(Record):
    """What this node does next."""

    kind: StepKind
    """``go_on``; ``stop`` or ``restart`` the group, stopped first if it runs; ``end`` the job.

    When nothing of the group is left: ``meet`` the other nodes for another attempt, ``finish`` when all nodes
    have finished, wait for word that other nodes are lost (``doubt``), or ``leave`` them before the end."""
    counted: bool = True
    """Restart: it uses one of the restarts that the user has granted."""
    code: int = 0
    """End and leave: the exit code (G2)."""
    restarts: int | None = None
    """Restart: how many restarts the nodes have counted; None: as before, plus this one if it counts."""
    within_s: float = 0.0
    """Meet: seconds to wait first. Doubt and leave: seconds to wait at most."""
    closes: bool = False
    """Leave: the job is over on the other nodes, too."""
    why: str = ""
    """End and leave: why the group could not be started again, if it should have been."""


GO_ON = Step("go_on")


class Elastic:
    """Policy of a job that runs with ``least`` to ``most`` nodes.

    ``gives_up``: attempts that get nowhere end the job, because the user has set no number of restarts.
    """

    def __init__(
        self, least: int, most: int, preempt_signal: int | None = None, *, gives_up: bool = False
    ) -> None:
        self._gives_up = gives_up
        self._may_shrink = least < most
        self._preempt_signal = preempt_signal

    def decide(self, history: History, event: object, membership: Membership) -> Step:
        """What follows from an event."""
        if isinstance(event, AttemptOutcome):
            return self._after(event, history, membership)
        if history.awaits:
            return self._while_waiting(history, event, membership)
        if _asked_to_end(history.news):
            return GO_ON  # the workers keep the time that they were given
        if isinstance(event, PeerFailure):
            return Step("stop") if event.is_final else Step("restart")
        if isinstance(event, MembershipChanged):
            if event.membership.is_closed:
                return Step("stop") if event.left else GO_ON
            return Step("restart", counted=False) if event.left or event.membership.waiting else GO_ON
        return GO_ON

    def _after(self, last: AttemptOutcome, history: History, membership: Membership) -> Step:
        """What follows when nothing of the group is left, or what is left cannot be ended."""
        ended, news = last.ended, last.news
        if ended.stop_signal is not None or _has(news, Stopping):
            return self._end(last)
        if history.gives_up or ended.survivors:
            return self._end(last, closes=not self._may_shrink)
        if _asked_to_end(news):
            return self._end_by_signal(news)
        if _has(news, PeerFailure, lambda told: told.is_final):
            return self._end(last)
        can_meet = not membership.is_closed and not _has(news, MeetingRefused)
        if ended.first_failure is None and not any(exit_.caused_by_stop for exit_ in last.exits):
            return Step("finish") if not _has(news, MeetingRefused) else self._end(last)
        if not can_meet:
            return self._end(last)
        return self._again(last, history, membership)

    def _again(self, last: AttemptOutcome, history: History, membership: Membership) -> Step:
        has_failed = last.ended.first_failure is not None
        if _has(last.news, MembershipChanged, lambda told: bool(told.left)):
            return Step("meet", counted=False)
        if not has_failed:
            return Step("meet", counted=_has(last.news, PeerFailure))
        patience = OTHER_HOSTS if self._may_shrink else SAME_HOSTS
        left = history.max_restarts - history.restarts
        step = after_failure(history.tried, patience, left, gives_up=self._gives_up and self._may_shrink)
        if step.kind == "spent":
            if self._may_shrink and not _are_alive(last.news, membership):
                return Step("doubt", within_s=DOUBT_S)
            return self._end(last, closes=True)
        if step.kind == "futile":
            why = "attempt after attempt has failed in the same way, soon after its start"
            return self._end(last, closes=True, why=why)
        return Step("meet", within_s=step.wait_s)

    def _while_waiting(self, history: History, event: object, membership: Membership) -> Step:
        last, awaits = history.last, history.awaits
        assert last is not None
        if awaits == "leave":
            is_over = isinstance(event, (MeetingRefused, PatienceOver, Stopping)) or _asked_to_end((event,))
            # Without a guard this node may not stay, not even for the other nodes.
            is_alone = isinstance(event, Notice) and _has(history.news, Stopping)
            return Step("end") if is_over or is_alone else GO_ON
        if isinstance(event, SignalReceived) and event.action in END_ACTIONS:
            return self._end_by_signal((event,))
        if isinstance(event, Stopping):
            ending = self._end(last)
            return replace(ending, code=ending.code or 1)
        if isinstance(event, PeerFailure) and event.is_final:
            return self._end(replace(last, news=(*last.news, event)))
        if isinstance(event, MeetingRefused) and event.is_unneeded and last.ended.first_failure is None:
            return Step("leave", within_s=LEAVE_S)
        if isinstance(event, MeetingRefused):
            why = event.text if awaits == "meet" else ""
            return replace(self._end(last, why=why), kind="end" if event.is_lost else "leave")
        if awaits == "finish":
            return self._while_finishing(last, event)
        if awaits == "doubt":
            return self._while_doubting(last, history.news, event, membership)
        if isinstance(event, NodesMet):
            meeting = event.meeting
            return Step("restart", counted=meeting.reason == "failure", restarts=meeting.restarts)
        return GO_ON

    def _while_finishing(self, last: AttemptOutcome, event: object) -> Step:
        """Our workers ended well. Nodes that start again need us: a round ends when all have left it."""
        if isinstance(event, NodesFinished):
            return Step("leave", code=exit_code(last.exits, last.ended), within_s=LEAVE_S)
        if isinstance(event, PeerFailure):
            return Step("meet")
        if isinstance(event, MembershipChanged) and not event.membership.is_closed:
            changed = event.left or event.membership.waiting
            return Step("meet", counted=False) if changed else GO_ON
        return GO_ON

    def _while_doubting(
        self, last: AttemptOutcome, news: Sequence[object], event: object, membership: Membership
    ) -> Step:
        """A worker failed, and no restart is left: that ends the job, unless a node is lost."""
        if isinstance(event, PatienceOver):
            return self._end(last, closes=True)
        if isinstance(event, MembershipChanged):
            if event.membership.is_closed:
                return self._end(last)
            if event.left:
                return Step("meet", counted=False)
        if _are_alive(news, membership):
            return self._end(last, closes=True)
        return GO_ON

    def _end_by_signal(self, news: Sequence[object]) -> Step:
        asked = [one for one in news if isinstance(one, SignalReceived) and one.action in END_ACTIONS]
        code = signal_code(asked[0].signum, self._preempt_signal)
        return Step("leave", code=code, within_s=LEAVE_S)

    def _end(self, last: AttemptOutcome, *, closes: bool = False, why: str = "") -> Step:
        is_lost = _has(last.news, MeetingRefused)
        kind: StepKind = "end" if is_lost else "leave"
        return Step(kind, code=code_of(last), closes=closes, why=why, within_s=LEAVE_S)


def code_of(last: AttemptOutcome) -> int:
    """The command's exit code after the last attempt (G2).

    Not 0 if the workers were stopped for a restart that never came.
    """
    if last.is_preempted:
        return last.final_code
    final = [one for one in last.news if isinstance(one, PeerFailure) and one.is_final]
    if final and last.ended.stop_signal is None:
        return final[0].code or 1
    was_stopped = any(exit_.caused_by_stop for exit_ in last.exits)
    if was_stopped and last.ended.first_failure is None and last.ended.stop_signal is None:
        told = [one.code for one in last.news if isinstance(one, PeerFailure)]
        return (told[0] if told else 1) or 1
    return last.code


def _has(news: Sequence[object], kind: type, is_meant: Callable[[Any], bool] = lambda _: True) -> bool:
    return any(isinstance(one, kind) and is_meant(one) for one in news)


def _asked_to_end(news: Sequence[object]) -> bool:
    return _has(news, SignalReceived, lambda told: told.action in END_ACTIONS)


def _are_alive(news: Sequence[object], membership: Membership) -> bool:
    """Whether every other node has shown that it is alive: it waits, or has reported a failure."""
    told = sum(isinstance(one, PeerFailure) for one in news)
    return told + membership.waiting >= membership.node_count - 1
