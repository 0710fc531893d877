"""Trainings on packed rows: attention by lengths for student and teacher, in training and evaluation."""

import pytest
import torch
import trainings
from packed import SquareTensors
from peft import LoraConfig, PrefixTuningConfig
from tiny import assert_same_gradients, completions, gradients, texts, tiny_model
from trainings import OnStep, logged, trained
from transformers import MambaConfig, MambaForCausalLM, masking_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from trl import SFTConfig, SFTTrainer

from liger_trainer import DistillationCallback, LigerConfig
from liger_trainer.errors import ConfigError

PACKING = {"packing": True, "max_length": 24, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2}
PACKED = "liger_packed_sdpa"


def sft(model=None, data=None, **options):
    model = tiny_model("qwen3") if model is None else model
    options = {**PACKING, "config": LigerConfig, "max_steps": 2, **options}
    return trainings.sft(model, texts(16) if data is None else data, **options)


def distill(student, teacher, **options):
    return trainings.distill(student, teacher, completions(16), **PACKING, max_steps=2, **options)


def losses_of(trainer):
    return logged(trained(trainer))


def first_batch(trainer):
    return next(iter(trainer.get_train_dataloader()))


def test_a_trained_model_is_exported():
    """torch.export cannot read lengths of documents, so its graph has the model's own mask."""
    model = sft(max_steps=1).model.eval()
    ids = torch.arange(12).view(2, 6)
    graph = torch.export.export(model, (), {"input_ids": ids, "use_cache": False}).module()
    with torch.no_grad():
        torch.testing.assert_close(graph(input_ids=ids, use_cache=False).logits, model(ids).logits)


def test_auto_and_model_train_alike():
    """With gradient checkpointing, where the backward has to find the documents again."""
    by_lengths, own = (
        sft(tiny_model("gemma3"), attention=attention, gradient_checkpointing=True, eval_packing=True,
            eval_data=texts(8, seed=1)) for attention in ("auto", "model")
    )  # fmt: skip
    assert by_lengths.model.config._attn_implementation == PACKED and own.model.config._attn_implementation == "sdpa"
    assert "packed attention" in str(by_lengths.patched.report) and "packed" not in str(own.patched.report)
    assert by_lengths.evaluate()["eval_loss"] == pytest.approx(own.evaluate()["eval_loss"], rel=1e-6)
    assert losses_of(by_lengths) == pytest.approx(losses_of(own), rel=1e-5)
    assert_same_gradients(dict(by_lengths.model.named_parameters()), dict(own.model.named_parameters()), 1e-4)


def test_transformers_is_not_asked_for_documents(monkeypatch):
    """Its answer would wait for the device. Lengths come with the batch; they do not where rows are padded."""
    asked, find = [], masking_utils.find_packed_sequence_indices
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda ids: asked.append(ids) or find(ids))
    replaced = masking_utils.find_packed_sequence_indices
    sft(eval_data=texts(8, seed=1)).train()
    assert not asked and masking_utils.find_packed_sequence_indices is replaced
    sft(attention="model").train()
    assert asked


def test_a_step_is_that_of_documents_one_by_one():
    """Through TRL's packing and collator, compared with rows of one document."""
    data = texts(12, seed=3)
    steps = []
    for how in ({"per_device_train_batch_size": 8}, {"packing": False, "per_device_train_batch_size": 12}):
        trainer = sft(tiny_model("qwen3"), data=data, **how, max_length=32)
        batch = first_batch(trainer)
        items = (batch["labels"][:, 1:] != -100).sum()
        trainer.compute_loss(trainer.model, batch, num_items_in_batch=items).backward()
        steps.append(gradients(trainer.model))
    assert_same_gradients(*steps, 1e-4)


def test_no_tensor_has_two_sides_of_the_row():
    trainer = sft(attention="auto")
    batch = first_batch(trainer)
    length = batch["input_ids"].shape[1]
    assert length not in (32, 48, 64) and len(batch["cu_seq_lens_q"]) > 3
    with SquareTensors(length) as squares:
        trainer.compute_loss(trainer.model, batch, num_items_in_batch=torch.tensor(20)).backward()
    assert not squares.operations


@pytest.mark.parametrize("kind", ["model", "self", "several"])
def test_teachers_read_packed_rows_by_lengths_too(kind):
    losses = []
    for attention, name in (("auto", PACKED), ("model", "sdpa")):
        student, one, two = tiny_model("qwen3"), tiny_model("llama", seed=1), tiny_model("gemma3", seed=2)
        teacher, options, teachers = one, {}, [one]
        if kind == "self":
            lora = LoraConfig(target_modules="all-linear", r=2, task_type="CAUSAL_LM")
            teacher, options, teachers = "self", {"peft_config": lora}, []
        elif kind == "several":
            teacher, teachers = {"one": one, "two": two}, [one, two]
        trainer = distill(student, teacher, attention=attention, **options)
        assert {model.config._attn_implementation for model in (student, *teachers)} == {name}
        losses.append(losses_of(trainer))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_the_model_is_given_back_and_checkpoints_say_nothing_of_it(tmp_path):
    model = tiny_model("qwen3")
    trainer = sft(model, output_dir=str(tmp_path), save_strategy="steps", save_steps=1)
    trainer.train()
    assert model.config._attn_implementation == PACKED
    for file in tmp_path.rglob("*.json"):
        assert "liger_packed" not in file.read_text()
    trainer.patched.undo()
    assert model.config._attn_implementation == "sdpa"
    for attention, name in (("model", "sdpa"), ("auto", PACKED), ("model", "sdpa")):
        assert sft(model, attention=attention).model.config._attn_implementation == name


@pytest.mark.parametrize("options", [{"packing": False}, {"packing": True, "packing_strategy": "wrapped"}])
def test_rows_that_are_one_sequence_need_no_mask(options, monkeypatch):
    """Padding stands behind the tokens, so a causal mask adds nothing."""
    trainers = {name: sft(attention=name, data=texts(16), **options) for name in ("model", "auto")}
    assert trainers["model"].packed_rows is None
    assert trainers["model"].model.config._attn_implementation == "sdpa"
    want, made = losses_of(trainers["model"]), []
    sdpa_mask = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS, "sdpa", lambda **how: made.append(1) or sdpa_mask(**how))
    assert losses_of(trainers["auto"]) == pytest.approx(want, rel=1e-5)
    assert not made


def test_padding_in_front_keeps_its_mask():
    """Outside of a step nobody has promised where padding is."""
    model = sft(packing=False).model.eval()
    ids, mask = torch.randint(5, 50, (2, 9)), torch.ones(2, 9, dtype=torch.int64)
    mask[0, :4] = 0
    logits = model(input_ids=ids, attention_mask=mask, position_ids=mask.cumsum(1).sub(1).clamp(0)).logits
    unpadded = model(input_ids=ids[:1, 4:]).logits
    torch.testing.assert_close(logits[:1, 4:], unpadded, rtol=1e-4, atol=1e-5)


def test_evaluation_alone_is_not_packed():
    """TRL's collator would lay out such rows as if each were one document."""
    with pytest.raises(ConfigError, match="eval_packing: TRL's collator"):
        sft(packing=False, eval_packing=True, eval_data=texts(8, seed=1))
    sft(packing=False, padding_free=True, max_length=None, eval_data=texts(8, seed=1))


def test_a_collator_of_one_s_own():
    """Positions that start again are enough."""

    def collate(rows):
        ids = torch.cat([torch.tensor(row["input_ids"]) for row in rows])[None]
        positions = torch.cat([torch.arange(len(row["input_ids"])) for row in rows])[None]
        return {"input_ids": ids, "labels": ids.masked_fill(positions == 0, -100), "position_ids": positions}

    data = texts(8)
    trainer = sft(data=data, packing=False, data_collator=collate, per_device_train_batch_size=8, max_steps=1)
    assert trainer.model.config._attn_implementation == PACKED
    padded = sft(data=data, packing=False, per_device_train_batch_size=8, max_steps=1)
    assert losses_of(trainer) == pytest.approx(losses_of(padded), rel=1e-5)


def test_the_callback_reads_packed_rows_by_lengths():
    teacher, seen = tiny_model("llama", seed=1), []
    student, trls = tiny_model("qwen3"), {"config": SFTConfig, "cls": SFTTrainer}
    trainer = sft(student, callbacks=[DistillationCallback(teacher)], **trls)
    look = OnStep(lambda: seen.append([model.config._attn_implementation for model in (student, teacher)]))
    trainer.add_callback(look)
    trainer.train()
    assert seen == [[PACKED, PACKED]] * 2
    assert student.config._attn_implementation == "sdpa"
    assert sft(config=SFTConfig).model.config._attn_implementation == PACKED  # TRL's arguments in our trainer


def test_models_that_mix_documents_are_refused():
    config = MambaConfig(
        vocab_size=64, hidden_size=32, state_size=4, num_hidden_layers=2, pad_token_id=60, eos_token_id=61,
        tie_word_embeddings=False,
    )  # fmt: skip
    for make in (sft, lambda model: distill(tiny_model(), model)):
        with pytest.raises(ConfigError, match="position_ids"):
            make(MambaForCausalLM(config))
    sft(MambaForCausalLM(config), packing=False)
    with pytest.raises(ConfigError, match="PREFIX_TUNING"):
        sft(peft_config=PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
