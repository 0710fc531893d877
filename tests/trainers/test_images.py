"""LigerTrainer and LigerDistillTrainer on rows with images: losses and gradients are stock's, image by image."""

import copy
import functools

import pytest
import torch
import trainings
import transformers
from datasets import Dataset
from packaging.version import Version
from peft import LoraConfig
from quick_cases import slow_but
from tiny import (
    assert_same_gradients,
    completions,
    divergence_by_hand,
    gradients,
    named_gradients,
    spread_weights,
    tiny_model,
)
from trainings import OnStep, logged, trained
from trl import SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling
from vision import VISION_FAMILIES, picture_answers, picture_chats, vision_model, vision_processor

from liger_trainer import DistillationCallback, LigerConfig, LigerTrainer, patch
from liger_trainer.errors import ConfigError, DataError
from liger_trainer.losses.model_parts import placeholder_ids
from liger_trainer.trainers.images import vision_tower

MARKS = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.18"), reason="TRL wants 5.18 for assistant_only_loss with images"
)


FORMS = (picture_chats, picture_answers)


def families(*quick):
    """All of them; the default run has those that are named."""
    return pytest.mark.parametrize("family", slow_but(VISION_FAMILIES, *quick))


ROWS = {f"{family}, {rows.__name__}": (family, rows) for family in VISION_FAMILIES for rows in FORMS}
families_and_rows = pytest.mark.parametrize(
    "case", slow_but(ROWS, "qwen2_5_vl, picture_chats", "gemma3, picture_answers")
)


def sft(family, rows, model=None, make=trainings.sft, **options):
    processor = vision_processor(family)
    model = vision_model(family, processor) if model is None else model
    options = {"max_length": None, "per_device_train_batch_size": 2, "processing_class": processor, **options}
    return make(model, data=rows, eval_data=rows.select(range(3)), **options)


def ours(family, rows, **options):
    return sft(family, rows, config=LigerConfig, **options)


def distill(family, rows, teacher, **options):
    return sft(family, rows, make=trainings.distill, teacher=teacher, **options)


def first_step(trainer, count=2):
    """Loss and gradients of the first rows."""
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(count)])
    trainer.model.train()
    loss = trainer.compute_loss(trainer.model, dict(batch))
    trainer.model.zero_grad()
    loss.backward()
    return loss.item(), gradients(trainer.model), batch


def assert_same_step(got, want, count=2):
    (loss, gradients, _), (expected, theirs, _) = first_step(got, count), first_step(want, count)
    assert loss == pytest.approx(expected, rel=1e-5)
    assert_same_gradients(gradients, theirs)
    return gradients


@families_and_rows
def test_loss_and_gradients_are_those_of_trl(case):
    """Also the weights and losses after steps, by the optimizer, and the evaluation."""
    family, rows = ROWS[case]
    data = rows(6)
    stock, mine = (sft(family, data, cls=cls, max_steps=2) for cls in (SFTTrainer, LigerTrainer))
    got = assert_same_step(mine, stock)
    assert any("visual" in name or "vision" in name for name, g in got.items() if g.abs().sum() > 0)
    assert logged(trained(mine)) == pytest.approx(logged(trained(stock)), rel=1e-4)
    stock.args.per_device_eval_batch_size = 8  # TRL's mean over batches is over tokens where there is one batch
    assert mine.evaluate()["eval_loss"] == pytest.approx(stock.evaluate()["eval_loss"], rel=1e-3)


@families("gemma3")
def test_image_tokens_are_learned_only_if_asked(family):
    data = picture_chats(4)
    mine, stock = ours(family, data), sft(family, data, cls=SFTTrainer)
    *_, batch = first_step(mine)
    ids = torch.tensor(placeholder_ids(mine.model.config))
    places = torch.isin(batch["input_ids"], ids)
    assert places.any() and (batch["labels"][places] == -100).all()
    collate = stock.data_collator

    def masked(rows):
        batch = collate(rows)
        batch["labels"][torch.isin(batch["input_ids"], ids)] = -100
        return batch

    stock.data_collator = masked
    assert_same_step(mine, stock)
    learning = ours(family, data, learn_image_tokens=True)
    assert (learning.data_collator([data[0], data[1]])["labels"][places] != -100).all()
    assert first_step(learning)[0] == pytest.approx(first_step(sft(family, data, cls=SFTTrainer))[0])


def without_an_image():
    rows = [picture_chats(3)[i] for i in range(3)]
    return Dataset.from_list([rows[0], {**rows[1], "images": []}, rows[2]])


@pytest.mark.parametrize(
    ("rows", "options"),
    [pytest.param(lambda: picture_chats(4), {"assistant_only_loss": True}, marks=MARKS, id="answers by marks"),
     pytest.param(without_an_image, {}, id="rows without images next to rows with them")],
)  # fmt: skip
def test_rows_of_other_forms(rows, options):
    data = rows()
    mine, stock = (sft("gemma3", data, cls=cls, **options) for cls in (LigerTrainer, SFTTrainer))
    assert_same_step(mine, stock, 3)


def test_max_length_cuts_text_as_trl_does_and_never_images():
    data = picture_answers(4)
    stock, mine = (sft("llava", data, cls=cls, max_length=22) for cls in (SFTTrainer, LigerTrainer))
    rows = [data[i] for i in range(4)]
    want, got = stock.data_collator(copy.deepcopy(rows)), mine.data_collator(copy.deepcopy(rows))
    assert got["input_ids"].shape[1] == 22
    assert {name: value.tolist() for name, value in got.items()} == {n: v.tolist() for n, v in want.items()}
    with pytest.raises(DataError, match=r"16 of them for its images \(\d+ x \d+ pixels\).*max_length=12"):
        sft("llava", data, max_length=12).train()


def test_ddp_looks_for_weights_without_gradient_where_a_batch_may_have_no_image():
    trainer, seen = ours("qwen2_5_vl", picture_chats(4), max_steps=1), []
    trainer.add_callback(OnStep(lambda: seen.append(trainer.accelerator.ddp_handler.find_unused_parameters)))
    trainer.train()
    assert seen == [True]


def test_a_frozen_tower_gets_no_gradients_and_the_rest_what_it_got():
    data = picture_chats(4)
    whole, frozen = (ours("gemma3", data, max_steps=1, freeze_vision_tower=freeze) for freeze in (False, True))
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
        trainer = ours(
            family, data, model=model, peft_config=lora, max_steps=1, freeze_vision_tower=freeze,
            gradient_checkpointing=True,
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
    with pytest.raises(ConfigError, match="adapters, or weights that are trained besides them, lie in"):
        within = LoraConfig(r=4, target_modules="all-linear", exclude_modules=["lm_head"])
        ours(family, data, peft_config=within, freeze_vision_tower=True)


def by_hand(model, teacher, batch, teacher_batch=None):
    """The mean divergence over learned tokens of stock models, and its gradients."""

    def learned_logits(model, batch):
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        return model(**inputs).logits[:, :-1][batch["labels"][:, 1:] != -100]

    with torch.no_grad():
        known = learned_logits(teacher, teacher_batch or batch)
    loss = divergence_by_hand(learned_logits(model, batch), known, "forward_kl", 1.0).mean()
    model.zero_grad()
    loss.backward()
    return loss.item(), gradients(model)


def assert_by_hand(loss, got, *models_and_batches):
    want = by_hand(*models_and_batches)
    assert loss == pytest.approx(want[0], rel=1e-5)
    assert_same_gradients(got, want[1])


@families_and_rows
def test_a_teacher_that_sees_the_same_images(case):
    """No image token is compared: the divergence is over learned tokens, which leave placeholders out."""
    family, rows = ROWS[case]
    teacher = vision_model(family, seed=1, num_hidden_layers=3)
    trainer = distill(family, rows(4), copy.deepcopy(teacher))
    loss, got, batch = first_step(trainer)
    places = torch.isin(batch["input_ids"], torch.tensor(placeholder_ids(trainer.model.config)))
    assert places.any() and (batch["labels"][places] == -100).all()
    assert_by_hand(loss, got, vision_model(family), teacher, batch)


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
    trainer = distill("gemma3", data, copy.deepcopy(teacher), teacher_processor=processor, **options)
    loss, got, batch = first_step(trainer)
    own = {k.removeprefix("teacher_reads/"): v for k, v in batch.items() if k.startswith("teacher_reads/")}
    assert own["input_ids"].shape[1] > batch["input_ids"].shape[1] and own["pixel_values"].shape[-1] == 48
    own.pop("places")
    own["labels"] = torch.full_like(own["input_ids"], -100)
    for mask, labels, learned in zip(own["attention_mask"], own["labels"], batch["labels"], strict=True):
        answer, end = learned[learned != -100], int(mask.sum())  # the answer is the end of each row
        labels[end - len(answer) : end] = answer
    read = {k: v for k, v in batch.items() if not k.startswith("teacher_reads/")}
    assert_by_hand(loss, got, vision_model("gemma3"), teacher, read, own)
    trainer.args.max_steps = 2
    trainer.train()
    assert trainer.evaluate()["eval_kd_loss"] > 0


def test_a_processor_that_writes_learned_tokens_otherwise_is_refused():
    teacher, processor = larger_images()
    trainer = distill("gemma3", picture_chats(4), teacher, teacher_processor=processor, learn_image_tokens=True)
    with pytest.raises(DataError, match="Learn only the answers"):
        first_step(trainer)


def test_a_student_without_its_adapters_and_several_teachers():
    rows, lora = picture_answers(4), LoraConfig(r=4, target_modules="all-linear")
    assert first_step(distill("gemma3", rows, "self", peft_config=lora))[0] == pytest.approx(0.0, abs=1e-6)
    teachers = {name: vision_model("gemma3", seed=seed) for seed, name in ((1, "one"), (2, "two"))}
    loss, _, batch = first_step(distill("gemma3", rows, copy.deepcopy(teachers)))
    each = [by_hand(vision_model("gemma3"), teacher, batch)[0] for teacher in teachers.values()]
    assert loss == pytest.approx(sum(each), rel=1e-5)


def test_hidden_states_of_the_decoder_are_compared():
    rows = picture_answers(4)
    losses = [{"type": "forward_kl", "weight": 1.0}, {"type": "hidden_mse", "weight": 1.0}]
    teacher = vision_model("qwen3_vl", seed=1)
    without = first_step(distill("qwen3_vl", rows, copy.deepcopy(teacher)))[0]
    both = first_step(distill("qwen3_vl", rows, copy.deepcopy(teacher), losses=losses))[0]
    assert both > without


SERVER = {"teacher_server_base_url": "http://localhost:1/v1", "teacher_server_model": "m"}
text_model = functools.partial(tiny_model, "llama", vocab_size=72)
REFUSED = [
    *((ours, {name: value}, f"{name} does not go") for name, value in
      (("packing", True), ("padding_free", True), ("eval_packing", True), ("supervised_part", "content"))),
    (distill, {**SERVER, "teacher": "server"}, "text"),
    (distill, {"teacher": "cache", "teacher_cache_dir": "/nowhere"}, "teacher: cache knows only rows of text"),
    (distill, {"lmbda": 0.5}, "samples does not go with rows that have images"),
    (distill, {"teacher_prompt": "Be kind."}, "teacher_prompt does not go"),
    (distill, {"losses": [{"type": "uld", "weight": 1.0}]}, "uld"),
    (distill, {"teacher": text_model}, "LlamaForCausalLM, takes none"),
    (ours, {"model": text_model}, "LlamaForCausalLM takes none"),
    (ours, {"model": functools.partial(vision_model, "internvl")}, "Pass the processor that belongs to the model"),
]  # fmt: skip


@pytest.mark.parametrize("make, options, words", REFUSED, ids=lambda x: x if isinstance(x, str) else "")
def test_what_does_not_go_with_rows_that_have_images(make, options, words):
    given = {name: value() if callable(value) else value for name, value in options.items()}
    if make is distill:
        given.setdefault("teacher", vision_model("gemma3", seed=1))
    with pytest.raises(ConfigError, match=words):
        make("gemma3", picture_answers(4), **given)


@families("qwen2_5_vl")
def test_the_callback_of_an_unmodified_trainer(family):
    """It learns what TRL's labels say, from a teacher that sees the same images."""
    rows, teacher = picture_answers(6), vision_model(family, seed=1)
    mine = trained(distill(family, rows, copy.deepcopy(teacher), max_steps=2))
    callback = DistillationCallback(copy.deepcopy(teacher))
    stock = trained(sft(family, rows, cls=SFTTrainer, callbacks=[callback], max_steps=2))
    assert logged(mine) == pytest.approx(logged(stock), rel=1e-5) and len(logged(mine)) == 2


def test_models_by_their_names_with_the_processors_beside_them(tmp_path):
    """The teacher's own processor is noticed; a checkpoint is resumed, with its processor next to it."""
    student, (teacher, processor) = vision_model("gemma3"), larger_images()
    student.save_pretrained(tmp_path / "student"), vision_processor("gemma3").save_pretrained(tmp_path / "student")
    teacher.save_pretrained(tmp_path / "teacher"), processor.save_pretrained(tmp_path / "teacher")
    options = {"output_dir": str(tmp_path / "out"), "save_strategy": "steps", "save_steps": 1, "max_length": None}

    def trainer():
        return trainings.distill(
            str(tmp_path / "student"), str(tmp_path / "teacher"), picture_answers(8), max_steps=2,
            per_device_train_batch_size=2, processing_class=None, **options,
        )  # fmt: skip

    whole = trained(trainer())
    assert type(whole.data_collator).__name__ == "OwnImages"
    resumed = trained(trainer(), str(tmp_path / "out" / "checkpoint-1"))
    assert logged(resumed) == pytest.approx(logged(whole), rel=1e-6) and len(logged(whole)) == 2
    saved = transformers.AutoProcessor.from_pretrained(tmp_path / "out" / "checkpoint-2")
    assert saved.image_processor.size["height"] == 32


@families("qwen2_5_vl")
def test_packed_rows_of_text_are_documents_one_by_one(family):
    """Stock Qwen2.5-VL lets packed documents see one another."""
    trainer = ours(family, completions(12), packing=True, max_length=32)
    got, grads, batch = first_step(trainer)
    model, ends, losses = vision_model(family).train(), batch["cu_seq_lens_q"].tolist(), []
    for start, end in zip(ends, ends[1:], strict=False):
        ids, labels = batch["input_ids"][:, start:end], batch["labels"][:, start + 1 : end]
        logits = model(input_ids=ids).logits[:, :-1][labels != -100]
        losses.append(torch.nn.functional.cross_entropy(logits, labels[labels != -100], reduction="none"))
    loss = torch.cat(losses).mean()
    assert len(losses) > 3 and got == pytest.approx(loss.item(), rel=1e-5)
    assert_same_gradients(grads, named_gradients(model, loss))


# On a GPU: Triton kernels in both towers, and decoder layers in CUDA graphs

on_gpu, every_family = pytest.mark.gpu, pytest.mark.parametrize("family", VISION_FAMILIES)


@on_gpu
@every_family
def test_loss_and_gradients_are_those_of_the_plain_model_on_a_gpu(family):
    """In fp32 without TF32; the rotation, norms and MLPs of both towers run as kernels."""
    processor = vision_processor(family)
    rows = picture_chats(3)
    batch = DataCollatorForVisionLanguageModeling(processor)([rows[i] for i in range(3)])
    inputs = {name: value.cuda() for name, value in batch.items()}
    model = vision_model(family, processor).cuda().train()
    plain = copy.deepcopy(model)
    want = plain(**inputs).loss
    with patch(model):
        got = model(**inputs).loss
        assert got.item() == pytest.approx(want.item(), rel=1e-5)
        assert_same_gradients(named_gradients(model, got), named_gradients(plain, want), 1e-4)


def of_one_shape(count=8):
    """Rows of as many tokens and patches, so that graphs are recorded and replayed."""
    row = picture_answers(1)[0]
    return Dataset.from_list([row] * count)


def on_a_gpu(family, make=trainings.sft, **options):
    processor = vision_processor(family)
    options = {"max_steps": 6, "per_device_train_batch_size": 2, "max_length": None, "use_cpu": False, **options}
    model = vision_model(family, processor)
    return trained(make(model, data=of_one_shape(12), processing_class=processor, **options))


@on_gpu
@every_family
def test_layers_in_graphs_train_as_they_do_without(family):
    want = on_a_gpu(family, cls=SFTTrainer)
    trainer = on_a_gpu(family, config=LigerConfig, cuda_graphs="always")
    assert logged(trainer) == pytest.approx(logged(want), rel=1e-3)
    if family != "gemma4":  # whose layers write keys and values into a dictionary
        assert "layers of the student" in trainer.graph_reports["student"]


@on_gpu
@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
def test_distillation_with_graphs_of_both_models(family):
    never, always = (
        logged(on_a_gpu(family, trainings.distill, teacher=vision_model(family, seed=1), cuda_graphs=graphs))
        for graphs in ("never", "always")
    )
    assert always == pytest.approx(never, rel=1e-3)
    assert torch.tensor(always).isfinite().all()


def test_a_trainer_without_a_model_says_so():
    """With a frozen vision tower too, which is looked for in the model."""
    with pytest.raises(ConfigError, match="^model: expected a causal language model"):
        LigerTrainer(args=LigerConfig("out", freeze_vision_tower=True, bf16=False), peft_config=LoraConfig())
