"""The Python face of ``dslrun`` as a user's own typed program uses it. Never run: `mypy` checks it."""

from __future__ import annotations

from typing import Any

import dsl.launch
import dsl.run
from dsl.errors import DslError
from dsl.functions.launcher import (
    ChildFailedError,
    EntrypointError,
    LaunchConfig,
    ProcessFailure,
    ResultError,
    SignalException,
    elastic_launch,
    launch,
)


def train(rate: float) -> float:
    return rate


def config() -> LaunchConfig:
    return LaunchConfig(
        min_nodes=2,
        max_nodes=2,
        nproc_per_node=4,
        rdzv_backend="static",
        rdzv_endpoint="10.0.0.1:29500",
        rdzv_configs={"rank": 1},
        redirects={0: 1},
        tee="3",
        local_ranks_filter=[0],
        grace_s=2.5,
        env={"A": "b"},
    )


def run() -> dict[int, Any]:
    try:
        return elastic_launch(config(), train)(0.1)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        shown: ProcessFailure = error.failures[rank]
        base: DslError = error
        print(base, shown.exitcode, failure.signal_name(), failure.error_file_data, error.exit_code)
    except (EntrypointError, ResultError) as error:
        print(error.exit_code)
    except SignalException as error:
        print(error.sigval.name)
    return elastic_launch(LaunchConfig(1, 1, 2), "echo")("${local_rank}", 3)


def simple() -> list[Any]:
    return [*launch(train, 0.1, nproc_per_node=2, max_restarts=1), *launch("true", grace_s=1.0)]


def command_line() -> int:
    """The functions of torch.distributed.run by their names."""
    args, rest = dsl.run.get_args_parser().parse_known_args(["--nproc-per-node", "2", "train.py"])
    dsl.run.run(args)
    dsl.run.run(dsl.run.parse_args(None))
    dsl.run.main(rest)
    dsl.launch.main()
    timeout_s: int | None = config().shutdown_timeout
    return timeout_s or 0


def logs() -> None:
    try:
        simple()
    except OSError as error:
        print(error)
