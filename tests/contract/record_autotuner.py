"""Record what DeepSpeed's autotuner (0.19.8) runs on made-up machines into ``golden/autotuner.json``.

Not part of a test run. From the root of the repository, with a Python that has deepspeed 0.19.8, tabulate, torch and this
package::

    python -m tests.contract.record_autotuner
    python -m tests.contract.record_autotuner --compare 300

The second line asks DeepSpeed and this package about as many more, and ends with 1 if they differ for
no listed reason.

Everything is DeepSpeed's own code but the run of an experiment, which answers from `autotuner_inputs`. Each machine is asked
twice: as it is, and with one defect mended that hides its decisions. After the look below the largest micro batch DeepSpeed
reads the metric file of an older experiment; mended, it reads that of the one it has just run. The configs of a full space are
tried in their listed order: DeepSpeed puts them into a set, which has none. Nothing in the golden is written
by hand.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.contract.autotuner_inputs import (
    ask_ours,
    is_equal,
    landscape,
    landscapes,
    measure,
    profile,
    reason,
)

GOLDEN = Path(__file__).parent / "golden" / "autotuner.json"
VERSION = "0.19.8"


def ask_theirs(case: dict[str, Any], *, mended: bool) -> dict[str, Any]:
    """What DeepSpeed runs, in order, and what it finds."""
    from deepspeed.autotuning import autotuner, scheduler, utils
    from deepspeed.utils import logger

    logger.setLevel(logging.CRITICAL)
    ran: list[str] = []
    batches: dict[str, int] = {}
    latest = {"path": "", "is_single": False}

    def run_experiment(exp: dict[str, Any], _reservations: Any, _script: str, _args: list[str]) -> None:
        ran.append(exp["name"])
        folder = Path(exp["result_dir"])
        folder.mkdir(parents=True, exist_ok=True)
        config = exp["ds_config"]
        words = ""
        if "model_info_path" in config["autotuning"]:
            Path(config["autotuning"]["model_info_path"]).write_text(json.dumps(profile(case)))
        else:
            batches[exp["name"]] = config["train_batch_size"]
            metrics = measure(case, config)
            if metrics is None:
                words = "RuntimeError: out of memory\n"
            else:
                (folder / "metrics.json").write_text(json.dumps(metrics))
        (folder / "stderr.log").write_text(words)

    class Tuner(autotuner.Autotuner):  # type: ignore[misc]
        def run_ds_config(self, ds_config: Any, exp_name: str) -> Any:
            found = super().run_ds_config(ds_config, exp_name)
            latest.update(path=os.path.join(self.results_dir, exp_name, "metrics.json"), is_single=True)
            return found

        def run_tuning_micro_batch_sizes(self, *args: Any) -> Any:
            latest["is_single"] = False
            return super().run_tuning_micro_batch_sizes(*args)

    class Hjson:
        @staticmethod
        def load(file: Any) -> Any:
            if mended and latest["is_single"] and file.name.endswith("metrics.json"):
                return json.loads(Path(str(latest["path"])).read_text())
            return json.load(file)

    def in_order(configs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return list({json.dumps(one, sort_keys=True): one for one in configs}.values())

    utils.remove_dupe_dicts = in_order
    spaces = [f"DEFAULT_TUNING_SPACE_ZERO_{stage}" for stage in range(4)]
    # A tuner writes into them.
    defaults = {name: copy.deepcopy(getattr(autotuner, name)) for name in spaces}
    kept = (
        scheduler.run_experiment,
        scheduler.TIMEOUT,
        autotuner.hjson,
        autotuner.get_accelerator,
        autotuner.logger,
    )
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        scheduler.run_experiment, scheduler.TIMEOUT, autotuner.hjson = run_experiment, 0.001, Hjson
        scheduler.tqdm = lambda **_options: SimpleNamespace(update=lambda _n: None)
        autotuner.get_accelerator = lambda: SimpleNamespace(total_memory=lambda: case["memory"])
        try:
            Path("c.json").write_text(json.dumps(case["config"]))
            args = SimpleNamespace(
                user_args=["--deepspeed_config", "c.json"], user_script="t.py", num_nodes=-1, num_gpus=-1,
                hostfile="h", master_port=1,
            )  # fmt: skip
            tuner = Tuner(args, {"localhost": list(range(case["workers"]))})
            tuner.tune()
            records = tuner.get_best_space_records()
        finally:
            for name, space in defaults.items():
                setattr(autotuner, name, space)
            os.chdir(here)
            scheduler.run_experiment, scheduler.TIMEOUT, autotuner.hjson, autotuner.get_accelerator, _ = kept
    best = {name: [one[0]["name"], one[1]] for name, one in records.items() if name != "global"}
    return {"ran": ran, "best": best, "batches": batches}


def names_of_full_spaces() -> list[dict[str, Any]]:
    """What DeepSpeed calls spaces and experiments beyond the micro batch, of configs without a ZeRO section."""
    from deepspeed.autotuning import autotuner, utils

    found = []
    half = {"enabled": True, "loss_scale_window": [500, 20000]}
    own = {"gradient_clipping": [0.5, 1.0], "fp16": half}
    for stage, user, sizes in ((1, {}, [4, 8]), (2, {}, [8]), (3, {}, [8]), (1, own, [8])):
        space = copy.deepcopy(getattr(autotuner, f"DEFAULT_TUNING_SPACE_ZERO_{stage}"))
        space["train_micro_batch_size_per_gpu"] = sizes
        name = utils.canonical_name(
            space, tuning_keys=utils.get_tuning_keys(space), prefix=f"z{stage}_", omit_val=True
        )
        tuner = SimpleNamespace(
            user_config=user, model_info={}, exp_num_gpus=2, exp_num_nodes=1, mp_size=lambda: 1
        )
        exps = autotuner.Autotuner._generate_experiments(tuner, space, 8)
        names = sorted(one["name"] for one in exps)
        found.append({"stage": stage, "config": user, "sizes": sizes, "space": name, "names": names})
    return found


def compare(count: int) -> int:
    """Ask both about machines that the golden has not; how many answers differ."""
    different = 0
    for seed in range(1000, 1000 + count):
        case = landscape(seed)
        ours, theirs = ask_ours(case), ask_theirs(case, mended=True)
        if not is_equal(ours, theirs) and not reason(case, ours, theirs):
            different += 1
            print(json.dumps({"case": case, "ours": ours, "theirs": theirs}))
    print(count - different, "equal,", different, "different")
    return different


def main() -> None:
    import deepspeed

    assert deepspeed.__version__.startswith(VERSION), deepspeed.__version__
    parser = argparse.ArgumentParser()
    parser.add_argument("--compare", type=int, default=0, metavar="N", help="ask both about N more machines")
    if count := parser.parse_args().compare:
        sys.exit(compare(count) > 0)
    cases = []
    for case in landscapes():
        answers = {"raw": ask_theirs(case, mended=False), "mended": ask_theirs(case, mended=True)}
        cases.append({"case": case, **answers})
    about = f"DeepSpeed {VERSION} by record_autotuner.py"
    golden = {"about": about, "cases": cases, "spaces": names_of_full_spaces()}
    GOLDEN.write_text(json.dumps(golden, indent=1) + "\n", encoding="utf-8")
    print(len(cases), "cases")


if __name__ == "__main__":
    main()
