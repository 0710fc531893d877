"""Byte-level tokenizers that learn their merges from other texts, and so differ."""

from tiny import tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

ENGLISH = ["the cat sat on the mat and the dog sat on the log", "she said that the thing was there then"] * 4
CODE = ["def f(x): return x + 1", "for i in range(10): print(i)", "import torch; torch.zeros(3)"] * 4


def byte_level(text: list[str], size: int = 290, special=("<|end|>",)) -> PreTrainedTokenizerFast:
    """A byte-level BPE, trained on the spot."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=size - len(special), initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(text, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=special[0], pad_token=special[0])
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    return tokenizer


def saved(path, tokenizer, **model) -> str:
    tiny_model(**{"num_hidden_layers": 1, "seed": 5, **model}).save_pretrained(path)
    if tokenizer is not None:
        tokenizer.save_pretrained(path)
    return str(path)
