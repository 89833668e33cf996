"""What the options that both commands have ask for."""

from __future__ import annotations

from dsl.model.request import OutputRequest, PlacementRequest, ShowRequest

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import Any

    from dsl.cli.reader import Options


def output_request(options: Options | argparse.Namespace, **own: Any) -> OutputRequest:
    """What is asked about output; ``own``: fields that only one of the commands has, or sees differently."""
    fields: dict[str, Any] = {
        "log_dir": options.log_dir or None,
        "redirects": options.redirects,
        "tee": options.tee,
        "local_ranks": options.local_ranks_filter,
        "stdout_words": options.duplicate_stdout_filters,
        "stderr_words": options.duplicate_stderr_filters,
        "tag": options.tag_output,
        "collapse": options.collapse,
        "stdin": options.stdin,
        "max_bytes": options.log_max_size,
    }
    return OutputRequest(**{**fields, **own})


def placement_request(options: Options | argparse.Namespace, **own: Any) -> PlacementRequest:
    """What is asked about devices, cores and memory; ``own``: fields that only one of the commands has."""
    return PlacementRequest(
        bind=options.bind,
        memory=options.mem_policy,
        strict=options.bind_strict,
        names_devices=options.report_bindings or options.dry_run or options.dry_run_json,
        **own,
    )


def show_request(options: Options | argparse.Namespace) -> ShowRequest:
    """What of the plan is to be shown."""
    return ShowRequest(options.report_bindings, options.dry_run, options.dry_run_json)
