"""Drafts: what is counted is what plain loops count, and the text is the teacher's own."""

import copy
import os
import random
from pathlib import Path

import pytest
import torch
import transformers
from commands import call, save_models, settings, write_rows
from packaging.version import Version
from parts import metrics, run
from peft import LoraConfig, get_peft_model
from tiny import VOCAB, WORDS, tiny_model, tiny_tokenizer

from liger_trainer.run import drafts
from liger_trainer.run.drafts import DraftCounts, DraftOptions, measure_drafts

WINDOWS = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"), reason="some versions mask drafts in windows wrongly"
)


def near(teacher, spread: float, seed: int = 0):
    """A student whose likeliest token is the teacher's now and then."""
    student, generator = copy.deepcopy(teacher), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in student.parameters():
            weight += spread * torch.randn(weight.shape, generator=generator) * weight.std()
    return student


def some_prompts(n: int, vocab: int = VOCAB - 5) -> list[list[int]]:
    rng = random.Random(os.urandom(4))
    return [[rng.randrange(vocab) for _ in range(rng.randint(1, 9))] for _ in range(n)]


def likeliest(model, ids: list[int], shared: int = VOCAB) -> int:
    with torch.no_grad():
        return int(model(torch.tensor([ids], device=model.device)).logits[0, -1, :shared].argmax())


def by_loops(teacher, student, prompt: list[int], tokens: int, most: int, end: int) -> DraftCounts:
    """Greedy speculative decoding without a cache: a whole pass for each token."""
    counts, text = DraftCounts(completions=1), list(prompt)
    while len(text) < len(prompt) + most and (text == prompt or text[-1] != end):
        draft = []
        while len(draft) < min(tokens, len(prompt) + most - len(text) - 1) and end not in draft:
            draft.append(likeliest(student, [*text, *draft]))
        counts.passes, counts.drafts = counts.passes + 1, counts.drafts + bool(draft)
        counts.drafted += len(draft)
        for token in [*draft, None]:
            truth = likeliest(teacher, text)
            text.append(truth)
            if truth != token or truth == end:
                break
    counts.written = len(text) - len(prompt)
    return counts


@pytest.mark.parametrize("tokens", [pytest.param(1, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("family", ["llama", pytest.param("gemma3", marks=[WINDOWS, pytest.mark.slow])])
def test_counts_are_those_of_plain_loops(family, tokens):
    teacher = tiny_model(family, seed=1)
    student, prompts = near(teacher, 0.2), some_prompts(6)
    student.generation_config.num_assistant_tokens_schedule = "heuristic"  # which is not what is measured
    counts = measure_drafts(teacher, student, tiny_tokenizer(), prompts, DraftOptions(tokens, max_new_tokens=14))
    each = [by_loops(teacher, student, prompt, tokens, 14, VOCAB - 3) for prompt in prompts]
    for name in ("written", "passes", "drafts", "drafted"):
        assert getattr(counts, name) == sum(getattr(one, name) for one in each), name
    assert counts.same == counts.completions == len(prompts) and counts.plain_written == counts.written
    assert counts.accepted > 0


def test_heads_of_other_sizes_and_adapters_draft_too():
    """The student's head is padded; what it could write there is never drafted, and the text stays the teacher's."""
    teacher = tiny_model(seed=1)
    wide = near(teacher, 0.1)
    wide.resize_token_embeddings(VOCAB + 8, mean_resizing=False)
    with torch.no_grad():
        wide.lm_head.weight[VOCAB:] *= 30
    student = get_peft_model(wide, LoraConfig(r=2, lora_alpha=1, target_modules=["down_proj"], init_lora_weights=False))
    student.train()
    prompts, options = some_prompts(8), DraftOptions(3, max_new_tokens=16, shared=VOCAB)
    before = copy.deepcopy(vars(wide.generation_config))
    counts = measure_drafts(teacher, student, tiny_tokenizer(), prompts, options)
    each = [by_loops(teacher, student.eval(), prompt, 3, 16, VOCAB - 3) for prompt in prompts]
    assert 0 < counts.accepted == sum(one.accepted for one in each) and counts.same == 8
    assert wide.config.vocab_size == VOCAB + 8 and vars(wide.generation_config) == before
    assert not wide._forward_pre_hooks and not teacher._forward_pre_hooks


def test_models_stay_in_their_modes():
    teacher, student = tiny_model(seed=1), tiny_model(seed=2).train()
    state = torch.get_rng_state()
    options = DraftOptions(2, temperature=0.7, max_new_tokens=8)
    measure_drafts(teacher, student, tiny_tokenizer(), some_prompts(1), options)
    assert all(module.training for module in student.modules()) and not any(m.training for m in teacher.modules())
    assert torch.equal(torch.get_rng_state(), state)


def test_sampled_drafts_are_accepted_as_often_as_both_would_write_them():
    """A draft x is accepted with min(1, p(x) / q(x)), so 1 - TVD of them are; the teacher's own copy always is."""
    teacher, prompts = tiny_model(seed=1), some_prompts(60)
    sampled = DraftOptions(1, temperature=1.0, max_new_tokens=2)
    same = measure_drafts(teacher, copy.deepcopy(teacher), tiny_tokenizer(), prompts[:5], sampled)
    assert same.drafted == same.passes == 5  # a pass more for each that is refused
    assert same.accepted == same.written - 5  # the one that ends a text is not counted
    student = tiny_model(seed=2)
    counts = measure_drafts(teacher, student, tiny_tokenizer(), prompts * 3, sampled)
    with torch.no_grad():
        p, q = (
            torch.stack([m(torch.tensor([ids])).logits[0, -1].softmax(-1) for ids in prompts])
            for m in (teacher, student)
        )
    expected = float(torch.minimum(p, q).sum(-1).mean())
    assert counts.drafts == 180
    assert abs(counts.accepted / 180 - expected) < 5 * (expected * (1 - expected) / 180) ** 0.5


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_models(tmp_path, "student", "teacher")
    rows = [{"prompt": " ".join(WORDS[i : i + 3]), "completion": " " + " ".join(WORDS[i : i + 4])} for i in range(20)]
    write_rows(Path("rows.jsonl"), rows)
    return tmp_path


DRAFTS = {"num_draft_prompts": 3, "draft_tokens": 2, "max_new_tokens": 12, "teacher_model_name_or_path": "teacher"}


def test_a_run_measures_before_and_after_and_eval_finds_the_same(folder, capsys, monkeypatch):
    monkeypatch.setattr("liger_trainer.run.reports.html.draw", lambda runs, labels: [])
    Path("run.yaml").write_text(settings(**DRAFTS, max_steps=40, beta=0.5))
    printed = run(capsys, "run", "run.yaml")
    before, after = metrics("out")["before"], metrics("out")["after"]
    assert after["draft_accepted"] > before["draft_accepted"] >= 0
    assert before["draft_same_text"] == after["draft_same_text"] == 1
    assert after["draft_speedup"] == pytest.approx(
        after["draft_tokens_per_second"] / after["draft_plain_tokens_per_second"]
    )
    shown = f"{after['draft_accepted']:.2f}"
    assert "accepted tokens a draft" in printed and shown in printed
    report = Path("out/report.html").read_text()
    assert "speed of the teacher with drafts (times)" in report and shown in report
    printed = run(capsys, "eval", "out")
    assert "accepted tokens a draft" in printed and shown in printed
    printed = run(capsys, "eval", "out", "num_draft_prompts=0", "~draft_tokens")
    assert "draft" not in printed


@pytest.mark.slow
def test_models_in_other_dtypes_are_counted_and_not_timed(folder, capsys):
    Path("run.yaml").write_text(settings(**DRAFTS, max_steps=1, teacher_dtype="bfloat16"))
    with pytest.warns(UserWarning, match=r"Drafts are counted, not timed: the student's weights are torch\.float32"):
        run(capsys, "run", "run.yaml")
    after = metrics("out")["after"]
    assert "draft_accepted" in after and "draft_speedup" not in after


REFUSED = {
    "sft": ({"teacher_model_name_or_path": None}, "num_draft_prompts: has no effect with `recipe: sft`"),
    "self": ({"teacher_model_name_or_path": None, "teacher": "self", "use_peft": True}, "needs the one model of"),
    "prompted": ({"teacher_prompt": "w1"}, "a prompt of its own"),
    "sharded": ({"fsdp": "full_shard"}, "num_draft_prompts: expected 0: a sharded model is not sampled from"),
    "correction": ({"teacher_correction": {"max_steps": 2, "learning_rate": 1e-3}, "fsdp": "full_shard"}, "sharded"),
    "none": ({"num_draft_prompts": 0}, "draft_tokens: has no effect without `num_draft_prompts` above 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_drafts_do_not_go_with_is_said_first(folder, capsys, name):
    changes, message = REFUSED[name]
    chosen = {key: value for key, value in {**DRAFTS, **changes}.items() if value is not None}
    Path("run.yaml").write_text(settings(**chosen))
    code, _, error = call(capsys, "validate", "run.yaml")
    assert code == 2 and message in " ".join(error.split())


def test_a_window_needs_masks_that_fit(folder, capsys, monkeypatch):
    fits = Version(transformers.__version__) >= Version("5.23")  # 5.17 forgets that more than the window is kept
    assert drafts._windows_are_taken_back() == fits
    monkeypatch.setattr(drafts, "_windows_are_taken_back", lambda: False)
    for name in ("student", "teacher"):
        tiny_model("gemma3").save_pretrained(name)
    Path("run.yaml").write_text(settings(**DRAFTS))
    code, _, error = call(capsys, "run", "run.yaml")
    assert code == 2 and "masks drafts for the windows of gemma3_text wrongly" in error


def test_sampled_drafts_need_heads_of_one_size(folder, capsys):
    wide = tiny_model(vocab_size=VOCAB + 8)
    wide.save_pretrained("student")
    Path("run.yaml").write_text(settings(**DRAFTS, draft_temperature=1.0))
    code, _, error = call(capsys, "run", "run.yaml")
    assert code == 2 and "draft_temperature: the heads have 72 and 64 rows" in error


@pytest.mark.gpu
def test_counts_on_a_gpu_are_those_of_plain_loops():
    teacher = tiny_model(seed=1)
    student, prompts = near(teacher, 0.2).cuda(), some_prompts(6)
    teacher = teacher.cuda()
    counts = measure_drafts(teacher, student, tiny_tokenizer(), prompts, DraftOptions(4, max_new_tokens=14))
    each = [by_loops(teacher, student, prompt, 4, 14, VOCAB - 3) for prompt in prompts]
    assert counts.passes == sum(one.passes for one in each) and counts.same == len(prompts)
