"""Rows as a trainer prepares them, without a model to train: for captures, previews, other tokenizers."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM
from trl.trainer.sft_trainer import SFTTrainer

from .chat_rows import datasets_in_messages
from .distill_config import LigerDistillConfig
from .sft_trainer import LigerTrainer, check_names
from .token_ids import LargestIds


@dataclass(frozen=True)
class PreparedRows:
    """Datasets as the trainer prepares them, and the tokenizer as it leaves it."""

    datasets: dict[str, Dataset]
    tokenizer: Any
    largest_ids: dict[str, LargestIds]


class Preparation(LigerTrainer):
    """The trainer's preparation of rows, around a model of no weight worth mentioning: rows depend on none."""

    def __init__(self, args: LigerDistillConfig, **kwargs: Any):
        self.row_facts, self.largest_ids = {}, {}
        sizes = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads"
        vocabulary = max(kwargs["processing_class"].get_vocab().values()) + 1
        special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
        stand_in = LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, **dict.fromkeys(sizes.split(), 1), **special))
        SFTTrainer.__init__(self, stand_in, args, **{**kwargs, **datasets_in_messages(kwargs, args)})


def prepare_rows(
    args: LigerDistillConfig, tokenizer: Any, train: Dataset, test: Dataset | dict[str, Dataset] | None = None
) -> PreparedRows:
    """What `LigerDistillTrainer` would make of these rows: template, masks, truncation, packing."""
    check_names(test)
    args = copy.copy(args)
    args.output_dir = args.teacher_cache_dir  # the trainer makes the directory
    args.model_init_kwargs, args.gradient_checkpointing, args.push_to_hub = None, False, False
    trainer: Any = Preparation(args, train_dataset=train, eval_dataset=test, processing_class=tokenizer)
    prepared = trainer.eval_dataset
    tests = {} if prepared is None else prepared if isinstance(prepared, dict) else {"eval": prepared}
    return PreparedRows({"train": trainer.train_dataset, **tests}, trainer.processing_class, trainer.largest_ids)


def rows_for_reading(
    args: LigerDistillConfig, dataset: Dataset, tokenizer: Any, formatting_func: Callable | None
) -> Dataset:
    """The rows of a dataset as a model of another tokenizer than the student is to read them, whole, in order."""
    args = copy.copy(args)
    args.packing, args.model_init_kwargs, args.push_to_hub, args.gradient_checkpointing = False, None, False, False
    args.chat_template_path = args.eos_token = args.pad_token = None  # the student's
    args.shuffle_dataset, args.max_length = False, None
    trainer: Any = Preparation(
        args, train_dataset=dataset, processing_class=copy.deepcopy(tokenizer), formatting_func=formatting_func
    )
    return trainer.train_dataset
