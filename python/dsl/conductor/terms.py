"""What a conductor knows from the start: the members of the job, and the rules by which they take part."""

from __future__ import annotations

from dsl._record import Record, replace
from dsl.words import quote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dsl.control.messages import Assignment, Hello
    from dsl.model.job import Job
    from dsl.plan.remote import Remote

START_S = 60.0
"""Most time that a member gets to answer before the job starts."""

FIRST_MEETING_S = 600.0
"""How long members that come by themselves are waited for, as by torch's static rendezvous."""

LAST_CALL_S = 30.0
"""When enough members are there, others get this long to join the attempt."""


class Seat(Record):
    """What is known of a member before it comes. The index of a seat is the place of its member."""

    node_rank: int
    """Its node: a place among `Job.hosts`, if the hosts are named."""
    host: str = ""
    """Name of its host; empty: the member says it."""
    size: int = 0
    """Number of its workers; 0: the member says it."""
    task: int | None = None
    """The one local rank that it starts; None: all ranks of the node."""


class Terms(Record):
    """How the members of a job take part."""

    job: Job
    """The job."""
    seats: tuple[Seat, ...]
    """The places of the members, in the order of their ranks."""
    version: str
    """Our version of dsl: members of another version cannot take part."""
    least: int
    """The least members that an attempt needs."""
    most: int
    """The most members that an attempt has. The others are spares."""
    is_elastic: bool = False
    """Members come and go: a lost one is reached again, and the others go on meanwhile. Otherwise a loss ends
    the job, and ``least`` and ``most`` are the number of members."""
    assignment: Assignment | None = None
    """The answer to a member's `Hello`; each member gets its own place in it. None: the members come by
    themselves, know the job, and say how many workers they have."""
    address: str = ""
    """Where rank 0 listens; empty: the first address of its host."""
    port: int | None = None
    """Port there; 0: any free one; None: the usual one, or another if that is taken."""
    start_s: float | None = START_S
    """Most seconds in which a member has to answer; None: it has as long as it needs."""
    wait_s: float | None = None
    """Elastic: seconds that the job waits when there are too few members. Of members that come by themselves:
    seconds until all of them have to be there. None: no such limit."""
    world_sizes: tuple[int, ...] = ()
    """Numbers of workers that the job accepts; empty: any."""
    heartbeat_s: float = 0.0
    """Seconds of silence after which the other side counts as lost."""
    last_call_s: float = LAST_CALL_S
    """Seconds that a job with enough members waits for others: for those that are starting, or for unknown
    ones if members may come at any time."""

    @property
    def members_come(self) -> bool:
        """Whether members come by themselves; otherwise we reach them."""
        return self.assignment is None

    @property
    def is_open(self) -> bool:
        """Whether members come by themselves at any time, each at a place that no other has had."""
        return self.offers and not self.seats

    @property
    def offers(self) -> bool:
        """Whether members come by themselves and go, and say before each attempt where rank 0 may listen."""
        return self.members_come and self.is_elastic

    @property
    def tries_again(self) -> bool:
        """Whether we reach members again that are lost."""
        return self.is_elastic and not self.members_come

    @property
    def can_shrink(self) -> bool:
        """Whether the job may go on with fewer members, or on other hosts."""
        return self.is_elastic and (self.least < self.most or not self.members_come)

    @property
    def noun(self) -> str:
        """What the user calls a member."""
        return "node" if self.members_come else "host"

    def seat(self, place: int) -> Seat:
        """What is known of the member at a place before it comes."""
        return Seat(place) if self.is_open else self.seats[place]

    def assigned(self, place: int) -> Assignment:
        """The answer to the `Hello` of a member that we reach."""
        assert self.assignment is not None
        seat = self.seats[place]
        return replace(self.assignment, node_rank=seat.node_rank, task=seat.task)


def objection(terms: Terms, place: int, hello: Hello) -> str:
    """Why a member that greets us cannot take part; empty: its greeting shows no reason."""
    if hello.version != terms.version:
        where = f" for {hello.python}" if hello.python else ""
        return f"it has dsl {hello.version}, this host has {terms.version}: install the same version{where}"
    task, run_id = terms.seat(place).task, terms.job.run_id
    if terms.members_come and hello.run_id != run_id:
        return f"its --rdzv-id is {quote(hello.run_id)}, that of node 0 is {quote(run_id)}"
    if terms.members_come and not hello.workers:
        return "it has no workers"
    if not terms.members_come and hello.is_task and hello.local_rank != task:
        return (
            f"is local rank {hello.local_rank} there, expected {task}: "
            "leave options that place ranks out of --launcher_args"
        )
    return ""


def seats_of(job: Job, *, per_node: bool) -> tuple[Seat, ...]:
    """The members of a job whose hosts we reach: one per host, or one per rank."""
    seats: list[Seat] = []
    for node_rank, host in enumerate(job.hosts):
        if per_node:
            seats.append(Seat(node_rank, host.name, len(host.slots)))
        else:
            seats += [Seat(node_rank, host.name, 1, task) for task in range(len(host.slots))]
    return tuple(seats)


def reached_terms(job: Job, remote: Remote, assignment: Assignment) -> Terms:
    """Terms of members that we reach. ``assignment`` is that of node 0; only the place of others differs."""
    seats = seats_of(job, per_node=remote.per_node)
    terms = Terms(
        job=job,
        seats=seats,
        version=assignment.version,
        least=len(seats),
        most=len(seats),
        assignment=assignment,
        address=job.meeting.address,
        port=job.meeting.port,
        heartbeat_s=remote.heartbeat_s,
    )
    if not remote.is_elastic:
        return terms
    return replace(
        terms,
        least=remote.least_nodes,
        most=remote.most_nodes,
        is_elastic=True,
        assignment=replace(assignment, is_elastic=True),
        address="",  # that of the first host which takes part
        start_s=None if remote.launcher == "slurm" else START_S,  # whose queue may be long
        wait_s=remote.wait_s,
        world_sizes=remote.world_sizes,
    )


def fixed_places(
    job: Job, count: int, version: str, address: str, port: int, wait_s: float = FIRST_MEETING_S
) -> Terms:
    """Terms of ``count`` members that come by themselves, each at the place that its user gave it.

    If some more are to come as spares, members may be lost or leave, and come again at their places. Rank 0
    listens at any free port of its node, and not at ``address`` and ``port``, where members may come.
    """
    spares = job.meeting.spares
    terms = Terms(
        job=job,
        seats=tuple([Seat(place) for place in range(count + spares)]),
        version=version,
        least=count,
        most=count,
        address=address,
        port=port,
        start_s=None,
        wait_s=wait_s,
    )
    return replace(terms, is_elastic=True, address="", port=0) if spares else terms


def open_places(job: Job, version: str, *, wait_s: float, last_call_s: float = LAST_CALL_S) -> Terms:
    """Terms of members that come by themselves at any time. Rank 0 listens at any free port of its node.

    ``wait_s``: how long the job waits when there are too few.
    """
    return Terms(
        job=job,
        seats=(),
        version=version,
        least=job.meeting.least_nodes,
        most=job.node_count,
        is_elastic=True,
        port=0,
        start_s=None,
        wait_s=wait_s,
        last_call_s=last_call_s,
    )
