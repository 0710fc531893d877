"""LigerTrainer and LigerDistillTrainer on rows with images: losses and gradients are stock's, image by image."""

import copy

import pytest
import torch
import transformers
from datasets import Dataset
from packaging.version import Version
from peft import LoraConfig
from tiny import (
    assert_same_gradients,
    completions,
    divergence_by_hand,
    gradients,
    named_gradients,
    spread_weights,
    tiny_model,
    train_args,
)
from trl import SFTConfig, SFTTrainer
from vision import VISION_FAMILIES, picture_answers, picture_chats, vision_model, vision_processor

from liger_trainer import DistillationCallback, LigerConfig, LigerDistillConfig, LigerDistillTrainer, LigerTrainer
from liger_trainer.errors import ConfigError, DataError
from liger_trainer.losses.model_parts import placeholder_ids
from liger_trainer.trainers.images import vision_tower

MARKS = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.18"), reason="TRL wants 5.18 for assistant_only_loss with images"
)


def families(*quick):
    """All of them; the default run has those that are named."""
    names = [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in VISION_FAMILIES]
    return pytest.mark.parametrize("family", names)


_QUICK = {("qwen2_5_vl", picture_chats), ("gemma3", picture_answers)}
families_and_rows = pytest.mark.parametrize(
    ("family", "rows"),
    [
        pytest.param(
            family, rows, id=f"{family}, {rows.__name__}", marks=[] if (family, rows) in _QUICK else pytest.mark.slow
        )
        for family in VISION_FAMILIES
        for rows in (picture_chats, picture_answers)
    ],
)


def trainer_of(trainer_class, config_class, family, rows, model=None, arguments=None, **options):
    processor = vision_processor(family)
    options = {"max_length": None, "per_device_train_batch_size": 2, **options}
    return trainer_class(
        model or vision_model(family, processor), args=train_args(config_class, **options), train_dataset=rows,
        eval_dataset=rows.select(range(3)), processing_class=processor, **(arguments or {}),
    )  # fmt: skip


def first_step(trainer, count=2):
    """Loss and gradients of the first rows."""
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(count)])
    trainer.model.train()
    loss = trainer.compute_loss(trainer.model, dict(batch))
    trainer.model.zero_grad()
    loss.backward()
    return loss.item(), gradients(trainer.model), batch


@families_and_rows
def test_loss_and_gradients_are_those_of_trl(family, rows):
    """Also the weights and losses after steps, by the optimizer, and the evaluation."""
    data = rows(6)
    stock = trainer_of(SFTTrainer, SFTConfig, family, data, max_steps=2)
    ours = trainer_of(LigerTrainer, SFTConfig, family, data, max_steps=2)
    want, got = first_step(stock), first_step(ours)
    assert got[0] == pytest.approx(want[0], rel=1e-5)
    assert_same_gradients(got[1], want[1])
    assert any("visual" in name or "vision" in name for name, g in got[1].items() if g.abs().sum() > 0)
    for trainer in (stock, ours):
        trainer.train()
    logs = [[log["loss"] for log in t.state.log_history if "loss" in log] for t in (stock, ours)]
    assert logs[1] == pytest.approx(logs[0], rel=1e-4)
    assert ours.evaluate()["eval_loss"] == pytest.approx(_eval_loss(stock), rel=1e-3)


def _eval_loss(trainer):
    """TRL's mean over batches is over tokens where there is one batch."""
    trainer.args.per_device_eval_batch_size = 8
    return trainer.evaluate()["eval_loss"]


@families("gemma3")
def test_image_tokens_are_learned_only_if_asked(family):
    data = picture_chats(4)
    ours = trainer_of(LigerTrainer, LigerConfig, family, data)
    got, gradients_without, batch = first_step(ours)
    ids = torch.tensor(placeholder_ids(ours.model.config))
    places = torch.isin(batch["input_ids"], ids)
    assert places.any() and (batch["labels"][places] == -100).all()
    stock = trainer_of(SFTTrainer, SFTConfig, family, data)
    collate = stock.data_collator

    def masked(rows):
        batch = collate(rows)
        batch["labels"][torch.isin(batch["input_ids"], ids)] = -100
        return batch

    stock.data_collator = masked
    want, gradients_masked, _ = first_step(stock)
    assert got == pytest.approx(want, rel=1e-5)
    assert_same_gradients(gradients_without, gradients_masked)
    learning = trainer_of(LigerTrainer, LigerConfig, family, data, learn_image_tokens=True)
    assert (learning.data_collator([data[0], data[1]])["labels"][places] != -100).all()
    assert first_step(learning)[0] == pytest.approx(first_step(trainer_of(SFTTrainer, SFTConfig, family, data))[0])


@MARKS
def test_answers_alone_by_the_marks_of_the_template():
    data = picture_chats(4)
    stock = trainer_of(SFTTrainer, SFTConfig, "gemma3", data, assistant_only_loss=True)
    ours = trainer_of(LigerTrainer, LigerConfig, "gemma3", data, assistant_only_loss=True)
    want, got = first_step(stock), first_step(ours)
    assert got[0] == pytest.approx(want[0], rel=1e-5)
    assert_same_gradients(got[1], want[1])


def test_rows_without_images_beside_rows_with_them():
    rows = [picture_chats(3)[i] for i in range(3)]
    rows[1] = {**rows[1], "images": []}
    data = Dataset.from_list(rows)
    want, got = (
        first_step(trainer_of(*c, "gemma3", data), 3) for c in ((SFTTrainer, SFTConfig), (LigerTrainer, SFTConfig))
    )
    assert got[0] == pytest.approx(want[0], rel=1e-5)
    assert_same_gradients(got[1], want[1])


def test_max_length_cuts_text_as_trl_does_and_never_images():
    data = picture_answers(4)
    stock, ours = (
        trainer_of(*classes, "llava", data, max_length=22)
        for classes in ((SFTTrainer, SFTConfig), (LigerTrainer, SFTConfig))
    )
    rows = [data[i] for i in range(4)]
    want, got = stock.data_collator(copy.deepcopy(rows)), ours.data_collator(copy.deepcopy(rows))
    assert got["input_ids"].shape[1] == 22
    assert {name: value.tolist() for name, value in got.items()} == {n: v.tolist() for n, v in want.items()}
    short = trainer_of(LigerTrainer, SFTConfig, "llava", data, max_length=12)
    with pytest.raises(DataError, match=r"16 of them for its images \(\d+ x \d+ pixels\).*max_length=12"):
        short.train()


@pytest.mark.parametrize(
    "options, words",
    [
        ({"packing": True}, "packing does not go with rows that have images"),
        ({"padding_free": True}, "padding_free does not go"),
        ({"eval_packing": True}, "eval_packing does not go"),
        ({"supervised_part": "content"}, "supervised_part does not go"),
    ],
)
def test_settings_that_rows_with_images_cannot_have(options, words):
    with pytest.raises(ConfigError, match=words):
        trainer_of(LigerTrainer, LigerConfig, "llava", picture_chats(4), **options)


def test_a_frozen_tower_gets_no_gradients_and_the_rest_what_it_got():
    data = picture_chats(4)
    whole, frozen = (
        trainer_of(LigerTrainer, LigerConfig, "gemma3", data, max_steps=1, freeze_vision_tower=freeze)
        for freeze in (False, True)
    )
    want, got = first_step(whole)[1], first_step(frozen)[1]
    tower, _ = vision_tower(frozen.model)
    assert not any(name.startswith(tower) for name in got)
    assert_same_gradients(got, {name: want[name] for name in got})
    assert any("projector" in name and g.abs().sum() > 0 for name, g in got.items())


@families("qwen2_5_vl")
def test_adapters_pass_a_frozen_tower_over_and_it_keeps_nothing_for_a_backward(family):
    """Although gradient checkpointing has the embeddings of patches require gradients."""
    data, lora = picture_chats(4), LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    seen, got = [], {}
    for freeze in (False, True):
        model = vision_model(family)
        torch.manual_seed(3)
        trainer = trainer_of(
            LigerTrainer, LigerConfig, family, data, model=model, arguments={"peft_config": lora}, max_steps=1,
            freeze_vision_tower=freeze, gradient_checkpointing=True,
        )  # fmt: skip
        path, tower = vision_tower(trainer.model)
        handle = tower.register_forward_hook(
            lambda module, inputs, output: seen.append(torch.utils._pytree.tree_leaves(dict(output))[0].requires_grad)
        )
        trainer.train()
        handle.remove()
        got[freeze] = [name for name, p in trainer.model.named_parameters() if p.requires_grad]
    assert seen == [True, False]
    assert any(path in name for name in got[False]) and not any(path in name for name in got[True])
    assert got[True] and "forward" not in vars(tower)
    with pytest.raises(ConfigError, match="adapters, or weights that are trained beside them, lie in"):
        within = LoraConfig(r=4, target_modules="all-linear", exclude_modules=["lm_head"])
        trainer_of(
            LigerTrainer, LigerConfig, family, data, arguments={"peft_config": within}, freeze_vision_tower=True
        )  # fmt: skip


def distiller(family, rows, knows, arguments=None, **options):
    return trainer_of(
        LigerDistillTrainer, LigerDistillConfig, family, rows, arguments={"teacher_model": knows, **(arguments or {})},
        **options,
    )  # fmt: skip


def by_hand(model, teacher, batch, kind="forward_kl", teacher_batch=None):
    """The mean divergence over learned tokens of stock models, and its gradients."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    learned = batch["labels"][:, 1:] != -100
    of_teacher = inputs if teacher_batch is None else {k: v for k, v in teacher_batch.items() if k != "labels"}
    there = learned if teacher_batch is None else teacher_batch["labels"][:, 1:] != -100
    with torch.no_grad():
        known = teacher(**of_teacher).logits[:, :-1][there]
    logits = model(**inputs).logits[:, :-1][learned]
    loss = divergence_by_hand(logits, known, kind, 1.0).mean()
    model.zero_grad()
    loss.backward()
    return loss.item(), gradients(model)


@families_and_rows
def test_a_teacher_that_sees_the_same_images(family, rows):
    """No image token is compared: the divergence is over learned tokens, which leave placeholders out."""
    teacher = vision_model(family, seed=1, num_hidden_layers=3)
    trainer = distiller(family, rows(4), copy.deepcopy(teacher))
    loss, got, batch = first_step(trainer)
    places = torch.isin(batch["input_ids"], torch.tensor(placeholder_ids(trainer.model.config)))
    assert places.any() and (batch["labels"][places] == -100).all()
    want = by_hand(vision_model(family), teacher, batch)
    assert loss == pytest.approx(want[0], rel=1e-5)
    assert_same_gradients(got, want[1])


def larger_images():
    """A Gemma 3 teacher of the same tokens, and its processor: images are larger and have 9 tokens in place of 4."""
    processor, config = vision_processor("gemma3"), vision_model("gemma3").config
    processor.image_processor.size = {"height": 48, "width": 48}
    processor = type(processor)(
        image_processor=processor.image_processor, tokenizer=processor.tokenizer, image_seq_length=9,
        chat_template=processor.chat_template,
    )  # fmt: skip
    config.vision_config.image_size, config.mm_tokens_per_image = 48, 9
    torch.manual_seed(5)
    return spread_weights(type(vision_model("gemma3"))(config), 5).eval(), processor


@pytest.mark.parametrize("rows", [pytest.param(picture_chats, marks=MARKS), picture_answers], ids=["chats", "answers"])
def test_a_teacher_whose_own_processor_draws_larger_images(rows):
    data, (teacher, processor) = rows(4), larger_images()
    options = {"assistant_only_loss": True} if rows is picture_chats else {}
    trainer = distiller("gemma3", data, copy.deepcopy(teacher), {"teacher_processor": processor}, **options)
    loss, got, batch = first_step(trainer)
    own = {k.removeprefix("teacher_reads/"): v for k, v in batch.items() if k.startswith("teacher_reads/")}
    assert own["input_ids"].shape[1] > batch["input_ids"].shape[1] and own["pixel_values"].shape[-1] == 48
    own.pop("places")
    own["labels"] = torch.full_like(own["input_ids"], -100)
    for mask, labels, learned in zip(own["attention_mask"], own["labels"], batch["labels"], strict=True):
        answer, end = learned[learned != -100], int(mask.sum())  # the answer is the end of each row
        labels[end - len(answer) : end] = answer
    read = {k: v for k, v in batch.items() if not k.startswith("teacher_reads/")}
    want = by_hand(vision_model("gemma3"), teacher, read, teacher_batch=own)
    assert loss == pytest.approx(want[0], rel=1e-5)
    assert_same_gradients(got, want[1])
    trainer.args.max_steps = 2
    trainer.train()
    assert trainer.evaluate()["eval_kd_loss"] > 0


def test_a_processor_that_writes_learned_tokens_otherwise_is_refused():
    teacher, processor = larger_images()
    trainer = distiller("gemma3", picture_chats(4), teacher, {"teacher_processor": processor}, learn_image_tokens=True)
    with pytest.raises(DataError, match="Learn the answers alone"):
        first_step(trainer)


def test_a_student_without_its_adapters_and_several_teachers():
    rows, lora = picture_answers(4), LoraConfig(r=4, target_modules="all-linear")
    alone = distiller("gemma3", rows, None, {"peft_config": lora}, teacher="self")
    assert first_step(alone)[0] == pytest.approx(0.0, abs=1e-6)
    teachers = {name: vision_model("gemma3", seed=seed) for seed, name in ((1, "one"), (2, "two"))}
    both = first_step(distiller("gemma3", rows, {k: copy.deepcopy(v) for k, v in teachers.items()}))
    each = [by_hand(vision_model("gemma3"), teacher, both[2])[0] for teacher in teachers.values()]
    assert both[0] == pytest.approx(sum(each), rel=1e-5)


def test_hidden_states_of_the_decoder_are_compared():
    rows = picture_answers(4)
    losses = [{"type": "forward_kl", "weight": 1.0}, {"type": "hidden_mse", "weight": 1.0}]
    teacher = vision_model("qwen3_vl", seed=1)
    alone = first_step(distiller("qwen3_vl", rows, copy.deepcopy(teacher)))[0]
    both = first_step(distiller("qwen3_vl", rows, copy.deepcopy(teacher), losses=losses))[0]
    assert both > alone


@pytest.mark.parametrize(
    "options, words",
    [
        (
            {"teacher": "server", "teacher_server_base_url": "http://localhost:1/v1", "teacher_server_model": "m"},
            "text",
        ),
        ({"teacher": "cache", "teacher_cache_dir": "/nowhere"}, "teacher: cache knows rows of text alone"),
        ({"lmbda": 0.5}, "samples does not go with rows that have images"),
        ({"teacher_prompt": "Be kind."}, "teacher_prompt does not go"),
        ({"losses": [{"type": "uld", "weight": 1.0}]}, "uld"),
    ],
)
def test_teachers_that_cannot_see(options, words):
    with pytest.raises(ConfigError, match=words):
        distiller("gemma3", picture_answers(4), None, **options)


def test_models_that_cannot_see():
    text = tiny_model("llama", vocab_size=72)
    with pytest.raises(ConfigError, match="LlamaForCausalLM, takes none"):
        distiller("gemma3", picture_answers(4), text)
    with pytest.raises(ConfigError, match="LlamaForCausalLM takes none"):
        trainer_of(LigerTrainer, LigerConfig, "gemma3", picture_answers(4), model=text)
    with pytest.raises(ConfigError, match="Pass the processor that belongs to the model"):
        trainer_of(LigerTrainer, LigerConfig, "gemma3", picture_answers(4), model=vision_model("internvl"))


@families("qwen2_5_vl")
def test_the_callback_of_an_unmodified_trainer(family):
    """It learns what TRL's labels say, from a teacher that sees the same images."""
    rows, teacher = picture_answers(6), vision_model(family, seed=1)
    ours = distiller(family, rows, copy.deepcopy(teacher), max_steps=2)
    callback = DistillationCallback(copy.deepcopy(teacher))
    stock = trainer_of(SFTTrainer, SFTConfig, family, rows, arguments={"callbacks": [callback]}, max_steps=2)
    for trainer in (ours, stock):
        trainer.train()
    logs = [[log["loss"] for log in t.state.log_history if "loss" in log] for t in (ours, stock)]
    assert logs[0] == pytest.approx(logs[1], rel=1e-5) and len(logs[0]) == 2


def test_models_by_their_names_with_the_processors_beside_them(tmp_path):
    """The teacher's own processor is noticed; a checkpoint is resumed, with its processor beside it."""
    student, (teacher, processor) = vision_model("gemma3"), larger_images()
    student.save_pretrained(tmp_path / "student"), vision_processor("gemma3").save_pretrained(tmp_path / "student")
    teacher.save_pretrained(tmp_path / "teacher"), processor.save_pretrained(tmp_path / "teacher")
    options = {"output_dir": str(tmp_path / "out"), "save_strategy": "steps", "save_steps": 1, "max_length": None}

    def trainer(steps):
        return LigerDistillTrainer(
            str(tmp_path / "student"), teacher_model=str(tmp_path / "teacher"), train_dataset=picture_answers(8),
            args=train_args(LigerDistillConfig, max_steps=steps, per_device_train_batch_size=2, **options),
        )  # fmt: skip

    whole = trainer(2)
    assert type(whole.data_collator).__name__ == "OwnImages"
    whole.train()
    resumed = trainer(2)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-1"))
    losses = [[log["loss"] for log in t.state.log_history if "loss" in log] for t in (whole, resumed)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6) and len(losses[0]) == 2
    beside = transformers.AutoProcessor.from_pretrained(tmp_path / "out" / "checkpoint-2")
    assert beside.image_processor.size["height"] == 32


@families("qwen2_5_vl")
def test_packed_rows_of_text_are_documents_one_by_one(family):
    """Stock Qwen2.5-VL lets packed documents see one another."""
    trainer = trainer_of(LigerTrainer, LigerConfig, family, completions(12), packing=True, max_length=32)
    got, grads, batch = first_step(trainer)
    model, ends, losses = vision_model(family).train(), batch["cu_seq_lens_q"].tolist(), []
    for start, end in zip(ends, ends[1:], strict=False):
        ids, labels = batch["input_ids"][:, start:end], batch["labels"][:, start + 1 : end]
        logits = model(input_ids=ids).logits[:, :-1][labels != -100]
        losses.append(torch.nn.functional.cross_entropy(logits, labels[labels != -100], reduction="none"))
    loss = torch.cat(losses).mean()
    assert len(losses) > 3 and got == pytest.approx(loss.item(), rel=1e-5)
    assert_same_gradients(grads, named_gradients(model, loss))
