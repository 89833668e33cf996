"""``dsl-elastic``: prints the batch and world sizes of a config's elasticity section, like ``ds_elastic``."""

from __future__ import annotations

import argparse

from dsl.cli.tool import Tool, ToolParser
from dsl.elasticity import ALGORITHM, compute_elastic_config
from dsl.elasticity.solver import ELASTICITY
from dsl.errors import ElasticityConfigError, OptionError
from dsl.facts import this_machine
from dsl.model.options import integer
from dsl.report.speak import show_text
from dsl.words import quote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

FRAME = "-" * 42


def _elastic(options: argparse.Namespace) -> int:
    if options.config is None:
        raise OptionError("no config was given: dsl-elastic -c CONFIG [-w N]")
    config = read_config(options.config, this_machine().files.read_text)
    show_text("\n".join(elastic_lines(config, options.world_size)))
    return 0


def read_config(path: str, read_text: Callable[[str], str | None]) -> Mapping[str, Any]:
    """The config from a JSON file.

    Raises:
        ElasticityConfigError: the file cannot be read, or has no JSON object.
    """
    from json import JSONDecodeError, loads

    where = f"config {quote(path)}"
    try:
        text = read_text(path)
    except OSError as error:
        raise ElasticityConfigError(f"{where} cannot be read: {(error.strerror or '').lower()}") from None
    if text is None:
        raise ElasticityConfigError(f"{where} does not exist, or is no regular file")
    try:
        config = loads(text)
    except JSONDecodeError as error:
        reason = error.msg[:1].lower() + error.msg[1:]
        raise ElasticityConfigError(f"{where} is no JSON: line {error.lineno}: {reason}") from None
    except (ValueError, RecursionError):
        raise ElasticityConfigError(f"{where} is no JSON that can be read") from None
    if not isinstance(config, dict):
        raise ElasticityConfigError(f"{where} is no JSON object")
    return config


def elastic_lines(config: Mapping[str, Any], world_size: int) -> list[str]:
    """The output of ``ds_elastic`` (0.19.7); 0 or less means no world size.

    Raises:
        ElasticityError: there is no solution.
    """
    from json import dumps

    size = max(world_size, 0)
    answer = compute_elastic_config(config, ALGORITHM, size)
    lines = [FRAME, "Elasticity config:", FRAME, dumps(config[ELASTICITY], indent=4, sort_keys=True)]
    title = f"Calculated results for world size {size}:" if size else "Calculated results:"
    lines += [FRAME, title, FRAME]
    lines += [f"final_batch_size .... {answer[0]}", f"valid_gpus .......... {answer[1]}"]
    return [*lines, f"micro_batch_size .... {answer[2]}"] if size else lines


def _add(parser: ToolParser) -> None:
    add = parser.add_argument
    add("-c", "--config", metavar="CONFIG", help="DeepSpeed config, a file of JSON")
    add(
        *("-w", "--world-size"),
        metavar="N",
        type=integer,
        default=0,
        help="number of data-parallel workers: check it, and tell the micro batch of each",
    )


ELASTIC = Tool(
    "dsl-elastic",
    "[OPTIONS] -c CONFIG",
    "Tell which batch size the elasticity section of a DeepSpeed config stands for, and which world sizes.",
    _add,
    _elastic,
)
