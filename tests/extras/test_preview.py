"""`preview`: the rows and supervised tokens it shows are the trainer's, and its counts those of plain loops."""

import numpy as np
import pytest
from commands import call, write_rows
from datasets import Dataset
from tiny import WORDS, tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM

from liger_trainer.config.run_config import load_run_config
from liger_trainer.extras.preview import preview
from liger_trainer.run.data.datasets import load_run_datasets
from liger_trainer.run.models import open_model
from liger_trainer.trainers.rows import count_rows
from liger_trainer.trainers.sft_trainer import LigerTrainer

SETTINGS = """
model_name_or_path: student
dataset_name: rows.jsonl
output_dir: out
max_length: 12
holdout_fraction: 0.2
use_cpu: true
report_to: none
"""
TEACHER = "teacher_model_name_or_path: teacher\n"


def chat(i: int) -> dict:
    question, answer = " ".join(WORDS[i : i + 2 + i % 9]), " ".join(WORDS[i : i + 1 + i % 6])
    return {"prompt": [{"role": "user", "content": question}], "completion": [{"role": "assistant", "content": answer}]}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A model's directory without weights, and rows."""
    monkeypatch.chdir(tmp_path)
    tiny_model().config.save_pretrained(tmp_path / "student")
    tiny_tokenizer().save_pretrained(tmp_path / "student")
    write_rows(tmp_path / "rows.jsonl", map(chat, range(20)))
    (tmp_path / "run.yaml").write_text(SETTINGS)
    return tmp_path


def opened(*overrides: str):
    config = load_run_config("run.yaml", overrides)
    return config, load_run_datasets(config), open_model(config, "model_name_or_path")


def previewed(count: int = 100, *overrides: str):
    return preview(*opened(*overrides), count)


def trained_on(*overrides: str) -> list[tuple[str, list[bool]]]:
    """Of each row that the trainer's collator makes: its text, and which tokens the loss is taken on."""
    config, data, files = opened(*overrides)
    rows = {"train_dataset": data.train, "eval_dataset": data.test}
    trainer = LigerTrainer(tiny_model(), args=config.training_args(), processing_class=files.tokenizer, **rows)
    rows = []
    for row in trainer.train_dataset:
        batch = trainer.data_collator([row])
        length = len(row["input_ids"])
        # the model's shift: token i is predicted where label i counts and a token comes before it
        counts = [i > 0 and bool(label != -100) for i, label in enumerate(batch["labels"][0, :length])]
        rows.append((trainer.processing_class.decode(batch["input_ids"][0, :length]), counts))
    return rows


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("packing=true", "max_length=30"),
        pytest.param(("packing=true", "packing_strategy=wrapped"), marks=pytest.mark.slow),
        pytest.param(("packing=true", "packing_strategy=bfd_split"), marks=pytest.mark.slow),
        # best fit keeps the start all the same
        pytest.param(("packing=true", "max_length=9", "truncation_mode=keep_end"), marks=pytest.mark.slow),
        ("completion_only_loss=false", "max_length=6", "truncation_mode=keep_end"),
        ("pad_to_multiple_of=8", "shuffle_dataset=true"),
    ],
)
def test_what_is_supervised_is_what_the_collator_says(folder, overrides):
    seen, trained = previewed(100, *overrides), trained_on(*overrides)
    shown = seen.rows
    assert len(shown) == len(trained) > 3
    for row, (text, counts) in zip(shown, trained, strict=True):
        # one word is one token
        pieces = [piece for document in row.documents for piece in document]
        words = [(word, piece.supervised) for piece in pieces for word in piece.text.split()]
        assert [word for word, _ in words] == text.split()
        assert [supervised for _, supervised in words] == counts
        assert (row.tokens, row.supervised) == (len(counts), sum(counts))
    if not {"packing_strategy=wrapped", "packing_strategy=bfd_split"} & set(overrides):  # these cut between documents
        facts = seen.facts["train"]
        assert facts.tokens == sum(row.tokens for row in shown)
        assert facts.supervised_tokens == sum(row.supervised for row in shown)


def test_what_is_cut_is_told_of_the_right_row(folder):
    rows = previewed(100, "shuffle_dataset=true").rows
    whole = {row.place: row for row in previewed(100, "max_length=null").rows}
    assert [row.place for row in rows] != sorted(row.place for row in rows)
    for row in rows:
        before = whole[row.place]
        assert row.tokens + row.tokens_cut == before.tokens and row.supervised + row.supervised_cut == before.supervised
    assert any(row.supervised_cut for row in rows)
    line = int(rows[0].place.removeprefix("rows.jsonl:"))
    assert rows[0].documents[0][0].text.split()[1] == WORDS[line - 1]


def test_documents_of_packed_rows_are_apart(folder):
    rows = previewed(100, "packing=true", "max_length=30").rows
    assert max(len(row.documents) for row in rows) > 1
    for row in rows:
        assert (
            row.place == f"{len(row.documents)} document{'s' * (len(row.documents) > 1)}, packed"
            and row.tokens_cut is None
        )
        assert all(document[0].text.startswith("<user>") for document in row.documents)


def test_the_command_prints_marks_without_colours_and_loads_no_weights(folder, capsys, monkeypatch):
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *a, **k: pytest.fail("weights were loaded"))
    code, out, _ = call(capsys, "preview", "run.yaml", "--rows", "2", "max_length=8", "use_liger_kernel=true")
    assert code == 0
    assert "── rows.jsonl:4: 8 tokens, 1 supervised; 4 beyond max_length, 4 of them supervised\n" in out
    assert "<user> w3 w4 w5 w6 w7 <assistant>⟦ w3⟧\n" in out
    assert out.count("── rows.jsonl") == 2 and "rows truncated" in out and "train rows repeated" in out
    assert not (folder / "out").exists()


def test_distillation_needs_no_teacher(folder, capsys):
    (folder / "run.yaml").write_text(SETTINGS + TEACHER)
    for settings, sampled in ([], False), (["lmbda=0.5"], True):
        code, out, _ = call(capsys, "preview", "run.yaml", "--rows", "1", *settings)
        assert code == 0 and "supervised" in out and ("completions are sampled too" in out) == sampled


@pytest.mark.parametrize("mode", ["keep_start", "keep_end"])
@pytest.mark.parametrize("limit", [None, 1, 4, 20])
def test_rows_are_counted_as_by_plain_loops(mode, limit):
    random = np.random.default_rng(0)
    made = [random.choice([-100, 5, 7], size=random.integers(1, 13)).tolist() for _ in range(500)]
    dataset = Dataset.from_dict({"labels": made}).shuffle(seed=3)  # rows behind a mapping of indices
    rows = list(dataset["labels"])
    facts, kept = count_rows(dataset, limit, mode)
    cut = [row if limit is None else row[:limit] if mode == "keep_start" else row[-limit:] for row in rows]

    def learned(row):
        return sum(label != -100 for label in row[1:])

    assert kept.tolist() == [i for i, row in enumerate(cut) if learned(row)]
    assert (facts.rows, facts.rows_dropped, facts.sequences) == (len(rows), len(rows) - len(kept), len(kept))
    assert facts.rows_truncated == sum(len(a) < len(b) for a, b in zip(cut, rows, strict=True))
    assert facts.tokens == sum(len(cut[i]) for i in kept)
    assert facts.supervised_tokens == sum(map(learned, cut))
    assert facts.supervised_tokens_lost == sum(map(learned, rows)) - sum(map(learned, cut))


def test_facts_of_packed_rows(folder):
    packed, plain = (previewed(1, "max_length=14", *more).facts["train"] for more in (["packing=true"], []))
    assert packed.sequences < plain.sequences and packed.rows_truncated == plain.rows_truncated > 0
    wrapped = previewed(1, "packing=true", "packing_strategy=wrapped").facts["train"]
    assert wrapped.rows_truncated == wrapped.supervised_tokens_lost == 0


@pytest.mark.parametrize("prompt", [chat(3)["prompt"], "w1 w2 w3"], ids=["chat", "text"])
def test_prompts_whose_completions_are_sampled_are_shown(folder, prompt):
    write_rows(folder / "rows.jsonl", [{"prompt": prompt}] * 20)
    shown = previewed(1, "recipe=distill", "teacher_model_name_or_path=teacher", "lmbda=1.0", "max_completion_length=4")
    (row,) = shown.rows
    assert row.supervised == row.tokens_cut == 0 and row.tokens == sum(
        len(piece.text.split()) for piece in row.documents[0]
    )
