"""``summary.txt``: the table of tuning spaces, as DeepSpeed's autotuner writes it.

Columns, their order, the last row and the last line are those of ``deepspeed.autotuning`` (0.19.8), which has
the table made by tabulate (its format ``pipe``). Counts are true: a config that is reused counts once.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from dsl.autotune.experiment import Summary

GLOBAL = "global"
"""Name of the last row, which has the best of all spaces."""

HEADERS = ("tuning_space", "num_experiments", "best_metric_val", "best_exp_name")
IS_NUMBER = (False, True, True, False)
LEAST_PADDING = 2
"""A column is wider than its header by at least this many characters."""


def summary_table(summary: Summary) -> str:
    """A row for each tuning space and one for all of them, without a line end behind the last.

    A space in which nothing ran has empty cells.
    """
    rows = [(one.name, str(one.trials), _number(one.value), one.best) for one in summary.spaces]
    best = "" if summary.best is None else summary.best.name
    rows.append((GLOBAL, str(sum(one.trials for one in summary.spaces)), _number(summary.value), best))
    columns = [_aligned(column, index) for index, column in enumerate(zip(*rows, strict=True))]
    lines = [_line(cells) for cells in zip(*columns, strict=True)]
    widths = [len(column[0]) for column in columns]
    marks = ["-" * (width + 1) for width in widths]
    rule = "|".join(
        [f"{mark}:" if right else f":{mark}" for mark, right in zip(marks, IS_NUMBER, strict=True)]
    )
    return "\n".join([lines[0], f"|{rule}|", *lines[1:]])


def summary_text(summary: Summary, elapsed_s: float) -> str:
    """The whole file: the table, a blank line, and how long it took and how many runs."""
    count = len(summary.runs)
    ended = f"Tuning completed in {duration(elapsed_s)}. Total number of experiments: {count}."
    return f"{summary_table(summary)}\n\n{ended}\n"


def duration(seconds: float) -> str:
    """``H:MM:SS.ffffff``."""
    whole = round(seconds * 1_000_000)
    minutes, rest = divmod(whole, 60_000_000)
    return f"{minutes // 60}:{minutes % 60:02}:{rest // 1_000_000:02}.{rest % 1_000_000:06}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


def _aligned(cells: Sequence[str], index: int) -> list[str]:
    """The header and the cells of a column, all of one width; numbers have their points below one another."""
    texts = [cell.replace("|", "\\|") for cell in cells]
    if IS_NUMBER[index]:
        behind = [_behind_point(text) for text in texts]
        texts = [
            text + " " * (max(behind) - places) if text else ""
            for text, places in zip(texts, behind, strict=True)
        ]
    width = max(len(HEADERS[index]) + LEAST_PADDING, *map(len, texts))
    shown = [HEADERS[index], *texts]
    return [text.rjust(width) if IS_NUMBER[index] else text.ljust(width) for text in shown]


def _behind_point(text: str) -> int:
    """Characters behind the point, or else behind the letter of an exponent; -1: there is neither."""
    place = text.rfind(".") if "." in text else text.rfind("e")
    return -1 if place < 0 else len(text) - place - 1


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
