"""Rows of ShareGPT and Alpaca: in preview, training and capture they are the same rows as their messages."""

import json
import signal

import pytest
from datasets import Dataset, IterableDataset
from tiny import CHAT_TEMPLATE, WORDS, chats, texts, tiny_model, tiny_tokenizer, train_args
from trainings import sft
from trl import chat_template_utils

from liger_trainer import LigerConfig, LigerDistillConfig
from liger_trainer.config.run_config import load_run_config
from liger_trainer.errors import ConfigError, DataError
from liger_trainer.extras.preview import preview
from liger_trainer.run.data.datasets import load_run_datasets
from liger_trainer.run.models import check_student, open_model
from liger_trainer.trainers import chat_template as chat_checks
from liger_trainer.trainers.chat_rows import in_messages, split_last
from liger_trainer.trainers.chat_template import check_chats
from liger_trainer.trainers.row_preparation import prepare_rows

SETTINGS = """
model_name_or_path: student
dataset_name: rows.jsonl
output_dir: out
holdout_fraction: 0.2
use_cpu: true
report_to: none
"""
NAMES = {"system": "system", "user": "human", "assistant": "gpt"}


def said(start: int, count: int = 2) -> str:
    return " ".join(WORDS[start : start + count])


def turns(i: int, system: bool = False) -> list[dict]:
    """Two questions and answers, or one, and perhaps a system prompt, which differ from row to row."""
    roles = ["system"] * system + ["user", "assistant"] * (1 + i % 2)
    return [{"role": role, "content": said(i + 3 * n)} for n, role in enumerate(roles)]


CHATS = [turns(i, system=i % 3 == 0) for i in range(12)]
SHAREGPT = [[{"from": NAMES[turn["role"]], "value": turn["content"]} for turn in chat] for chat in CHATS]
OF_MESSAGES = [{"messages": chat} for chat in CHATS]
OF_SHAREGPT = [{"conversations": chat} for chat in SHAREGPT]
OF_ALPACA = [
    {"instruction": said(i), "input": [said(i + 9), "", None][i % 3], "output": said(i + 20), "text": "w1 w2"}
    for i in range(12)
]
OF_PAIRS = [
    {
        "prompt": [{"role": "user", "content": f"{row['instruction']}\n{row['input']}" if row["input"] else said(i)}],
        "completion": [{"role": "assistant", "content": row["output"]}],
    }
    for i, row in enumerate(OF_ALPACA)
]
EQUAL = [(OF_SHAREGPT, OF_MESSAGES), (OF_ALPACA, OF_PAIRS), ([{"conversations": chat} for chat in CHATS], OF_MESSAGES)]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Rows in a file, and a configuration that names them: the configuration, the data and the model's files."""
    monkeypatch.chdir(tmp_path)
    tiny_model().config.save_pretrained("student")
    tiny_tokenizer().save_pretrained("student")
    (tmp_path / "run.yaml").write_text(SETTINGS)

    def load(rows: list[dict], *overrides: str):
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = load_run_config("run.yaml", overrides)
        data, files = load_run_datasets(config), open_model(config, "model_name_or_path")
        check_student(config, files, data)
        return config, data, files

    return load


def trainer_of(rows, **options):
    return sft(data=Dataset.from_list(rows) if isinstance(rows, list) else rows, **options)


def seen(run, rows: list[dict], *overrides: str) -> list:
    return [row.documents for row in preview(*run(rows, *overrides), 100).rows]


@pytest.mark.parametrize(
    ("data", "options"), [(0, ()), (0, ("assistant_only_loss=true",)), (0, ("last_turn_only=true",)), (1, ()), (2, ())]
)
def test_preview_shows_the_same_text_and_the_same_supervised_tokens(run, data, options):
    theirs, ours = EQUAL[data]
    got = seen(run, theirs, *options)
    assert len(got) == 10 and got == seen(run, ours, *options)
    assert all("<user>" in str(row) and "<assistant>" in str(row) and "<unk>" not in str(row) for row in got)


def test_of_alpaca_the_output_is_learned_and_of_sharegpt_every_token(run):
    def learned(rows, *options):
        (document,) = seen(run, rows, *options)[0]
        return [(piece.text.split()[-1], piece.supervised) for piece in document]

    answer, all_ = [("<assistant>", False), ("<eos>", True)], [("<user>", False), ("<eos>", True)]
    assert learned(OF_ALPACA) == answer and learned(OF_ALPACA, "completion_only_loss=false") == all_
    assert learned(OF_SHAREGPT) == all_  # the first token is never predicted
    for (document,) in seen(run, [row for row in OF_SHAREGPT if len(row["conversations"]) > 3], "last_turn_only=true"):
        assert [piece.supervised for piece in document] == [False, True]
        assert document[0].text.count("<assistant>") == 2


STANFORD = "Below is an instruction that describes a task{}. Write a response that appropriately completes the request."


def test_stanfords_prompt_as_a_message_and_as_text(run):
    rows = [{"instruction": "Add.", "input": "2 and 2", "output": "4"}, {"instruction": "Hello", "output": "Hi."}] * 2
    with_input = ", paired with an input that provides further context"
    asked = {
        "4": STANFORD.format(with_input) + "\n\n### Instruction:\nAdd.\n\n### Input:\n2 and 2\n\n### Response:",
        "Hi.": STANFORD.format("") + "\n\n### Instruction:\nHello\n\n### Response:",
    }
    text, chat = run(rows, "alpaca_prompt=stanford_text")[1].train, run(rows, "alpaca_prompt=stanford")[1].train
    assert {row["completion"]: row["prompt"] for row in text} == {i: f"{prompt}\n" for i, prompt in asked.items()}
    assert {row["completion"][0]["content"]: row["prompt"][0]["content"] for row in chat} == asked
    trainer = trainer_of(rows, config=LigerConfig, alpaca_prompt="stanford_text", max_length=None)  # and in Python
    tokenizer = tiny_tokenizer()
    assert trainer.train_dataset[0]["input_ids"] == tokenizer(asked["4"] + "\n4<eos>")["input_ids"]
    assert trainer.train_dataset[0]["labels"][-3:] == [-100, *tokenizer("4 <eos>")["input_ids"]]


ALPACA, TEXT = {"instruction": "w1", "output": "w2"}, {"text": "w1 w2"}
DO_NOT_FIT = [
    ({**ALPACA, "system": "w3"}, ["alpaca_prompt=stanford_text"], "stanford_text has no place for the system prompt"),
    (OF_MESSAGES[0], ["alpaca_prompt=stanford"], "alpaca_prompt: needs the columns instruction and output;"),
    (TEXT, ["supervised_part=content"], "supervised_part: needs rows of chat messages"),
    (ALPACA, ["supervised_part=content", "alpaca_prompt=stanford_text"], "supervised_part: needs rows of chat messag"),
    (TEXT, ["last_turn_only=true"], "last_turn_only: needs rows of chat messages; the rows have plain text"),
    # rows that are no such rows
    ({"instruction": "w1", "output": None}, [], r"rows.jsonl:\d: .*column 'output': expected text, got null"),
    ({**ALPACA, "input": 3}, [], r"rows.jsonl:\d: .*column 'input': expected text or null, got an integer"),
    ({**ALPACA, "history": [["w3"]]}, [], r"rows.jsonl:\d: .*column 'history': expected pairs"),
    ({"conversations": SHAREGPT[1][:1], "system": 3}, [], r"rows.jsonl:\d: .*column 'system': expected text or null"),
    ({"conversations": [{"from": "human", "text": "w1"}]}, [], "expected a list of {from, value} messages"),
]


@pytest.mark.parametrize(("row", "options", "message"), DO_NOT_FIT)
def test_rows_that_do_not_fit_their_form_or_the_keys(run, row, options, message):
    with pytest.raises((ConfigError, DataError), match=message):
        run([row] * 4, *options)


@pytest.mark.parametrize("data", [0, 1], ids=["sharegpt", "alpaca"])
def test_training_and_capture_in_python(data, tmp_path):
    """The trainer and the capture read such a dataset themselves, streamed or not."""
    theirs, ours = (Dataset.from_list(rows) for rows in EQUAL[data])
    theirs = theirs.remove_columns("text") if data else theirs

    def prepared(rows, **options):
        trainer = trainer_of(rows, max_length=64, max_steps=1, **options)
        return [(row["input_ids"], row["labels"]) for row in trainer.train_dataset]

    def captured(rows):
        args = train_args(LigerDistillConfig, teacher="cache", teacher_cache_dir=str(tmp_path / "cache"), max_length=64)
        rows = prepare_rows(args, tiny_tokenizer(), rows).datasets["train"]
        return rows["input_ids"][:], rows["labels"][:]

    assert prepared(theirs) == prepared(ours) == prepared(theirs.to_iterable_dataset())
    assert prepared(theirs, assistant_only_loss=True) == prepared(ours, assistant_only_loss=True)
    assert captured(theirs) == captured(ours)


def test_a_column_of_text_that_is_named_is_read_as_text(run):
    assert run(OF_ALPACA)[1].facts.form == "prompt-completion"
    assert run(OF_ALPACA, "dataset_text_field=text")[1].facts.form == "text"
    assert in_messages(Dataset.from_list(OF_ALPACA)).column_names == ["instruction", "input", "output", "text"]


def test_system_prompts_and_history_of_their_own_columns(run):
    alpaca = {"instruction": "w1", "output": "w2", "system": "w3", "history": [["w4", "w5"]]}
    row = run([alpaca] * 4)[1].train[0]
    assert [(m["role"], m["content"]) for m in row["prompt"]] == [
        ("system", "w3"), ("user", "w4"), ("assistant", "w5"), ("user", "w1"),
    ]  # fmt: skip
    for row in run([{"conversations": chat, "system": "w9"} for chat in SHAREGPT[:4]])[1].train:
        systems = [m["content"] for m in row["messages"] if m["role"] == "system"]
        assert systems in (["w9"], [CHATS[0][0]["content"]], [CHATS[3][0]["content"]])  # the row's own goes first
    read = in_messages(Dataset.from_list([{"conversations": [], "system": "s"}]))
    assert read[0]["messages"] == [{"role": "system", "content": "s"}]


def test_tools_as_json_text(run):
    """Empty text, or a list of nothing, is no tools, as in datasets of tool calls whose other rows have some."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    texts = ["", "[]", json.dumps([tool]), None]
    rows = [{**OF_MESSAGES[1], "tools": text} for text in texts]
    assert (
        run([{**row, "tools": text} for row, text in zip(rows, ["", "[]"] * 2, strict=True)])[1].facts.train_rows == 3
    )
    assert in_messages(Dataset.from_list(rows))["tools"][:] == [None, None, texts[2], None]
    with pytest.raises(DataError, match="does not write 'tools'"):  # those that are tools still count
        run([{**row, "tools": texts[2]} for row in rows])
    with pytest.raises(
        DataError, match="row 0: column 'tools': expected a list of tools, or JSON text of one, got 'f'"
    ):
        trainer_of([{**OF_MESSAGES[1], "tools": "f"}])


@pytest.mark.parametrize("key", ["conversations", "messages"])
def test_a_role_that_the_template_does_not_know_is_named_with_its_row(run, key):
    names = ("from", "value") if key == "conversations" else ("role", "content")
    good = [{names[0]: "user", names[1]: "w1"}, {names[0]: "assistant", names[1]: "w2"}]
    rows = [{key: good}] * 9
    rows[6] = {key: [*good, {names[0]: "critic", names[1]: "w3"}]}
    with pytest.raises(DataError, match=r"rows.jsonl:7: the chat template does not know the role 'critic'"):
        run(rows)
    with pytest.raises(DataError, match=r"^row 6 of the train dataset: .*'critic'"):
        trainer_of(rows)


MESSAGE = "{{ m['content'] }}{% endfor %}"
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
TOOLS = [
    {"role": "user", "content": "w1"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "w2"},
    {"role": "assistant", "content": "w3"},
]
CRITIC = [{"role": "user", "content": "w1"}, {"role": "critic", "content": "w2"}]
UNKNOWN = "row 0: the chat template does not know the role '{}'"
NO_CRITIC, NO_TOOL, FOREIGN = UNKNOWN.format("critic"), UNKNOWN.format("tool"), vars(chat_template_utils)
_FAR = "{% for i in range(99999) %}{% for j in range(99999) %}"
TEMPLATES = {  # a chat, a template, and what is said of it
    # by ==, by `in [...]`
    **{f"{name}'s tools": (TOOLS, FOREIGN[f"{name}_chat_template"], None)
       for name in ("qwen3", "llama3_1", "gptoss") if f"{name}_chat_template" in FOREIGN},
    "Llama 3's": (TOOLS, FOREIGN["llama3_chat_template"], NO_TOOL),
    "one without tools": (TOOLS, CHAT_TEMPLATE, NO_TOOL),
    # a role is known where the template tells it from a name made up
    "a dictionary": (
        CRITIC, "{% for m in messages %}{{ {'user': '<user> ', 'critic': '<unk> '}[m['role']] }}" + MESSAGE, None,
    ),
    "a variable": (
        CRITIC, "{% set names = ['user', 'critic'] %}{% for m in messages %}{% if m.role not in names %}"
        "{{ raise_exception('no ' + m.role) }}{% endif %}" + MESSAGE, None,
    ),
    "it leaves others out": (CRITIC, "{% for m in messages if m.role in ('user', 'critic') %}" + MESSAGE, None),
    "written as text": (CRITIC, "{% for m in messages %}{{ '<|' + m.role + '|>' }}" + MESSAGE, NO_CRITIC),
    "in capitals": (CRITIC, "{% for m in messages %}{{ m.role | upper }}" + MESSAGE, NO_CRITIC),
    "as the user": (
        CRITIC, "{% for m in messages %}{{ '<user> ' if m.role != 'assistant' }}" + MESSAGE, NO_CRITIC,
    ),
    "left out": (CRITIC, "{% for m in messages if m.role == 'user' %}" + MESSAGE, NO_CRITIC),
    "a system prompt": (
        CHATS[3], FOREIGN["gemma_chat_template"],
        "row 0: the chat template refuses the row: System role not supported",
    ),
    "no template": (CRITIC, "{% if %}", "the chat template cannot be read: line 1"),
    # jinja itself stops these
    "far": (CRITIC[:1], "{% for i in range(10**9) %}{% endfor %}", "row 0: the chat template refuses the row"),
    "deep": (
        CRITIC[:1], "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "row 0: the chat template refuses the row",
    ),
}  # fmt: skip


def checked(chat: list, template: str) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.bos_token = "<eos>"  # which Llama 3's template writes
    check_chats(Dataset.from_list([{"messages": chat}]), tokenizer, template, "row {}".format)


@pytest.mark.parametrize("case", TEMPLATES)
def test_what_a_template_makes_of_a_chat(case):
    chat, template, said = TEMPLATES[case]
    if said is None:
        checked(chat, template)
    else:
        with pytest.raises((DataError, ConfigError), match=said):
            checked(chat, template)


_ENDLESS = {
    "loops in each other": (_FAR + "{% endfor %}{% endfor %}", "took more than 0.3 s"),
    "a text without end": (_FAR + "{{ messages[0]['content'] * 100000 }}{% endfor %}{% endfor %}", "took more than"),
}


@pytest.mark.parametrize("way", _ENDLESS)
@pytest.mark.parametrize("role", ["user", "critic"])  # the second is looked for in the template first
def test_a_template_that_never_ends_is_stopped(monkeypatch, way, role):
    monkeypatch.setattr(chat_checks, "RENDER_SECONDS", 0.3)
    monkeypatch.setattr(chat_checks, "RENDER_MIB", 100.0)
    handler, (template, why) = signal.getsignal(signal.SIGALRM), _ENDLESS[way]
    with pytest.raises(ConfigError, match=f"row 0: the chat template does not come to an end: rendering the row {why}"):
        checked([{"role": role, "content": "w1"}], template)
    assert signal.getsignal(signal.SIGALRM) is handler and signal.getitimer(signal.ITIMER_REAL)[0] == 0


def test_a_template_of_a_file_or_of_another_model_is_the_one_that_is_asked(run, tmp_path):
    rows = [{"conversations": [{"from": "human", "value": "w1"}, {"from": "critic", "value": "w2"}]}] * 4
    knows = CHAT_TEMPLATE.replace("{% else %}", "{% elif m['role'] in ['critic'] %}{{ '<user> ' }}{% else %}")
    (tmp_path / "critics.jinja").write_text(knows)
    run(rows, "chat_template_path=critics.jinja")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = knows
    tokenizer.save_pretrained("critics")
    run(rows, "chat_template_path=critics")
    with pytest.raises(DataError, match="'critic'"):
        run(rows)


def test_what_follows_the_last_answer_is_left_out_and_prompts_are_left_as_they_are():
    chat = [*turns(1), {"role": "user", "content": "w30"}]
    rows = split_last(Dataset.from_list([{"messages": chat}, {"messages": chat[:-1]}]))
    assert rows[0] == rows[1] == {"prompt": chat[:3], "completion": [chat[3]]}
    pairs = Dataset.from_list(OF_PAIRS)
    assert split_last(pairs) is pairs
    assert isinstance(split_last(Dataset.from_list(OF_MESSAGES).to_iterable_dataset()), IterableDataset)


@pytest.mark.parametrize("chat", [[], turns(0)[:1], turns(0)[1:]], ids=["nothing", "a question", "an answer"])
def test_a_row_without_a_turn_to_learn_is_named(chat):
    with pytest.raises(DataError, match="row 1: only the last answer is to be learned"):
        split_last(Dataset.from_list([{"messages": turns(0)}, {"messages": chat}]))


def test_what_trl_refuses_is_refused_in_its_words():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="chat_template is not set"):
        trainer_of(OF_MESSAGES, processing_class=tokenizer)


@pytest.mark.parametrize(
    "rows, options, says",
    [(chats, {}, True), (chats, {"eos_token": "<eos>"}, False), (chats, {"packing": True}, True), (texts, {}, False)],
)
def test_chats_that_end_by_another_token_than_the_model_does_are_told(rows, options, says, capsys):
    """A base model's eos is seldom the end of a turn: it would learn to end turns, and write on behind them."""
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = "<unk>"
    model = tiny_model(eos_token_id=tokenizer.convert_tokens_to_ids("<unk>"))
    sft(model, rows(), processing_class=tokenizer, **options)
    said = "the training rows end with '<eos>', but what the model writes ends with '<unk>'" in capsys.readouterr().out
    assert said is says


def test_the_usual_end_is_not_told(capsys):
    sft(tiny_model(), chats())
    assert "the training rows end with" not in capsys.readouterr().out
