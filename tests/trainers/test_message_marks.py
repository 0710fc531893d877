"""supervised_part: any chat template learns parts of messages, and is otherwise the template that it was."""

import functools

import pytest
from datasets import Dataset
from foreign_masks import HEADER, MESSAGES, PAIRS, mask_tokenizer
from foreign_masks import marked as shown
from quick_cases import slow_but
from tiny import tiny_model
from trainings import sft
from trl import SFTConfig, chat_template_utils

from liger_trainer import LigerConfig
from liger_trainer.errors import ConfigError, DataError
from liger_trainer.trainers.chat_template import marked_template

TEMPLATES = {
    name.removesuffix("_chat_template"): template
    for name, template in vars(chat_template_utils).items()
    if name.endswith("_chat_template") and isinstance(template, str)
}
CHAT = [{"role": "user", "content": "Red?"}, {"role": "assistant", "content": "A colour."}]
LONGER = [*CHAT, {"role": "user", "content": "Blue?"}, {"role": "assistant", "content": "Another."}]
# Of some, TRL marks another beginning of an answer: its header, a line break in it, or thoughts that the prompt begins.
OTHER_MARKS = {
    "deepseek_r1_distill", "deepseekv3", "muse_glimmer", "nemotron_3_5_lightning", "nemotron_3_nano",
    "nemotron_3_super", "nemotron_3_ultra", "qwen2_5", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6", "qwen3_8",
}  # fmt: skip
NOT_ALIKE = {"gptoss", "gptoss_training", "qwen3", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6"}
OF_PARTS = {"llava_next", "llava_next_training"}  # messages of text and images


one_tokenizer = functools.cache(mask_tokenizer)


def rendered(template, chat, **options):
    return one_tokenizer().apply_chat_template(chat, chat_template=template, tokenize=False, **options)


def masks(template, chat):
    row = one_tokenizer().apply_chat_template(
        chat, chat_template=template, return_dict=True, return_assistant_tokens_mask=True
    )
    return row["input_ids"], row["assistant_masks"]


def learned(trainer):
    tokenizer = one_tokenizer()
    return [
        shown((tokenizer.decode([i]), label != -100) for i, label in zip(row["input_ids"], row["labels"], strict=True))
        for row in trainer.train_dataset
    ]


def make(rows, template=None, config: type[SFTConfig] = LigerConfig, **options):
    tokenizer = mask_tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    options = {"config": config, "max_length": None, **options}
    return sft(tiny_model(vocab_size=300), Dataset.from_list(rows), processing_class=tokenizer, **options)


NAMES = sorted(TEMPLATES.keys() - OF_PARTS - NOT_ALIKE)


@pytest.mark.parametrize("name", slow_but(NAMES, *NAMES[::4]))
def test_text_is_that_of_the_template_and_marks_are_trls(name):
    template = TEMPLATES[name]
    marked = marked_template(template, "content", answers_only=True)
    for chat in (CHAT, LONGER):
        assert rendered(marked, chat) == rendered(template, chat)
    asked = {"add_generation_prompt": True}
    assert rendered(marked, LONGER[:3], **asked) == rendered(template, LONGER[:3], **asked)
    assert 1 in masks(marked, LONGER)[1]
    if name.endswith("_training") and name.removesuffix("_training") not in OTHER_MARKS:
        assert masks(marked, LONGER) == masks(template, LONGER)


def test_a_mark_that_keeps_white_space_is_replaced_too():
    text = "{% for m in messages %}\n  {%+ generation +%}\n{{ m.content }}{%- endgeneration -%} {% endfor %}"
    assert rendered(marked_template(text, "message", answers_only=True), CHAT) == rendered(text, CHAT)


PARTS = {
    ("message", True): "<|begin_of_text|>{user}Red?<|eot_id|>⟦{assistant}A colour.<|eot_id|>⟧",
    ("content", True): "<|begin_of_text|>{user}Red?<|eot_id|>{assistant}⟦A colour.<|eot_id|>⟧",
    ("content", False): "<|begin_of_text|>{user}⟦Red?<|eot_id|>⟧{assistant}⟦A colour.<|eot_id|>⟧",
}


@pytest.mark.parametrize(("part", "answers_only"), PARTS)
def test_the_trainer_learns_the_part_with_a_template_that_trl_has_no_marks_for(part, answers_only):
    template = chat_template_utils.llama3_chat_template.replace("| trim", "|trim ")
    with pytest.raises(ConfigError, match="Set supervised_part to content too"):
        make([{"messages": CHAT}], template, assistant_only_loss=True)
    options = {"supervised_part": part, "assistant_only_loss": answers_only}
    trainer = make([{"messages": CHAT}], template, **options)
    want = PARTS[part, answers_only].format(user=HEADER.format("user"), assistant=HEADER.format("assistant"))
    assert learned(trainer) == [want]
    assert trainer.processing_class.chat_template == template and trainer.chat_template is None
    assert trainer.args.assistant_only_loss is answers_only
    trainer.evaluate(Dataset.from_list([{"messages": CHAT}]))
    assert trainer.row_facts["eval"].supervised_tokens == trainer.row_facts["train"].supervised_tokens


def test_completions_with_their_headers():
    rows, options = PAIRS[:1], {"supervised_part": "message", "assistant_only_loss": True}
    with pytest.raises(ConfigError, match="supervised_part: message: the header .* completion_only_loss to false"):
        make(rows, **options)
    assert learned(make(rows, **options, completion_only_loss=False)) == learned(make(MESSAGES[:1], **options))


REFUSED = {
    "it renders answers otherwise where others follow": (
        TEMPLATES["qwen3"].replace("{%- for", "{%-  for"),  # which TRL does not know
        [CHAT[0], {**CHAT[1], "content": "<think>\nHm\n</think>\n\nA"}],
        r"row 0 of the train dataset: .* renders message 2 \(assistant\) otherwise where other messages follow",
    ),
    "it writes the system prompt with the next message": (
        TEMPLATES["gemma3"], [{"role": "system", "content": "Be brief."}],
        r"row 0 .* does not write the content of message 1 \(system\) where the message stands",
    ),
}  # fmt: skip


@pytest.mark.parametrize("why", REFUSED)
def test_a_row_whose_parts_cannot_be_told_apart(why):
    template, start, message = REFUSED[why]
    with pytest.raises(DataError, match=message):
        make([{"messages": [*start, *LONGER]}], template, supervised_part="content")


def test_trls_training_template_renders_the_rows_where_it_has_one():
    """The template itself would be refused, as above."""
    thoughts = {"role": "assistant", "content": "<think>\nHm\n</think>\n\nA"}
    trainer = make([{"messages": [CHAT[0], thoughts, *LONGER]}], TEMPLATES["qwen3"], supervised_part="content")
    assert learned(trainer)[0].count("⟦") == 6


def test_a_later_row_that_cannot_be_marked_is_refused_in_words_too():
    template = "{% for m in messages %}{{ m.role + m.content }}{{ '!' if loop.last and 'A' in m.content }}{% endfor %}"
    rows = [{"messages": [{**message, "content": text} for message in LONGER]} for text in ("B", "A")]
    with pytest.raises(DataError, match="refuses a row of the train dataset: it renders message 1"):
        make(rows, template, supervised_part="content")


@pytest.mark.parametrize("rows", [{"text": "Red."}, {"prompt": "Red?", "completion": "Yes."}, {"input_ids": [1, 2]}])
def test_rows_that_are_no_chats(rows):
    with pytest.raises(ConfigError, match="supervised_part: needs rows of chat messages; the rows have"):
        make([rows], supervised_part="content")


def test_trls_own_configuration_is_taken_as_before():
    stock = make([{"messages": CHAT}], config=SFTConfig, assistant_only_loss=True)
    assert learned(stock) == learned(make([{"messages": CHAT}], supervised_part="content", assistant_only_loss=True))
