# /// script
# requires-python = ">=3.11"
# dependencies = ["liger-trainer"]
# ///
"""Run a configuration where uv finds a machine for it: dependencies are in the comment above.

    uv run docs/jobs/run.py smollm2/distill_pruned max_steps=20
    hf jobs uv run --flavor a100-large --secrets HF_TOKEN docs/jobs/run.py qwen3/distill_full_0.6b \
        output_dir=/tmp/student push_to_hub=true hub_model_id=you/student

A job's disk goes with it: `push_to_hub` keeps the student, its card and its report.
"""

import sys

from liger_trainer.cli import main

if __name__ == "__main__":
    main(["run", *sys.argv[1:]])
