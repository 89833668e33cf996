"""Every error that `dsl` reports to its user, with the exit code of the command.

The command ends with 2 for a `UsageError` and with 1 for other errors, unless the class has another
``exit_code``.

Where DeepSpeed or torch raises a builtin exception for the same mistake, our error is a subclass of it, so
that their users' except clauses keep working. The text of an error is one line: what is wrong, where, and how
to fix it.
"""

from __future__ import annotations


class DslError(Exception):
    """Base of every error meant for the user."""

    exit_code = 1


class PidFileError(DslError):
    """The file of ``--save_pid`` exists already or cannot be written."""


class OutputError(DslError):
    """What the user has asked for cannot be written to stdout."""


class ReaderGoneError(OutputError):
    """Nobody reads stdout any more, as after ``| head``: the command ends as if by SIGPIPE, silently."""

    exit_code = 128 + 13


class TimelineError(DslError):
    """The timeline of a record cannot be drawn or written."""


class JobFolderError(DslError):
    """The folder of jobs in the background cannot be made or read, or is not for this user alone."""


class ControlError(DslError):
    """The head and an agent of a job cannot reach each other, or one of the two has ended."""


class RefusedLinkError(ControlError):
    """The head of a job refuses this node, and has said why: for example, their keys do not fit."""

    exit_code = 2


class RendezvousError(DslError):
    """The nodes of a job do not meet, or lose the store through which they met."""


class HangError(DslError):
    """The job hung, and was ended for that: its ``hang_action`` is ``stop``."""

    exit_code = 124


class ProgramError(DslError):
    """The program of ``--no_python`` cannot be executed."""

    exit_code = 126


class ProgramNotFoundError(ProgramError, FileNotFoundError):
    """The program of ``--no_python`` or ``--wrap`` does not exist, or is not on ``PATH``."""

    exit_code = 127


class ProgramNotExecutableError(ProgramError, PermissionError):
    """The program of ``--no_python`` or ``--wrap`` exists but may not be executed."""


class UsageError(DslError):
    """The command line, a file it names or the environment asks for something that cannot be done."""

    exit_code = 2


class OptionError(UsageError, ValueError):
    """An option has a bad value, or options exclude or need one another."""


class EventsFileError(UsageError):
    """The file of ``--events`` cannot be written, or belongs to another user."""


class MetricsError(UsageError):
    """``--metrics`` is no address and no file that can be written, or its port is not free."""


class NumNodesError(UsageError, RuntimeError, ValueError):
    """``--num_nodes`` is neither a count nor the MIN:MAX of an elastic job."""


class HostfileError(UsageError, ValueError):
    """The hostfile cannot be read, or a line of it is malformed."""


class OutOfReachError(PermissionError):
    """A file may exist or not: this user may not enter its directory. Callers say so in their own words."""


class EnvFileError(UsageError, ValueError):
    """A file of variables for all hosts cannot be read, or a line of it is malformed."""


class FilterError(UsageError, ValueError):
    """A filter is malformed, names an unknown host or slot, or leaves nothing to start."""


class AcceleratorError(UsageError, ValueError):
    """``DS_ACCELERATOR`` or ``LOCAL_SIZE`` has an invalid value."""


class NoDevicesError(UsageError, RuntimeError):
    """The chosen accelerator has no device on this machine."""


class PlacementError(UsageError, ValueError):
    """A core list is malformed, or cores cannot be given to every worker."""


class PortError(UsageError):
    """The master port cannot be used."""


class ScriptError(UsageError):
    """The Python script or module does not exist, cannot be read, or is not Python."""


class ScriptSyntaxError(ScriptError):
    """The script is not correct Python. The exit code is the one that Python itself would end with."""

    exit_code = 1


class LogDirError(UsageError, ValueError, OSError):
    """A directory for logs is a file, or cannot be made or written."""


class LogDirIsFileError(LogDirError, NotADirectoryError):
    """A directory for logs is a file, or lies below one."""


class LauncherError(UsageError, NotImplementedError):
    """The launcher is unknown, is not installed, or cannot do what the user asked for."""


class HostNameError(UsageError, ValueError):
    """A host has a name that its launcher takes for something else, such as an option."""


class JobFormatError(UsageError, ValueError):
    """The bytes that describe a job are damaged, or another version of dsl has written them."""


class ElasticityError(UsageError):
    """The ``elasticity`` section of a config does not fit what the user asked for."""


class ElasticityConfigError(ElasticityError, ValueError, NotImplementedError):
    """The ``elasticity`` section is missing, disabled or malformed, or no batch size satisfies it."""


class ElasticityIncompatibleWorldSize(ElasticityError):  # noqa: N818  DeepSpeed's name
    """A world size that the ``elasticity`` section rules out."""


class AutotuningError(UsageError, ValueError):
    """The config of ``--autotuning``, or its ``autotuning`` section, is missing or malformed."""


class UnsupportedError(UsageError):
    """The request is understood, but this version does not support it."""
