"""What other tools supervise: configurations of theirs, three rows each, and rows as text with marked tokens.

`foreign_configs/masks.json` was recorded from the tools on these cases, by a script that the repository has up to
commit 2bd752dc; `test_masks.py` compares it with what a converted configuration supervises here. Every character is a
token, or part of a special token, so the marks say for each token whether the loss is on it. The chat template is Llama
3's.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import chat_template_utils

GOLDEN = Path(__file__).parents[1] / "extras" / "foreign_configs" / "masks.json"
HEADER = "<|start_header_id|>{}<|end_header_id|>\n\n"
SPECIAL = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
NAMES = {"system": "system", "user": "human", "assistant": "gpt"}

CHATS = [
    [("user", "What is 2 + 2?"), ("assistant", "4")],
    [("system", "Be brief."), ("user", "Hello"), ("assistant", "Hi"), ("user", "Who?"), ("assistant", "A model.")],
    [("user", "Red?"), ("assistant", "A colour."), ("user", "Blue?"), ("assistant", "Another.")],
]
MESSAGES = [{"messages": [{"role": role, "content": said} for role, said in chat]} for chat in CHATS]
SHAREGPT = [{"conversations": [{"from": NAMES[role], "value": said} for role, said in chat]} for chat in CHATS]
ALPACA = [
    {"instruction": "Add.", "input": "2 and 2", "output": "4"},
    {"instruction": "Say hello.", "input": "", "output": "Hello."},
    {"instruction": "Name a colour.", "input": "", "output": "Red"},
]
TEXT = [{"text": said} for said in ("Two and two are four.", "Hello.", "Red is a colour.")]
PAIRS = [
    {"prompt": [{"role": role, "content": said} for role, said in chat[:-1]],
     "completion": [{"role": role, "content": said} for role, said in chat[-1:]]}
    for chat in CHATS
]  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A configuration of a tool about three rows.

    Attributes:
        config: its YAML, as far as it is about the rows, whose file is called ROWS.
        rows: in that file.
        about: the entry of LLaMA-Factory's dataset_info.json.
    """

    config: str
    rows: list[dict]
    about: dict | None = None


def _torchtune(dataset: str) -> str:
    return (
        "checkpointer: {checkpoint_dir: model}\ntokenizer: {max_seq_len: null}\n"
        f"dataset: {{source: json, data_files: ROWS, _component_: torchtune.datasets.{dataset}}}\n"
    )


def _axolotl(dataset: str, more: str = "") -> str:
    return f"base_model: model\ndatasets:\n  - {{path: ROWS, {dataset}}}\n{more}"


def _distillkit() -> str:
    return "model: model\nteacher: {kind: hf, path: model}\ndataset: {train_dataset: {disk_path: ROWS}}\n"


def _llamafactory(more: str = "") -> str:
    return f"model_name_or_path: model\nfinetuning_type: full\ntemplate: llama3\ndataset: rows\ndataset_dir: .\n{more}"


_OPENAI = {
    "formatting": "sharegpt",
    "columns": {"messages": "messages"},
    "tags": {
        "role_tag": "role",
        "content_tag": "content",
        "user_tag": "user",
        "assistant_tag": "assistant",
        "system_tag": "system",
    },
}
_SHAREGPT = {"formatting": "sharegpt"}
_FROM_VALUE = "field_messages: conversations, message_property_mappings: {role: from, content: value}"

CASES: dict[str, dict[str, Case]] = {
    "torchtune": {
        "sharegpt": Case(
            _torchtune("chat_dataset, conversation_column: conversations, conversation_style: sharegpt"),
            SHAREGPT),
        "messages": Case(
            _torchtune("chat_dataset, conversation_column: messages, conversation_style: openai"), MESSAGES),
        "train_on_input": Case(
            _torchtune("chat_dataset, conversation_column: messages, conversation_style: openai, train_on_input: true"),
            MESSAGES),
        "alpaca": Case(_torchtune("alpaca_dataset"), ALPACA),
        "alpaca, answers alone": Case(_torchtune("alpaca_dataset, train_on_input: false"), ALPACA),
    },
    "axolotl": {
        "messages": Case(_axolotl("type: chat_template"), MESSAGES),
        "sharegpt": Case(_axolotl(f"type: chat_template, {_FROM_VALUE}"), SHAREGPT),
        "train_on_inputs": Case(_axolotl("type: chat_template", "train_on_inputs: true\n"), MESSAGES),
        "alpaca": Case(_axolotl("type: alpaca"), ALPACA),
        "alpaca, train_on_inputs": Case(_axolotl("type: alpaca", "train_on_inputs: true\n"), ALPACA),
        "text": Case(_axolotl("type: completion"), TEXT),
    },
    "llamafactory": {
        "sharegpt": Case(_llamafactory(), SHAREGPT, about=_SHAREGPT),
        "messages": Case(_llamafactory(), MESSAGES, about=_OPENAI),
        "mask_history": Case(_llamafactory("mask_history: true\n"), SHAREGPT, about=_SHAREGPT),
        "train_on_prompt": Case(_llamafactory("train_on_prompt: true\n"), SHAREGPT, about=_SHAREGPT),
        "alpaca": Case(_llamafactory(), ALPACA, about={}),
        "alpaca, train_on_prompt": Case(_llamafactory("train_on_prompt: true\n"), ALPACA, about={}),
    },
    "distillkit": {
        "messages": Case(_distillkit(), MESSAGES),
        "sharegpt": Case(_distillkit(), SHAREGPT),
        "text": Case(_distillkit(), TEXT),
    },
}  # fmt: skip


def mask_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and Llama 3's special tokens and chat template."""
    vocabulary = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    by_bytes = Tokenizer(models.BPE(vocabulary, []))
    by_bytes.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    by_bytes.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=by_bytes, bos_token=SPECIAL[0], eos_token=SPECIAL[-1], pad_token="<|pad|>",
        additional_special_tokens=list(SPECIAL[1:-1]),
    )  # fmt: skip
    tokenizer.chat_template = chat_template_utils.llama3_chat_template
    return tokenizer


def marked(tokens: Iterable[tuple[str, bool]]) -> str:
    """A row as text with its supervised tokens in ⟦⟧. The first token is never predicted, so it is none."""
    first, *others = tokens
    runs = groupby([(first[0], False), *others], key=lambda token: token[1])
    texts = [("".join(text for text, _ in run), supervised) for supervised, run in runs]
    return "".join(f"⟦{text}⟧" if supervised else text for text, supervised in texts)
