"""How few functions lie between a model's forward and its row kernel, as `python -m benchmarks.trace_loss` prints."""

import pytest

from benchmarks.trace_loss import traced


@pytest.fixture(scope="module")
def chains():
    return traced()


@pytest.mark.parametrize("name, loss", [("fine-tuning", "cross_entropy.py"), ("distillation", "dense.py")])
def test_from_the_forward_to_the_op_there_are_five_functions_in_three_files(chains, name, loss):
    ours = [step for step in chains[name] if step.file.startswith("liger_trainer/")]
    assert len(ours) == 5
    files = {"losses/fused_forward.py", "common/replacements.py", f"losses/{loss}"}
    assert {step.file for step in ours} == {f"liger_trainer/{file}" for file in files}


@pytest.mark.parametrize("name", ["fine-tuning", "distillation"])
def test_from_the_forward_to_the_row_kernel_there_are_ten_functions_in_six_files(chains, name):
    assert len(chains[name]) == 10
    assert len({step.file for step in chains[name]}) == 6
