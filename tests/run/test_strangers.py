"""Rows as people have them, in seven kinds of files: each is previewed and trained on by one line of the command."""

import json
import re

import datasets
import pyarrow
import pytest
from commands import call, done, lines, metrics, refused, save_models, settings, without_report
from tiny import WORDS

QUESTIONS = [" ".join(WORDS[i : i + 3]) for i in range(30)]
ANSWERS = [" ".join(WORDS[i + 3 : i + 6]) for i in range(30)]
PAIRS = list(zip(QUESTIONS, ANSWERS, strict=True))
CHATS = [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]} for q, a in PAIRS]
EACH = "every message, the user's too"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("strangers")
    save_models(folder, "student")
    (folder / "my.yaml").write_text(settings(max_steps=1, bf16=False))
    sharegpt = [
        {"id": str(i), "conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]}
        for i, (q, a) in enumerate(PAIRS)
    ]
    (folder / "sharegpt.json").write_text(json.dumps(sharegpt))
    (folder / "alpaca.json").write_text(json.dumps([{"instruction": q, "input": "", "output": a} for q, a in PAIRS]))
    (folder / "openai.jsonl").write_text(lines(CHATS))
    table = datasets.Dataset.from_list(CHATS)
    table.to_parquet(str(folder / "chats.parquet"))
    table.save_to_disk(str(folder / "saved"))
    next((folder / "saved").glob("*.arrow")).rename(folder / "stream.arrow")
    with pyarrow.OSFile(str(folder / "feather.arrow"), "wb") as file:
        rows = table.data.table
        with pyarrow.ipc.new_file(file, rows.schema) as writer:
            writer.write_table(rows)
    (folder / "pairs.csv").write_text("prompt,completion\n" + "".join(f"{q} ,{a}\n" for q, a in PAIRS))
    (folder / "notes.txt").write_text("\n".join(f"{q} {a}" for q, a in PAIRS))
    return folder


@pytest.fixture(autouse=True)
def in_the_folder(folder, monkeypatch):
    monkeypatch.chdir(folder)


def seen(question: str, answer: str, kind: str) -> str:
    """The row as `preview` prints it, what is learned between marks. The first token of a row is never learned."""
    first, rest = question.split(" ", 1)
    return {
        EACH: f"<user>⟦ {question} <assistant> {answer} <eos>⟧",
        "answers": f"<user> {question} <assistant>⟦ {answer} <eos>⟧",
        "the completions": f"<user> {question} <assistant>⟦ {answer} <eos>⟧",
        "pairs": f"{question}⟦ {answer} <eos>⟧",
        "every token": f"{first}⟦ {rest} {answer} <eos>⟧",
    }[kind]


@pytest.mark.parametrize(
    ("file", "learned", "kind"),
    [
        ("sharegpt.json", EACH, EACH), ("alpaca.json", "the completions", "the completions"),
        pytest.param("openai.jsonl", EACH, EACH, marks=pytest.mark.slow), ("chats.parquet", EACH, EACH),
        ("stream.arrow", EACH, EACH), pytest.param("feather.arrow", EACH, EACH, marks=pytest.mark.slow),
        ("pairs.csv", "the completions, after prompts of plain text", "pairs"),
        ("notes.txt", "every token", "every token"),
    ],
)  # fmt: skip
def test_one_line_each(folder, monkeypatch, capsys, file, learned, kind):
    without_report(monkeypatch)
    out, _ = done(call(capsys, "preview", "my.yaml", f"dataset_name={file}", "--rows", "1"))
    found = re.search(r"── .*?(?:row |:)(\d+): .*\n(.*)", out)
    assert found is not None
    index = int(found[1]) - (not file.endswith((".json", ".csv", ".parquet", ".arrow")))
    assert " ".join(found[2].split()) == seen(*PAIRS[index], kind)
    assert re.search(rf"│ learned +│ {learned} +│", out), out
    assert ("What the user says is learned too" in out) == (learned == EACH)
    assert ("without the chat template" in out) == (kind == "pairs")
    out, _ = done(call(capsys, "run", "my.yaml", f"dataset_name={file}", f"output_dir=out-{file}"))
    assert metrics(folder / f"out-{file}")["data"]["learned"] == learned


@pytest.mark.parametrize(
    ("changes", "learned"),
    [
        (["assistant_only_loss=true", "supervised_part=content"], "the answers of each chat without their headers"),
        (["last_turn_only=true"], "the completions"),
        (["supervised_part=content"], "every message, the user's too without their headers"),
    ],
)
def test_what_is_learned_follows_the_settings(folder, capsys, changes, learned):
    out, _ = done(call(capsys, "preview", "my.yaml", "dataset_name=openai.jsonl", "--rows", "1", *changes))
    assert re.search(rf"│ learned +│ {learned[:40]}", out)
    assert ("What the user says" in out) == ("user" in learned)
    if "answers" in learned:
        assert seen(*PAIRS[0], "answers") in " ".join(out.split())


def test_files_that_cannot_be_read_are_named(folder, capsys):
    for source in ("stream", "feather"):
        (folder / "cut.arrow").write_bytes((folder / f"{source}.arrow").read_bytes()[:200])
        refused(call(capsys, "preview", "my.yaml", "dataset_name=cut.arrow"), 4, "cut.arrow: cannot be read as arrow")
    (folder / "latin.csv").write_bytes("prompt,completion\nh\u00e9,\u00f6\n".encode("latin-1"))
    refused(call(capsys, "preview", "my.yaml", "dataset_name=latin.csv"), 4, "Save it as UTF-8")


def test_a_system_prompt_beside_plain_text_is_pointed_out(folder, capsys):
    for name, rows in (("text", [{"prompt": f"{q} ", "completion": a} for q, a in PAIRS]), ("chat", CHATS)):
        (folder / "systems.jsonl").write_text(lines([{**row, "system": "w1"} for row in rows]))
        out, _ = done(call(capsys, "preview", "my.yaml", "dataset_name=systems.jsonl", "--rows", "1"))
        assert ("The column system is not read" in out) == (name == "text")
