"""``--launcher pdsh``, DeepSpeed's default: one pdsh, which starts an ssh for each host."""

from __future__ import annotations

from dsl._record import replace
from dsl.errors import HostNameError, LauncherError
from dsl.launchers.base import ENDED, PLACE, Agents, Start, agent_command, bare, host_names, shell_word
from dsl.model.remote import PDSH_SSH_ARGS, Remote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


FANOUT = 1024
"""Hosts that pdsh reaches at once, or all hosts if there are more: no agent ends before all have started."""

SSH_OPTIONS = ("-oBatchMode=yes", "-oClearAllForwardings=yes", "-oControlMaster=no")
"""The same options as in `dsl.launchers.ssh`."""

SSH_MODULE = "ssh:"
"""Prefix for an address with colons: pdsh reads the text before the first colon as the name of a module."""

_PLACE = "%n"

# pdsh reports nothing for an agent that ends with 0. And when the connection is gone, sshd only closes the
# input of the command. So a shell stays with the agent: it reports the agent's exit code. Until the agent has
# connected to the head, and has a process group of its own, the shell also ends both with the connection.
_WATCH = (
    "exec 3<&0 </dev/null; "
    '(while read -r dsl_word; do :; done; kill -s KILL -- "-$$") <&3 >/dev/null 2>&1 & '
    'dsl_watch=$!; exec 3<&-; "$@"; dsl_code=$?; '
    f'kill -s KILL "$dsl_watch" 2>/dev/null; echo "{ENDED} $0 $dsl_code"; exit "$dsl_code"'
)


def pdsh(remote: Remote, agents: Agents) -> tuple[Start, ...]:
    """The command that starts an agent on every host. In it pdsh writes a host's place for ``%n``.

    Raises:
        HostNameError: the name of a host means something else to pdsh.
        LauncherError: the user turns labels off.
    """
    if "-N" in remote.args:
        raise LauncherError(
            "-N lets pdsh leave out the names by which dsl tells the lines of hosts apart: "
            "take it out of the words for the launcher"
        )
    if agents.variables:
        raise ValueError("pdsh carries no variables")
    names = tuple(_host(name) for name in host_names(agents, "pdsh", also="@:%[]+"))
    port = () if remote.ssh_port is None else ("-p", str(remote.ssh_port))
    # The user's words come first, because ssh uses the first value of an option.
    ssh_args = (dict(agents.environ).get(PDSH_SSH_ARGS, "").strip(), *SSH_OPTIONS, *port)
    fanout = str(max(FANOUT, len(names)))
    argv = ("pdsh", "-S", "-f", fanout, "-w", ",".join(names), *remote.args, _line(remote, agents))
    env = (("PDSH_RCMD_TYPE", "ssh"), (PDSH_SSH_ARGS, " ".join(filter(None, ssh_args))))
    return (Start(argv=argv, env=env, labels=_labels(names)),)


def _labels(names: Sequence[str]) -> tuple[tuple[str, int], ...]:
    """The labels of pdsh for each host: its name, or if all hosts have one domain, the name without it.

    A short name counts as a label only if no other host has it.
    """
    hosts = [name.removeprefix(SSH_MODULE).rpartition("@")[2] for name in names]
    shorts = [host if host[:1].isdigit() else host.partition(".")[0] for host in hosts]
    of_short: dict[str, set[int]] = {}
    for node_rank, both in enumerate(zip(hosts, shorts, strict=True)):
        for name in both:
            of_short.setdefault(name, set()).add(node_rank)
    labels = [(host, node_rank) for node_rank, host in enumerate(hosts)]
    more = [(short, node_rank) for node_rank, short in enumerate(shorts) if of_short[short] == {node_rank}]
    return tuple(dict.fromkeys((*labels, *more)))


def _host(given: str) -> str:
    """The name of a host as pdsh needs it: pdsh reads the text before a ``:`` as its module for the host."""
    name = bare(given)
    if name.count("@") > 1:
        raise HostNameError(
            f"host name {given!a} cannot be given to pdsh: write it into ~/.ssh/config under a plain name, "
            "or use --launcher ssh"
        )
    if "[" in name or "]" in name:
        raise HostNameError(f"host name {given!a} cannot be given to pdsh: it is no host, but a list")
    return f"{SSH_MODULE}{name}" if ":" in name else name


def _line(remote: Remote, agents: Agents) -> str:
    """The command for the login shell of each host, as one word."""
    agent = replace(agents, words=(*agents.words, PLACE, _PLACE))
    words = agent_command(remote, agent, place="$0", name=_PLACE)
    words = ("sh", "-c", _WATCH, _PLACE, *words)
    # pdsh writes % for %%.
    shown = (word if word == _PLACE else shell_word(word).replace("%", "%%") for word in words)
    return " ".join(("exec", *shown))
