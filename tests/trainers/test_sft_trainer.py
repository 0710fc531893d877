"""LigerTrainer besides the forms of rows: metrics, layers, adapters on the head, rows that are left out, refusals."""

import copy
import json
import math
from typing import Any

import peft
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tiny import VOCAB, WORDS, completions, double_copy, texts, tiny_model, tiny_tokenizer, train_args
from torch import nn
from trainings import logged, sft, trained
from transformers import BartConfig, BartForCausalLM, Trainer
from trl import ModelConfig, SFTTrainer, get_peft_config

from liger_trainer import LigerDistillConfig, patch
from liger_trainer.errors import ConfigError, DataError
from liger_trainer.patching.patcher import patched_record
from liger_trainer.trainers.row_preparation import prepare_rows

pytestmark = pytest.mark.filterwarnings("error::liger_trainer.MaterializedLogitsWarning")


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"gradient_accumulation_steps": 2}, marks=pytest.mark.slow)], ids=str
)
def test_dropout_of_adapters(options):
    """Masks that torch's seed decides, with and without layers that run a second time in the backward."""

    def losses(dropout, checkpoints):
        adapters = LoraConfig(target_modules="all-linear", r=4, lora_dropout=dropout)
        how = {"peft_config": adapters, "gradient_checkpointing": checkpoints, "max_steps": 4}
        trainer = trained(sft(data=texts(), **how, **options))
        assert not [name for name in trainer.patched.report.left_alone if "LoRA" in name]
        return logged(trainer)

    want = losses(0.3, False)
    assert losses(0.3, True) == pytest.approx(want, rel=1e-6) and losses(0.0, False) != pytest.approx(want, rel=1e-6)


def test_what_a_loss_is_divided_by_survives_bf16():
    """FSDP2 casts the floating inputs of a model, whatever they are: in bf16, 4,088 tokens are 4,096."""
    trainer = sft()
    items = trainer._get_num_items_in_batch([{"labels": torch.full((8, 512), 5)}], trainer.args.device)
    assert items == 8 * 511 and not items.is_floating_point()


# Metrics


def test_tokens_are_counted_through_checkpoints(tmp_path):
    options = {"max_steps": 5, "logging_steps": 3, "save_strategy": "steps", "save_steps": 2}

    def tokens(checkpoint=None, folder="run", **kwargs):
        trainer = sft(output_dir=str(tmp_path / folder), **options, **kwargs)
        for _ in range(2):  # a second training begins from the start
            yield logged(trained(trainer, checkpoint and str(tmp_path / checkpoint)), "num_tokens")

    whole = next(tokens())
    assert len(whole) == 2 and list(tokens()) == [whole, whole]
    assert next(tokens("run/checkpoint-2")) == next(tokens("run/checkpoint-4")) == whole
    next(tokens(folder="trl", cls=SFTTrainer))  # whose checkpoint has only the tokens of its last log
    first, last = next(tokens("trl/checkpoint-4"))
    assert first == whole[0] and first < last < whole[1]


METRICS = ("perplexity", "entropy", "mean_token_accuracy")


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_in_evaluation_tokens_count_the_same_in_any_batch(family):
    """Only the auxiliary loss is defined by the batch."""
    whole, parts = (
        sft(tiny_model(family), eval_data=completions(10, seed=5), per_device_eval_batch_size=size).evaluate()
        for size in (10, 3)
    )
    aux = whole.pop("eval_aux_loss", 0.0), parts.pop("eval_aux_loss", 0.0)
    for metrics, loss in zip((whole, parts), aux, strict=True):
        metrics["eval_loss"] -= 0.3 * loss  # the model's own coefficient
        assert metrics["eval_loss"] == pytest.approx(math.log(metrics["eval_perplexity"]), rel=1e-6)
    assert bool(aux[0]) == (family == "mixtral")
    for name in ("loss", *METRICS):
        assert parts[f"eval_{name}"] == pytest.approx(whole[f"eval_{name}"], rel=1e-6), name


def test_each_evaluation_dataset_has_its_own_metrics():
    parts = {"long": completions(8, seed=1), "short": completions(5, seed=2)}
    trainer = sft(eval_data=parts, max_steps=1, eval_strategy="steps", eval_steps=1)
    got = trainer.evaluate()
    for name, rows in parts.items():
        want = sft(eval_data=rows).evaluate()
        for metric in ("loss", *METRICS, "num_tokens"):
            assert got[f"eval_{name}_{metric}"] == want[f"eval_{metric}"], (name, metric)
    assert "eval_perplexity" not in got and "eval_entropy" not in got
    trainer.train()
    assert logged(trainer, "eval_long_perplexity") and logged(trainer, "eval_short_perplexity")


def test_an_evaluation_has_the_metrics_of_its_rows_whatever_came_before(monkeypatch):
    """A prediction of other rows, and an evaluation of others that was broken off."""
    trainer = sft(eval_data=completions(6, seed=2))
    want = trainer.evaluate()
    rows = sft(eval_data=completions(9, seed=1))
    metrics = trainer.predict(rows.eval_dataset).metrics
    assert metrics["test_perplexity"] == rows.evaluate()["eval_perplexity"] != want["eval_perplexity"]
    assert "test_entropy" in metrics and "eval_entropy" not in metrics
    again, step, calls = trainer.evaluate(), trainer.prediction_step, []

    def broken(*args, **kwargs):
        calls.append(1)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return step(*args, **kwargs)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(trainer, "prediction_step", broken)
        trainer.evaluate(completions(12, seed=7))
    last = trainer.evaluate()
    assert all(again[f"eval_{name}"] == last[f"eval_{name}"] == want[f"eval_{name}"] for name in METRICS)


def test_compute_loss_func_gets_logits():
    shapes = []

    def compute_loss_func(outputs, labels, num_items_in_batch=None):
        shapes.append(outputs.logits.shape)
        assert isinstance(outputs.logits, torch.Tensor)
        return outputs.logits.float().square().mean()

    ours, trls = (
        trained(sft(**cls, max_steps=1, compute_loss_func=compute_loss_func)) for cls in ({}, {"cls": SFTTrainer})
    )
    assert shapes[0][-1] == VOCAB
    for name in ("loss", "entropy", "mean_token_accuracy"):
        assert logged(ours, name) == pytest.approx(logged(trls, name), rel=1e-5)


# Layers


def test_layers_are_patched_and_one_line_says_so(capsys):
    trainer = sft()
    assert trainer.patched is patched_record(trainer.model) and trainer.fused is trainer.patched.fused
    assert {"RMSNorm", "SwiGLU", "rope", "fused loss"} <= set(trainer.patched.report.swapped)
    assert capsys.readouterr().out.count(f"liger-trainer: {trainer.patched.report}\n") == 1
    trainer.patched.undo()
    assert all("forward" not in vars(layer) for layer in trainer.model.modules() if layer is not trainer.model)
    swapped = sft(liger_kernel_config={"rms_norm": False}).patched.report.swapped
    assert "RMSNorm" not in swapped and "SwiGLU" in swapped


def with_limit(value):
    model = tiny_model()
    model.generation_config.max_new_tokens = value
    return model


def with_another_loss():
    model = tiny_model()
    model.loss_function = lambda logits, labels, vocab_size, **kwargs: logits.sum()
    return model


def bart_decoder():
    sizes = {"d_model": 8, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 8}
    return BartForCausalLM(BartConfig(vocab_size=VOCAB, is_decoder=True, is_encoder_decoder=False, **sizes))


ON_LOGITS = "compute their loss from hidden states.*SFTTrainer"
REFUSED = {  # before training
    "an unknown option": (tiny_model, {"rms_norms": True}, "Unknown patch options: rms_norms. There are rope"),
    "no fused loss": (tiny_model, {"fused_linear_cross_entropy": False}, ON_LOGITS),
    "a loss on logits": (tiny_model, {"cross_entropy": True}, ON_LOGITS),
    "compiled": (lambda: torch.compile(tiny_model()), None, "got the OptimizedModule .* set torch_compile=True"),
    "a backbone": (lambda: tiny_model().model, None, "model: expected a causal language model, .*, got a LlamaModel"),
    "wrapped": (lambda: nn.DataParallel(tiny_model()), None, "without a wrapper, .* got a DataParallel"),
    "no weights": (lambda: tiny_model().to("meta"), None, "model: expected a Llama.* on the meta device, .*embed_tok"),
    "a loss in its forward": (bart_decoder, None, "BartForCausalLM does not compute its loss through `loss_function`"),
    "another loss": (with_another_loss, None, "has its own loss"),
    "a file that cannot be saved": (
        lambda: with_limit(-1), None, "generation_config could not be saved with the trained model: .*-1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_models_and_options_that_are_refused(case):
    make, options, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        sft(make(), liger_kernel_config=options)


def test_a_copy_of_a_trainers_model_is_trained_by_a_trainer_of_its_own():
    """With its own loss, whatever the first trainer's is, and though TRL has wrapped the copied forward again."""
    first = sft(label_smoothing_factor=0.3)
    copied = copy.deepcopy(first.model)
    want = logged(trained(sft(max_steps=2)))
    assert logged(trained(sft(copied, max_steps=2))) == pytest.approx(want, rel=1e-6)
    smooth = logged(trained(sft(label_smoothing_factor=0.3, max_steps=2)))
    assert logged(trained(first))[:2] == pytest.approx(smooth, rel=1e-6) and smooth != pytest.approx(want, rel=1e-3)


def test_a_model_that_was_patched_with_a_loss_on_logits_is_refused_and_stays_so():
    model = tiny_model()
    record = patch(model, cross_entropy=True)
    with pytest.raises(ConfigError, match="was patched with cross_entropy=True before.*without cross_entropy"):
        sft(model)
    assert record.report.swapped["cross-entropy"] == 1 and patched_record(model) is record


def test_a_loss_that_an_sfttrainer_took_off_is_missed():
    model = tiny_model()
    trainer = sft(model, eval_data=completions(4, 3))
    sft(model, cls=SFTTrainer)
    with pytest.raises(ConfigError, match="was replaced after this LigerTrainer was made, as by an SFTTrainer"):
        trainer.evaluate()


# Adapters on the head, which TRL refuses


def head_adapter():
    return LoraConfig(target_modules=["lm_head", "q_proj"], r=4, lora_alpha=32, init_lora_weights=False)


@pytest.mark.filterwarnings("ignore::liger_trainer.MaterializedLogitsWarning")  # the loss is the same
def test_adapters_on_the_head_are_part_of_the_loss():
    torch.manual_seed(0)
    trainer = sft(peft_config=head_adapter())
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.patched.undo()
    truth = double_copy(trainer.model)
    truth.get_base_model().forward = type(truth.get_base_model()).forward.__get__(truth.get_base_model())
    want = truth(**batch).loss
    names = [name for name, p in truth.named_parameters() if "lm_head.lora" in name]
    gradients = torch.autograd.grad(want, [truth.get_parameter(name) for name in names])

    trainer = sft(trainer.model)
    loss = trainer.compute_loss(trainer.model, dict(batch))
    torch.testing.assert_close(loss, want, rtol=1e-5, atol=0)
    with trainer.model.disable_adapter(), torch.no_grad():
        assert abs(trainer.compute_loss(trainer.model, dict(batch)) - want) > 0.05
    loss.backward()
    assert len(names) == 2
    for name, gradient in zip(names, gradients, strict=True):
        torch.testing.assert_close(trainer.model.get_parameter(name).grad.double(), gradient, rtol=1e-4, atol=1e-6)


def test_trl_still_refuses_them():
    """Also after our trainer, whether it was made or refused its options."""
    sft()
    with pytest.raises(ConfigError):
        sft(liger_kernel_config={"nope": True})
    with pytest.raises(ValueError, match="adapter to `lm_head` is not supported"):
        sft(cls=SFTTrainer, peft_config=head_adapter())


def test_one_module_in_trls_model_arguments_gets_adapters():
    """ModelConfig makes text of the list, which PEFT takes for a pattern of whole paths."""
    adapters: Any = get_peft_config(ModelConfig(use_peft=True, lora_target_modules=["q_proj"], lora_r=2))
    trained_names = [name for name, p in sft(peft_config=adapters).model.named_parameters() if p.requires_grad]
    assert trained_names and all(".q_proj.lora_" in name for name in trained_names)
    assert adapters.target_modules == "q_proj"


# Rows that are left out


def with_prompts(*lengths):
    """Rows of (prompt, completion) words."""
    return Dataset.from_list(
        [{"prompt": " ".join(WORDS[:p]), "completion": " " + " ".join(WORDS[10 : 10 + c])} for p, c in lengths]
    )


ONLY_FIRST = Dataset.from_list(  # what is left is one supervised token in front, which nothing predicts
    [{"input_ids": [1, 2, 3], "labels": [1, -100, -100]}, {"input_ids": [1, 2], "labels": [-100, 2]}]
)
FIVE = with_prompts((2, 3), (8, 3), (7, 3), (9, 9), (1, 1))
LEFT_OUT = {  # rows, options, how many are left out. With the end token, completions are one token longer.
    "no completion left": (FIVE, {"max_length": 8}, 2),
    "before they are packed": (FIVE, {"max_length": 8, "packing": True}, 2),
    "cut at the end": (with_prompts((8, 1), (2, 2)), {"max_length": 6}, 1),
    "cut at the start": (with_prompts((8, 1), (2, 2)), {"max_length": 6, "truncation_mode": "keep_end"}, 0),
    "the first token": (ONLY_FIRST, {}, 1),
    # which keep what lies beyond max_length
    "split": (with_prompts((9, 3), (2, 3)), {"max_length": 8, "packing": True, "packing_strategy": "bfd_split"}, 0),
    "wrapped": (with_prompts((9, 3), (2, 3)), {"max_length": 8, "packing": True, "packing_strategy": "wrapped"}, 0),
}


@pytest.mark.parametrize("case", LEFT_OUT)
def test_rows_without_supervised_tokens_are_counted_and_left_out(case):
    data, options, count = LEFT_OUT[case]
    trainer = sft(data=data, eval_data=with_prompts((20, 2), (2, 2)), **options)
    assert trainer.skipped_rows["train"] == count
    if case == "no completion left":
        assert sorted(len(ids) for ids in trainer.train_dataset["input_ids"]) == [3, 6, 8]
        assert trainer.skipped_rows["eval"] == 1
        metrics = trainer.evaluate(with_prompts((9, 1), (8, 2), (2, 2)))
        assert trainer.skipped_rows["eval"] == 2 and math.isfinite(metrics["eval_loss"])


def test_an_evaluation_dataset_is_not_called_as_the_training_rows_are(tmp_path):
    named = {"train": completions(4)}
    cache = train_args(LigerDistillConfig, teacher_cache_dir=str(tmp_path))
    for call in (
        lambda: sft(eval_data=named),
        lambda: sft().evaluate(named),
        lambda: prepare_rows(cache, tiny_tokenizer(), **named, test=named),
    ):
        with pytest.raises(ConfigError, match="'train' is the name of the training rows"):
            call()


def test_no_row_left_is_an_error():
    short = {"train": {"data": with_prompts((4, 2), (5, 1))}, "eval": {"eval_data": with_prompts((4, 2))}}
    for which, rows in short.items():
        message = f"No row of the {which} dataset has a supervised token within max_length=4: .*Check the completions"
        with pytest.raises(DataError, match=message):
            sft(max_length=4, **{"data": with_prompts((1, 2)), **rows})


def test_rows_are_counted_in_a_stream_by_trl():
    trainer = trained(sft(data=completions().to_iterable_dataset(), max_steps=2))
    assert trainer.skipped_rows == {} and math.isfinite(logged(trainer)[0])


def test_an_evaluation_before_training_leaves_nothing_on_the_model_of_several_processes(monkeypatch):
    """What accelerate did for it is undone, so that training prepares the model again."""
    trainer, found = sft(bf16=True, max_steps=1), []
    before = trainer.model.forward
    trainer.evaluate(trainer.train_dataset)
    assert trainer.model.forward != before
    monkeypatch.setattr(type(trainer.accelerator), "num_processes", 2)
    monkeypatch.setattr(Trainer, "train", lambda self, *_, **__: found.append(self.model.forward == before))
    trainer.train()
    assert found == [True]


@pytest.mark.parametrize("by_name", [True, False])
def test_a_generation_config_as_published_is_saved_as_it_is(by_name, tmp_path):
    published = {"do_sample": False, "temperature": 0.9, "top_p": 0.6}  # against transformers' rules
    model, given = tiny_model(), str(tmp_path / "model")
    model.save_pretrained(given)
    (tmp_path / "model/generation_config.json").write_text(json.dumps(published))
    trainer = trained(sft(given if by_name else type(model).from_pretrained(given), max_steps=1))
    trainer.save_model(str(tmp_path / "saved"))
    saved = json.loads((tmp_path / "saved/generation_config.json").read_text())
    assert published.items() <= saved.items()


@pytest.mark.parametrize("case", ["whole", "padded", "stream"])
def test_rows_beyond_the_positions_of_a_table_are_refused(case):
    long = Dataset.from_list([{"text": "w1 " * n} for n in (3, 30, 5)])
    rows = {"whole": long, "padded": long.select([0, 2, 2]), "stream": long.to_iterable_dataset()}[case]
    model, options = tiny_model("gpt2", max_position_embeddings=24), {}
    if case == "padded":
        options = {"pad_to_multiple_of": 32}
    with pytest.raises(ConfigError, match="max_length is 64, .* has (31|32|64) tokens, but the model has 24 positions"):
        sft(model, rows, max_length=64, max_steps=1, **options)
    sft(model, rows, max_length=24, max_steps=1).train()
    if case == "whole":  # a model that computes its positions has no such limit
        sft(tiny_model(max_position_embeddings=24), rows, max_length=64, max_steps=1).train()


@pytest.mark.parametrize("kind", ["AdaptionPromptConfig", "CPTConfig", "PolyConfig"])
def test_adapters_that_run_by_a_forward_of_their_own_are_refused(kind):
    more = {
        "AdaptionPromptConfig": {"adapter_len": 2, "adapter_layers": 1},
        "CPTConfig": {"cpt_token_ids": [1], "cpt_mask": [1], "cpt_tokens_type_mask": [1]},
        "PolyConfig": {"r": 2, "target_modules": ["q_proj"]},
    }
    with pytest.raises(ConfigError, match="forward, loss or inputs of their own.* transformers' Trainer"):
        sft(peft_config=getattr(peft, kind)(task_type="CAUSAL_LM", **more[kind]))


@pytest.mark.parametrize("adapters", [True, False])
def test_a_model_of_which_nothing_is_trained_is_refused(adapters):
    model: Any = tiny_model()
    if adapters:
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    trainer = sft(model.requires_grad_(False))
    with pytest.raises(ConfigError, match="is_trainable=True" if adapters else "every one of LlamaForCausalLM is froz"):
        trainer.train()
