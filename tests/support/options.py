"""A row for each option of the two commands: a value that fits, and what it asks for."""

from __future__ import annotations

from typing import Any

from dsl.cli import deepspeed, options_deepspeed, options_torch, torchrun
from dsl.model.options import CommandLine, Option

FRONT_ENDS: dict[str, Any] = {"dsl": deepspeed, "dslrun": torchrun}
LINES: dict[str, CommandLine] = {
    "dsl": options_deepspeed.COMMAND_LINE,
    "dslrun": options_torch.COMMAND_LINE,
}
OPTIONS = [(command, option) for command, line in LINES.items() for option in line.options]

# The word after the option ("": it is a flag), the field of the `Request` that changes ("": none, or several), its value.
BOTH: dict[str, tuple[str, str, Any]] = {
    "grace": ("7", "signals.grace_s", 7.0),
    "preempt_grace": ("9", "signals.preempt_grace_s", 9.0),
    "restart_on": ("1,130-131,SIGKILL", "policy.restart_on", (1, 130, 131, 137)),
    "give_up_on": ("3", "policy.give_up_on", (3,)),
    "signal_scope": ("group", "signals.scope", "group"),
    "log_dir": ("d", "output.log_dir", "d"),
    "redirects": ("0:1", "output.redirects", "0:1"),
    "tee": ("0:2", "output.tee", "0:2"),
    "local_ranks_filter": ("0", "output.local_ranks", "0"),
    "ranks_filter": ("0,8-15", "output.global_ranks", "0,8-15"),
    "duplicate_stdout_filters": ("a", "output.stdout_words", "a"),
    "duplicate_stderr_filters": ("b", "output.stderr_words", "b"),
    "log_line_prefix_template": ("${rank}:", "output.template", "${rank}:"),
    "tag_output": ("always", "output.tag", "always"),
    "collapse": ("", "output.collapse", True),
    "partial_after": ("never", "output.partial_after_s", None),
    "stdin": ("none", "output.stdin", "none"),
    "log_max_size": ("64K", "output.max_bytes", 1 << 16),
    "bind": ("auto", "placement.bind", "auto"),
    "bind_strict": ("", "placement.strict", True),
    "mem_policy": ("local", "placement.memory", "local"),
    "start_method": ("forkserver", "start.method", "forkserver"),
    "preload": ("torch,a.b", "start.preload", ("torch", "a.b")),
    "warm_for": ("60", "start.warm_for_s", 60.0),
    "warm_memory": ("2G", "start.warm_memory", 2 << 30),
    "wrap": ("0:nsys profile", "start.wraps", ("0:nsys profile",)),
    "debug": ("all", "debug.ranks", "all"),
    "debug_port": ("7000", "debug.port", 7000),
    "debug_address": ("0.0.0.0", "debug.address", "0.0.0.0"),
    "debug_wait": ("", "debug.waits", True),
    "report_bindings": ("", "show.bindings", True),
    "dry_run": ("", "show.dry_run", True),
    "dry_run_json": ("", "show.dry_run_json", True),
    "doctor": ("", "show.doctor", True),
    "doctor_first": ("", "show.doctor_first", True),
    "ring": ("", "show.ring", True),
    "log_level": ("debug", "log_level", "debug"),
    "strict": ("", "is_strict", True),
    "events": ("e", "events", "e"),
    "metrics": ("9100", "metrics", "9100"),
    "detach": ("", "detaches", True),
    "stacks_on_failure": ("", "stacks_on_failure", True),
    "hang_timeout": ("600", "hang_timeout_s", 600.0),
    "hang_action": ("stop", "hang_action", "stop"),
    "env": ("NAME=1", "variables", ("NAME=1",)),
    "preempt_signal": ("USR1", "", None),
    "fork_server_per": ("node", "", None),
}
DEEPSPEED: dict[str, tuple[str, str, Any]] = {
    "hostfile": ("/hosts", "resources.hostfile", "/hosts"),
    "include": ("localhost:1,3", "resources.include", "localhost:1,3"),
    "exclude": ("localhost:0", "resources.exclude", "localhost:0"),
    "num_nodes": ("1", "resources.min_nodes", 1),
    "num_gpus": ("3", "resources.num_gpus", 3),
    "master_port": ("29501", "meeting.master_port", 29501),
    "master_addr": ("10.0.0.2", "meeting.master_addr", "10.0.0.2"),
    "min_elastic_nodes": ("2", "elastic.min_nodes", 2),
    "max_elastic_nodes": ("2", "elastic.max_nodes", 2),
    "elastic_training": ("", "elastic.training", True),
    "elastic_wait": ("7", "elastic.wait_s", 7.0),
    "discover": ("cat hosts", "elastic.discover", "cat hosts"),
    "max_restarts": ("3", "max_restarts", 3),
    "autotuning": ("run", "elastic.autotuning", "run"),
    "no_ssh": ("", "remote.no_ssh", True),
    "node_rank": ("1", "meeting.node_rank", 1),
    "no_ssh_check": ("", "remote.no_ssh_check", True),
    "force_multi": ("", "remote.force_multi", True),
    "launcher": ("slurm", "remote.launcher", "slurm"),
    "launcher_args": ("x y", "remote.launcher_args", "x y"),
    "ssh_port": ("6", "remote.ssh_port", 6),
    "venv_script": ("v", "remote.venv_script", "v"),
    "one_agent_per_node": ("", "remote.per_node", True),
    "heartbeat": ("3", "remote.heartbeat_s", 3.0),
    "ssh_program": ("x y", "remote.ssh_program", "x y"),
    "wait_hosts": ("3", "remote.wait_hosts_s", 3.0),
    "module": ("", "program.kind", "module"),
    "no_python": ("", "program.kind", "program"),
    "no_local_rank": ("", "program.local_rank_option", ""),
    "bind_cores_to_rank": ("", "placement.bind_cores_to_rank", True),
    "bind_core_list": ("0-3", "placement.core_list", "0-3"),
    "enable_each_rank_log": ("logs", "output.each_rank_log", "logs"),
    "save_pid": ("", "save_pid", True),
    "quiet": ("", "log_level", "error"),
}
TORCH: dict[str, tuple[str, str, Any]] = {
    "nproc_per_node": ("2", "resources.nproc_per_node", "2"),
    "spares": ("1", "resources.spares", 1),
    "node_rank": ("1", "meeting.node_rank", 1),
    "role": ("r", "role", "r"),
    "max_restarts": ("3", "max_restarts", 3),
    "master_addr": ("10.0.0.2", "meeting.master_addr", "10.0.0.2"),
    "master_port": ("29501", "meeting.master_port", 29501),
    "local_addr": ("10.0.0.1", "meeting.local_addr", "10.0.0.1"),
    "standalone": ("", "meeting.standalone", True),
    "rdzv_backend": ("c10d", "meeting.backend", "c10d"),
    "rdzv_endpoint": ("10.0.0.1:29501", "meeting.endpoint", "10.0.0.1:29501"),
    "rdzv_id": ("mine", "meeting.run_id", "mine"),
    "rdzv_conf": ("a=1", "meeting.settings", "a=1"),
    "module": ("", "program.kind", "module"),
    "no_python": ("", "program.kind", "program"),
    "virtual_local_rank": ("", "placement.virtual_local_rank", True),
    "numa_binding": ("node", "placement.numa_binding", "node"),
    "logs_specs": ("mine", "output.logs_specs", "mine"),
    "local_rank_arg": ("dash", "program.local_rank_option", "--local-rank"),
    "signals_to_handle": ("TERM", "signals.stop", (15,)),
    "forward_signals": ("USR1", "signals.forward", (10,)),
    "nnodes": ("2", "", None),
    "run_path": ("", "", None),
    "use_env": ("", "", None),
    "monitor_interval": ("5", "", None),
    "exit_barrier_timeout": ("600", "", None),
    "print_completion": ("zsh", "", None),
    "event_log_handler": ("mine", "", None),
}
ROWS = {"dsl": {**BOTH, **DEEPSPEED}, "dslrun": {**BOTH, **TORCH}}

NEEDS = {
    "preempt_grace": "--preempt-signal USR1",
    "log_max_size": "--log-dir d",
    **dict.fromkeys(("restart_on", "give_up_on"), "--max-restarts 3"),
    **dict.fromkeys(("bind_strict", "mem_policy"), "--bind auto"),
    **dict.fromkeys(("debug_port", "debug_address", "debug_wait"), "--debug"),
    "preload": "--start-method forkserver",
    **dict.fromkeys(("warm_for", "warm_memory"), "--start-method warm"),
    "hang_action": "--hang-timeout 600",
}
"""What else has to be said so that an option of both commands has an effect."""


def said(option: Option, value: str, name: str = "") -> list[str]:
    """The words of a command line that give an option this value, under one of its names."""
    assert option.is_flag == (not value)
    name = name or next(name for name in option.names if name[:2] == "--")
    return [f"{name}={value}"] if option.bare else [name, value] if value else [name]
