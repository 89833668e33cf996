"""A worker group started through the library face, with its events kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Literal, TypeVar

from dsl import Ended, Event, Exit, Exited, LaunchSpec, Started, Supervisor, WorkerSpec

_E = TypeVar("_E")


class Group:
    """One group under its own `Supervisor`; closed at the end of the ``with`` block."""

    def __init__(
        self,
        workers: Sequence[WorkerSpec | Sequence[str]],
        *,
        env: dict[str, str] | None = None,
        on_failure: Literal["stop", "report"] = "stop",
        grace_s: float = 5.0,
        binding: Literal["required", "cpus_required", "wanted"] = "required",
        servers: Sequence[Sequence[str]] = (),
        slow_s: float = 30.0,
        lingers: bool = False,
    ) -> None:
        """`servers`: commands of fork servers, which workers name by their places."""
        self.events: list[Event] = []
        specs = [one if isinstance(one, WorkerSpec) else WorkerSpec(one) for one in workers]
        self._size = len(specs)
        self.supervisor = Supervisor()
        try:
            for words in servers:
                self.supervisor.start_fork_server(words, slow_s=slow_s)
            spec = LaunchSpec(
                specs,
                env=env,
                on_failure=on_failure,
                grace_s=grace_s,
                binding=binding,
                lingers=lingers,
            )
            self.supervisor.start(spec)
        except Exception:
            self.supervisor.close()
            raise

    def again(self, workers: Sequence[WorkerSpec], grace_s: float = 5.0) -> None:
        """Start another group under the same supervisor, and forget the events of the one that has ended."""
        self.events = []
        self._size = len(workers)
        self.supervisor.start(LaunchSpec(workers, grace_s=grace_s))

    def __enter__(self) -> Group:  # noqa: PYI034  typing.Self needs 3.11
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.supervisor.close()

    def until(self, condition: Callable[[Group], bool], timeout_s: float = 15.0) -> None:
        """Take events until `condition` holds, for a bounded time."""
        deadline = time.monotonic() + timeout_s
        while not condition(self):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                msg = f"not so after {timeout_s} s; events: {self.events}"
                raise AssertionError(msg)
            self.events += self.supervisor.wait(min(left_s, 0.05))

    def finish(self, timeout_s: float = 15.0) -> Ended:
        """Take events until the last one; return that."""
        self.until(lambda group: bool(group.events) and isinstance(group.events[-1], Ended), timeout_s)
        last = self.events[-1]
        assert isinstance(last, Ended)
        return last

    def all_started(self, timeout_s: float = 15.0) -> dict[int, int]:
        """Take events until every worker has started; {worker: pid}."""
        self.until(lambda group: len(group.of(Started)) == self._size, timeout_s)
        return {event.worker: event.pid for event in self.of(Started)}

    def of(self, kind: type[_E]) -> list[_E]:
        """Events of one kind so far."""
        return [event for event in self.events if isinstance(event, kind)]

    def exits(self) -> dict[int, Exit]:
        return {event.exit.worker: event.exit for event in self.of(Exited)}
