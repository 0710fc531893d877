"""enable(): use_liger_kernel=True of Trainer and TRL's trainers, unmodified, served by our kernels."""

import random
import sys

import pytest
import torch
import transformers
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tiny import VOCAB, completions, largest_vocabulary_tensor, tiny_model, tiny_tokenizer, train_args
from transformers import Trainer, TrainingArguments
from trl import (
    DistillationConfig,
    DistillationTrainer,
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)
from trl.trainer.utils import add_fused_lm_head

import liger_trainer
from liger_trainer import patch
from liger_trainer.errors import ConfigError
from liger_trainer.losses import deferred_logits
from liger_trainer.losses.deferred_logits import DeferredLogits
from liger_trainer.patching.patcher import patched_record

pytestmark = [
    pytest.mark.filterwarnings("error::liger_trainer.MaterializedLogitsWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture(autouse=True)
def served():
    before = transformers.trainer.apply_liger_kernel, Trainer.evaluation_loop
    liger_trainer.enable()
    yield
    liger_trainer.disable()
    assert (transformers.trainer.apply_liger_kernel, Trainer.evaluation_loop) == before


def rows(n=12, seed=0):
    """Rows of 7 to 9 tokens with labels on what follows the third."""
    rng = random.Random(seed)
    lengths = [rng.randint(7, 9) for _ in range(n)]
    ids = [[rng.randrange(VOCAB - 5) for _ in range(length)] for length in lengths]
    return Dataset.from_list([{"input_ids": row, "labels": [-100] * 3 + row[3:]} for row in ids])


def collate(batch):
    padded = {}
    for name, filler in (("input_ids", VOCAB - 4), ("labels", -100)):
        rows = [torch.tensor(row[name]) for row in batch]
        padded[name] = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=filler)
    return {**padded, "attention_mask": (padded["input_ids"] != VOCAB - 4).long()}


def make(model=None, arguments=None, **options):
    options = {"max_steps": 2, "use_liger_kernel": True, **options}
    return Trainer(
        tiny_model() if model is None else model, args=train_args(TrainingArguments, **options),
        train_dataset=rows(), eval_dataset=rows(6, seed=1), data_collator=collate, **(arguments or {}),
    )  # fmt: skip


def losses(trainer, names=("loss", "eval_loss")):
    return [log[name] for log in trainer.state.log_history for name in names if name in log]


def assert_same_losses(got, want, rel=1e-5):
    assert len(losses(got)) == len(losses(want)) > 0
    assert losses(got) == pytest.approx(losses(want), rel=rel, abs=1e-7)


# transformers.Trainer


def test_a_stock_trainer_trains_the_patched_model_as_the_plain_one(capsys):
    trainer, plain = (
        make(eval_strategy="steps", eval_steps=1),
        make(eval_strategy="steps", eval_steps=1, use_liger_kernel=False),
    )
    for t in (trainer, plain):
        t.train()
    assert_same_losses(trainer, plain)
    record = patched_record(trainer.model)
    assert record.fused is not None and {"RMSNorm", "SwiGLU"} <= set(record.report.swapped)
    assert patched_record(plain.model) is None
    assert capsys.readouterr().out.count(f"liger-trainer: {record.report}\n") == 1
    for got, want in zip(trainer.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_no_logits_of_a_batch_exist_in_train_or_eval(monkeypatch):
    trainer = make(eval_strategy="steps", eval_steps=1)
    with largest_vocabulary_tensor(monkeypatch, rows=8) as seen:
        trainer.train()
    assert 0 < seen.rows <= 8


def test_accumulation_counts_the_tokens_of_the_whole_batch():
    options = {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 2}
    trainer, plain = make(**options), make(**options, use_liger_kernel=False)
    for t in (trainer, plain):
        t.train()
    assert_same_losses(trainer, plain)


def test_the_config_says_what_is_replaced():
    trainer = make(liger_kernel_config={"rms_norm": False, "cross_entropy": True})
    trainer.train()
    swapped = patched_record(trainer.model).report.swapped
    assert "RMSNorm" not in swapped and swapped["cross-entropy"] == 1 and "SwiGLU" in swapped
    plain = make(use_liger_kernel=False)
    plain.train()
    assert_same_losses(trainer, plain)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rms_norms": True}, "Unknown patch options: rms_norms. There are rope"),
        ({"cross_entropy": True, "fused_linear_cross_entropy": True}, "choose one"),
    ],
)
def test_a_wrong_config_is_an_error(config, message):
    trainer = make(liger_kernel_config=config)
    with pytest.raises(ConfigError, match=message):
        trainer.train()


def test_a_module_that_is_no_model_of_transformers_is_an_error():
    class Own(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = tiny_model()

        def forward(self, **batch):
            return self.model(**batch)

    with pytest.raises(ConfigError, match="needs a PreTrainedModel .* got Own"):
        make(Own()).train()


def test_a_peft_model():
    config = LoraConfig(target_modules="all-linear", r=4)
    trainers = []
    for flag in (True, False):
        torch.manual_seed(0)
        trainers.append(make(get_peft_model(tiny_model(), config), use_liger_kernel=flag))
        trainers[-1].train()
    assert_same_losses(*trainers)
    assert patched_record(trainers[0].model).fused is not None


def test_a_model_made_anew_for_each_trial():
    made, trainers = [], []

    def model_init():
        made.append(tiny_model())
        return made[-1]

    for flag in (True, False):
        args = train_args(TrainingArguments, max_steps=2, use_liger_kernel=flag)
        trainers.append(Trainer(model_init=model_init, args=args, train_dataset=rows(), data_collator=collate))
        trainers[-1].train()
    assert_same_losses(*trainers)
    patched = [model for model in made if patched_record(model) is not None]
    assert len(made) == 4 and patched == [made[1]] and trainers[0].model is made[1]


def test_a_model_that_was_patched_before():
    model = tiny_model()
    record = patch(model, rms_norm=False)
    make(model).train()
    assert patched_record(model) is record and "RMSNorm" not in record.report.swapped
    with pytest.raises(ConfigError, match="asks for {'rms_norm': True}, but this LlamaForCausalLM was patched with"):
        make(model, liger_kernel_config={"rms_norm": True}).train()


def test_ligers_name_of_a_flag_agrees_with_ours():
    model = tiny_model()
    record = patch(model, relu2=False)
    make(model, liger_kernel_config={"relu_squared": False}).train()
    assert patched_record(model) is record
    with pytest.raises(ConfigError, match="asks for {'relu2': True}"):
        make(model, liger_kernel_config={"relu_squared": True}).train()


def test_training_in_bf16_after_an_evaluation():
    trainers = [make(bf16=True, use_liger_kernel=flag) for flag in (True, False)]
    for trainer in trainers:
        trainer.evaluate()
        trainer.train()
    assert_same_losses(*trainers, rel=2e-2)


def test_a_patch_after_accelerate_has_wrapped_the_forward_keeps_its_autocast():
    trainer, seen = make(bf16=True, use_liger_kernel=False), []
    trainer.evaluate()
    trainer.model.lm_head.register_forward_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    patch(trainer.model)
    batch = collate(list(rows(2)))
    trainer.model(**batch)
    assert seen == [True]


# Evaluation


@pytest.fixture
def no_logits(monkeypatch):
    def compute(*_):
        raise AssertionError("logits were computed")

    monkeypatch.setattr(DeferredLogits, "compute", compute)
    monkeypatch.setattr(deferred_logits, "CHEAP", 0)


def test_evaluate_and_predict_before_train_are_served(no_logits):
    want = make(use_liger_kernel=False).evaluate()["eval_loss"]
    trainer = make()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(want, rel=1e-6)
    assert patched_record(trainer.model).fused is not None
    trainer = make(prediction_loss_only=True)
    assert trainer.predict(rows(6, seed=1)).metrics["test_loss"] == pytest.approx(want, rel=1e-6)
    assert patched_record(trainer.model).fused is not None


@pytest.mark.parametrize("flag", [True, False])
def test_a_loss_only_evaluation_computes_no_logits(flag, no_logits):
    model = tiny_model()
    patch(model)
    trainer = make(model, use_liger_kernel=flag)
    want = make(use_liger_kernel=False).evaluate()["eval_loss"]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize(("flag", "bf16"), [(True, False), (False, True)])
def test_metrics_that_need_logits_get_them(flag, bf16):
    seen = {}

    def compute_metrics(prediction):
        seen[len(seen)] = torch.from_numpy(prediction.predictions)
        return {"mean": float(prediction.predictions.mean())}

    model = tiny_model()
    patch(model)
    options = {"arguments": {"compute_metrics": compute_metrics}, "bf16": bf16}
    metrics = make(model, use_liger_kernel=flag, **options).evaluate()
    plain = make(use_liger_kernel=False, **options).evaluate()
    assert seen[0].shape == seen[1].shape and seen[0].shape[-1] == VOCAB
    torch.testing.assert_close(seen[0], seen[1], rtol=0.1 if bf16 else 1e-5, atol=0.05 if bf16 else 1e-5)
    if bf16:  # computed under the autocast of their forward, though it is over
        assert all(torch.equal(logits.bfloat16().float(), logits) for logits in seen.values())
    assert metrics["eval_loss"] == pytest.approx(plain["eval_loss"], rel=2e-2 if bf16 else 1e-6)


def test_skip_logits_gives_a_loss_and_computes_no_logits(no_logits):
    model, batch = tiny_model(), collate(list(rows(3)))
    patch(model)
    for mode in (torch.no_grad, torch.enable_grad):
        with mode():
            outputs = model(**batch, skip_logits=True)
            assert (outputs.logits is None and "logits" not in outputs) == torch.is_grad_enabled()
            torch.testing.assert_close(outputs.loss, model(**batch).loss)
    loss, *rest = model(**batch, skip_logits=True, return_dict=False)
    assert loss.dim() == 0 and not any(isinstance(x, (torch.Tensor, DeferredLogits)) for x in rest)

    with torch.no_grad():
        assert model(**batch, skip_logits=True).logits.shape[-1] == VOCAB  # not computed: nobody has read them
    # A loss computed outside needs them.
    batch.pop("labels")
    assert model(**batch, skip_logits=True).logits.shape[-1] == VOCAB


def loss_of_ones_own(outputs, labels, num_items_in_batch=None):
    return outputs.logits.float().square().mean() * labels.ne(-100).float().mean()


@pytest.mark.parametrize(
    "options", [{"label_smoothing_factor": 0.2}, {"arguments": {"compute_loss_func": loss_of_ones_own}}],
    ids=["label_smoother", "compute_loss_func"],
)  # fmt: skip
def test_a_loss_computed_by_the_trainer_gets_logits(options):
    options = {**options, "eval_strategy": "steps", "eval_steps": 1}
    trainer, plain = make(**options), make(**options, use_liger_kernel=False)
    for t in (trainer, plain):
        t.train()
    assert_same_losses(trainer, plain)


def test_data_parallel_is_refused(monkeypatch):
    from torch.nn.parallel import replicate

    model = tiny_model()
    patch(model)
    module = sys.modules["torch.nn.parallel.replicate"]  # as if there were two GPUs
    monkeypatch.setattr(module, "_get_device_index", lambda *_: 0)
    monkeypatch.setattr(module, "_broadcast_coalesced_reshape", lambda tensors, *_, **__: [tensors] * 2)
    with pytest.raises(ConfigError, match="does not run under nn.DataParallel.*torchrun"):
        replicate(model, [0, 1])


# Switching it on and off


def test_twice_is_once_and_off_without_on_is_harmless():
    ours = transformers.trainer.apply_liger_kernel
    loop = Trainer.evaluation_loop
    liger_trainer.enable()
    assert Trainer.evaluation_loop is loop
    for _ in range(2):
        liger_trainer.disable()
        assert transformers.trainer.apply_liger_kernel is not ours
        assert transformers.trainer.apply_liger_kernel is transformers.integrations.liger.apply_liger_kernel
        assert not hasattr(Trainer.evaluation_loop, "__wrapped__")


def test_switched_off_the_flag_means_liger_kernel_again():
    liger_trainer.disable()
    with pytest.raises(ImportError, match="liger-kernel >= 0.3.0 is not available"):
        make().train()


@pytest.fixture
def stub(tmp_path, monkeypatch):
    """A package in the place of LinkedIn's, that takes note of what it is asked for."""
    package = tmp_path / "liger_kernel"
    (package / "transformers").mkdir(parents=True)
    (package / "__init__.py").write_text("__version__ = '0.8.5'\n")
    (package / "transformers" / "__init__.py").write_text(
        "asked = []\ndef _apply_liger_kernel_to_instance(model, **flags):\n    asked.append(flags)\n"
    )
    info = tmp_path / "liger_kernel-0.8.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: liger-kernel\nVersion: 0.8.5\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "liger_kernel"]:
        del sys.modules[name]


def test_beside_liger_kernel_ours_is_the_one_and_says_so(stub, capsys):
    trainer = make()
    trainer.train()
    assert "liger_kernel" not in sys.modules
    out = capsys.readouterr().out
    assert f"{patched_record(trainer.model).report} The liger-kernel 0.8.5 that is installed is not used." in out


def test_switched_off_beside_liger_kernel_it_is_the_one(stub, monkeypatch):
    liger_trainer.disable()
    monkeypatch.setattr("transformers.integrations.liger.is_liger_kernel_available", lambda: True)
    trainer = make(liger_kernel_config={"rope": False})
    trainer.train()
    assert sys.modules["liger_kernel.transformers"].asked == [{"rope": False}]
    assert patched_record(trainer.model) is None


# TRL's trainers


def preferences(n=8):
    data = completions(n)
    return data.rename_column("completion", "chosen").add_column("rejected", completions(n, seed=9)["completion"])


def judged(n=8):
    return completions(n).add_column("label", [i % 2 == 0 for i in range(n)])


def prompts(n=8):
    return completions(n).remove_columns("completion")


def length(completions, **_):
    return [float(len(text.split())) for text in completions]


SAMPLED = {
    "max_completion_length": 6,
    "num_generations": 2,
    "temperature": 0.9,
    "generation_kwargs": {"min_new_tokens": 2},
}
TRL = {
    "sft": (SFTTrainer, SFTConfig, completions, {}, {}),
    "dpo": (DPOTrainer, DPOConfig, preferences, {}, {}),
    "kto": (KTOTrainer, KTOConfig, judged, {}, {}),
    "grpo": (GRPOTrainer, GRPOConfig, prompts, {"beta": 0.1, **SAMPLED}, {"reward_funcs": length}),
    "rloo": (RLOOTrainer, RLOOConfig, prompts, SAMPLED, {"reward_funcs": length}),
    "distillation": (DistillationTrainer, DistillationConfig, prompts, {"max_completion_length": 6}, {}),
}


def make_trl(name, model=None, peft_config=None, **options):
    cls, config, data, needed, arguments = TRL[name]
    if name == "distillation":
        arguments = {"teacher_model": tiny_model("qwen3", seed=3)}
    options = {"max_steps": 2, "per_device_train_batch_size": 4, "use_liger_kernel": True, **needed, **options}
    tokenizer = tiny_tokenizer()
    tokenizer.padding_side = "left"
    return cls(
        model=model or tiny_model(), args=train_args(config, **options), train_dataset=data(),
        processing_class=tokenizer, peft_config=peft_config, **arguments,
    )  # fmt: skip


# KTO shares DPO's path through our code, RLOO GRPO's.
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in ("kto", "rloo"))) for n in TRL])
def test_trainers_of_trl_train_patched_layers_as_the_plain_ones(name, tmp_path):
    reference = tiny_model()
    reference.save_pretrained(tmp_path)  # where GRPO and RLOO load their reference from
    trainers = []
    for flag in (True, False):
        model = tiny_model()
        model.config._name_or_path = str(tmp_path)
        trainers.append(make_trl(name, model, use_liger_kernel=flag))
        trainers[-1].train()
    patched, plain = trainers
    record = patched_record(patched.model)
    assert record is not None and {"RMSNorm", "SwiGLU"} <= set(record.report.swapped)
    assert (record.fused is None) == (name != "distillation")  # the one that passes no config, and asks for no loss
    assert_same_losses(patched, plain, rel=1e-4)
    for got, want in zip(patched.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


def test_a_trainer_of_trl_with_adapters():
    config = LoraConfig(target_modules=["q_proj", "down_proj"], r=4)
    trainers = [make_trl("dpo", peft_config=config, use_liger_kernel=flag) for flag in (True, False)]
    for trainer in trainers:
        trainer.train()
    assert_same_losses(*trainers, rel=1e-4)
    assert "RMSNorm" in patched_record(trainers[0].model).report.swapped


def test_trls_head_stays_on_a_model_that_was_patched_before():
    trainers = []
    for flag in (True, False):
        model = tiny_model()
        if flag:
            patch(model)
        trainers.append(make_trl("sft", model, use_liger_kernel=flag))
        trainers[-1].train()
    assert_same_losses(*trainers)
    patched_record(trainers[0].model).undo()  # TRL's head is above, and stays
    assert trainers[0].evaluate(completions(4))["eval_loss"] == pytest.approx(
        trainers[1].evaluate(completions(4))["eval_loss"], rel=1e-4
    )


def test_a_patch_of_a_model_with_trls_head_leaves_the_loss_to_it():
    model = tiny_model()
    add_fused_lm_head(model, temperature=0.7)
    head, batch = model.forward, collate(list(rows(3)))
    want = model(**batch, fused_lm_head=True).loss
    record = patch(model)
    assert "TRL" in record.report.left_alone["loss"] and record.fused is None
    assert model.forward.__func__ is head.__func__ and "RMSNorm" in record.report.swapped
    torch.testing.assert_close(model(**batch, fused_lm_head=True).loss, want, rtol=1e-6, atol=0)


def test_stored_logits_have_no_use_under_trls_head():
    with pytest.raises(ConfigError, match="cross_entropy=True has no effect here"):
        make_trl("sft", liger_kernel_config={"cross_entropy": True}).train()
