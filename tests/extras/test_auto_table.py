"""The table of docs/distributed.md with the engine that `auto` takes for each built-in configuration.

One row is computed again by default, all with `-m slow`. Run as a script, it writes the rows that are named, or all.
"""

import pytest
from page_table import PageTable
from real_shapes import save_shapes

from liger_trainer.config.run_config import load_run_config
from liger_trainer.config.schema import built_in_configs
from liger_trainer.extras.estimate.engine import choices
from liger_trainer.extras.estimate.estimator import gpu_named

COUNTS, SIZES = (1, 2, 4, 8), ("24GB", "48GB", "80GB")
# the demo's data would be written, and smollm2's fit everywhere
NAMES = [name for name in built_in_configs() if not name.startswith("smollm2/")]
SAMPLE = {"llama3/sft_full_1b"}
HEAD = "| configuration | " + " | ".join(f"{size[:2]} GB" for size in SIZES) + " |\n|---|" + "---|" * len(SIZES) + "\n"
BEGIN, END = "<!-- engines: tests/extras/test_auto_table.py writes it -->", "<!-- end of the engines -->"
TABLE = PageTable("distributed.md", BEGIN, END, HEAD, NAMES)


def row(name: str, folders: dict[str, str]) -> str:
    """The cells of a configuration: an engine, or what happens, by number of cards."""
    named = load_run_config(name, exact=True)
    keys = ("model_name_or_path", "teacher_model_name_or_path")
    shapes = [f"{key}={folders[named[key]]}" for key in keys if named.values.get(key) in folders]
    config = load_run_config(name, [*shapes, "accelerate_config=auto"], exact=True)
    by_size = choices(config, COUNTS, [gpu_named(size) for size in SIZES])
    cells = (", ".join(f"{count}: {what}" for count, what in cell.items()) for cell in by_size)
    return f"| `{name}` | {' | '.join(cells)} |"


def test_each_built_in_configuration_has_a_row():
    assert list(TABLE.rows()) == NAMES


@pytest.mark.parametrize("name", [n if n in SAMPLE else pytest.param(n, marks=pytest.mark.slow) for n in NAMES])
def test_a_row_is_what_auto_chooses(name, tmp_path):
    assert TABLE.rows()[name] == row(name, save_shapes(tmp_path)), "write it: see above"


if __name__ == "__main__":
    TABLE.write(row)
