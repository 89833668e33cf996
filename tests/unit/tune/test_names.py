"""Names of experiments are names of folders."""

from __future__ import annotations

import pytest

from dsl.tune.spaces import as_folder, dotted_name, full_name


def test_names_are_deepspeeds() -> None:
    config = {
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "reduce_bucket_size": 500_000_000,
            "offload_optimizer": {"device": "cpu", "pin_memory": False},
            "offload_param": None,
        },
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
    }
    assert (
        full_name(config, ["overlap_comm", "reduce_bucket_size"], "z3_")
        == "z3_ocT_rbs5.0e+08_oo_dcpu_pmF_op_None_tmbspg4_gas2"
    )


def test_names_of_a_space_of_the_users_own_show_the_last_part_of_each_key() -> None:
    assert dotted_name({"batch": 8, "optim.lr": 0.1}) == "batch=8_lr=0.1"


@pytest.mark.parametrize(
    "text, name",
    [("a/../b c", "a-..-b-c"), ("..", "exp"), ("", "exp"), ("é\n", "--"), ("x" * 300, "x" * 180)],
)
def test_no_value_leads_out_of_the_folder_of_results(text: str, name: str) -> None:
    assert as_folder(text) == name
