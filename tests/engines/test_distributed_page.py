"""The table of docs/distributed.md: each "yes" is a case that a test runs, and each refusal is one.

Run as a script, it writes the table.
"""

import re
from pathlib import Path

import pytest
import test_non_finite
import test_other_counts
import test_trained_steps
import test_zero
from splits import SPLITS

from liger_trainer.config.run_config import load_run_config
from liger_trainer.errors import ConfigError

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "distributed.md"
BEGIN, END = "<!-- matrix: tests/engines/test_distributed_page.py writes it -->\n", "<!-- end of the matrix -->"
CASES = {
    *(("ddp", *split) for split in SPLITS),
    *test_trained_steps.STEPS,
    *(("zero", *step) for step in (*test_zero.STEPS, *test_zero.NON_FINITE, test_zero.RESUMED)),
    *(("resumed", engine) for engine in test_other_counts.ENGINES),
    *(("NaN", engine, policy) for engine, policy, _ in test_non_finite.CASES),
}


def refused(*settings):
    """What an engine refuses before it is launched."""
    return ("refused", *settings)


def refused_by(file, words):
    """What a test sees refused."""
    return ("refused by", file, words)


def zero(objective, variant=""):
    return "zero", 3, objective, variant


OFFLOADED = refused("teacher_model_name_or_path=x", "recipe=distill", "teacher_offload=true")
WHOLE = refused("teacher_model_name_or_path=x", "recipe=distill", "teacher_device=cpu")
CAPTURED = refused_by("tests/trainers/test_capture.py", "test_deepspeed_is_left_out_of_a_capture")
MATRIX = {  # what: by DDP, by FSDP2, by ZeRO-3
    "fine-tuning": (("ddp", "ce", 2), ("fsdp2", "tied ce", ""), zero("tied ce", "named")),
    "... with LoRA, on our ops": (("ddp", "lora", 2), ("fsdp2", "lora", ""), zero("lora")),
    "... and gradient checkpointing": (
        ("ddp", "lora", "recomputed"), ("fsdp2", "lora", "recomputed"), zero("lora", "recomputed"),
    ),
    "a stock trainer with `use_liger_kernel`": (
        ("ddp", "stock flag", 2), ("fsdp2", "stock flag", ""), zero("stock flag"),
    ),
    "distillation from a model": (("ddp", "kd", 2), ("fsdp2", "tied kd", ""), zero("tied kd", "named")),
    "... mixed with the labels": (("ddp", "mix", 2), ("fsdp2", "mix", ""), zero("cached")),
    "... of adapters, on the head too": (("ddp", "lora kd", 2), ("fsdp2", "lora kd", ""), zero("lora kd")),
    "... whole in each process (`teacher_device`)": (
        ("ddp", "tied kd", "whole teacher"), ("fsdp2", "tied kd", "whole teacher"), WHOLE,
    ),
    "`teacher_offload`": (None, OFFLOADED, OFFLOADED),
    "`teacher: self`": (("ddp", "self", 2), ("fsdp2", "tied self", ""), zero("tied self")),
    "... with gradient checkpointing": (None, ("fsdp2", "tied self", "recomputed"), zero("tied self", "recomputed")),
    "a teacher cache, read by two": (("ddp", "cached", 2), ("fsdp2", "cached", ""), zero("cached")),
    "... and captured by two": (("ddp", "cached", 2), ("fsdp2", "cached", ""), CAPTURED),
    "`DistillationCallback`": (("ddp", "callback", 2), ("fsdp2", "callback", ""), zero("callback")),
    "losses between hidden states": (
        ("ddp", "hidden, one width", 2), ("fsdp2", "hidden, one width", ""), zero("hidden, one width"),
    ),
    "... with projectors": (("ddp", "hidden", 2), ("fsdp2", "hidden", ""), zero("hidden")),
    "weights and optimizer offloaded to the CPU": (None, None, zero("lora kd", "offloaded")),
    "rows weighted by a column": (("ddp", "weighted", 2), ("fsdp2", "weighted", ""), zero("weighted")),
    "completions sampled in training": (("ddp", "on_policy", 2), ("fsdp2", "on_policy", ""), zero("on_policy")),
    "... by adapters": (None, ("fsdp2", "tied lora on_policy", ""), zero("lora on_policy")),
    "... by the teacher (`seq_kd`)": (("ddp", "seq_kd", 2), ("fsdp2", "seq_kd", ""), zero("seq_kd")),
    "resuming on as many": (("resumed", "ddp"), ("resumed", "fsdp2"), zero("tied ce", "resumed")),
    "resuming on one and on four": (("resumed", "ddp"), ("resumed", "fsdp2"), None),
    "... from sharded checkpoints": (None, ("resumed", "fsdp2, sharded checkpoints"), None),
    "NaN on one process stops all": (("NaN", "ddp", "stop"), ("NaN", "fsdp2", "stop"), zero("stop", "loss")),
    "... or is left out by all": (
        ("NaN", "ddp", "skip_step"), ("NaN", "fsdp2", "skip_step"), zero("skip_step", "loss"),
    ),
}  # fmt: skip
CELLS = [cell for row in MATRIX.values() for cell in row if cell is not None]


def table():
    rows = ["| | DDP | FSDP2 | ZeRO-3 |", "|---|---|---|---|"]
    rows += [f"| {what} | {' | '.join(map(word, row))} |" for what, row in MATRIX.items()]
    return "\n".join(rows) + "\n"


def word(cell):
    return "" if cell is None else "refused" if cell[0].startswith("refused") else "yes"


def test_the_page_has_the_table():
    assert re.search(f"{BEGIN}(.*){END}", PAGE.read_text(), re.DOTALL)[1] == table(), "write it: see above"


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_each_cell_is_a_case_of_a_test(cell, tmp_path):
    if cell[0] == "refused":
        (tmp_path / "my.yaml").write_text("model_name_or_path: x\ndataset_name: y\noutput_dir: z\n")
        config, others = str(tmp_path / "my.yaml"), list(cell[1:])
        by, match = ("fsdp2", "FSDP") if cell == OFFLOADED else ("zero3", "DeepSpeed")
        with pytest.raises(ConfigError, match=match):
            load_run_config(config, [f"accelerate_config={by}", *others])
        load_run_config(config, ["accelerate_config=ddp", *others])
    elif cell[0] == "refused by":
        assert cell[2] in (ROOT / cell[1]).read_text()
    else:
        assert cell in CASES


if __name__ == "__main__":
    page = PAGE.read_text()
    begin, end = page.index(BEGIN) + len(BEGIN), page.index(END)
    PAGE.write_text(page[:begin] + table() + page[end:])
