"""Says in words what the ranks of a job do, and which of them do something else than the others.

Pure: from the stacks of all nodes to lines. Ranks that do the same at the same line of the user's program are
one group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dsl._record import Record
from dsl.model.observation import Frame, NodeStacks, RankStacks, ThreadStack
from dsl.words import numbered, printable, signal_name

MOST_NAMED = 4
"""Groups that the first line names."""
MOST_FRAMES = 8
"""Frames of a group that are shown."""
MOST_LIBRARY_FRAMES = 3
"""Frames of libraries among them, which the user's code has called."""
MOST_BESIDE = 2
"""Other threads or descendants that are named with a rank."""
THRASHING = 40
"""Major page faults a second from which a rank counts as short of memory."""
BUSY = 0.5
"""A rank that uses more of a CPU computes."""

# Folders of code that users have not written, and functions of it that only pass on.
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "/lib64/python3")
_PASSING = {
    *("wrapper", "inner", "_wrapped_call_impl", "_call_impl", "decorate_context", "_fn"),
    *("__call__", "__enter__", "__init__", "<module>", "<lambda>", "<listcomp>"),
}
MEETING = "init_process_group"
"""The operation in which a process group meets at its store."""
_COLLECTIVES = {
    *("all_reduce", "all_reduce_coalesced", "reduce", "broadcast", "all_gather"),
    *("all_gather_into_tensor", "all_gather_object", "all_gather_coalesced", "gather"),
    *("gather_object", "scatter", "scatter_object_list", "reduce_scatter", "reduce_scatter_tensor"),
    *("all_to_all", "all_to_all_single", "broadcast_object_list", "barrier", "monitored_barrier"),
    *("send", "recv", "batch_isend_irecv", "destroy_process_group", "new_group"),
    *("send_object_list", "recv_object_list"),
    MEETING,
}
_C_FILES = (".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".pyx", ".rs")
_LOCKS = {"futex"}
_SLEEPS = {"nanosleep", "clock_nanosleep"}
_OPENS = {"open", "openat"}


class Doing(Record):
    """What a thread does, in words that ranks share."""

    verb: str
    """``wait``: "waits" for one rank, "wait" for several."""
    rest: str
    """What follows the verb: ``in all_reduce``."""
    place: str = ""
    """File and line of the user's program; empty: unknown."""

    def phrase(self, host: str = "", *, is_one: bool = True) -> str:
        """As a clause without its subject, with the place and the host."""
        where = ", ".join([one for one in (self.place, f"host {host}" if host else "") if one])
        words = f"{_verb(self.verb, is_one=is_one)} {self.rest}".rstrip()
        return f"{words} ({where})" if where else words


class Group(Record):
    """Ranks that do the same."""

    doing: Doing
    """What they do."""
    members: tuple[tuple[str, RankStacks], ...]
    """Host and stacks of each, by rank."""

    def phrase(self, host: str = "") -> str:
        """What they do, as a clause; for a single rank also what it waits for, as far as that is known."""
        is_one = len(self.members) == 1
        return self.doing.phrase(host, is_one=is_one) + (
            _beside(self.doing, self.members[0][1]) if is_one else ""
        )


def explain_stacks(nodes: Sequence[NodeStacks], missing: Sequence[str] = ()) -> list[str]:
    """The explanation: a line that names all groups, then a block with the stack of each.

    ``missing``: hosts that have not answered.
    """
    groups = group(nodes)
    if not groups:
        return ["no rank has answered"] + [f"host {host} has not answered" for host in missing]
    has_hosts = len({node.host for node in nodes}) > 1
    lines = [_headline(groups, has_hosts=has_hosts)]
    lines += _recorded(nodes)
    lines += [f"host {host} has not answered" for host in missing]
    for one in groups:
        lines += ["", *_block(one, has_hosts=has_hosts)]
    return [printable(line) for line in lines]


def group(nodes: Iterable[NodeStacks]) -> list[Group]:
    """All ranks in groups, the largest group first."""
    found: dict[Doing, list[tuple[str, RankStacks]]] = {}
    ranks = [(node.host, one) for node in nodes for one in node.ranks]
    for host, one in sorted(ranks, key=lambda pair: (pair[1].rank, pair[0], pair[1].local_rank)):
        found.setdefault(doing(one), []).append((host, one))
    groups = [Group(key, tuple(members)) for key, members in found.items()]
    # Of two groups of the same size, the one that waits for others is the crowd. Else the order stays.
    return sorted(groups, key=lambda group: (-len(group.members), not is_collective(group.doing)))


def is_collective(doing: Doing) -> bool:
    """Whether it is a collective operation."""
    return doing.verb == "wait" and doing.rest.removeprefix("in ").partition(",")[0] in _COLLECTIVES


def waits_in_collective(rank: RankStacks) -> bool:
    """Whether the main thread of a rank is in a collective operation."""
    return is_collective(doing(rank))


def spins_in_collective(rank: RankStacks) -> bool:
    """Whether the innermost Python frame of its main thread is a collective operation itself."""
    main = next((one for one in rank.threads if one.is_main), None)
    frames = python_frames(main) if main is not None else []
    return bool(frames) and frames[0].function in _COLLECTIVES and "/torch/distributed/" in frames[0].file


def is_known_wait(thread: ThreadStack, rank: RankStacks) -> bool:
    """Whether a thread is in a function that is known to wait, and may look again and again meanwhile."""
    return thread_doing(thread, rank).verb == "wait"


def doing(rank: RankStacks) -> Doing:
    """What a rank does, judged by its main thread."""
    if not rank.pid or rank.state in ("Z", "X"):
        return Doing("have", "ended")
    main = next((one for one in rank.threads if one.is_main), None)
    if main is None:
        return Doing("be", f"in an unknown place: {rank.problem or 'it has no thread'}")
    place = _place(user_frame(main.frames))
    if rank.state == "T":
        return Doing("be", "stopped by a signal (SIGCONT lets it go on)", place)
    if rank.state == "t":
        return Doing("be", "held by a debugger", place)
    if main.signal:
        inner = thread_doing(main, rank).rest
        return Doing("be", f"in its handler of {signal_name(main.signal)}, {inner}", place)
    if rank.major_faults >= THRASHING:
        return Doing("be", "short of memory: it waits for pages from disk again and again", place)
    if main.state == "D":
        where = _call_words(main.call) or (
            f"in the kernel ({main.channel})" if main.channel else "in the kernel"
        )
        return Doing(
            "be", f"{where}, stuck in state D: a disk, a file system or a driver does not answer", place
        )
    return thread_doing(main, rank)


def thread_doing(thread: ThreadStack, rank: RankStacks) -> Doing:
    """What a thread does, by the function that the user's code has called, else by its system call."""
    frame = user_frame(thread.frames)
    place = _place(frame)
    called = _called(thread.frames)
    if called in _COLLECTIVES:
        at = f", store {rank.store}" if called == MEETING and rank.store else ""
        return Doing("wait", f"in {called}{at}", place)
    if any(one.file.endswith("torch/utils/data/dataloader.py") for one in _inner(thread.frames)):
        return Doing("wait", "for its data loader", place)
    if called == "_shutdown":
        return Doing("have", "ended its program and waits for its threads", place)
    if called and rank.cpu_share >= BUSY and thread.state == "R":
        return Doing("compute", f"in {called}()", place)
    if called:
        return Doing(
            "wait" if called.endswith(("wait", "join", "get", "result")) else "be", f"in {called}()", place
        )
    name, _, about = thread.call.partition("(")
    if name in _LOCKS and frame is not None:
        return Doing("wait", "for a lock", place)
    if thread.call:
        return Doing("wait" if about == "stdin)" else "be", _call_words(thread.call), place)
    if thread.state == "R" or rank.cpu_share >= BUSY:
        return Doing("compute", f"in {short(frame.function)}()" if frame else "", place)
    return Doing("be", f"in {short(frame.function)}()" if frame else "in an unknown place", place)


def _call_words(call: str) -> str:
    """A system call in words."""
    name, _, about = call.partition("(")
    about = about.removesuffix(")")
    if not name:
        return ""
    if name in _SLEEPS:
        return "in sleep()"
    if name == "read" and about == "stdin":
        return "for input on stdin"
    if name in _OPENS:
        name = "open"
    if name in ("wait4", "waitid"):
        return f"in wait() for its child {about}".rstrip()
    return f"in {name}()" + (f" of {about}" if about else "")


def _beside(found: Doing, rank: RankStacks) -> str:
    """The threads or the descendants for which the main thread waits."""
    own = [one for one in rank.threads if not one.is_main and not one.pid and user_frame(one.frames)]
    below = [one for one in rank.threads if one.pid]
    if found.rest == "for a lock":
        others = [one for one in own if thread_doing(one, rank).rest == "for a lock"]
        words = [
            f'its thread "{one.name}" {thread_doing(one, rank).phrase()}' for one in others[:MOST_BESIDE]
        ]
        return f", while {' and '.join(words)}: each may hold the lock of the other" if words else ""
    words = []
    if found.verb == "wait" and not is_collective(found) and found.rest != "for its data loader":
        words = [f'its thread "{thread.name}" {thread_doing(thread, rank).phrase()}' for thread in own]
    if not words or "child" in found.rest or "subprocess" in found.rest:
        busy = [child for child in below if user_frame(child.frames) or child.cpu_share >= BUSY]
        words += [_descendant(child, rank) for child in busy]
    return f"; {'; '.join(words[:MOST_BESIDE])}" if words else ""


def _descendant(thread: ThreadStack, rank: RankStacks) -> str:
    what = thread_doing(thread, rank).phrase() if thread.frames else f"uses {thread.cpu_share:.1f} CPUs"
    return f"its child {thread.name} (pid {thread.pid}) {what}"


def user_frame(frames: Sequence[Frame]) -> Frame | None:
    """The innermost frame of code that is no library; None: there is none."""
    return next((one for one in frames if is_users(one)), None)


def python_frames(thread: ThreadStack) -> list[Frame]:
    """The frames of a thread that are no C frames, innermost first."""
    return [one for one in thread.frames if _is_python(one)]


def is_users(frame: Frame) -> bool:
    """Whether it is code in Python that is no library."""
    return _is_python(frame) and not any(folder in frame.file for folder in _LIBRARIES)


def _is_python(frame: Frame) -> bool:
    """Whether it is no C frame. Of these, only some have a line."""
    file = frame.file
    return (
        bool(frame.line)
        and not file.startswith("<frozen")
        and not file.endswith(_C_FILES)
        and ".so" not in file
    )


def _inner(frames: Sequence[Frame]) -> list[Frame]:
    """The frames of libraries inside the innermost frame of the user's, innermost first."""
    index = next((at for at, one in enumerate(frames) if is_users(one)), len(frames))
    return list(frames[:index])


def _called(frames: Sequence[Frame]) -> str:
    """The library function that the innermost frame of the user's has called; empty: none."""
    names = [short(one.function) for one in reversed(_inner(frames)) if _is_python(one)]
    names = [name for name in names if name.rpartition(".")[2] not in _PASSING]
    known = [name for name in names if name in _COLLECTIVES]
    return (known or names or [""])[0]


def short(function: str) -> str:
    """The last two parts of a qualified name."""
    parts = [part for part in function.split(".") if part and part != "<locals>"]
    return ".".join(parts[-2:])


def _place(frame: Frame | None) -> str:
    return f"{frame.file.rpartition('/')[2]}:{frame.line}" if frame else ""


def _verb(verb: str, *, is_one: bool) -> str:
    if is_one:
        return {"be": "is", "have": "has"}.get(verb, f"{verb}s")
    return {"be": "are"}.get(verb, verb)


def _headline(groups: Sequence[Group], *, has_hosts: bool) -> str:
    total = sum(len(one.members) for one in groups)
    clauses = []
    for index, one in enumerate(groups[:MOST_NAMED]):
        count = len(one.members)
        hosts = {host for host, _ in one.members}
        host = hosts.pop() if has_hosts and len(hosts) == 1 and (index or count == 1) else ""
        who = _names(one)
        if not index and count > 1:
            who = f"all {total} ranks" if count == total else f"{count} of {total} ranks"
        clauses.append(f"{who} {one.phrase(host)}")
    rest = sum(len(one.members) for one in groups[MOST_NAMED:])
    if rest:
        clauses.append(
            f"{rest} more do other things, see below" if rest > 1 else "1 more does something else"
        )
    return "; ".join(clauses)


def _names(group: Group) -> str:
    """``rank 3``, ``ranks 3,5-7``; workers without a rank by their local ranks."""
    ranks = [one.rank for _, one in group.members]
    if min(ranks) < 0:
        words = [f"{one.local_rank} of host {host}" for host, one in group.members]
        return ("worker " if len(words) == 1 else "workers ") + ", ".join(words)
    return numbered("rank", ranks)


def _recorded(nodes: Iterable[NodeStacks]) -> list[str]:
    """What torch's flight recorder adds: which rank is behind in a process group."""
    ranks = [one for node in nodes for one in node.ranks if one.sequence]
    lines = []
    for name in sorted({one.process_group for one in ranks}):
        inside = sorted([one for one in ranks if one.process_group == name], key=lambda one: one.rank)
        most = max(one.sequence for one in inside)
        behind = [one for one in inside if one.sequence < most]
        words = [f"rank {one.rank} has begun {one.sequence}, last {one.collective}" for one in behind]
        last = sorted({one.collective for one in inside if one.sequence == most})
        begun = f"collective operations of {name}: {most} begun, last {' or '.join(last)}"
        more = [f"{len(words) - MOST_NAMED} more ranks are behind"] if len(words) > MOST_NAMED else []
        lines.append("; ".join([begun, *words[:MOST_NAMED], *more]))
    return lines


def _block(group: Group, *, has_hosts: bool) -> list[str]:
    """The stack of the first rank of a group, the innermost frame first."""
    first = group.members[0][1]
    count = len(group.members)
    hosts = sorted({host for host, _ in group.members})
    more = " and others" if len(hosts) > MOST_NAMED else ""
    known = [f"{count} ranks" if count > 1 else f"pid {first.pid}" if first.pid else ""]
    known += [f"host{'s' * (len(hosts) > 1)} {', '.join(hosts[:MOST_NAMED])}{more}"] if has_hosts else []
    about = ", ".join([one for one in known if one])
    lines = [f"{_names(group)}{f' ({about})' if about else ''}: {group.phrase()}"]
    for thread in first.threads:
        if thread.is_main or thread.pid or user_frame(thread.frames):
            lines += _thread_lines(thread)
    problems: dict[str, list[int]] = {}
    for _, one in group.members:
        if one.problem:
            problems.setdefault(one.problem, []).append(one.rank)
    lines += [f"  Python stack unknown: {why}" for why in problems]
    return lines


def _thread_lines(thread: ThreadStack) -> list[str]:
    lines = []
    if not thread.is_main:
        lines.append(
            f"  child {thread.name} (pid {thread.pid})" if thread.pid else f'  thread "{thread.name}"'
        )
    if thread.call or thread.state in ("D", "R"):
        call = thread.call or {"D": "waits", "R": "runs"}[thread.state]
        lines.append(f"    kernel: {call}" + (f" in {thread.channel}" if thread.channel else ""))
    library, user = _inner(thread.frames), [one for one in thread.frames if is_users(one)]
    # Of the library, what the user's code has called says more than what that leads to.
    library = [one for one in library if one.function.rpartition(".")[2] not in _PASSING][
        -MOST_LIBRARY_FRAMES:
    ]
    shown = [*library, *user][:MOST_FRAMES] if user else thread.frames[:MOST_FRAMES]
    return [*lines, *[f"    {short(one.function)} ({_file(one)})" for one in shown]]


def _file(frame: Frame) -> str:
    """Path of a frame, for a library from its package on, with the line."""
    path = frame.file
    for folder in _LIBRARIES[:2]:
        path = path.rpartition(folder)[2]
    return f"{path}:{frame.line}" if frame.line else path
