"""The hosts of an elastic job that a program prints, at the start and while the job runs (``--discover``)."""

from __future__ import annotations

from dsl._record import replace
from dsl.errors import HostfileError, OptionError
from dsl.model.job import Host
from dsl.model.request import DEFAULT_HOSTFILE
from dsl.plan.hosts import Pool
from dsl.plan.remote import launcher_word, option_words
from dsl.resources.hosts import parse_discovered, parse_pythons
from dsl.words import MOST_NODES, quote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dsl.facts import Facts
    from dsl.model.job import Job
    from dsl.model.request import Request
    from dsl.plan.remote import Remote


def first_list(request: Request, facts: Facts) -> Pool:
    """The hosts that the program prints at the start.

    Raises:
        OptionError: there is no such program, or another option names hosts, too.
        HostfileError: the program fails, or its list has mistakes.
    """
    asked, launcher = request.resources, launcher_word(request.remote)
    others = {
        "--hostfile": asked.hostfile not in (None, DEFAULT_HOSTFILE),
        "--include": asked.include,
        "--exclude": asked.exclude,
        "--num_gpus": asked.num_gpus,
        "--num_nodes without a range": asked.min_nodes and asked.max_nodes is None,
        "--no_ssh": request.remote.no_ssh,
        f"--launcher {launcher}": launcher not in (None, "ssh", "pdsh"),  # the others need files first
    }
    for name, is_given in others.items():
        if is_given:
            raise OptionError(f"{name} cannot be used with --discover, leave one of them out")
    words = option_words("--discover", request.elastic.discover)
    if not words or not facts.files.has_program(words[0]):
        raise OptionError(f"--discover {quote(''.join(words[:1]))} names no program that can be executed")
    text = facts.files.ask_for_hosts(words)
    slots = {name: range(count) for name, count in parse_discovered(text.split("\n")).items()}
    return Pool(slots, "hostfile", "--discover", text=text)


def relisted(job: Job, remote: Remote, text: str, executable: str) -> tuple[Job, Remote, frozenset[int]]:
    """The job and its hosts after another list of hosts, and the places of the hosts in it.

    A host that was ever listed keeps its place; with other slots it is another host. ``executable``:
    the usual interpreter.

    Raises:
        HostfileError: the list has mistakes, or there were too many hosts.
    """
    lines = text.split("\n")
    places = {(host.name, len(host.slots)): place for place, host in enumerate(job.hosts)}
    named, pythons = parse_pythons(lines, "--discover"), [*(remote.pythons or (executable,) * len(job.hosts))]
    hosts, listed = [*job.hosts], []
    for name, slots in parse_discovered(lines).items():
        if (name, slots) not in places:
            places[name, slots] = len(hosts)
            hosts.append(Host(name, tuple(range(slots))))
            pythons.append(named.get(name, executable))
        listed.append(places[name, slots])
    if len(hosts) > MOST_NODES:
        raise HostfileError(f"--discover: over {MOST_NODES} different hosts were listed")
    job = replace(job, hosts=tuple(hosts), node_count=len(hosts))
    remote = replace(remote, pythons=() if set(pythons) == {executable} else tuple(pythons))
    return job, remote, frozenset(listed)
