"""A tiny Qwen3, its teacher and 64 rows on disk, for the commands of other tools: `python tiny_files.py FOLDER`."""

import json
import random
import sys
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def chatml_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of bytes with Qwen's special tokens and a ChatML template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    bpe.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>", additional_special_tokens=SPECIAL[1:]
    )
    tokenizer.chat_template = CHATML
    return tokenizer


def qwen3(tokenizer: PreTrainedTokenizerFast, layers: int, seed: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=512, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def write(folder: str | Path) -> Path:
    """Write `student` and `teacher` into the folder, and the same rows as `chats.jsonl` and as `alpaca.json`."""
    folder, tokenizer, rng = Path(folder), chatml_tokenizer(), random.Random(0)
    for name, layers, seed in (("student", 1, 0), ("teacher", 2, 1)):
        qwen3(tokenizer, layers, seed).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    sums = [(rng.randint(0, 99), rng.randint(0, 99)) for _ in range(64)]
    rows = [{"instruction": f"What is {a} and {b}?", "output": f"It is {a + b}."} for a, b in sums]
    (folder / "alpaca.json").write_text(json.dumps(rows))
    names = {"instruction": "user", "output": "assistant"}
    chats = [[{"role": names[key], "content": text} for key, text in row.items()] for row in rows]
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return folder


if __name__ == "__main__":
    print(write(*sys.argv[1:]))
