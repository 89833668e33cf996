"""Chooses the variables of the launching command that go to the workers on other hosts.

The rules are DeepSpeed's: variables with certain prefixes, including those of the accelerator, and PYTHONPATH
with the working directory in front. Values stay unchanged.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

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
