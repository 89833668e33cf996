"""What a conductor knows from the start: the members of the job, and the rules by which they take part."""

from __future__ import annotations

from dsl._record import Record, replace
from dsl.lists import quote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dsl.control.messages import Assignment, Hello
    from dsl.model.job import Job
    from dsl.model.remote import Remote

START_S = 60.0
"""Most time that a member gets to answer before the job starts."""

FIRST_MEETING_S = 600.0
"""How long members that come by themselves are waited for, as by torch's static rendezvous."""


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
    gives_up: bool = False
    """The job ends if attempts fail over and over in their first seconds, as the user set no limit."""
    heartbeat_s: float = 0.0
    """Seconds of silence after which the other side counts as lost."""

    @property
    def members_come(self) -> bool:
        """Whether members come by themselves; otherwise we reach them."""
        return self.assignment is None

    def assigned(self, place: int) -> Assignment:
        """The answer to the `Hello` of a member that we reach."""
        assert self.assignment is not None
        seat = self.seats[place]
        return replace(self.assignment, node_rank=seat.node_rank, task=seat.task)


def version_problem(hello: Hello, version: str) -> str:
    """What is wrong with the version of dsl on a host; empty if it is the head's version."""
    if hello.version == version:
        return ""
    where = f" for {hello.python}" if hello.python else ""
    return f"it has dsl {hello.version}, this host has {version}: install the same version{where}"


def objection(terms: Terms, place: int, hello: Hello) -> str:
    """Why a member that greets us cannot take part; empty: its greeting shows no reason."""
    if problem := version_problem(hello, terms.version):
        return problem
    task, run_id = terms.seats[place].task, terms.job.run_id
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
        gives_up=remote.gives_up,
    )


def fixed_places(
    job: Job, count: int, version: str, address: str, port: int, wait_s: float = FIRST_MEETING_S
) -> Terms:
    """Terms of ``count`` members that come by themselves, each at the place that its user gave it."""
    return Terms(
        job=job,
        seats=tuple([Seat(place) for place in range(count)]),
        version=version,
        least=count,
        most=count,
        address=address,
        port=port,
        start_s=None,
        wait_s=wait_s,
    )
