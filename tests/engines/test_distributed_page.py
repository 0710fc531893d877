"""The table of docs/distributed.md: each "yes" is a case that a test runs, and each refusal is one.

Run as a script, it writes the table.
"""

import re
from pathlib import Path

import pytest
from engines import non_finite_ranks, other_counts
from engines.trained_steps import STEPS
from splits import SPLITS

from liger_trainer.config.run_config import load_run_config
from liger_trainer.errors import ConfigError

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "distributed.md"
BEGIN, END = "writes it -->\n", "<!-- end of the matrix -->"
CASES = {
    **{("ddp", *split): "yes" for split in SPLITS},
    **{step: "yes" for step in STEPS},
    **{("resumed", engine): "yes" for engine in other_counts.ENGINES},
    **{("NaN", engine, policy): "yes" for engine, policy, _ in non_finite_ranks.CASES},
}


def refused(*settings):
    """What `accelerate_config: fsdp2` refuses before it is launched."""
    return ("refused", *settings)


def refused_by(file, words):
    """What a test sees refused."""
    return ("refused by", file, words)


OFFLOADED = refused("teacher_model_name_or_path=x", "recipe=distill", "teacher_offload=true")
PROJECTORS = refused_by("tests/losses/test_hidden_states.py", "learn projectors beside the student")
MATRIX = {  # what: by DDP, by FSDP2
    "fine-tuning": (("ddp", "ce", 2), ("fsdp2", "tied ce", "")),
    "... with LoRA, on our ops": (("ddp", "lora", 2), ("fsdp2", "lora", "")),
    "... and gradient checkpointing": (("ddp", "lora", "recomputed"), ("fsdp2", "lora", "recomputed")),
    "a stock trainer with `use_liger_kernel`": (("ddp", "stock flag", 2), ("fsdp2", "stock flag", "")),
    "distillation from a model": (("ddp", "kd", 2), ("fsdp2", "tied kd", "")),
    "... mixed with the labels": (("ddp", "mix", 2), ("fsdp2", "mix", "")),
    "... of adapters, on the head too": (("ddp", "lora kd", 2), ("fsdp2", "lora kd", "")),
    "... whole in each process (`teacher_device`)": (
        ("ddp", "tied kd", "whole teacher"), ("fsdp2", "tied kd", "whole teacher"),
    ),
    "`teacher_offload`": (None, OFFLOADED),
    "`teacher: self`": (("ddp", "self", 2), ("fsdp2", "tied self", "")),
    "... with gradient checkpointing": (None, ("fsdp2", "tied self", "recomputed")),
    "a teacher cache, captured and read by two": (("ddp", "cached", 2), ("fsdp2", "cached", "")),
    "`DistillationCallback`": (("ddp", "callback", 2), ("fsdp2", "callback", "")),
    "losses between hidden states": (("ddp", "hidden, one width", 2), ("fsdp2", "hidden, one width", "")),
    "... with projectors": (("ddp", "hidden", 2), PROJECTORS),
    "rows weighted by a column": (("ddp", "weighted", 2), ("fsdp2", "weighted", "")),
    "completions sampled in training": (("ddp", "on_policy", 2), ("fsdp2", "on_policy", "")),
    "... by adapters": (None, ("fsdp2", "tied lora on_policy", "")),
    "... by the teacher (`seq_kd`)": (("ddp", "seq_kd", 2), ("fsdp2", "seq_kd", "")),
    "resuming on one and on four": (("resumed", "ddp"), ("resumed", "fsdp2")),
    "... from sharded checkpoints": (None, ("resumed", "fsdp2, sharded checkpoints")),
    "NaN on one process stops all": (("NaN", "ddp", "stop"), ("NaN", "fsdp2", "stop")),
    "... or is left out by all": (("NaN", "ddp", "skip_step"), ("NaN", "fsdp2", "skip_step")),
}  # fmt: skip
CELLS = [cell for row in MATRIX.values() for cell in row if cell is not None]


def table():
    rows = ["| | DDP | FSDP2 |", "|---|---|---|"]
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
        settings = [str(tmp_path / "my.yaml"), ["accelerate_config=fsdp2", *cell[1:]]]
        with pytest.raises(ConfigError, match="FSDP"):
            load_run_config(*settings)
        settings[1][0] = "accelerate_config=ddp"
        load_run_config(*settings)
    elif cell[0] == "refused by":
        assert cell[2] in (ROOT / cell[1]).read_text()
    else:
        assert CASES[cell] == "yes"


if __name__ == "__main__":
    page = PAGE.read_text()
    begin, end = page.index(BEGIN) + len(BEGIN), page.index(END)
    PAGE.write_text(page[:begin] + table() + page[end:])
