"""Configurations of the trainers: values that are refused, key by key, and what is decided where nothing is said."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from commands import save_models
from peft import LoraConfig
from tiny import completions, texts, tiny_model, tiny_tokenizer, train_args
from trainings import a_teacher, distill, sft
from trl import SFTTrainer
from trl.experimental.gkd import GKDConfig

from liger_trainer import DistillationCallback, LigerConfig, LigerDistillConfig, LigerTrainer
from liger_trainer.config.run_config import check_text
from liger_trainer.errors import ConfigError
from liger_trainer.trainers import config as sft_config

KD, SFT = LigerDistillConfig, LigerConfig
KL, CE = {"type": "forward_kl"}, {"type": "ce"}
CACHE = {"teacher": "cache", "teacher_cache_dir": "x"}
HIDDEN = {**CACHE, "cache_kind": "hidden"}
SERVER = {"teacher": "server", "teacher_server_base_url": "http://localhost/v1", "teacher_server_model": "m"}
OWN = {"name": "a", "teacher": "self"}


def several(*entries: Any, **more: Any) -> dict[str, Any]:
    return {"teachers": list(entries), **more}


SAMPLED = "does not go with completions that are sampled"
VALUES: list[tuple[Any, dict[str, Any], str]] = [  # what an option declares by itself: test_options.py
    # losses
    (KD, {"temperature": -1.0, "kd_temperature": 1.0}, "temperature: expected"),
    (KD, {"losses": [{**CE, "weight": 0}]}, "every weight is 0, so nothing would be learned"),
    (KD, {"loss_type": "dft"}, "loss_type='dft' weighs the cross-entropy of fine-tuning; distillation takes 'nll'"),
    (KD, {"losses": []}, r"losses must be a list such as .*, got \[\]"),
    (KD, {"losses": "ce"}, "losses: expected a list, or JSON text of one, got 'ce'"),
    (KD, {"losses": ["ce"]}, "Each of losses needs a type out of forward_kl, reverse_kl, jsd, .*; got 'ce'"),
    (KD, {"losses": [{**CE, "weight": "much"}]}, "losses: ce: weight: expected a number, got 'much'"),
    (KD, {"losses": [CE, CE]}, "losses names ce twice"),
    (partial(DistillationCallback, "x"), {"beta": 2.0}, "beta"),
    (partial(DistillationCallback, "x"), {"temperature": 0.0}, "temperature"),
    (partial(DistillationCallback, "x"), {"losses": [{"type": "no_kl"}]}, "type"),
    # teachers
    (KD, {"verify_teacher_cache": True}, "verify_teacher_cache: has no effect without `teacher: cache`"),
    (KD, {"teacher_load_in_4bit": True, "teacher_offload": True}, "offload: does not go with teacher_load_in_4bit"),
    (KD, {"teacher_device": "cpu", "teacher_offload": True}, "teacher_offload: does not go with teacher_device"),
    (KD, {"teacher_dtype": "auto", "teacher_model_init_kwargs": {"dtype": "float32"}}, "either teacher_dtype or dtype"),
    (KD, {"teacher_load_in_8bit": True, "teacher_model_init_kwargs": '{"quantization_config": {}}'},
     "either teacher_load_in_8bit or quantization_config"),
    (KD, {"teacher_device": "cpu", "teacher_model_init_kwargs": {"device_map": "auto"}}, "either teacher_device or"),
    (KD, {"teacher": "self", "teacher_offload": True}, "teacher_offload: has no effect with `teacher: self`"),
    # several of them
    (KD, several(), r"teachers must be a list such as .*, got \[\]"),
    (KD, several({"weight": 1}), "needs a name, text without a slash; got None"),
    (KD, several({**OWN, "name": "a/b"}), "needs a name, text without a slash; got 'a/b'"),
    (KD, several({**OWN, "teacher_model_name_or_path": "x"}), "leave teacher_model_name_or_path out"),
    (KD, several({**OWN, "teacher_dtype": "auto"}), "leave teacher_dtype out"),
    (KD, several({"name": "a", "teacher": "cache"}), "must be of kind model or self, got 'cache'"),
    (KD, several({"name": "a", "teacher_model_name_or_path": "x", "weight": 0}), "a number above 0, got 0"),
    (KD, several({**OWN, "weight": True}), "a number above 0, got True"),
    (KD, several({"name": "a", "path": "x"}), "a dictionary with keys out of name, teacher, weight"),
    (KD, several(OWN, OWN), "'a' belongs to two of them"),
    (KD, several({**OWN, "routes": ["x"]}), "no effect without teacher_column"),
    (KD, several({**OWN, "routes": ["b"]}, {**OWN, "name": "b"}, teacher_column="d"), "'b' belongs to two of them"),
    (KD, several(OWN, teacher="self"), "teachers: are models"),
    (KD, several(OWN, teacher_model_name_or_path="x"), "either teachers or"),
    (KD, {"teachers": '[{"name": "a", "weight": -1}]'}, "a number above 0, got -1"),
    # caches: what they do not determine
    (KD, {**CACHE, "beta": 0.5}, "determines only the forward KL.* asks for jsd"),
    (KD, {**CACHE, "losses": [{"type": "reverse_kl"}], "cache_tail_draws": 4}, "asks for reverse_kl"),
    (KD, {**CACHE, "losses": [{"type": "reverse_kl"}], "cache_kind": "sampled"}, "for reverse_kl"),
    (KD, {**CACHE, "losses": [CE]}, "asks for no divergence"),
    (KD, {**CACHE, "label_smoothing_factor": 0.1}, "label_smoothing_factor: is not part"),
    *((KD, {**HIDDEN, name: value}, f"{name}: has no effect with `cache_kind: hidden`")
      for name, value in {"cache_entries": 8, "cache_bits": 16, "cache_tail_draws": 0}.items()),
    (KD, {**HIDDEN, "losses": [KL, {"type": "hidden_mse"}]}, "hidden_mse compares the outputs of layers"),
    (KD, {**HIDDEN, "losses": [{"type": "uld"}]}, "uld needs the model of a teacher"),
    (KD, {**HIDDEN, "seq_kd": True}, "a cache knows only the completions in the rows"),
    # servers
    (KD, {**SERVER, "teacher_server_base_url": None}, "teacher_server_base_url: missing; `teacher: server` needs it"),
    (KD, {**SERVER, "teacher_server_model": None}, "teacher_server_model: missing; `teacher: server` needs it"),
    *((KD, {**SERVER, "teacher_server_base_url": url}, "expected an address such as http")
      for url in ("localhost:8000", ["http://a/v1", "b:80"])),
    (KD, {**SERVER, "teacher_server_base_url": []}, "teacher_server_base_url: missing"),
    (KD, {**SERVER, "taid": {"start": 0.4}}, "taid: it mixes logits of the whole vocabulary"),
    (KD, {**SERVER, "losses": [{"type": "hidden_mse"}, KL]}, "hidden_mse needs the teacher's model"),
    (KD, {**SERVER, "beta": 1.0, "kd_temperature": 2.0}, "kd_temperature: a server's log-probabilities are of temp"),
    (KD, {**SERVER, "losses": [CE]}, "the loss asks for no divergence"),
    (KD, {**SERVER, "label_smoothing_factor": 0.1}, "not part of the loss against a teacher's server"),
    (KD, {**SERVER, "teacher_dtype": "bfloat16"}, "teacher_dtype: has no effect with `teacher: self` or `server`"),
    # sampling
    (KD, {**CACHE, "lmbda": 0.1}, "a cache knows only the completions in the rows"),
    (KD, {"lmbda": 1.0, "losses": [KL, CE]}, "ce in losses has no effect: it is of given completions, not of the st"),
    # rows
    (KD, {"weight_column": "weight", "lmbda": 0.5}, f"weight_column: {SAMPLED}"),
    (KD, {"supervised_part": "content", "lmbda": 0.5}, f"supervised_part: {SAMPLED}"),
    (SFT, {"supervised_part": "message"}, "supervised_part: without `assistant_only_loss: true`"),
    # steps
    (SFT, {"memory": "balanced", "gradient_checkpointing": True}, "^memory: has no effect with gradient_checkpointin"),
    (SFT, {"memory": "balanced", "torch_compile": True}, "^memory: has no effect with torch_compile"),
    (SFT, {"on_non_finite": "skip_step", "optim": "lomo"}, "on_non_finite: skip_step leaves the optimizer's step out"),
    *((config, {"metric_for_best_model": "entropy"},
       "metric_for_best_model: neither more nor less of entropy is better") for config in (SFT, KD)),
]  # fmt: skip


@pytest.mark.parametrize("config, options, message", VALUES, ids=lambda x: str(x)[:50] if isinstance(x, dict) else "")
def test_values_that_are_refused(config, options, message):
    make = partial(train_args, config) if config in (KD, SFT) else config
    with pytest.raises(ValueError, match=message):
        make(**options)


YAML = "recipe: distill\nmodel_name_or_path: m\ndataset_name: d.jsonl\n"
MODEL, SELF = "teacher_model_name_or_path: t", "teacher: self\nuse_peft: true"
ONE_BY_ONE = "completions are sampled for rows one by one"
NO_LAYERS = "the base that teaches would lack these layers too"
FILES: dict[str, list[str]] = {  # lines of a file: all that is said of them
    "teacher: self": ["teacher: self is the student without its adapters; add `use_peft: true`"],
    f"{SELF}\n{MODEL}": ["teacher_model_name_or_path: has no effect with `teacher: self`"],
    f"{SELF}\nkeep_every_nth_layer: 2": [f"keep_every_nth_layer: {NO_LAYERS}; leave `teacher: self` out"],
    "teachers: [{name: a, teacher: self}]\nuse_peft: true\nkeep_layers: [0]": [f"keep_layers: {NO_LAYERS}"],
    f"{SELF}\ndeepspeed: d.json": ["deepspeed: no such file"],
    "teacher: server\nteacher_server_top_k: 2000": [
        "teacher_server_top_k: expected a number of at most 1,024", "teacher_server_base_url: missing",
        "teacher_server_model: missing"],
    f"{MODEL}\nteacher_column: c": ["teacher_column: has no effect without `teachers`"],
    f"{MODEL}\nteacher_offload: true\nfsdp: full_shard": ["teacher_offload: does not go with FSDP"],
    "teachers: [{name: a}]": ["teachers: a needs teacher_model_name_or_path"],
    "teachers: [{name: a, teacher: self, wieght: 1}]": ["[0].wieght: unknown key. Did you mean weight"],
    "teachers: [{teacher: self}]": ["[0]: name is missing"],
    f"{MODEL}\nlmbda: 1.0\npacking: true": [f"packing: {ONE_BY_ONE}"],
    f"{MODEL}\nschedules: {{lmbda: {{to: 0.5}}}}\npacking: true": [f"packing: {ONE_BY_ONE}"],
    f"{MODEL}\nseq_kd: true\npadding_free: true\nmax_length: null": [f"padding_free: {ONE_BY_ONE}"],
    "lmbda: 0.5\nteacher: cache\nteacher_cache_dir: c": ["teacher: a cache knows only the completions in the rows"],
    f"{MODEL}\nlmbda: 0.5\nuse_vllm: true\nkeep_layers: [0, 2]": ["use_vllm: vLLM would load model_name_or_path wi"],
}  # fmt: skip


@pytest.mark.parametrize("lines", FILES)
def test_what_validate_finds_in_a_file(lines):
    with pytest.raises(ConfigError) as error:
        check_text(YAML + lines, "my.yaml")
    found = FILES[lines]
    assert all(message in str(error.value) for message in found)
    assert str(error.value).count("my.yaml:") == len(found) + (len(found) > 1), str(error.value)


# Whether a training computes in bf16 where nobody said so: the device decides


@pytest.mark.parametrize(
    ("has", "options", "expected"),
    [
        (True, {}, True), (False, {}, False), (True, {"fp16": True}, False), (True, {"use_cpu": True}, False),
        (False, {"bf16": True}, True), (True, {"bf16": False}, False),
    ],
)  # fmt: skip
def test_the_device_decides_where_nothing_is_set(monkeypatch, has, options, expected):
    monkeypatch.setattr(sft_config, "is_torch_bf16_gpu_available", lambda: has)
    args = SimpleNamespace(**{"bf16": None, "fp16": False, "use_cpu": False, **options})
    sft_config.choose_bf16(args)
    assert args.bf16 is expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is no GPU, TRL's default is an error")
@pytest.mark.parametrize("config", [LigerConfig, LigerDistillConfig])
def test_a_configuration_without_bf16_on_a_cpu(config, tmp_path):
    assert config(output_dir=str(tmp_path)).bf16 is False
    assert config(output_dir=str(tmp_path), bf16=True, use_cpu=True).bf16 is True


def test_a_trainer_without_arguments_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = texts(8)
    save_models(tmp_path / "some", "model")
    trainer = LigerTrainer("some/model", train_dataset=rows)
    assert isinstance(trainer.args, LigerConfig) and trainer.args.output_dir == "model-SFT"
    assert trainer.train_dataset.num_rows == len(rows)
    short = train_args(LigerConfig, max_steps=1)
    trainer = LigerTrainer(tiny_model("llama_tied"), short, None, rows, processing_class=tiny_tokenizer())
    assert trainer.args is short and trainer.train().metrics["train_loss"] > 0


# Which way metrics are better, for what chooses by them

LESS = "loss eval_loss perplexity eval_rows_forward_kl reverse_kl kd_loss jsd loss/alm law/forward_kl spans/student_nll"
FOLLOW = {"eval_data": completions(4, seed=1), "eval_strategy": "steps", "eval_steps": 1, "max_steps": 2}


@pytest.mark.parametrize("config", [LigerConfig, LigerDistillConfig])
def test_our_configurations_choose_by_each_metrics_direction(config):
    def chosen(metric, **options):
        return train_args(config, metric_for_best_model=metric, **options).greater_is_better

    assert {name for name in LESS.split() if chosen(name) is not False} == set()
    for more in ("eval_agreement_at_1", "rows_mean_token_accuracy", "accuracy", "f1", "market_share"):
        assert chosen(more) is True
    assert chosen("perplexity", greater_is_better=True) is True
    for neither in ("entropy", "eval_teacher_perplexity"):
        assert chosen(neither, greater_is_better=False) is False


@pytest.mark.parametrize("scheduler", ["reduce_lr_on_plateau", "greedy"])
@pytest.mark.parametrize(
    ("metric", "mode"), [("mean_token_accuracy", "max"), ("perplexity", "min"), (None, "min"), ("accuracy", "max")]
)
def test_learning_rates_that_follow_evaluations_follow_it(scheduler, metric, mode):
    trainer = sft(config=LigerConfig, **FOLLOW, metric_for_best_model=metric, lr_scheduler_type=scheduler)
    trainer.create_optimizer_and_scheduler(2)
    assert trainer.lr_scheduler.mode == mode


def test_a_guess_of_transformers_is_corrected_and_said():
    for make, metric in (
        (sft, "perplexity"),
        (lambda **options: distill(config=GKDConfig, **options), "forward_kl"),
        (lambda **options: sft(cls=SFTTrainer, callbacks=[DistillationCallback(a_teacher())], **options), "forward_kl"),
    ):
        with pytest.warns(UserWarning, match=f"transformers takes more {metric} for the better"):
            trainer = make(metric_for_best_model=metric, **FOLLOW)
        assert not trainer.args.greater_is_better


@pytest.mark.parametrize("adapters", [None, LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")])
def test_nobody_is_warned_of_what_other_libraries_call_by_old_names(adapters, tmp_path, recwarn):
    args = LigerConfig(str(tmp_path), max_steps=1, report_to="none")
    LigerTrainer(tiny_model(), args, train_dataset=texts(4), processing_class=tiny_tokenizer(), peft_config=adapters)
    assert args.gradient_checkpointing is True
    assert [str(each.message) for each in recwarn if each.category is FutureWarning] == []
