"""`teacher_prompt`: the teacher reads more than the student. Its answers are those to the longer text, by hand."""

import copy
import json

import pytest
import torch
from commands import call, save_models, settings, without_report, write_rows
from datasets import Dataset
from peft import LoraConfig
from quick_cases import by_turns
from tiny import WORDS, tiny_model, tiny_tokenizer, train_args

from liger_trainer import LigerDistillConfig, LigerDistillTrainer
from liger_trainer.errors import ConfigError, DataError
from liger_trainer.extras.privileged import prompted

PROMPT = "w9 w8 w7 w9"
_TURNS = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ '<assistant> ' + m['content'] + ' <eos> ' }}"
    "{% elif m['role'] == 'user' %}{{ '<user> ' + m['content'] + ' ' }}{% else %}{{ '<unk> ' + m['content'] + ' ' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"
)
TEMPLATES = {
    "plain": None,
    "system as user": tiny_tokenizer().chat_template,
    "system message": _TURNS,
    "default system message": "{% if messages[0]['role'] != 'system' %}{{ '<unk> w1 w2 ' }}{% endif %}" + _TURNS,
    "folded into the question": (
        "{% set offset = 1 if messages[0]['role'] == 'system' else 0 %}{% for m in messages[offset:] %}"
        "{% if m['role'] == 'assistant' %}{{ '<assistant> ' + m['content'] + ' <eos> ' }}{% else %}{{ '<user> ' }}"
        "{% if loop.first and offset %}{{ messages[0]['content'] + ' ' }}{% endif %}{{ m['content'] + ' ' }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"
    ),
}


def rows(chat: bool, count: int = 12) -> list[dict]:
    """Questions and answers of different lengths, each with a prompt of its own."""
    pairs = [(" ".join(WORDS[i : i + 2 + i % 3]), " ".join(WORDS[20 + i : 22 + i + i % 4])) for i in range(count)]
    own = [" ".join(WORDS[40 + i : 42 + i + i % 5]) for i in range(count)]
    if not chat:
        return [{"prompt": q + " ", "completion": a, "told": f"{p} "} for (q, a), p in zip(pairs, own, strict=True)]
    return [
        {"prompt": [{"role": "user", "content": q}], "completion": [{"role": "assistant", "content": a}], "told": p}
        for (q, a), p in zip(pairs, own, strict=True)
    ]


def trainer_of(template: str, *, data: list[dict] | None = None, lora: bool = False, **options) -> LigerDistillTrainer:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATES[template]
    data = rows(template != "plain") if data is None else data
    options = {"teacher_prompt": PROMPT + " ", **options}
    args = train_args(LigerDistillConfig, **options)
    more = {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM")} if lora else {}
    return LigerDistillTrainer(
        tiny_model(seed=1), None if lora else tiny_model(seed=2), args, train_dataset=Dataset.from_list(data),
        eval_dataset=Dataset.from_list(data[:5]), processing_class=tokenizer, **more,
    )  # fmt: skip


def longer(trainer, ids: list[int], prompt: str, template: str) -> list[int]:
    """What the teacher reads for a row of the student, by rendering its text again."""
    tokenizer = trainer.tokenizer
    if template == "plain":
        return tokenizer(prompt + tokenizer.decode(ids))["input_ids"]
    text = tokenizer.decode(ids).removeprefix("<unk> w1 w2 " if template == "default system message" else "")
    question = text.removeprefix("<user> ").partition(" <assistant>")[0]
    messages = [{"role": "system", "content": prompt}, {"role": "user", "content": question}]
    front = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
    answer = ids[ids.index(tokenizer.convert_tokens_to_ids("<assistant>")) + 1 :]
    return front["input_ids"] + answer


def assert_as_by_hand(trainer, teacher, batch: dict, template: str, prompts: list[str]) -> int:
    """Compare the answer to a batch with the teacher run on each longer row by itself; return how many tokens."""
    labels, lengths = batch["labels"], batch["attention_mask"].sum(1).tolist()
    with torch.no_grad():
        answer = trainer.teaching.answer({k: v for k, v in batch.items() if k != "labels"})
        logits = answer.compute() if hasattr(answer, "compute") else answer
    compared = 0
    for row, (ids, length) in enumerate(zip(batch["input_ids"].tolist(), lengths, strict=True)):
        long = longer(trainer, ids[:length], prompts[row], template)
        with torch.no_grad():
            want = teacher(torch.tensor([long])).logits[0]
        places = [j for j in range(length - 1) if labels[row, j + 1] != -100]
        moved = [j + len(long) - length for j in places]
        assert [long[j + 1] for j in moved] == [ids[j + 1] for j in places]
        torch.testing.assert_close(logits[row, places], want[moved], rtol=1e-4, atol=1e-4)
        compared += len(places)
    return compared


@pytest.mark.parametrize(("template", "lora"), by_turns(TEMPLATES, [False, True]))
def test_the_answer_is_that_to_the_longer_text(template, lora):
    """With a teacher of its own and with the student's base, whose head has an adapter too."""
    trainer = trainer_of(template, lora=lora, **({"teacher": "self"} if lora else {}))
    teacher = copy.deepcopy(tiny_model(seed=1 if lora else 2))
    if lora:  # adapters that matter, were they left on
        for name, weight in trainer.student.named_parameters():
            weight.data.normal_() if "lora_B" in name else None
    batches = trainer.get_eval_dataloader()
    compared = [assert_as_by_hand(trainer, teacher, batch, template, [PROMPT + " "] * 8) for batch in batches]
    assert sum(compared) == trainer.row_facts["eval"].supervised_tokens


@pytest.mark.parametrize("template", ["plain", "default system message"])
def test_a_column_has_the_prompt_of_each_row(template):
    data = rows(template != "plain")
    trainer = trainer_of(template, data=data, teacher_prompt=None, teacher_prompt_column="told")
    by_text = {}
    for row in data:
        question = row["prompt"] if template == "plain" else row["prompt"][0]["content"]
        by_text[question.strip()] = row["told"]
    for batch in trainer.get_train_dataloader():
        texts = trainer.tokenizer.batch_decode(batch["input_ids"])
        prompts = [next(p for q, p in sorted(by_text.items(), key=lambda x: -len(x[0])) if f"{q} " in t) for t in texts]
        assert_as_by_hand(trainer, tiny_model(seed=2), batch, template, prompts)


def test_the_loss_and_the_metrics_are_of_the_longer_text():
    """KL(teacher with the prompt, student without it), the mean over the supervised tokens, in fp64."""
    trainer = trainer_of("default system message")
    teacher, student = tiny_model(seed=2).double(), tiny_model(seed=1).double()
    total = count = 0.0
    for batch in trainer.get_eval_dataloader():
        for ids, labels, mask in zip(batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True):
            length = int(mask.sum())
            long = longer(trainer, ids[:length].tolist(), PROMPT + " ", "default system message")
            p = teacher(torch.tensor([long])).logits[0, len(long) - length :].log_softmax(-1)
            q = student(ids[None, :length]).logits[0].log_softmax(-1)
            taught = labels[1:length] != -100
            total += ((p.exp() * (p - q)).sum(-1)[:-1][taught]).sum().item()
            count += int(taught.sum())
    metrics = trainer.evaluate()
    assert metrics["eval_forward_kl"] == pytest.approx(total / count, rel=1e-4)
    assert metrics["eval_loss"] == pytest.approx(total / count, rel=1e-4)
    assert trainer_of("default system message", teacher_prompt="w1").evaluate()["eval_loss"] != metrics["eval_loss"]


@pytest.mark.parametrize("template", ["plain", "system message"])
def test_sampled_completions(template, monkeypatch):
    trainer = trainer_of(template, lmbda=1.0, max_completion_length=5, max_steps=2)
    answer, seen = trainer.teaching.answer, []

    def follow(inputs):
        seen.append({k: v.clone() for k, v in inputs.items() if isinstance(v, torch.Tensor)})
        return answer(inputs)

    monkeypatch.setattr(trainer.teaching, "answer", follow)
    trainer.train()
    monkeypatch.undo()
    assert len(seen) >= 2
    dataset_rows = {tuple(row) for row in trainer.train_dataset["input_ids"]}
    sampled = 0
    for batch in seen:
        lengths = batch["attention_mask"].sum(1).tolist()
        kept = [tuple(ids[:n]) for ids, n in zip(batch["input_ids"].tolist(), lengths, strict=True)]
        sampled += sum(row not in dataset_rows for row in kept)
        labels = torch.where(batch["attention_mask"] == 1, batch["input_ids"], -100)
        labels[:, :4] = -100
        assert_as_by_hand(trainer, tiny_model(seed=2), {**batch, "labels": labels}, template, [PROMPT + " "] * 8)
    assert sampled


def test_truncation_is_of_the_students_row():
    """max_length cuts what the student reads; the teacher's row is longer by its prompt."""
    trainer = trainer_of("plain", max_length=6)
    compared = 0
    for batch in trainer.get_train_dataloader():
        assert batch["input_ids"].shape[1] <= 6
        compared += assert_as_by_hand(trainer, tiny_model(seed=2), batch, "plain", [PROMPT + " "] * 8)
    assert compared == trainer.row_facts["train"].supervised_tokens and trainer.row_facts["train"].rows_truncated


def test_rows_with_prompts_of_different_lengths():
    ids, mask = torch.tensor([[1, 2, 3, 0], [4, 5, 6, 7]]), torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    prompts, sizes, replaces = torch.tensor([[8, 9], [8, 0]]), torch.tensor([2, 1]), torch.tensor([1, 0])
    got = prompted(ids, mask, prompts, sizes, replaces)
    assert got["attention_mask"].tolist() == [[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0]]
    assert (got["input_ids"] * got["attention_mask"]).tolist() == [[8, 9, 2, 3, 0, 0], [8, 4, 5, 6, 7, 0]]


SYSTEM = [{"role": "system", "content": "w5"}]


@pytest.mark.parametrize(
    ("template", "options", "message"),
    [
        ("plain", {"teacher_prompt": "w1 " * 125}, "longest row 13\\d tokens, and it reads 128 at most"),
        ("plain", {"packing": True}, "set packing, eval_packing and padding_free to false"),
        ("plain", {"losses": [{"type": "hidden_mse"}]}, "leave hidden_\\*, uld and alm out"),
        ("plain", {"teacher_prompt_column": "told"}, "either the text or its column"),
        ("plain", {"teacher_prompt": None, "teacher_prompt_column": "no"}, "no column 'no'"),
        ("plain", {"seq_kd": True}, "set seq_kd to false"),
        ("system message", {"system": True}, "does not begin as rows without a system message do"),
        ("default system message", {"system": True}, "does not begin as rows without a system message"),
        ("default system message", {"completion_only_loss": False}, "has labels on tokens that"),
    ],
)
def test_what_cannot_work_is_refused(template, options, message):
    data, options = rows(template != "plain"), dict(options)
    if options.pop("system", False):
        data = [{**row, "prompt": SYSTEM + row["prompt"]} for row in data]
    with pytest.raises((ValueError, ConfigError, DataError), match=message):
        trainer_of(template, data=data, **options)


def test_the_command_learns_instructions(tmp_path, monkeypatch, capsys):
    """After training, the student without the prompt is nearer to the base that has it."""
    monkeypatch.chdir(tmp_path)
    without_report(monkeypatch)
    save_models(tmp_path, "student")
    write_rows(tmp_path / "rows.jsonl", [{k: v for k, v in row.items() if k != "told"} for row in rows(True, 20)])
    lora = {"use_peft": True, "lora_r": 4, "lora_target_modules": ["q_proj", "v_proj", "up_proj"]}
    (tmp_path / "run.yaml").write_text(
        settings(teacher="self", teacher_prompt=PROMPT, **lora, max_steps=20, learning_rate=2e-2)
    )
    code, _, err = call(capsys, "run", "run.yaml")
    assert code == 0, err
    written = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert written["before"]["forward_kl"] > 0.01  # the adapters do nothing yet: this is what the prompt does
    assert written["after"]["forward_kl"] < 0.8 * written["before"]["forward_kl"]
    code, _, err = call(capsys, "validate", "run.yaml", "packing=true")
    assert code == 2 and "packing: teacher_prompt goes before each single row; set it to false." in err
