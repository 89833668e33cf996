"""Counts of the kill matrix: per case how often it ran, what survived, who was harmed."""

from __future__ import annotations

from typing import NamedTuple


class Run(NamedTuple):
    survivors: int
    harmed: int
    wrong_code: bool
    seconds: float
    """From the signal until the command had ended and nothing of the job was left."""


class Tally:
    """All runs so far, by case and number of workers."""

    def __init__(self) -> None:
        self._runs: dict[tuple[str, int], list[Run]] = {}

    def __bool__(self) -> bool:
        return bool(self._runs)

    def add(self, case: str, workers: int, run: Run) -> None:
        self._runs.setdefault((case, workers), []).append(run)

    def rows(self) -> list[dict[str, str | int | float]]:
        """One row a case and size, in a fixed order."""
        rows: list[dict[str, str | int | float]] = []
        for (case, workers), runs in sorted(self._runs.items()):
            seconds = sorted(run.seconds for run in runs)
            rows.append(
                {
                    "case": case,
                    "workers": workers,
                    "runs": len(runs),
                    "survivors": sum(run.survivors for run in runs),
                    "bystanders_harmed": sum(run.harmed for run in runs),
                    "wrong_codes": sum(run.wrong_code for run in runs),
                    "median_s": round(seconds[len(seconds) // 2], 3),
                    "max_s": round(seconds[-1], 3),
                }
            )
        return rows

    def lines(self) -> list[str]:
        """The rows as text, with the sum."""
        rows = self.rows()
        texts = [
            f"{row['case']:26} n={row['workers']:<4} runs {row['runs']:>3}  survivors {row['survivors']}  "
            f"harmed {row['bystanders_harmed']}  wrong codes {row['wrong_codes']}  "
            f"median {row['median_s']:.2f} s  max {row['max_s']:.2f} s"
            for row in rows
        ]
        keys = ("runs", "survivors", "bystanders_harmed", "wrong_codes")
        runs, survivors, harmed, wrong = (sum(int(row[key]) for row in rows) for key in keys)
        cases = len({row["case"] for row in rows})
        texts.append(
            f"{cases} cases, {runs} runs: {survivors} survivors, {harmed} bystanders harmed, {wrong} wrong codes"
        )
        return texts
