"""What a process of `benchmarks.trainer_step` and `benchmarks.curves` needs, but nothing of ours: a fork server imports
it once for all of them."""

import datasets
import peft
import trl.trainer.sft_trainer

__all__ = ["datasets", "peft", "trl"]
