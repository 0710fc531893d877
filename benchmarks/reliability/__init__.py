"""Harms that are done to runs, and how each of these runs ends: with which exit code and sentence, and what it leaves.

    python -m benchmarks.reliability                        # every part, as in docs/results/reliability.md
    python -m benchmarks.reliability kill --moments 6       # one part, few moments
    python -m benchmarks.reliability kill --kinds sft       # one kind of run

All runs are forked from one process that has imported everything, so that each takes a second or two on one core. Full
disks and signals to launchers, whose ends are not random, are in tests/run.
"""

import os
import sys
from pathlib import Path

# Hugging Face's libraries read these when they are imported; a process that has seen a GPU cannot fork.
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1")
os.environ.update(CUDA_VISIBLE_DEVICES="", TRL_EXPERIMENTAL_SILENCE="1")
sys.path.insert(0, str(Path(__file__).parents[2] / "tests/support"))  # the tests' models and rows
