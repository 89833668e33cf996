"""How a node joins a job of several nodes: what it knows from the start, and the key of the links. Pure."""

from __future__ import annotations

from dsl import __version__
from dsl._record import Record, replace
from dsl.control.messages import Hello
from dsl.errors import OptionError
from dsl.plan.worker import JOB_KEY_VARIABLE
from dsl.rendezvous.settings import number
from dsl.words import MOST_SECONDS, parse_seconds, quote, with_port

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dsl.facts import Facts
    from dsl.model.job import Job, Meeting, Pairs
    from dsl.plan.job import JobPlan
    from dsl.rendezvous.delegate_messages import Claimed

TIMEOUT_S = 600.0
"""How long the nodes wait for each other before the first attempt, as torch's static rendezvous does."""

SIGN_OF_LIFE_S, MOST_MISSED = 5.0, 3
"""A node that is silent for the product of these two is lost. The values are torch's."""

SHORTEST_KEY = 16
"""Least characters of a job key: a shorter one could be guessed."""

KEY_BYTES = 32
HEX_DIGITS = frozenset("0123456789abcdefABCDEF")
SCRYPT_COST = 1 << 14
"""A guess takes so much memory, in KiB, and about 50 ms."""
MAKE_KEY = "make one with `openssl rand -hex 32`"

LONGEST_COMMAND = 1500
"""Most characters of a command in a message."""

RANK_OPTION, SHORTEST_RANK = "--node-rank", "--nod"
"""The option for a node's place, and its shortest abbreviation."""

VARIABLES = "PET_"
"""Prefix of the variables that are defaults of options."""


WAITING = "waiting for "
"""How the line of node 0 begins that says which nodes are missing."""


class Joining(Record):
    """How a node takes part."""

    job: Job
    """The job."""
    hello: Hello
    """What it says about itself."""
    address: str
    """Address of node 0, without brackets."""
    port: int
    """The port there."""
    key: bytes
    """The key of the link, 32 bytes."""
    is_keyed: bool
    """The user has given the key; otherwise everybody who knows the run id has it."""
    timeout_s: float
    """How long this node waits for the first attempt."""
    silence_s: float
    """After this many seconds of silence the other side is lost."""
    command: tuple[tuple[str, ...], ...] = ()
    """The words of this command before and after its rank option; empty: not known."""
    ranks: tuple[int, ...] = ()
    """See `JobPlan.ranks`."""
    claimed: Claimed | None = None
    """Who conducts a job over a store."""

    @property
    def meeting_point(self) -> str:
        """Address and port as users write them."""
        return with_port(self.address, self.port)

    def option_of(self, place: int) -> tuple[str, str]:
        """The rank option of a node, and its value."""
        return self.job.flavour.spell(RANK_OPTION), str(self.ranks[place] if self.ranks else place)

    def command_of(self, place: int) -> str:
        """What to type for another node; empty if that does not fit on a line."""
        from shlex import join

        before, after = self.command or ((), ())
        line = join((*before, *self.option_of(place), *after))
        return line if self.command and line.isprintable() and len(line) <= LONGEST_COMMAND else ""


def joining_of(planned: JobPlan, facts: Facts, workers: int) -> Joining:
    """How this node joins its job with so many workers.

    Raises:
        OptionError: a setting or the job key is not valid.
    """
    job, point = planned.job, planned.job.meeting
    assert point.port is not None
    settings = dict(point.settings)
    key, is_keyed = job_key(facts.environ, job.run_id)
    return Joining(
        job,
        _hello(planned, planned.node_rank, workers, facts),
        point.address,
        point.port,
        key,
        is_keyed,
        timeout_s=_seconds(settings, "timeout", TIMEOUT_S),
        silence_s=_seconds(settings, "keep_alive_interval", SIGN_OF_LIFE_S)
        * _seconds(settings, "keep_alive_max_attempt", MOST_MISSED),
        command=without_place(planned.argv, job, facts.environ),
        ranks=planned.ranks,
    )


def _hello(planned: JobPlan, place: int, workers: int, facts: Facts) -> Hello:
    job, names = planned.job, facts.names
    return Hello(
        __version__,
        place,
        job.hosts[planned.node_rank].name if job.hosts else names.host,
        names.pid,
        nodes=job.node_count,
        spares=job.meeting.spares,
        workers=workers,
        role=job.role,
        run_id=job.run_id,
    )


def awaited(job: Job) -> str:
    """What the nodes of a job wait for, in words."""
    place = f" at {job.meeting.endpoint}" if job.meeting.endpoint else ""
    return f"the nodes with run id {job.run_id}{place}"


def silence_of(job: Job) -> float:
    """After this many seconds of silence the other side is lost."""
    settings = job.meeting.settings
    return float(number(settings, "keep_alive_interval") * number(settings, "keep_alive_max_attempt"))


def store_joining(
    planned: JobPlan, claimed: Claimed, workers: int, facts: Facts, last: Meeting | None
) -> Joining:
    """How this node takes part, with so many workers. ``last``: its meeting under an earlier conductor."""
    job = planned.job
    hello = replace(
        _hello(planned, 0 if claimed.conducts else claimed.place, workers, facts),
        order=claimed.node,
        attempts=0 if last is None else last.attempt + 1,
        restarts=0 if last is None else last.restarts,
    )
    return Joining(
        job,
        hello,
        claimed.at_address,
        claimed.at_port,
        bytes.fromhex(claimed.key),
        is_keyed=True,
        timeout_s=number(job.meeting.settings, "join_timeout"),
        silence_s=silence_of(job),
        claimed=claimed,
    )


def job_key(environ: Mapping[str, str], run_id: str) -> tuple[bytes, bool]:
    """The key of a job, and whether the user has given one: `DSL_JOB_KEY`, else made of the run id.

    A key of 64 hexadecimal digits is taken as it is. Others may be words that an attacker, who has seen a
    handshake, could guess: there each guess costs time and memory.

    Raises:
        OptionError: the user's key is too short, or this Python has no scrypt.
    """
    import hashlib

    text = environ.get(JOB_KEY_VARIABLE)
    if text is None:
        return hashlib.sha256(b"dsl run id\0" + run_id.encode(errors="surrogateescape")).digest(), False
    if len(text) < SHORTEST_KEY:
        raise OptionError(
            f"{JOB_KEY_VARIABLE} has {len(text)} characters, it needs at least {SHORTEST_KEY}: "
            f"{MAKE_KEY}, the same for all nodes"
        )
    if len(text) == 2 * KEY_BYTES and HEX_DIGITS.issuperset(text):
        return bytes.fromhex(text), True
    try:
        data = text.encode(errors="surrogateescape")
        return hashlib.scrypt(data, salt=b"dsl job key", n=SCRYPT_COST, r=8, p=1, dklen=KEY_BYTES), True
    except (AttributeError, ValueError):
        raise OptionError(
            f"{JOB_KEY_VARIABLE}: this Python has no scrypt, so it needs 64 hexadecimal digits: {MAKE_KEY}"
        ) from None


def objection(hello: Hello, own: Hello, job: Job) -> str:
    """Why a node that calls has no place in a job of that many nodes; empty: it may have one."""
    if hello.nodes != own.nodes:
        count = "number of hosts" if job.hosts else "--nnodes"
        return f"its {count} is {hello.nodes}, that of node 0 is {own.nodes}"
    if hello.spares != own.spares:
        return f"its --spares is {hello.spares}, that of node 0 is {own.spares}"
    places, option = own.nodes + own.spares, job.flavour.spell(RANK_OPTION)
    if not 0 < hello.place < places:
        return f"its {option} is {hello.place}, with {places} nodes it must be 1 to {places - 1}"
    return ""


def without_place(argv: tuple[str, ...], job: Job, environ: Mapping[str, str]) -> tuple[tuple[str, ...], ...]:
    """The words of this command before and after its rank option; empty if it cannot be made.

    Options from the environment are a part of this command.
    """
    script = len(argv) - len(job.program.args) - 1
    if argv[script:][:1] == ("--",):  # separates the script from its arguments
        script -= 1
    is_long = sum(map(len, argv)) > LONGEST_COMMAND
    if is_long or script < 0 or argv[script] != job.program.script:
        return ()
    argv, place = (*without_secrets(argv[:script], job.env), *argv[script:]), script
    rest = tuple(argv[script:])
    for index, word in enumerate(argv[:script]):
        name, equals, _ = word.replace("_", "-").partition("=")
        if len(name) >= len(SHORTEST_RANK) and RANK_OPTION.startswith(name):
            place, rest = index, tuple(argv[index + (1 if equals else 2) :])
    held = [f"{name}={value}" for name, value in environ.items() if name.startswith(VARIABLES)]
    held = [word for word in held if not word.startswith(f"{VARIABLES}NODE_RANK=")]
    return (*(("env", *without_secrets(held, job.env)) if held else ()), *argv[:place]), rest


def without_secrets(words: Sequence[str], env: Pairs) -> tuple[str, ...]:
    """Words of options, with ``NAME`` for ``NAME=VALUE`` if that may be a secret: messages go to logs."""
    from dsl.plan.starting import may_be_secret

    for name, _ in env:
        parts = [word.partition(f"{name}=") for word in words]
        words = [head + (name if mid and may_be_secret(name, end) else mid + end) for head, mid, end in parts]
    return tuple(words)


def _seconds(settings: dict[str, str], name: str, default: float) -> float:
    text = settings.get(name)
    if text is None:
        return default
    value = parse_seconds(text)
    if value is None or not 0 < value <= MOST_SECONDS:
        raise OptionError(f"--rdzv-conf {name}={quote(text)}: expected a number above 0")
    return value
