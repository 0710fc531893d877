"""Messages as people write them: nulls, parts, marks, tool calls and fields that a template does not write."""

import json

import pytest
import trainings
from datasets import Dataset, Features, IterableDataset, Json, List, Value
from tiny import CHAT_TEMPLATE, WORDS, tiny_tokenizer

from liger_trainer import LigerConfig
from liger_trainer.errors import DataError
from liger_trainer.run.data.text_files import as_written
from liger_trainer.trainers.chat_rows import as_json, in_messages, is_plain, split_last
from liger_trainer.trainers.chat_template import check_chats, fit_arguments, fitting
from liger_trainer.trainers.given_datasets import datasets_in_messages

ASKED = {"role": "user", "content": "w1"}
MARKED = (
    "{% for m in messages %}{{ '<' + m.role + '> ' }}{% if m.role == 'assistant' %}"
    "{%- generation %}{{ m.content + ' ' }}"
    "{%- endgeneration %}{% else %}{{ m.content + ' ' }}{% endif %}{% endfor %}"
)
BARE = MARKED.replace("{%- generation %}", "").replace("{%- endgeneration %}", "")
CALLS = "{% for m in messages %}{{ m.role }}{% for c in m.tool_calls %}{{ ARGUMENTS }}{% endfor %}{% endfor %}"


def called(arguments) -> list[dict]:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    return [ASKED, {"role": "assistant", "content": "", "tool_calls": [call]}]


def answered(*answers: dict) -> list[dict]:
    return [turn for answer in answers for turn in (ASKED, {"role": "assistant", **answer})]


def with_template(template: str):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def checked(row: dict, template: str, **options) -> None:
    rows = in_messages(as_written({name: [value] for name, value in row.items()}))
    check_chats(rows, with_template(template), None, "row {}".format, **options)


VALUES = [{"city": "Rome"}, {"x": 0.3}, {"x": 1}, {"x": None, "y": [1, "a", {"z": 12345678901}]}]
MESSAGES = [called(value) for value in VALUES]


def test_json_rows_stay_as_written_through_every_step(tmp_path):
    columns = {"messages": MESSAGES, "tools": [None, [{"a": 1}], [{"b": None}], []], "odd": [1, "42", None, {"a": 2}]}

    def written(rows):
        return [json.dumps(row) for row in rows]

    rows = as_written(columns)
    expected = written(dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
    read = in_messages(rows).select_columns(list(columns))
    read.save_to_disk(str(tmp_path / "rows"))
    assert written(rows) == written(read) == written(Dataset.load_from_disk(str(tmp_path / "rows"))) == expected
    asked = split_last(rows.select_columns(["messages"]))
    streamed = in_messages(rows.to_iterable_dataset())
    assert written([*row["prompt"], *row["completion"]] for row in asked) == written(MESSAGES)
    assert written(row["messages"] for row in streamed) == written(MESSAGES)


@pytest.mark.parametrize("make", ["structs", "json", "mixed", "stream"])
def test_nulls_that_arrow_fills_in_are_left_out(make):
    chats = [{"messages": called({"a": 1})}, {"messages": called({"b": "w"})}]
    data = {
        "structs": lambda: Dataset.from_list(chats),
        "json": lambda: Dataset.from_list(chats, features=Features({"messages": List(Json())})),
        "mixed": lambda: Dataset.from_list(chats, on_mixed_types="use_json"),
        "stream": lambda: Dataset.from_list(chats).to_iterable_dataset(),
    }[make]()
    assert list(in_messages(data)) == chats


def test_plain_chats_are_left_alone_and_numbers_of_json_are_read_exactly():
    plain = Dataset.from_list([{"messages": answered({"content": "w2"})}])
    assert is_plain(plain.features) and in_messages(plain) is plain
    rows = Dataset.from_dict(
        {"messages": [[as_json(m) for m in called({"x": 0.3})]]}, Features({"messages": List(Json())})
    )
    assert in_messages(rows)[0]["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"x": 0.3}


@pytest.mark.parametrize(
    ("parts", "text"),
    [([{"type": "text", "text": "w1 "}, {"type": "text", "text": "w2"}], "w1 w2"), (["w1"], "w1"), ([], "")],
)
def test_parts_of_text_are_joined(parts, text):
    chats = [{"messages": [{"role": "user", "content": parts}, *answered({"content": "w3"})]}] * 2
    assert in_messages(as_written({"messages": [c["messages"] for c in chats]}))[1]["messages"][0]["content"] == text


def sft(**options):
    return trainings.sft(config=LigerConfig, **options)


def supervised(chats: list, template: str, **options) -> list[str]:
    tokenizer = with_template(template)
    rows = as_written({"messages": chats}) if isinstance(chats, list) else chats
    trainer = sft(data=rows, processing_class=tokenizer, **options)
    return [tokenizer.decode([i for i in row["labels"] if i != -100]) for row in trainer.train_dataset]


@pytest.mark.parametrize(
    ("mark", "template", "options", "learned"),
    [
        ({"weight": 0}, MARKED, {"assistant_only_loss": True}, "w3"),
        ({"loss": False}, BARE, {"assistant_only_loss": True, "supervised_part": "content"}, "w3"),
        ({"training": False}, BARE, {}, "<user> w1 <user> w1 <assistant> w3"),
        ({"loss_weight": 0.0}, MARKED, {"assistant_only_loss": True}, "w3"),
    ],
)
def test_a_marked_message_is_not_learned(mark, template, options, learned):
    chats = [answered({"content": "w2", **mark}, {"content": "w3", **dict.fromkeys(mark, 1)})] * 2
    assert supervised(chats, template, **options) == [learned] * 2


def test_marks_of_a_stream():
    chats = [{"messages": answered({"content": "w2", "weight": 0}, {"content": "w3"})}] * 4
    rows = IterableDataset.from_generator(lambda: iter(chats))
    assert supervised(rows, MARKED, assistant_only_loss=True, max_steps=1) == ["w3"] * 4


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"messages": called({"a": 1})}, "row 0: the chat template does not write 'tool_calls'.*allow_unwritten_fi"),
        ({"messages": answered({"content": "w2", "reasoning_content": "w3"})}, "does not write 'reasoning_content'"),
        ({"messages": answered({"content": "w2"}), "tools": [{"name": "f"}]}, "does not write 'tools'"),
    ],
)
def test_fields_that_the_template_leaves_out(row, problem):
    with pytest.raises(DataError, match=problem):
        checked(row, BARE)
    checked(row, BARE, allow_unwritten=True)
    checked(row, BARE + "{{ tools }}{% for m in messages %}{{ m.tool_calls }}{{ m.reasoning_content }}{% endfor %}")


def test_a_template_of_other_names_writes_no_content():
    row = {"messages": answered({"content": "w2"})}
    with pytest.raises(DataError, match="the chat template does not write 'content': the row would be learned without"):
        checked(row, "{% for m in messages %}<{{ m.role }}> {{ m.text }}{% endfor %}")


@pytest.mark.parametrize(
    ("writes", "text", "mapping"),
    [
        ("c.function.arguments | tojson", {"a": "é"}, {"a": "é"}),
        ("'x' + c.function.arguments", '{"a": "é"}', '{"a": "é"}'),
        ("c.function.arguments if c.function.arguments is string else c.function.arguments | tojson",
         '{"a": "é"}', {"a": "é"}),
    ],
)  # fmt: skip
def test_arguments_are_what_the_template_takes(writes, text, mapping):
    tokenizer = with_template(CALLS.replace("ARGUMENTS", writes))
    for given, expected in (('{"a": "é"}', text), ({"a": "é"}, mapping)):
        rows = fit_arguments(as_written({"messages": [called(given)]}), tokenizer, None)
        for chat in (fitting(called(given), tokenizer), rows[0]["messages"]):
            assert chat[1]["tool_calls"][0]["function"]["arguments"] == expected


def test_arguments_that_are_no_json():
    with pytest.raises(DataError, match="row 0: .*expected a mapping or JSON text, got '{a'"):
        checked({"messages": called("{a")}, CALLS.replace("ARGUMENTS", "c.function.arguments | tojson"))


@pytest.mark.parametrize("form", ["messages", "prompt"])
def test_a_column_system_is_the_first_message(form):
    row = {form: [ASKED], "system": "w9"}
    rows = in_messages(Dataset.from_list([row, {**row, "system": None}]))
    assert [[m["role"] for m in r[form]] for r in rows] == [["system", "user"], ["user"]]
    assert "system" not in rows.column_names


def test_a_formatting_func_is_read_where_rows_have_messages():
    rows = Dataset.from_list([{"messages": answered({"content": "w2"})}] * 2)
    made = sft(data=rows, formatting_func=lambda row: WORDS[7]).train_dataset
    assert {tiny_tokenizer().decode(row["input_ids"], skip_special_tokens=True) for row in made} == {WORDS[7]}
    with pytest.raises(DataError, match="formatting_func: expected the text of one row, got \\["):
        sft(data=rows, formatting_func=lambda row: [WORDS[7]])


def answer(**message):
    return lambda: as_written({"messages": [answered({"content": "w2"}), answered(message)]})


def columns(**of):
    return lambda: Dataset.from_dict(of)


PREFERRED = {"chosen and rejected.*DPOTrainer": {"chosen": "w1", "rejected": "w2"},
             "DPOTrainer": {"rejected_response": "w2"}, "column label.*KTOTrainer": {"label": False}}  # fmt: skip
REFUSED = {
    "an image": (answer(content=[{"type": "image"}]), "row 1.*'messages': expected content as text .* a part 'image'"),
    "thoughts": (answer(content=[{"type": "thinking", "thinking": "w"}]), "row 1.*got a part 'thinking'"),
    "half a mark": (answer(content="w2", weight=0.5), "row 1.*'weight'.*expected 0 or 1.*weight_column.*got 0.5"),
    "another mark": (answer(content="w2", train="no"), "row 1.*'train'.*got 'no'"),
    **{
        f"{message} of {[*row]}": (lambda row=row, more=more: Dataset.from_list([{**row, **more}]), message)
        for message, more in PREFERRED.items()
        for row in ({"messages": answered({"content": "w2"})}, {"prompt": "w1", "completion": "w2"})
    },
    "nothing to read": (
        columns(question=["a"], answer=["b"]), "no usable column. Expected .*; the rows have: question",
    ),
    "pairs": (columns(question=["a"], response_j=["b"], response_k=["c"]), "they are for preferences"),
    "numbers": (columns(instruction=["a"], input=["b"], output=[4]), "column 'output': expected text, got int64"),
    "text of numbers": (columns(text=[0.5]), "column 'text': expected text, got float64"),
    "a number in a message": (
        columns(messages=[[{"role": "assistant", "content": 3}]]), "column 'messages': expected content as text",
    ),
    "no content": (
        columns(messages=[answered({"content": None})]),
        "row 0 of the train dataset: expected text, got a message of assistant without any content",
    ),
    "JSON": (columns(messages=["[]"]), r"'messages': expected a list of messages, got text. .*json.loads"),
    "JSON of ShareGPT": (columns(conversations=["[]"]), "'conversations': expected a list of messages, got text"),
    "lists of roles": (columns(messages=[{"role": ["user"], "content": ["w1"]}]), "got mappings of role, content"),
    "ShareGPT by another name": (
        columns(messages=[[{"from": "human", "value": "w1"}]]), "row 0: .*Name the column conversations",
    ),
    "turns of nothing": (columns(conversations=[[{"said": "w1"}]]), "row 0: .*expected turns of from and value"),
    "no role": (columns(messages=[[{"content": "w1"}]]), "row 0: .*expected messages of role and content"),
    "an empty chat": (columns(messages=[answered({"content": "w2"}), []]), "row 1 of the train.*got an empty list"),
    "no chat": (columns(messages=[None, answered({"content": "w2"})]), "row 0: .*expected messages, got null"),
    "no text": (
        lambda: Dataset.from_dict({"text": [None, "w1", "w2", None]}).select([2, 1, 3]), "row 2: .*text, got null",
    ),
    "lists of text": (columns(text=[["w1"]]), "column 'text': expected text, got lists"),
    "bytes": (columns(text=[b"w1"]), "column 'text': expected text, got binary"),
    "text and messages": (
        columns(prompt=["w1"], completion=[[{"role": "assistant", "content": "w2"}]]), "expected both as text, or both",
    ),
    "tokens in lists of lists": (columns(input_ids=[[[1, 2]]]), "'input_ids': expected a list of token ids"),
    "fewer labels": (
        columns(input_ids=[[1, 2], [1, 2]], labels=[[1, 2], [1]]), "row 1: .*got 1 labels of 2 tokens",
    ),
    "a number as system prompt": (
        columns(messages=[answered({"content": "w2"})], system=[3]), "column 'system': expected text, got int64",
    ),
    "null for tokens": (columns(input_ids=[[1, 2], None]), "row 1: .*expected a list of token ids, got null"),
    "a chat of which nothing is learned": (
        lambda: as_written({"messages": [[{**ASKED, "train": False}]]}),
        "row 0 of the train dataset: there is nothing to learn, each message of this chat is marked",
    ),
    "no rows": (columns(messages=[]), "expected rows, got a dataset without any; its columns are: messages"),
    "an empty stream": (lambda: IterableDataset.from_generator(lambda: iter(())), "expected a stream of rows, got one"),
    "labels of texts": (columns(text=["w1"], labels=[1]), "column 'labels': .*made of their text"),
    "prompts": (columns(prompt=["w1"]), "train dataset has prompts and no completions"),
    "prompts of chats": (
        columns(prompt=["w1"], messages=[answered({"content": "w2"})]), "To learn its messages, take the column prompt",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_rows_in_python_that_cannot_be_learned_are_refused(name):
    data, message = REFUSED[name]
    with pytest.raises(DataError, match=message):
        sft(data=data())


def stream_of(*rows: dict) -> IterableDataset:
    return IterableDataset.from_generator(lambda: iter(rows))


GOOD, TURN = [{"text": f"w{i}"} for i in range(5)], [{"messages": answered({"content": "w2"})}] * 5
STREAMS = {
    "null": ([*GOOD, {"text": None}], "'text': expected text, got null"),
    "a number": ([*GOOD, {"text": 7}], "'text': expected text, got 7"),
    "no completion": (
        [*[{"prompt": "w1", "completion": "w2"}] * 5, {"prompt": "w1", "completion": None}], "'completion': expect",
    ),
    "no chat": ([*TURN, {"messages": None}], "'messages': expected messages, got null"),
    "no content": ([*TURN, {"messages": answered({"content": None})}], "a message of assistant without any content"),
    "a role": ([*TURN, {"messages": [{"role": "critic", "content": "w1"}]}], "does not know the role 'critic'"),
    "text for messages": (
        [*[{"prompt": [ASKED], "completion": TURN[0]["messages"][1:]}] * 5, {"prompt": [ASKED], "completion": "w"}],
        "'prompt' and 'completion': expected both as text, or both",
    ),
    **{
        f"tokens like {ids}": ([*[{"input_ids": [1, 2]}] * 5, {"input_ids": ids}], "'input_ids': expected a list of t")
        for ids in ([1.0, 2.0], ["1"], [[1, 2]], [True])
    },
    "no tokens": ([*[{"input_ids": [1, 2]}] * 5, {"input_ids": None}], "'input_ids': expected a list of token ids"),
    "fewer labels": (
        [*[{"input_ids": [1, 2], "labels": [1, 2]}] * 5, {"input_ids": [1, 2], "labels": [1]}],
        "got 1 labels of 2 tokens",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STREAMS)
def test_a_row_of_a_stream_that_cannot_be_learned_is_refused_when_it_comes(name):
    rows, message = STREAMS[name]
    tokenizer = with_template(CHAT_TEMPLATE.replace("{% else %}", "{% elif m['role'] == 'user' %}"))
    trainer = sft(data=stream_of(*rows), processing_class=tokenizer, max_steps=2)
    with pytest.raises(DataError, match=f"^row 5 of the train dataset: .*{message}"):
        trainer.train()


@pytest.mark.parametrize("rows", [GOOD, {"a": GOOD}, {"text": ["w1"]}, "test"])
def test_rows_to_evaluate_that_are_no_dataset_are_refused_by_their_type(rows):
    refused = pytest.raises(DataError, match="eval_dataset: expected a Dataset or .*, got (list|str).* Make one of")
    with refused:
        sft(eval_data=rows)
    with pytest.raises(DataError, match="train_dataset: expected a Dataset or .*, got (list|dict|str). Make one of"):
        sft(data=rows)
    if not isinstance(rows, str):  # there it is a name
        with refused:
            sft().evaluate(rows)


def test_what_is_not_read_may_be_anything():
    chat, pair = answered({"content": "w2"}), {"prompt": ["w1"], "completion": [" w2"]}
    for rows in ({"messages": [chat], "input": [3], "text": [None]}, {"messages": [chat], **pair}):
        assert len(sft(data=Dataset.from_dict(rows)).train_dataset) == 1


@pytest.mark.parametrize("kind", ["numpy", "torch", "pandas", "arrow"])
def test_rows_of_another_format_are_read_as_pythons(kind):
    rows = Dataset.from_list([{"messages": answered({"content": "w2"})}, {"messages": answered({"content": "w3"})}])
    got, want = (sft(data=data).train_dataset for data in (rows.with_format(kind), rows))
    assert got["input_ids"] == want["input_ids"]


def test_a_chat_without_an_answer_is_named_and_a_label_of_a_text_is_no_preference():
    with pytest.raises(DataError, match="row 1 of the train dataset: only answers are to be learned, but the chat has"):
        supervised([answered({"content": "w2"}), [ASKED]], MARKED, assistant_only_loss=True)
    assert in_messages(Dataset.from_list([{"text": "w1", "label": 1}])).column_names == ["text", "label"]


def test_a_column_without_any_text_is_none_of_numbers():
    rows = Dataset.from_dict({"instruction": ["w1"], "input": [None], "output": ["w2"]})
    rows = rows.cast_column("input", Value("float64"))
    read = datasets_in_messages({"train_dataset": rows}, None)["train_dataset"]
    assert read[0]["prompt"][0]["content"] == "w1"
