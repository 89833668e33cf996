"""What the conductor of a job and the examination of its hosts share: members, times, and the end."""

from __future__ import annotations

from dsl.conductor.members import MOST_PLACES, Roster
from dsl.conductor.orders import Send, Speak
from dsl.control.messages import Over
from dsl.model.job import Notice
from dsl.words import signal_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dsl.conductor.terms import Terms
    from dsl.control.clock import Clock
    from dsl.model.judgement import Judgement


class BaseConductor:
    """Decides for all members. Times are `time.monotonic` seconds."""

    farewell_s = 10.0
    """Most time that a member gets to end when it has nothing left to do."""

    def __init__(self, terms: Terms, now_s: float) -> None:
        self._now_s, self._count = now_s, 0
        self.roster = Roster(terms, now_s)
        """What is known of the members."""
        self._deadline_s: float | None = None
        """When members count as lost if they have not answered, or not said goodbye."""
        self.notices: list[Notice] = []
        """What to tell the user at the end beside `judgement`, once all output has been shown."""
        self.judgement: Judgement | None = None
        """What follows from the reports about the last attempt; None: it has not ended, or all is well."""
        self.code: int | None = None
        """Exit code of the command, once decided."""
        self.clocks: dict[int, Clock] = {}
        """Compared clocks of the members, by place."""

    @property
    def _terms(self) -> Terms:
        return self.roster.terms

    @property
    def deadline_s(self) -> float | None:
        """When to call `wait_is_over`; None: nothing is due."""
        return min([one for one in self._due() if one is not None], default=None)

    @property
    def has_begun(self) -> bool:
        """Whether members have been sent into an attempt."""
        return self._count > 0

    def takes_part(self, place: int) -> bool:  # noqa: ARG002  where attempts begin, it differs
        """Whether a member has a part in the attempt that runs, or was the last; not: it is a spare."""
        return True

    def _due(self) -> list[float | None]:
        """When something is due; None: never."""
        return [] if self.roster.is_done else [self._deadline_s]

    def expects(self, place: int) -> bool:
        """Whether a member may greet us: one at a time per place."""
        terms = self._terms
        if terms.is_open and place >= MOST_PLACES:
            return False
        one = self.roster[place]
        comes_again = terms.is_elastic or (terms.members_come and not self.has_begun)
        return one.hello is None or (comes_again and not one.is_there)

    def wait_longer(self, now_s: float) -> None:
        """Extend the deadline: the user's side does not read the output, so members cannot send the rest."""
        if self.roster.is_over and self._deadline_s is not None:
            self._deadline_s = now_s + self.farewell_s

    def cut_output(self, signum: int) -> list[object]:
        """End at once: the user no longer waits for the output of an ended job to be read."""
        self.code = self.code or 128 + signum
        self.roster.give_up()
        text = f"{signal_name(signum)} received: output that nobody has read is lost"
        said = [Speak(Notice("warning", text))] if self.has_begun else []
        return [*said, *self._dismiss_if_done()]

    def wait_is_over(self, now_s: float) -> list[object]:
        """What follows when `deadline_s` has passed."""
        self._now_s = now_s
        if self._deadline_s is None or now_s < self._deadline_s:
            return []
        self._deadline_s = None
        if not self.roster.is_over:
            return self._lose_silent()
        self.roster.give_up()
        return self._dismiss_if_done()

    def _lose_silent(self) -> list[object]:
        """Count members as lost that have not answered in time."""
        raise NotImplementedError

    def _end(self) -> list[object]:
        """The job is over: members have to say goodbye in time."""
        self._deadline_s = self._now_s + self.farewell_s
        return self._tell_all_over()

    def _tell_all_over(self) -> list[object]:
        """Tell all members that the job is over."""
        self.roster.is_over = True
        told = [order for place in range(len(self.roster)) for order in self._tell_over(place)]
        return [*told, *self._dismiss_if_done()]

    def _tell_over(self, place: int) -> list[object]:
        """Tell a member, once, that the job is over for it."""
        one = self.roster[place]
        if not one.is_there:
            return []
        one.is_told = True
        return [Send(place, self._over())]

    def _over(self) -> object:
        """The last message to a member."""
        tells = self.roster.is_over and self._terms.members_come
        return Over(self.judgement if tells else None, has_succeeded=tells and self.code == 0)

    def _dismiss_if_done(self) -> list[object]:
        return self.roster.dismiss_if_done(self.farewell_s)
