"""The table of docs/recipes.md with the longest row that fits on a card.

In each phase of a step every further token takes as much memory as the one before, so two lengths tell all others. One
cell of the table is computed again by default, all with `-m slow`. Run as a script, it writes the rows named, or all.
"""

import pytest
from page_table import PageTable
from real_shapes import save_shapes

from liger_trainer.config.run_config import load_run_config
from liger_trainer.extras.estimate.estimator import LIBRARIES, MIB, Estimate, estimate, gpu_named

CARDS = [gpu_named(name) for name in ("RTX 4090", "L40S", "H100")]
LENGTHS = 8192, 16384
ONE_CARD = ("accelerate_config=null", "num_processes=1", "dtype=bfloat16")
METHODS = {
    "Llama-3.1-8B, LoRA": ("llama3/sft_lora_8b",),
    "Qwen3-8B, LoRA": ("qwen3/sft_lora_8b",),
    "Llama-3.1-8B, QLoRA": ("llama3/sft_qlora_8b",),
    "Qwen3-8B, QLoRA": ("qwen3/sft_qlora_8b",),
    "Llama-3.1-8B, all weights": ("llama3/sft_full_8b_8gpu", *ONE_CARD),
    "Qwen3-8B, all weights": ("qwen3/sft_full_8b_8gpu", *ONE_CARD),
}
MEMORY = {
    "memory: fast": ("gradient_checkpointing=false",),
    "memory: lean": ("gradient_checkpointing=false", "memory=lean"),
    "gradient_checkpointing": ("gradient_checkpointing=true",),
}
SAMPLE = "Llama-3.1-8B, LoRA", "memory: lean"
CELLS = [(method, memory) for method in METHODS for memory in MEMORY]
BEGIN, END = "<!-- longest rows: tests/extras/test_longest_row.py writes it -->", "<!-- end of the longest rows -->"
HEAD = f"| | {' | '.join(card.name for card in CARDS)} |\n|---|{'---|' * len(CARDS)}\n"
TABLE = PageTable("recipes.md", BEGIN, END, HEAD, list(METHODS))


def step(method: str, memory: str, length: int, folders: dict[str, str]) -> Estimate:
    """What `estimate` says of a step on one row of as many tokens."""
    config, *settings = METHODS[method]
    model = load_run_config(config, exact=True)["model_name_or_path"]
    rows = ("per_device_train_batch_size=1", "gradient_accumulation_steps=1", f"max_length={length}")
    given = [f"model_name_or_path={folders[model]}", *settings, *MEMORY[memory], *rows]
    return estimate(load_run_config(config, given, exact=True), None)


def longest(method: str, memory: str, folders: dict[str, str]) -> list[int]:
    """The tokens that fit on each card; 0 where not even weights and optimizer do."""
    short, long = (step(method, memory, length, folders).peaks_mib for length in LENGTHS)
    found = []
    for card in CARDS:
        room = card.usable_mib - LIBRARIES[1] / MIB
        tokens = float("inf")
        for phase, mib in short.items():
            a_token = (long[phase] - mib) / (LENGTHS[1] - LENGTHS[0])
            more = (room - mib) / a_token if a_token > 0 else float("inf") if mib <= room else float("-inf")
            tokens = min(tokens, LENGTHS[0] + more)
        found.append(int(max(0, tokens)))
    return found


def cells(method: str, memory: str, folders: dict[str, str]) -> list[str]:
    return [str(tokens // 1000) if tokens >= 1000 else "no" for tokens in longest(method, memory, folders)]


def row(method: str, folders: dict[str, str]) -> str:
    by_card = zip(*(cells(method, memory, folders) for memory in MEMORY), strict=True)
    return f"| {method} | {' | '.join(' / '.join(each) for each in by_card)} |"


def test_each_way_has_a_row():
    assert list(TABLE.rows()) == list(METHODS)


@pytest.mark.parametrize(
    ("method", "memory"), [cell if cell == SAMPLE else pytest.param(*cell, marks=pytest.mark.slow) for cell in CELLS]
)
def test_a_cell_is_what_estimate_says(method, memory, tmp_path):
    by_card = TABLE.rows()[method].strip("| ").split(" | ")[1:]
    written = [each.split(" / ")[list(MEMORY).index(memory)] for each in by_card]
    assert written == cells(method, memory, save_shapes(tmp_path)), "write it: see above"


@pytest.mark.slow
def test_a_length_beyond_the_two_is_what_estimate_says_of_it(tmp_path):
    folders = save_shapes(tmp_path)
    tokens = longest(*SAMPLE, folders)[-1]
    assert step(*SAMPLE, tokens, folders).peak_mib == pytest.approx(CARDS[-1].usable_mib, rel=2e-3)


if __name__ == "__main__":
    TABLE.write(row)
