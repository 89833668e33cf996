"""The variables that go to the workers on other hosts: some of the launching command's, and those of files.

The rules are DeepSpeed's: variables with certain prefixes, including those of the accelerator, and PYTHONPATH
with the working directory in front. Values stay unchanged. A file (``.deepspeed_env``) has ``NAME=VALUE`` on
each line: in DeepSpeed's grammar, the value is the text after the first ``=``, without blanks at its ends. We
also allow blank lines, lines that start with ``#``, ``export`` before the name, and quotation marks around
the whole value. Text in single quotes stays as it is; elsewhere ``$NAME`` and ``${NAME}`` stand for the
variable's value on each host, and in double quotes a backslash escapes ``$``, ``"`` and itself.
"""

from __future__ import annotations

from dsl.errors import EnvFileError, OutOfReachError
from dsl.model.job import Notice
from dsl.words import quote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

PREFIXES = ("MLFLOW", "PYTHON", "MV2", "UCX")
"""Variables whose names start with one of these go to every host."""

NEBULA = (
    *("DLTS_JOB_ID", "DLTS_NUM_WORKER", "NEBULA_PERSISTENT_STORAGE_PATH", "NEBULA_PERSISTENT_TIME_INTERVAL"),
    *("AML_RUN_ID", "AZUREML_RUN_TOKEN", "AZUREML_WORKSPACE_SCOPE", "AZUREML_EXPERIMENT_SCOPE"),
    *("AZUREML_RUN_HISTORY_SERVICE_ENDPOINT", "AZUREML_RUN_ID", "NEBULA_MEMORY_BUFFER_SIZE"),
    *("AZUREML_PARAMETER_ITPJOB_NAME", "FC_TASKROLE_NAME", "FC_TASK_INDEX", "MASTER_HOST", "LOCAL_HOST"),
    *("AZUREML_BLOB_ACCOUNT_NAME", "AZUREML_BLOB_ACCOUNT_KEY"),
)
"""More such prefixes, from DeepSpeed up to 0.19.7."""

EXCLUSIONS = {"AISC_JOB_NAME": ("NCCL_IB_HCA", "UCX_NET_DEVICES")}
"""If the variable on the left is set, those on the right differ from host to host, and are not sent."""

GENERAL = ("LD_LIBRARY", "PATH")
"""Prefixes of general variables, which some accelerators list although they do not belong to any."""

DEFAULT_NAME = ".deepspeed_env"
"""Name of the file in the home directory and the working directory."""

MARK = "\0"
"""Stands before and after the name of a variable in a value that has to be filled in on each host."""

NAME_VARIABLE = "DS_ENV_FILE"
"""Variable with another name of the file. An absolute path means that one file."""


def choose_exports(environ: Mapping[str, str], cwd: str, prefixes: Iterable[str]) -> dict[str, str]:
    """Return the variables that go to every host.

    ``cwd``: the directory in which the workers run. ``prefixes``: those of the accelerator.
    """
    old = environ.get("PYTHONPATH")
    beginnings = (*PREFIXES, *NEBULA, *prefixes)
    excluded = {name for variable, names in EXCLUSIONS.items() if variable in environ for name in names}
    found = {
        name: value for name, value in environ.items() if name.startswith(beginnings) and name not in excluded
    }
    found["PYTHONPATH"] = f"{cwd}:{old}" if old else cwd
    return found


def named_variables(
    words: Iterable[str], environ: Mapping[str, str], notices: list[Notice]
) -> dict[str, str]:
    """The variables that the user names with ``-x``; a later word wins.

    ``notices`` gets a warning for each word that names none.
    """
    from fnmatch import fnmatchcase

    found: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        named = {name: value} if equals else {one: environ[one] for one in environ if fnmatchcase(one, name)}
        if not named:
            text = f"-x {quote(word)} names no variable of this command: set it, or write NAME=VALUE"
            notices.append(Notice("warning", text))
        found.update(named)
    return found


def fill_in(pairs: Iterable[tuple[str, str]], environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a host, overlaid with a job's variables, whose references are filled in."""
    env = dict(environ)
    for name, value in pairs:
        if MARK in value:
            parts = value.split(MARK)
            parts[1::2] = [env.get(variable, "") for variable in parts[1::2]]
            value = "".join(parts)  # noqa: PLW2901  the value of this host
        env[name] = value
    return env


def env_file_paths(name: str, home: str, cwd: str) -> tuple[str, ...]:
    """The paths where dsl looks for files of this name. A later file overrides an earlier one."""
    if name.startswith("/"):
        return (name,)
    return tuple(dict.fromkeys([f"{folder.rstrip('/')}/{name}" for folder in (home, cwd) if folder]))


def read_env_files(
    paths: tuple[str, ...], read_text: Callable[[str], str | None]
) -> dict[str, list[tuple[str, str]]]:
    """Read the files that exist: path -> names and values, with `MARK` around what each host fills in.

    Raises:
        EnvFileError: a file cannot be read, or a line is malformed.
    """
    known: dict[str, str] = {}
    found = {}
    for path in paths:
        try:
            text = read_text(path)
        except OutOfReachError:
            continue  # nobody has named it: it may be the home of another user
        except OSError as error:
            raise EnvFileError(f"{path} cannot be read: {(error.strerror or '').lower()}") from None
        if text is not None:
            found[path] = [*parse_env_file(text, path, known)]
    return found


def parse_env_file(text: str, path: str, known: dict[str, str]) -> Iterator[tuple[str, str]]:
    """The names and values of a file. Each pair is also added to ``known``.

    ``known``: what earlier lines have set; other variables are filled in on the host. ``path``: name of the
    file in errors.

    Raises:
        EnvFileError: a malformed line.
    """
    for number, raw in enumerate(text.split("\n"), start=1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        name, equals, value = line.partition("=")
        words = name.split()
        if words[:1] == ["export"] and (len(words) > 1 or not equals):
            del words[0]
        where = f"{path} line {number}"
        if not equals or len(words) != 1:
            raise EnvFileError(
                f"{where}: {line.partition('=')[0][:40]!r} is no NAME=VALUE, correct or remove it"
            )
        value = value.strip()
        if "\0" in line:
            raise EnvFileError(f"{where}: the value of {words[0]} holds a NUL byte, which no variable can")
        known[words[0]] = _read_value(value, known, where, words[0])
        yield words[0], known[words[0]]


def _read_value(value: str, known: Mapping[str, str], where: str, name: str) -> str:
    mark = value[:1] if value[:1] in ("'", '"') else ""
    parts = []
    place = len(mark)
    while place < len(value) and (not mark or value[place] != mark):
        letter = value[place]
        place += 1
        if mark == '"' and letter == "\\" and value[place : place + 1] in ("\\", '"', "$"):
            letter = value[place]
            place += 1
        elif mark != "'" and letter == "$":
            reference = _reference(value, place)
            if reference is not None:
                variable, place = reference
                letter = known.get(variable, f"{MARK}{variable}{MARK}")
            elif value[place : place + 1] == "$":  # a shell would write its pid for $$
                letter, place = "$$", place + 1
        parts.append(letter)
    rest = value[place + 1 :].strip()
    if mark and place >= len(value):
        raise EnvFileError(f"{where}: the value of {name} has no closing {mark}")
    if rest and not rest.startswith("#"):
        raise EnvFileError(f"{where}: the value of {name} goes on behind its closing {mark}, quote all of it")
    return "".join(parts)


def _reference(text: str, place: int) -> tuple[str, int] | None:
    """The variable after the ``$`` before ``place``, and the index where it ends; None if there is none."""
    braced = text[place : place + 1] == "{"
    end = start = place + braced
    while end < len(text) and text[end].isascii() and (text[end].isalnum() or text[end] == "_"):
        end += 1
    if end == start or text[start].isdigit() or (braced and text[end : end + 1] != "}"):
        return None
    return text[start:end], end + braced
