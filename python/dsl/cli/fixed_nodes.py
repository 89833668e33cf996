"""Jobs whose nodes have fixed places (``--node-rank``), with this command on each of them."""

from __future__ import annotations

from dsl.agent.agent import Agent
from dsl.agent.first_node import FirstNode
from dsl.agent.joining import LONGEST_COMMAND, joining_of
from dsl.agent.other_node import OtherNode
from dsl.agent.part import Orders, Reporter, decide
from dsl.agent.planner import Planner
from dsl.agent.preflight import debugger_notices
from dsl.cli.options_torch import ENVIRONMENT_PREFIX
from dsl.cli.process import Crew, HeldSignals, channels_of, guarded, listen
from dsl.control.messages import Refused
from dsl.machine.check import check_program
from dsl.report.narrator import Narrator

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Protocol

    from dsl import Supervisor
    from dsl.facts import Facts
    from dsl.model.job import Meeting, Notice
    from dsl.model.request import ProgramRequest, Request, ShowRequest
    from dsl.plan.job import JobPlan

    class Speaker(Protocol):
        """What this module needs of a command: its messages start with the command's name."""

        def say(self, text: str) -> None:
            """Write one line to stderr."""

        def show(self, notices: Sequence[Notice], log_level: str) -> None:
            """Say the notices of this level or above."""


RANK_OPTION, SHORTEST_RANK = "--node-rank", "--nod"
"""The option for a node's place, and its shortest abbreviation."""


def start_fixed(
    command: Speaker,
    planned: JobPlan,
    request: Request,
    show: ShowRequest,
    facts: Facts,
    argv: tuple[str, ...] = (),
) -> int:
    """Run this node's part of a job with fixed places, or show it.

    ``argv``: what the user has typed, with the program's name. Returns the command's exit code only if
    nothing was started.

    Raises:
        DslError: the job cannot be planned or prepared, or the nodes do not meet.
    """
    job = planned.job
    check_program(job.program, job.flavour, facts.environ)

    def tell(notices: Sequence[Notice]) -> None:
        command.show(notices, request.log_level)

    tell(planned.notices)
    if show.dry_run or show.dry_run_json:
        from dsl.cli.show import show_plan

        plan = Planner(planned, facts).plan(0)
        tell(plan.notices)
        show_plan(show, plan, facts.environ, command.say)
        return 0
    planner = Planner(planned, facts)
    sketch = planner.sketch()
    again = without_place(argv, request.program, facts.environ)
    joining = joining_of(planned, facts, planner.local_world_size, again)
    node: FirstNode | OtherNode
    first: Meeting | None = None
    if planned.node_rank:
        node = OtherNode(job, joining, lambda notice: tell([notice]))
        found = node.join()  # signals end this process
        assert not isinstance(found, int)
        first = found
    else:
        node = FirstNode(job, joining, facts.ports, lambda notice: tell([notice]))

    def run(supervisor: Supervisor) -> int:
        met = node.join(supervisor) if first is None else first
        if isinstance(met, int):
            return met
        orders = Orders(node, met)
        planner.meet_by(orders)
        plan = planner.plan(0)
        notices = plan.notices
        if job.debug.ranks:
            notices = (*notices, *debugger_notices(job, plan, facts))
        tell([notice for notice in notices if not notice.is_made])
        if show.is_asked:
            from dsl.cli.show import show_plan

            show_plan(show, plan, facts.environ, command.say)
        plan = planner.prepare(plan)
        tell([notice for notice in notices if notice.is_made])
        narrator = Narrator(plan, judged=lambda: orders.judgement)
        agent = Agent(
            planner,
            plan,
            [*listen(planner, plan, narrator), Reporter(plan, node.send), node],
            [orders, *channels_of(planner)],
            policy=decide,
            stdin_is_terminal=facts.console.stdin_is_terminal,
        )
        return agent.run(supervisor).code

    with HeldSignals() as held:
        held.hold()
        try:
            return guarded(planner, sketch, _NodeCrew(node), held, run)
        finally:
            planner.finish(succeeded=False)  # nothing was started


class _NodeCrew(Crew):
    """Leaves the connections between the nodes to the agent's process, and ends them there."""

    def __init__(self, node: FirstNode | OtherNode) -> None:
        super().__init__([])
        self._node = node

    def stay(self) -> None:
        """Leave the connections to the agent: when the agent dies, the other nodes see it at once."""
        self._node.disown()

    def enter(self, supervisor: Supervisor) -> None:  # noqa: ARG002  as every crew
        """Serve the connections."""
        self._node.start()

    def refuse(self, command: str, text: str, code: int) -> None:
        """Report it, and tell the conductor that this node has no part in the job."""
        super().refuse(command, text, code)
        self._node.send(Refused(text, code))

    def leave(self, code: int) -> int:
        """Say goodbye to the other nodes."""
        self._node.leave(code)
        return code


def without_place(
    argv: tuple[str, ...], program: ProgramRequest, environ: Mapping[str, str]
) -> tuple[tuple[str, ...], int]:
    """The command of this node without its rank option, and the index where another node's option belongs.

    Options from the environment are a part of this command. If it cannot be made: no words, and 0.
    """
    script = len(argv) - len(program.args) - 1
    if argv[script:][:1] == ("--",):  # separates the script from its arguments
        script -= 1
    is_long = sum(map(len, argv)) > LONGEST_COMMAND
    if is_long or script < 0 or argv[script] != program.script:
        return (), 0
    place = script
    rest = tuple(argv[script:])
    for index, word in enumerate(argv[:script]):
        name, equals, _ = word.replace("_", "-").partition("=")
        if len(name) >= len(SHORTEST_RANK) and RANK_OPTION.startswith(name):
            place, rest = index, tuple(argv[index + (1 if equals else 2) :])
    held = [f"{name}={value}" for name, value in environ.items() if name.startswith(ENVIRONMENT_PREFIX)]
    held = [word for word in held if not word.startswith(f"{ENVIRONMENT_PREFIX}NODE_RANK=")]
    before = (*(("env", *held) if held else ()), *argv[:place])
    return (*before, *rest), len(before)
