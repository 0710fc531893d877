"""`chat`, driven by stdin: answers are those of the models' own generation, with history, teacher and settings."""

import io
import json
import shutil
import sys

import pytest
import torch
from commands import call, done, refused, save_models
from peft import LoraConfig, PeftModel, get_peft_model
from tiny import WORDS, tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM

LIMIT = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Directories as runs leave them: one with a teacher, one with adapters beside their base."""
    folder = tmp_path_factory.mktemp("chat")
    save_models(folder, "out", "tuned", "teacher", "base")
    (folder / "tuned" / "config.yaml").write_text(
        "recipe: sft\nmodel_name_or_path: base\ndataset_name: rows.jsonl\noutput_dir: tuned\n"
    )
    (folder / "out" / "config.yaml").write_text(
        "model_name_or_path: base\nteacher_model_name_or_path: teacher\ndataset_name: rows.jsonl\noutput_dir: out\n"
    )
    adapted = get_peft_model(tiny_model("llama_tied", seed=2), LoraConfig(target_modules=["q_proj"], r=4))
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                weight.normal_()
    adapted.peft_config["default"].base_model_name_or_path = "base"
    adapted.save_pretrained(folder / "adapter")
    (folder / "adapter" / "config.yaml").write_text(
        "model_name_or_path: base\nteacher: self\nuse_peft: true\nrecipe: distill\ndataset_name: rows.jsonl\n"
    )
    (folder / "killed" / "checkpoint-2").mkdir(parents=True)
    return folder


@pytest.fixture
def talk(folder, monkeypatch, capsys):
    """Exit code, stdout without the echoed lines, stderr."""
    monkeypatch.chdir(folder)

    def run(*lines: str, of: str = "out", options: tuple = ("--temperature", "0")) -> tuple[int, list[str], str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        code, out, err = call(capsys, "chat", of, "--max-new-tokens", LIMIT, "--device", "cpu", *options)
        return code, [line for line in out.splitlines() if not line.startswith("> ")], err

    return run


def greedy(model, *messages: tuple[str, str]) -> str:
    tokenizer = tiny_tokenizer()
    chat = [{"role": role, "content": text} for role, text in messages]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    written = model.generate(**ids, max_new_tokens=LIMIT, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    return tokenizer.decode(written[0, ids["input_ids"].shape[1] :], skip_special_tokens=True).strip()


def load(path):
    return AutoModelForCausalLM.from_pretrained(path).eval()


FIRST, SECOND = " ".join(WORDS[1:4]), " ".join(WORDS[7:9])


def test_answers_are_the_models_and_the_chat_remembers(talk, folder):
    student = load(folder / "out")
    first = greedy(student, ("user", FIRST))
    history = ("user", FIRST), ("assistant", first), ("user", SECOND)
    out, _ = done(talk(FIRST, SECOND, "/retry", "/clear", FIRST))
    second = greedy(student, *history)
    assert [line.strip() for line in out] == [first, second, second, first]
    assert second != greedy(student, ("user", SECOND))  # the history was read


def test_the_teacher_answers_beside_the_student(talk, folder):
    first = greedy(load(folder / "out"), ("user", FIRST))
    both = [f"student: {first}", f"teacher: {greedy(load(folder / 'teacher'), ('user', FIRST))}"]
    assert both[0].partition(" ")[2] != both[1].partition(" ")[2]
    out, _ = done(talk("!teacher", FIRST, "/teacher", "/clear", FIRST, "/exit", SECOND))
    assert [line.strip() for line in out] == [
        "The teacher answers too.", *both, "The teacher answers no longer.", first,
    ]  # fmt: skip
    assert [line.strip() for line in talk(FIRST, options=("--temperature", "0", "--teacher"))[1]] == both


def test_adapters_and_the_base_that_taught_them(talk, folder):
    base = load(folder / "base")
    out, _ = done(talk(FIRST, of="adapter", options=("--temperature", "0", "--teacher")))
    teacher = greedy(base, ("user", FIRST))
    student = greedy(PeftModel.from_pretrained(base, str(folder / "adapter")).eval(), ("user", FIRST))
    assert [line.strip() for line in out] == [f"student: {student}", f"teacher: {teacher}"] and student != teacher


def test_settings(talk, folder):
    student = load(folder / "out")
    system = greedy(student, ("system", WORDS[9]), ("user", FIRST))
    assert system != greedy(student, ("user", FIRST))
    out, _ = done(talk(f"/system {WORDS[9]}", FIRST, "/set max_new_tokens=2", "/retry"))
    assert out[0].strip() == system and out[1].split() == system.split()[:2]
    sampled = [talk(FIRST, options=("--temperature", "5", "--seed", seed))[1] for seed in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]


def test_save_and_status(talk, folder, tmp_path):
    out, _ = done(talk("/status", FIRST, f"/save {tmp_path / 'a.json'}", "/help"))
    assert "parameters, torch.float32 on cpu" in out[0] and "/retry" in "".join(out)
    saved = json.loads((tmp_path / "a.json").read_text())
    assert [m["role"] for m in saved["messages"]] == ["user", "assistant"] and saved["messages"][0]["content"] == FIRST
    assert saved["settings"] == {"max_new_tokens": LIMIT, "temperature": 0.0}


@pytest.mark.parametrize(
    ("line", "of", "message"),
    [
        ("/sett", "out", "/sett is no command; expected one of /help"),
        ("/set top_q=1", "out", "/set: expected KEY=VALUE with one of max_new_tokens"),
        ("/set top_p=much", "out", "top_p: expected a number, got 'much'"),
        ("/set top_p=2", "out", "top_p: 2.0 is out of range"),
        ("/retry", "out", "nothing was asked yet"),
        ("/teacher", "base", "base names no teacher that can be loaded here"),
        (" ".join(WORDS[:40] * 20), "out", "the chat has 802 tokens and student reads"),
        (" ".join(WORDS[:40] * 20), "tuned", "the chat has 802 tokens and model reads"),
        ("hello", "killed", "killed holds no model. The run has not finished."),
        ("hello", "./nowhere", "./nowhere cannot be loaded"),
    ],
)
def test_mistakes_end_a_script(talk, line, of, message):
    code, out, err = talk(line, of=of)
    assert code == 2 and message in err and not out


def test_on_a_terminal_a_mistake_is_told_and_the_chat_goes_on(folder, monkeypatch, capsys):
    lines = iter(["/sett", "", FIRST])

    def answer(prompt: str) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.chdir(folder)
    monkeypatch.setattr("builtins.input", answer)
    monkeypatch.setattr(sys, "stdin", type("Terminal", (io.StringIO,), {"isatty": lambda self: True})())
    out, err = done(call(capsys, "chat", "out", "--max-new-tokens", LIMIT, "--temperature", "0", "--device", "cpu"))
    assert "/sett is no command" in err
    assert "/help lists the commands." in out and greedy(load(folder / "out"), ("user", FIRST)) in out
    assert "tokens/s)" in out


@pytest.mark.parametrize("place", ["within", "above"])
def test_a_folders_configuration_does_not_have_a_models_code_run(folder, tmp_path, place, monkeypatch, capsys):
    model = tmp_path / "run" / "model"
    shutil.copytree(folder / "out", model)
    shutil.move(model / "config.yaml", (model if place == "within" else model.parent) / "config.yaml")
    with next(model.parent.rglob("config.yaml")).open("a") as file:
        file.write("trust_remote_code: true\n")
    content = json.loads((model / "config.json").read_text())
    ours = {"model_type": "theirs", "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}}
    (model / "config.json").write_text(json.dumps(content | ours))
    (model / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("w1\n"))
    for command in ("chat", "eval"):
        refused(call(capsys, command, model), 2, "trust_remote_code: True can run code that a model")
    code, _, err = call(capsys, "chat", model, "--trust-remote-code")
    assert code != 0 and (tmp_path / "ran").exists()
