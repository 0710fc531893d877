"""On-policy distillation: whose completions, how sampled, the denominator, metrics, rows of only prompts, refusals."""

import copy
import inspect
import math
import warnings

import pytest
import torch
import yaml
from datasets import Dataset
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from splits import capture_gradients
from tiny import (
    VOCAB,
    assert_same_gradients,
    chats,
    completions,
    double_copy,
    kl,
    texts,
    tiny_model,
    tiny_tokenizer,
    train_args,
)
from trainings import OnStep, a_teacher, batches_of, distill, logged, supervised_logits, trained
from trl.generation import vllm_generation
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from liger_trainer import LigerDistillConfig, patch
from liger_trainer.config.run_config import check_text
from liger_trainer.errors import ConfigError, DataError
from liger_trainer.trainers import on_policy as on_policy_file
from liger_trainer.trainers.decoder import ModelSampler
from liger_trainer.trainers.on_policy import DATASET, STUDENT, TEACHER, prompts_of, rows_of, sources
from liger_trainer.trainers.options import NOTHING_SAMPLED
from liger_trainer.trainers.rows import AllowedIds
from liger_trainer.trainers.step_graphs import PADDING

EOS = VOCAB - 3


def make(data=None, eval_data=None, student=None, teacher=None, **options):
    return distill(student, teacher, data, eval_data, **{"max_completion_length": 6, "max_steps": 2, **options})


def sampler(**options):
    args = train_args(LigerDistillConfig, **{"max_completion_length": 6, **options})
    return ModelSampler(args, tiny_tokenizer(), AllowedIds(VOCAB))


def greedy(**options):
    return sampler(generation_kwargs={"do_sample": False}, **options)


PROMPTS = [[3, 4, 5, 6], [7], [8, 9]]


# Prompts and rows


def test_the_prompt_of_a_row_is_what_comes_before_its_first_supervised_token():
    ids = torch.arange(24).view(3, 8)
    labels = torch.full_like(ids, -100)
    labels[0, 3:6] = 1
    labels[1, 2] = labels[1, 6] = 1  # two turns: the first answer
    mask = torch.ones_like(ids)
    mask[2, 5:] = 0  # no completion at all, and padding
    batch = {"input_ids": ids, "labels": labels, "attention_mask": mask}
    assert prompts_of(batch) == [[0, 1, 2], [8, 9], [16, 17, 18, 19, 20]]
    labels[1, 0] = 1
    with pytest.raises(DataError, match="no prompt to complete"):
        prompts_of(batch)


def test_whose_completions_follows_from_seed_and_step():
    drawn = [sources(0.3, False, 42, step, 4) for step in range(500)]
    assert drawn == [sources(0.3, False, 42, step, 4) for step in range(500)]
    flat = [source for step in drawn for source in step]
    assert set(flat) == {STUDENT, DATASET}
    assert flat.count(STUDENT) / 2000 == pytest.approx(0.3, abs=3 * math.sqrt(0.21 / 2000))
    for lmbda, writer in ((1.0, STUDENT), (0.0, TEACHER)):
        assert {source for step in range(50) for source in sources(lmbda, True, 0, step, 3)} == {writer}
    assert sources(0.5, False, 1, 0, 8) != sources(0.5, False, 2, 0, 8)


# Sampling


def test_samples_follow_the_models_distribution_at_the_temperature():
    model, draws = tiny_model(), 5000
    model.generation_config.top_k, model.generation_config.temperature = 1, 9.0  # the model's own wishes do not count
    prompts = [[3, 4, 5] if i % 2 else [4, 5, 6, 7, 8] for i in range(draws)]  # padded on the left
    tokens = torch.tensor([t[0] for t in sampler(max_completion_length=1, temperature=0.7).sample(model, prompts, 1)])
    for start, prompt in enumerate((prompts[0], prompts[1])):
        want = (double_copy(model)(torch.tensor([prompt])).logits[0, -1] / 0.7).softmax(-1)
        got = torch.bincount(tokens[start::2], minlength=VOCAB) / (draws // 2)
        assert (got - want).abs().sum() / 2 < 0.06  # total variation; at temperature 1 it is 0.14
        hot = double_copy(model)(torch.tensor([prompt])).logits[0, -1].softmax(-1)
        assert (got - hot).abs().sum() / 2 > 0.1


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3", "gpt2"])
def test_a_patched_model_samples_what_the_unpatched_one_does(family):
    plain = tiny_model(family)
    want = sampler().sample(plain, PROMPTS, seed=3)
    patched = copy.deepcopy(plain)
    with patch(patched):
        assert sampler().sample(patched, PROMPTS, seed=3) == want
        slow = sampler(generation_kwargs={"use_cache": False}).sample(patched, PROMPTS, seed=3)
    assert slow == want and len({tuple(tokens) for tokens in want}) == 3
    for prompt, tokens in zip(PROMPTS, greedy().sample(plain, PROMPTS, 0), strict=True):
        unpadded = double_copy(plain)(torch.tensor([prompt + tokens])).logits[0].argmax(-1)[len(prompt) - 1 : -1]
        assert unpadded.tolist() == tokens  # padding on the left changes nothing


def test_a_mixture_of_experts_samples_without_its_auxiliary_loss():
    """transformers 5.23 cannot compute that loss for a batch with padding and a KV cache."""
    want = sampler().sample(tiny_model("mixtral", output_router_logits=False), PROMPTS, seed=3)
    student, teacher = tiny_model("mixtral"), tiny_model("mixtral", seed=5)
    assert sampler().sample(student, PROMPTS, seed=3) == want and student.config.output_router_logits
    trainer = make(student=student, teacher=teacher, lmbda=0.5, seq_kd=True, max_steps=1, gradient_accumulation_steps=6)
    log = trained(trainer).state.log_history[0]  # both have sampled
    assert 0 < log["on_policy_share"] < 1 and log["aux_loss"] > 0
    assert student.config.output_router_logits and teacher.config.output_router_logits


def test_a_completion_ends_with_the_first_end_of_sequence():
    """The tokenizer's, or one that the model declares."""
    model = tiny_model()
    model.generation_config.eos_token_id = [7, EOS]
    made = sampler().sample(model, PROMPTS * 40, seed=1)
    for tokens in made:
        assert not {7, EOS} & set(tokens[:-1]) and (tokens[-1] in (7, EOS) or len(tokens) == 6)
    assert {7, EOS} <= {tokens[-1] for tokens in made}


def test_sampling_leaves_modes_and_random_numbers_alone():
    model = tiny_model("phi").train()
    model.lm_head.eval()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    torch.manual_seed(7)
    before, modes = torch.get_rng_state(), [module.training for module in model.modules()]
    first = sampler().sample(model, PROMPTS, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert [module.training for module in model.modules()] == modes
    assert first == sampler().sample(tiny_model("phi"), PROMPTS, seed=1)  # without dropout
    assert first == sampler(generation_batch_size=None).sample(model, PROMPTS, 1) != sampler().sample(model, PROMPTS, 2)


def test_each_process_draws_for_itself(monkeypatch):
    prompts, drawn = [], []
    for rank in range(2):
        trainer = make(lmbda=1.0)
        monkeypatch.setattr(type(trainer.accelerator), "process_index", rank)
        seen = batches_of(trainer)
        trainer.train()
        prompts.append([prompts_of(batch) for batch in seen])
        drawn.append([batch["labels"].tolist() for batch in seen])
    assert prompts[0] == prompts[1] and all(one != other for one, other in zip(*drawn, strict=True))


ALIKE = {  # how a model samples that has these options: as one without them
    "in parts": ({}, {"generation_batch_size": 2, "generation_kwargs": {"do_sample": False}}),
    **{f"the model's own {name}": ({name: value}, {})
       for name, value in (("min_p", 1.0), ("no_repeat_ngram_size", 1), ("num_beams", 4))},
}  # fmt: skip


@pytest.mark.parametrize("case", ALIKE)
def test_what_leaves_samples_as_they_are(case):
    own, options = ALIKE[case]
    model, plain = tiny_model(), {name: x for name, x in options.items() if name != "generation_batch_size"}
    model.generation_config.update(**own)
    assert sampler(**options).sample(model, PROMPTS, 3) == sampler(**plain).sample(tiny_model(), PROMPTS, 3)
    assert all(getattr(model.generation_config, name) == value for name, value in own.items())


def test_adapters_sample_too():
    torch.manual_seed(0)
    lora = LoraConfig(target_modules="all-linear", r=4, lora_dropout=0.5, init_lora_weights=False)
    model = get_peft_model(tiny_model(), lora)
    made = sampler().sample(model.train(), PROMPTS, 4)
    assert made == sampler().sample(copy.deepcopy(model).merge_and_unload(), PROMPTS, 4)
    assert made != sampler().sample(tiny_model(), PROMPTS, 4)


def test_options_of_generation_reach_it():
    settings = sampler(
        top_p=0.9, top_k=5, min_p=0.1, repetition_penalty=1.3, temperature=0.6, kd_temperature=2.0,
        max_completion_length=3, cache_implementation="static", generation_kwargs='{"no_repeat_ngram_size": 2}',
    ).settings(tiny_model())  # fmt: skip
    got = (settings.top_p, settings.top_k, settings.min_p, settings.repetition_penalty, settings.temperature)
    assert got == (0.9, 5, 0.1, 1.3, 0.6) and settings.do_sample and settings.max_new_tokens == 3
    assert settings.no_repeat_ngram_size == 2 and settings.cache_implementation == "static"
    assert settings.eos_token_id == [EOS] and settings.pad_token_id == VOCAB - 4
    with pytest.raises(ConfigError, match="GenerationConfig has no frequency_penalty"):
        sampler(generation_kwargs={"frequency_penalty": 1.0}).settings(tiny_model())
    with pytest.raises(ConfigError, match="num_return_sequences must be 1"):
        sampler(generation_kwargs={"num_return_sequences": 2}).settings(tiny_model())


# Training


def completed(batch):
    """The prompts of a micro-batch, and the tokens behind them: of padded rows, or of those that lie end to end."""
    if "cu_seq_lens_q" in batch:
        sizes = batch["cu_seq_lens_q"].diff().tolist()
        rows = zip(*(batch[name][0].split(sizes) for name in ("input_ids", "labels")), strict=True)
    else:
        sizes = batch["attention_mask"].sum(1).tolist()
        rows = ((i[:n], x[:n]) for i, x, n in zip(batch["input_ids"], batch["labels"], sizes, strict=True))
    begins = [(ids.tolist(), int((labels != -100).int().argmax())) for ids, labels in rows]
    return [ids[:begin] for ids, begin in begins], [ids[begin:] for ids, begin in begins]


def test_a_step_is_on_the_students_own_completions_with_its_own_tokens_as_denominator():
    """Against the KL by hand in fp64, of exactly the sampled tokens, over micro-batches of unequal lengths."""
    student, teacher = tiny_model("llama_tied"), a_teacher()
    trainer = make(student=student, teacher=teacher, lmbda=1.0, max_completion_length=40, gradient_accumulation_steps=3,
                   per_device_train_batch_size=2, learning_rate=0.0, max_steps=1)  # fmt: skip
    given = [tiny_tokenizer()(prompt)["input_ids"] for prompt in completions()["prompt"]]
    collate = DataCollatorForLanguageModeling(pad_token_id=VOCAB - 4)
    seen, total, sizes, models = batches_of(trainer), 0.0, [], (double_copy(student), double_copy(teacher))
    logs = trained(trainer).state.log_history[0]
    assert len(seen) == 3
    for batch in seen:
        prompts, answers = completed(batch)
        rows = rows_of(prompts, answers)
        again = collate(rows)
        assert all(torch.equal(again[name], batch[name]) for name in again)
        assert all(prompt in given for prompt in prompts)
        assert all(len(answer) == 40 or answer.index(EOS) == len(answer) - 1 for answer in answers)
        for row in rows:
            with torch.no_grad():
                q, p, _ = supervised_logits(models, row)
            total += float(kl(p.log_softmax(-1), q.log_softmax(-1)).sum())
        sizes += map(len, answers)
    assert len(set(sizes)) > 1  # so that a mean of means would differ
    assert logs["loss"] == pytest.approx(total / sum(sizes), rel=1e-5)
    assert logs["forward_kl"] == pytest.approx(total / sum(sizes), rel=1e-5)
    assert logs["completion_length"] == pytest.approx(sum(sizes) / 6) and logs["on_policy_share"] == 1.0
    assert logs["sampled_tokens_per_second"] > 0 and not any("policy/" in name for name in logs)


@pytest.mark.parametrize("lmbda, seq_kd", [pytest.param(0.5, False, marks=pytest.mark.slow), (0.0, True), (0.5, True)])
def test_whose_tokens_they_are(lmbda, seq_kd):
    """Greedy, so that who wrote them shows."""
    models = {STUDENT: tiny_model(), TEACHER: a_teacher()}
    trainer = make(completions(16), student=models[STUDENT], teacher=models[TEACHER], lmbda=lmbda, seq_kd=seq_kd,
                   gradient_accumulation_steps=4, per_device_train_batch_size=2, learning_rate=0.0,
                   generation_kwargs={"do_sample": False})  # fmt: skip
    given = [row["input_ids"] for row in trainer.train_dataset]
    seen, found = batches_of(trainer), []
    trainer.train()
    for prompts, answers in map(completed, seen):
        writers = {name for name, model in models.items() if greedy().sample(model, prompts, 0) == answers}
        if all(prompt + answer in given for prompt, answer in zip(prompts, answers, strict=True)):
            writers.add(DATASET)
        (writer,) = writers
        found.append(writer)
    want = [source for step in range(2) for source in sources(lmbda, seq_kd, 42, step, 4)]
    assert found == want and (len(set(want)) == 2) == (lmbda == 0.5)


def test_gradient_checkpointing_keeps_the_cache_and_is_back_for_the_step():
    logs = []
    for checkpointing in (False, True):
        trainer = make(lmbda=1.0, gradient_checkpointing=checkpointing)
        widths, trained = [], []

        def look(layer, args, kwargs, trained=trained, widths=widths):
            (trained if layer.training else widths).append((args[0] if args else kwargs["hidden_states"]).shape[1])

        trainer.student.model.layers[0].register_forward_pre_hook(look, with_kwargs=True)
        trainer.train()
        assert set(widths[1:6]) == {1}  # one token at a time
        assert trainer.student.is_gradient_checkpointing == checkpointing and len(trained) >= 2
        logs.append(logged(trainer))
    assert logs[0] == pytest.approx(logs[1], rel=1e-5)


def test_runs_repeat_and_resume(tmp_path):
    options = {"lmbda": 0.5, "seq_kd": True, "max_steps": 2, "save_strategy": "steps", "save_steps": 1,
               "gradient_accumulation_steps": 4, "per_device_train_batch_size": 2}  # fmt: skip
    whole, resumed, seeded = (make(output_dir=str(tmp_path / f"{seed}"), seed=seed, **options) for seed in (42, 42, 1))
    trained(whole)
    trained(seeded)
    trained(resumed, str(tmp_path / "42" / "checkpoint-1"))
    for got, want in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)
    assert not torch.equal(seeded.model.lm_head.weight, whole.model.lm_head.weight)


@pytest.mark.parametrize("how", ["packed", "filled", "padded"])
@pytest.mark.parametrize("student", ["llama", "adapters"])
def test_sampled_rows_lie_end_to_end_or_next_to_those_of_like_length(how, student, monkeypatch):
    """All rows of the step once, each with its own completion. Loss and gradients are those of padded rows in order."""
    options = {"lmbda": 1.0, "max_steps": 1, "gradient_accumulation_steps": 3, "per_device_train_batch_size": 2,
               "max_completion_length": 40}  # fmt: skip

    def train():
        model, teacher = tiny_model(), tiny_model("qwen3", seed=5)
        if student == "adapters":
            model, teacher = get_peft_model(model, LoraConfig(init_lora_weights=False)), "self"
        trainer = make(completions(6), student=model, teacher=teacher, **options)
        trainer._on_policy._packs &= how != "padded"
        if how == "filled":  # as with layers in graphs
            trainer._on_policy._collate.pad_to_multiple_of = 8
        seen, gradients = batches_of(trainer), capture_gradients(trainer)
        return trained(trainer).state.log_history[0], seen, gradients

    logs, seen, gradients = train()
    monkeypatch.setattr(on_policy_file, "_OF_ANY_ROWS", set())
    want, in_order, wanted = train()

    def rows(batches):
        return sorted((a, b) for batch in batches for a, b in zip(*completed(batch), strict=True))

    sizes = [batch["input_ids"].numel() for batch in seen]
    assert all(("attention_mask" in batch) == (how == "padded") != ("cu_seq_lens_q" in batch) for batch in seen)
    if how == "filled":
        assert all(size % 16 == 0 for size in sizes)
        for batch in seen:
            tokens = batch["input_ids"].numel() - batch[PADDING]
            assert (batch["labels"][0, tokens:] == -100).all()
            batch |= {name: batch[name][:, :tokens] for name in ("input_ids", "labels")}
            batch["cu_seq_lens_q"] = batch["cu_seq_lens_q"].clamp(max=tokens).unique()
    lengths = [[len(prompt) + len(answer) for prompt, answer in rows([batch])] for batch in seen]
    if how == "packed":
        assert sizes == [sum(each) for each in lengths] and max(sizes) - min(sizes) < max(sum(lengths, []))
    assert rows(seen) == rows(in_order)
    assert sum(sizes) < sum(batch["input_ids"].numel() for batch in in_order)
    names = ("loss", "grad_norm", "completion_length", "num_tokens", "reverse_kl")
    assert [logs[name] for name in names] == pytest.approx([want[name] for name in names], rel=1e-5)
    assert_same_gradients(gradients, wanted)


def test_who_keeps_padded_rows():
    """Own attention, eager attention, prefixes, teachers that look at rows."""
    prefixes = get_peft_model(tiny_model(), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    for model, teacher, options in (
        (None, tiny_model("qwen3"), {"attention": "model"}),
        (None, tiny_model("gemma2"), {}),
        (prefixes, tiny_model("qwen3"), {}),
        (tiny_model("gpt2"), tiny_model("gpt2", seed=1), {}),
    ):
        trainer = make(lmbda=1.0, student=model, teacher=teacher, **options)
        seen = batches_of(trainer)
        trainer.train()
        assert seen and all("attention_mask" in batch for batch in seen)


def test_the_ranks_rows_are_dealt_out_by_turns(monkeypatch):
    """Of as many rows each; else each rank keeps its own. That the gradients stay is in engines/."""
    trainer = make(lmbda=1.0)
    for lengths, parts, want in (
        (((9, 2, 5, 1), (3, 8, 4, 7)), 1, [[9, 7, 4, 2], [8, 5, 3, 1]]),
        (((9, 2, 5, 1), (3, 8, 4, 7)), 2, [[9, 4, 7, 2], [8, 3, 5, 1]]),
        (((9, 2, 5, 1), (3, 8)), 1, [[9, 5, 2, 1], [8, 3]]),
    ):
        rows = [[{"input_ids": [0] * n} for n in each] for each in lengths]
        monkeypatch.setattr(on_policy_file, "gather_object", lambda _, rows=rows: rows)
        for rank in range(2):
            monkeypatch.setattr(type(trainer.accelerator), "process_index", rank)
            dealt = trainer._on_policy._dealt(rows[rank], parts)
            assert [len(row["input_ids"]) for row in dealt] == want[rank]


@pytest.mark.parametrize("sampler", ["generate", "graphs"])
def test_completions_grow_by_a_schedule_and_the_rest_is_as_without(sampler, tmp_path):
    """Prefixes of what would be sampled without it, as long as the schedule says, also after a resume."""
    schedule = {"max_completion_length": {"from": 2, "to": 6, "steps": 4}}
    options = {"lmbda": 1.0, "max_steps": 6, "learning_rate": 0.0, "sampler": sampler, "save_strategy": "steps",
               "save_steps": 2, "generation_kwargs": {"eos_token_id": -1, "do_sample": False}}  # fmt: skip
    trainer = make(schedules=schedule, output_dir=str(tmp_path / "a"), **options)
    seen = batches_of(trainer)
    assert logged(trained(trainer), "completion_length") == [2, 3, 4, 5, 6, 6]
    assert logged(trainer, "schedule/max_completion_length") == [2.0, 3.0, 4.0, 5.0, 6.0, 6.0]
    whole = make(output_dir=str(tmp_path / "b"), **options)
    all_of = batches_of(whole)
    whole.train()
    for batch, full, length in zip(seen, all_of, (2, 3, 4, 5, 6, 6), strict=True):
        assert completed(batch) == (completed(full)[0], [tokens[:length] for tokens in completed(full)[1]])
    again = make(schedules=schedule, output_dir=str(tmp_path / "a"), **options)
    assert logged(trained(again, str(tmp_path / "a" / "checkpoint-2")), "completion_length") == [2, 3, 4, 5, 6, 6]


def test_metrics_are_split_by_whose_completions_they_are_at_no_extra_forward():
    trainer = make(lmbda=0.5, gradient_accumulation_steps=4, learning_rate=0.0, max_steps=1)
    seen, passes = batches_of(trainer), []
    trainer.teacher.register_forward_pre_hook(lambda *_: passes.append(1))
    trainer.train()
    logs, tokens = trainer.state.log_history[0], {"on_policy": 0, "off_policy": 0}
    for batch, source in zip(seen, sources(0.5, False, 42, 0, 4), strict=True):
        tokens["on_policy" if source == STUDENT else "off_policy"] += int((batch["labels"][:, 1:] != -100).sum())
    assert all(tokens.values()) and len(passes) == 4
    for name in ("forward_kl", "reverse_kl", "kd_loss", "ce_loss", "agreement_at_1", "teacher_entropy"):
        parts = sum(tokens[part] * logs[f"{part}/{name}"] for part in tokens) / sum(tokens.values())
        assert parts == pytest.approx(logs[name], rel=1e-6) and logs[f"on_policy/{name}"] != logs[f"off_policy/{name}"]
    assert logs["on_policy_share"] == sources(0.5, False, 42, 0, 4).count(STUDENT) / 4
    assert not any(name.endswith("policy/entropy") for name in logs)


def test_lmbda_may_change_while_training_and_logs_after_a_resume_are_what_they_would_have_been(tmp_path):
    trainer = make(max_steps=2)
    trainer.add_callback(OnStep(lambda: setattr(trainer, "lmbda", 1.0)))
    first, second = trained(trainer).state.log_history[:2]
    assert "on_policy_share" not in first and second["on_policy_share"] == 1.0
    schedule = {"lmbda": {"from": 0.0, "to": 1.0, "steps": 2}}
    options = {"schedules": schedule, "max_steps": 4, "save_strategy": "steps", "save_steps": 3}
    whole, resumed = (make(output_dir=str(tmp_path), **options) for _ in range(2))
    logs = trained(whole).state.log_history[:3]
    assert [entry["schedule/lmbda"] for entry in logs] == [0.0, 0.5, 1.0] and whole.lmbda == 1.0
    drawn = [sources(lmbda, False, 42, step, 1).count(STUDENT) for step, lmbda in enumerate((0.0, 0.5, 1.0))]
    assert [entry["on_policy_share"] for entry in logs] == drawn
    trained(resumed, str(tmp_path / "checkpoint-3"))
    want, got = (trainer.state.log_history[3] for trainer in (whole, resumed))
    assert want["step"] == 4 and want.keys() == got.keys() and "on_policy/forward_kl" in want


def test_the_evaluation_is_on_the_datasets_completions():
    want, got = (make(eval_data=completions(6), lmbda=lmbda).evaluate() for lmbda in (0.0, 1.0))
    assert got["eval_forward_kl"] == want["eval_forward_kl"] and got["eval_loss"] == want["eval_loss"]
    assert not any("policy" in name for name in got)


@pytest.mark.parametrize("options", [{"lmbda": 0.999}, {"seq_kd": True}], ids=["student", "base"])
def test_the_student_without_its_adapters_as_teacher(options):
    """The adapters are as they were drawn, so the two are equal and there is nothing to learn but from the labels, and
    the student's own tokens are none."""
    trainer = make(teacher="self", losses=[{"type": "forward_kl"}, {"type": "ce"}], peft_config=LoraConfig(r=4),
                   generation_kwargs={"do_sample": False}, **options)  # fmt: skip
    seen = batches_of(trainer)
    first, second = trained(trainer).state.log_history[:2]
    assert abs(first["forward_kl"]) < 1e-6 and (second["forward_kl"] > 1e-6) == ("seq_kd" in options)  # they learn
    prompts, answers = completed(seen[0])
    assert answers == greedy().sample(tiny_model(), prompts, 0)


# Rows

THINKING = (  # as DeepSeek-R1's: a turn that is asked for is opened, and one that is written is not
    "{% for m in messages %}{{ '<' ~ m.role ~ '> ' ~ m.content ~ ' ' }}{% if m.role == 'assistant' %}"
    "{% generation %}<eos> {% endgeneration %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant> w7 {{ 'w8 ' if quick }}{% endif %}"
)


def pairs(n=6, **more):
    """Rows with the prompt as text, or as a chat, and an answer to it."""
    return [
        {"prompt": [{"role": "user", "content": f"w{i}"}],
         "completion": [{"role": "assistant", "content": f"w{i + 9}"}], **more} for i in range(n)
    ]  # fmt: skip


ASKED = {
    "prompt and completion": (pairs(), {}),
    "template options": (pairs(chat_template_kwargs={"quick": True}), {}),
    "messages": ([{"messages": row["prompt"] + row["completion"] + row["prompt"]} for row in pairs()],
                 {"assistant_only_loss": True}),
    "cut at the front": (pairs(), {"truncation_mode": "keep_end", "max_length": 3}),
    "the teacher's": (pairs(), {"lmbda": 0.0, "seq_kd": True}),
    "stream": (pairs(), {}),
}  # fmt: skip


@pytest.mark.parametrize("case", ASKED)
def test_a_prompt_ends_where_the_template_asks_for_an_answer(case):
    """Not where the texts of the prompt, and of prompt and completion, part."""
    rows, options = ASKED[case]
    tokenizer, data = tiny_tokenizer(), Dataset.from_list(rows)
    tokenizer.chat_template = THINKING
    data = data.to_iterable_dataset() if case == "stream" else data
    trainer = make(data, max_steps=1, processing_class=tokenizer, **{"lmbda": 1.0, **options})
    seen = batches_of(trainer)
    trainer.train()
    how = {"add_generation_prompt": True, "return_dict": True, "quick": case == "template options"}
    want = [tokenizer.apply_chat_template(pair["prompt"], **how)["input_ids"] for pair in pairs()]
    want = [prompt[-3:] for prompt in want] if case == "cut at the front" else want
    assert prompts_of(seen[0]) and all(prompt in want for prompt in prompts_of(seen[0]))
    assert "generation_prompt" not in seen[0]


def test_chats_are_not_sampled_where_their_prompts_were_not_prepared():
    trainer = make(chats(8), assistant_only_loss=True)
    trainer.lmbda = 1.0
    with pytest.raises(ConfigError, match="lmbda was 0.0 when the chats were prepared"):
        trainer.train()


@pytest.mark.parametrize("lmbda, seq_kd, learned", [(0.999, False, 0.0), (0.0, True, 1.0), (0.0, False, 1.0)])
def test_cross_entropy_is_of_given_completions(lmbda, seq_kd, learned):
    """Those of the dataset, and those of the teacher, which are given to the student."""
    losses = [{"type": "forward_kl", "weight": 0.5}, {"type": "ce"}]
    log = trained(make(lmbda=lmbda, seq_kd=seq_kd, losses=losses, max_steps=1)).state.log_history[0]
    assert log["loss"] == pytest.approx(log["kd_loss"] + learned * log["ce_loss"], rel=1e-5)


def prompts_only(n=12, chat=False):
    texts = completions(n)["prompt"]
    return Dataset.from_list([{"prompt": [{"role": "user", "content": p}] if chat else p} for p in texts])


@pytest.mark.parametrize("chat, options", [(False, {"lmbda": 1.0}), (True, {"lmbda": 0.5, "seq_kd": True})],
                         ids=["text", "chat"])  # fmt: skip
def test_rows_of_prompts_alone(chat, options):
    trainer = make(prompts_only(chat=chat), prompts_only(4, chat), max_steps=1, learning_rate=0.0, **options)
    assert trainer.prompts_alone == {"train", "eval"} and trainer.row_facts["train"].rows == 12
    tokenizer = tiny_tokenizer()
    want = [tokenizer(p)["input_ids"] for p in prompts_only()["prompt"]]
    if chat:
        user, assistant = tokenizer.convert_tokens_to_ids(["<user>", "<assistant>"])
        want = [[user, *p, assistant] for p in want]
    assert list(trainer.train_dataset["input_ids"]) == want
    seen = batches_of(trainer)
    trainer.train()
    assert all(prompt in want for prompt in prompts_of(seen[0]))
    first = trainer.evaluate()
    assert math.isfinite(first["eval_forward_kl"]) and first["eval_forward_kl"] == trainer.evaluate()["eval_forward_kl"]


def test_prompts_alone_that_come_with_an_evaluation():
    trainer = make(max_steps=1)
    got = trainer.evaluate(prompts_only(4))
    assert got["eval_forward_kl"] == make(eval_data=prompts_only(4), lmbda=1.0).evaluate()["eval_forward_kl"]
    trainer.train()
    assert trainer.state.log_history[-2]["on_policy_share"] == 0  # the rows of training are as they were


def test_prompts_that_fill_max_length_are_left_out_and_counted():
    rows = prompts_only(24)
    lengths = [len(row["prompt"].split()) for row in rows]
    trainer = make(rows, lmbda=1.0, max_length=4)
    facts = trainer.row_facts["train"]
    assert facts.rows_dropped == sum(n >= 4 for n in lengths) > 0 and facts.sequences == len(trainer.train_dataset)
    assert trainer.skipped_rows["train"] == facts.rows_dropped
    with pytest.raises(DataError, match="Every prompt of the train dataset has max_length=2 tokens or more"):
        make(rows, lmbda=1.0, max_length=2)


# vLLM


class FakeVLLM:
    """TRL's class without vLLM: answers with the student's current weights, greedily, when they were sent."""

    made: list = []

    def __init__(self, model, accelerator, processing_class, **options):
        self.model, self.options, self.synced, self.steps = model, options, [], []
        FakeVLLM.made.append(self)

    def sync_weights(self):
        self.synced.append({name: p.detach().clone() for name, p in self.model.named_parameters()})

    def generate(self, prompts, images, num_generations, profiler=None):
        assert images is None and num_generations == 1 and all(isinstance(p, list) for p in prompts)
        assert all(torch.equal(p, self.synced[-1][name]) for name, p in self.model.named_parameters())
        self.steps.append(len(prompts))
        return prompts, [[5, EOS, 6, 6] if i % 2 else [7, 8] for i, _ in enumerate(prompts)], None, None


@pytest.fixture
def vllm(monkeypatch):
    FakeVLLM.made = []
    monkeypatch.setattr(vllm_generation, "VLLMGeneration", FakeVLLM)
    monkeypatch.setattr(vllm_generation, "is_vllm_available", lambda: True)
    return FakeVLLM


def test_vllm_samples_for_the_student_with_the_weights_of_the_step(vllm):
    plain = list(dict(tiny_model().named_parameters()))
    trainer = make(
        lmbda=1.0, use_vllm=True, vllm_mode="server", vllm_server_port=8123, top_p=0.9, temperature=0.7, max_steps=3,
        gradient_accumulation_steps=2, per_device_train_batch_size=2, generation_kwargs={"frequency_penalty": 0.1},
    )  # fmt: skip
    (engine,) = vllm.made
    wanted = {
        "mode": "server", "server_port": 8123, "top_p": 0.9, "temperature": 0.7, "max_completion_length": 6,
        "max_num_seqs": 4, "generation_kwargs": {"frequency_penalty": 0.1}, "logprobs": None, "group_port": 51216,
    }  # fmt: skip
    assert {name: engine.options[name] for name in wanted} == wanted
    assert list(dict(engine.model.named_parameters())) == plain  # patched, under the same names
    seen = batches_of(trainer)
    trainer.train()
    assert len(engine.synced) == 3 and engine.steps == [4, 4, 4]
    assert not torch.equal(engine.synced[0]["lm_head.weight"], engine.synced[2]["lm_head.weight"])
    answers = [row[row != -100].tolist() for batch in seen for row in batch["labels"]]
    assert sorted(answers) == sorted([[7, 8], [5, EOS]] * 6)
    assert trainer.state.log_history[0]["completion_length"] == 2.0


def test_vllm_that_is_not_installed_and_the_options_of_trls_class(vllm, monkeypatch):
    make(lmbda=1.0, use_vllm=True)
    monkeypatch.undo()
    known = inspect.signature(vllm_generation.VLLMGeneration).parameters
    assert set(vllm.made[0].options) <= known.keys()
    monkeypatch.setattr(vllm_generation, "is_vllm_available", lambda: False)
    with pytest.raises(ConfigError, match=r"vllm is not installed. `pip install trl\[vllm\]`"):
        make(lmbda=1.0, use_vllm=True)


# Refusals


COLLATOR = {"data_collator": lambda rows: {}}
REFUSED = {
    "packing": (completions, {"lmbda": 1.0, "packing": True, "max_length": 24}, "set packing and padding_free to fal"),
    "texts": (texts, {"lmbda": 0.5}, "A row has no prompt to complete"),
    "chats": (chats, {"seq_kd": True}, "A row has no prompt to complete"),
    "prompts": (prompts_only, {"lmbda": 0.5}, "training rows have prompts and no completions: set lmbda to 1.0"),
    "prompts later": (
        prompts_only, {"lmbda": 1.0, "schedules": {"lmbda": {"to": 0.5}}},
        "training rows have prompts and no completions: set lmbda to 1.0",
    ),
    "a collator": (completions, {"lmbda": 1.0, **COLLATOR}, "rows with sampled completions are batched by TRL's own"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_sampled_is_refused(case):
    rows, options, message = REFUSED[case]
    with pytest.raises((ConfigError, DataError), match=message):
        make(rows(), **options)
    if case == "texts":
        make(rows())  # as ever


def test_what_cannot_be_sampled_later_is_refused(monkeypatch):
    only_prompts, without_knowledge, sharded = make(prompts_only(), lmbda=1.0), make(), make()
    only_prompts.lmbda = 0.5
    with pytest.raises(ConfigError, match="rows have only prompts, but lmbda is 0.5"):
        only_prompts.train()
    without_knowledge.teaching.knows_new_tokens, without_knowledge.lmbda = False, 1.0
    with pytest.raises(ConfigError, match="knows only the completions of the dataset"):
        without_knowledge.train()
    sharded.is_fsdp_enabled, sharded.lmbda = True, 1.0
    with pytest.raises(ConfigError, match="not from one that FSDP1 or tensor parallelism splits"):
        sharded.get_batch_samples(iter(()), 1, torch.device("cpu"))
    monkeypatch.setattr(type(sharded.accelerator), "is_fsdp2", True)
    sharded.args.use_vllm = True
    with pytest.raises(ConfigError, match="Under FSDP2 and ZeRO-3 the student, or its own teacher, samples by"):
        sharded.get_batch_samples(iter(()), 1, torch.device("cpu"))


# What has no effect, or does not go together

YAML = "model_name_or_path: s\nteacher_model_name_or_path: t\ndataset_name: d\nrecipe: distill\n"
NO_VLLM = "has no effect without `use_vllm: true`."


MODEL_ONLY = {"eval_data": prompts_only(4)}
IN_VAIN: list[tuple[dict, dict[str, str]]] = [  # options, and what is said of some of them
    ({"top_p": 0.9, "use_vllm": True}, {"top_p": NOTHING_SAMPLED, "use_vllm": NOTHING_SAMPLED}),
    *(({"top_p": 0.9, **sampled}, {}) for sampled in ({"lmbda": 0.5}, {"seq_kd": True}, MODEL_ONLY)),
    ({"top_p": 0.9, "schedules": {"lmbda": {"to": 0.5}}}, {}),
    ({"lmbda": 1.0, "vllm_mode": "server"}, {"vllm_mode": NO_VLLM}),
]


@pytest.mark.parametrize("options, said", IN_VAIN)
def test_options_of_sampling_without_effect_are_told_in_a_file_and_by_the_trainer(options, said):
    """The trainer knows whether an evaluation samples."""
    if options.keys().isdisjoint(MODEL_ONLY):
        notices = check_text(YAML + yaml.safe_dump(options), "run.yaml").notices
        found = {finding.key: finding.message for finding in notices}
        assert found.keys() == said.keys() and all(found[key].startswith(said[key]) for key in said)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make(max_completion_length=512, **options)
    words = [f"{key} {message}" for key, message in said.items()]
    assert [str(w.message) for w in caught if "no effect" in str(w.message)] == words


def test_sampled_completions_are_not_logged():
    (finding,) = check_text(YAML + "lmbda: 1.0\nlog_completions: true\n", "run.yaml").notices
    assert finding.message.startswith("has no effect: sampled completions are not logged")
