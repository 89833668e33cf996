"""Jobs whose nodes have fixed places (``--node-rank``), with this command on each of them."""

from __future__ import annotations

from dsl.agent.first_node import FirstNode
from dsl.agent.joining import LONGEST_COMMAND, joining_of
from dsl.agent.other_node import OtherNode
from dsl.agent.part import Orders, Reporter, decide
from dsl.agent.planner import Planner
from dsl.agent.session import Crew, listen, timers_of
from dsl.cli.options_torch import ENVIRONMENT_PREFIX
from dsl.control.messages import Refused
from dsl.machine.check import check_program
from dsl.report.narrator import Narrator

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dsl import Supervisor
    from dsl.agent.session import Launch
    from dsl.facts import Facts
    from dsl.model.job import Meeting, Notice
    from dsl.model.node import NodePlan
    from dsl.model.request import Program, Request, ShowRequest
    from dsl.plan.job import JobPlan


RANK_OPTION, SHORTEST_RANK = "--node-rank", "--nod"
"""The option for a node's place, and its shortest abbreviation."""


def start_fixed(
    planned: JobPlan,
    request: Request,
    show: ShowRequest,
    facts: Facts,
    argv: tuple[str, ...],
    tell: Callable[[Sequence[Notice]], None],
    launch: Launch,
) -> int:
    """Run this node's part of a job with fixed places, or show it.

    ``argv``: what the user has typed, with the program's name. Returns the command's exit code only if
    nothing was started.

    Raises:
        DslError: the job cannot be planned or prepared, or the nodes do not meet.
    """
    job = planned.job
    check_program(job.program, job.flavour, facts.environ)

    tell(planned.notices)
    planner = Planner(planned, facts)
    orders: Orders | None = None

    def crew(plan: NodePlan) -> Crew:
        assert orders is not None  # the nodes have met
        told = orders
        narrator = Narrator(plan, judged=lambda: told.judgement)
        listeners = [*listen(planner, plan, narrator), Reporter(plan, node.send), node]
        return Crew(listeners, (told, *timers_of(planner)), decide)

    session = launch(planner, crew, planner.notices)
    if show.dry_run or show.dry_run_json:
        return session.run_guarded()  # which ends with the preview
    sketch = planner.sketch()
    again = without_place(argv, request.program, facts.environ)
    joining = joining_of(planned, facts, planner.local_world_size, again)
    node: FirstNode | OtherNode
    first: Meeting | int | None = None
    if planned.node_rank:
        node = OtherNode(job, joining, lambda notice: tell([notice]))
        first = node.join()  # signals end this process
    else:
        node = FirstNode(job, joining, facts.ports, lambda notice: tell([notice]))

    def join(supervisor: Supervisor) -> int | None:
        nonlocal orders
        met = node.join(supervisor) if first is None else first
        if isinstance(met, int):
            return met
        orders = Orders(node, met)
        planner.meet_by(orders)
        return None

    return session.run_joined(sketch, _NodeCrew(node), join)


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
    argv: tuple[str, ...], program: Program, environ: Mapping[str, str]
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
