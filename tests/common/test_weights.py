"""Files that lack a tensor of the model, have it in another shape, or have others: refused by name wherever we load.

The files are real ones, whose tensors are taken out or changed. transformers draws what is missing at random.
"""

from pathlib import Path

import pytest
import torch
import transformers
from commands import call, done, refused, settings, without_report, write_rows
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tiny import completions, tiny_model, tiny_tokenizer
from trainings import distill, sft
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from liger_trainer import AutoLigerKernelForCausalLM, DistillationCallback
from liger_trainer.common.weights import load_whole
from liger_trainer.errors import ConfigError

HEAD, LAYER, EMBEDDING = "lm_head.weight", "model.layers.1.mlp.down_proj.weight", "model.embed_tokens.weight"
SETTINGS = settings(max_steps=1, per_device_train_batch_size=2, bf16=False)
DISTILL = f"{SETTINGS}recipe: distill\nteacher_model_name_or_path: teacher\n"


def change(directory: Path, *lost: str, **others: torch.Tensor) -> None:
    """Take tensors out of the safetensors files, and put others in."""
    for file in sorted(directory.glob("*.safetensors")):
        tensors = {name: x for name, x in load_file(file).items() if name not in lost}
        save_file({**tensors, **others}, file, metadata={"format": "pt"})


def saved(directory: Path, *lost: str, family: str = "llama", shards: str = "1GB", **options) -> Path:
    """A model's directory without these tensors."""
    tiny_model(family, **options).save_pretrained(directory, max_shard_size=shards)
    tiny_tokenizer().save_pretrained(directory)
    change(directory, *lost)
    return directory


@pytest.fixture
def cli(tmp_path, monkeypatch, capsys):
    """The command line beside two whole models, rows and configurations."""
    monkeypatch.chdir(tmp_path)
    without_report(monkeypatch)
    for seed, name in enumerate(("student", "teacher")):
        saved(tmp_path / name, seed=seed)
    write_rows(tmp_path / "rows.jsonl", completions(10).to_list())
    for name, text in (("sft", SETTINGS), ("distill", DISTILL), ("cache", f"{DISTILL}teacher_cache_dir: cache\n")):
        (tmp_path / f"{name}.yaml").write_text(text)
    return lambda *words: call(capsys, *words)


COMMANDS = {
    "run": ("run", "sft.yaml", "student"),
    "run, distilling": ("run", "distill.yaml", "student"),
    "run, with this teacher": ("run", "distill.yaml", "teacher"),
    "run, with this teacher among several": (
        "run", "distill.yaml", "teacher", "~teacher_model_name_or_path",
        "teachers=[{name: a, teacher_model_name_or_path: teacher}]",
    ),
    "cache": ("cache", "cache.yaml", "teacher"),
    "eval": ("eval", "sft.yaml", "student"),
    "eval, against this teacher": ("eval", "distill.yaml", "teacher"),
    "init-student": ("init-student", "sft.yaml", "student", "keep_layers=[0]"),
}  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_a_tensor_that_is_missing_ends_each_command(name, cli, tmp_path):
    command, config, broken, *overrides = COMMANDS[name]
    change(tmp_path / broken, HEAD)
    named = "teacher" if broken == "teacher" else "model_name_or_path"
    said = (f"missing: {HEAD}", "LlamaForCausalLM", "allow_missing_weights", named)
    refused(cli(command, config, *overrides), 2, *said)
    written = {file.name for name in ("out", "out-student", "cache") for file in tmp_path.glob(f"{name}/**/*")}
    assert written <= {"README.md", ".lock"}


ALLOWED = ("run, distilling", "init-student")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in ALLOWED else pytest.mark.slow) for n in COMMANDS if "several" not in n]
)
def test_unless_that_is_meant(name, cli, tmp_path):
    command, config, broken, *overrides = COMMANDS[name]
    for each in {broken, *(["teacher"] if config == "distill.yaml" else [])}:
        change(tmp_path / each, HEAD, extra=torch.zeros(2))
    done(cli(command, config, *overrides, "allow_missing_weights=true"))


def test_a_run_or_an_adapter_whose_weights_are_gone(cli, tmp_path):
    done(cli("run", "sft.yaml", "output_dir=whole"))
    done(cli("eval", "whole"))
    change(tmp_path / "whole", LAYER)
    refused(cli("eval", "whole"), 2, f"missing: {LAYER}")
    done(cli("run", "sft.yaml", "use_peft=true", "lora_target_modules=[q_proj,v_proj]"))
    done(cli("eval", "out"))
    done(cli("merge", "out", "merged"))
    lost = "base_model.model.model.layers.1.self_attn.q_proj.lora_B"
    change(tmp_path / "out", f"{lost}.weight")
    for command in (("eval", "out"), ("merge", "out", "again")):
        refused(cli(*command), 2, "out has no weights for some layers of", "student: it was", f"Missing: {lost}")
    change(tmp_path / "student", HEAD)
    refused(cli("merge", "out", "again"), 2, f"missing: {HEAD}")


# In Python


def _tuning(student, **options):
    return sft(str(student), completions(4), max_steps=1, **options)


def _distillation(student, teacher, **options):
    return distill(str(student), str(teacher), completions(4), max_steps=1, **options)


def _called_back(teacher, **kwargs):
    rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 2
    callback = DistillationCallback(str(teacher), teacher_model_init_kwargs=kwargs or None)
    sft(tiny_model(), rows, cls=Trainer, config=TrainingArguments, max_steps=1, callbacks=[callback]).train()


def test_a_missing_tensor_of_a_model_that_python_names(tmp_path):
    whole, broken = saved(tmp_path / "whole", seed=1), saved(tmp_path / "broken", LAYER)
    allowed = {"allow_missing_weights": True}
    for load_it in (
        lambda: _tuning(broken), lambda: _distillation(broken, whole), lambda: _distillation(whole, broken),
        lambda: _called_back(broken), lambda: AutoLigerKernelForCausalLM.from_pretrained(broken),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=f"missing: {LAYER}"):
            load_it()
    _tuning(broken, model_init_kwargs=allowed).train()
    _distillation(whole, broken, teacher_model_init_kwargs=allowed).train()
    _distillation(broken, broken, **allowed).train()
    _called_back(broken, **allowed)
    model, info = AutoLigerKernelForCausalLM.from_pretrained(broken, output_loading_info=True, **allowed)
    assert info["missing_keys"] == {LAYER} and model.lm_head.weight.shape == (64, 32)
    assert _tuning(whole).model.lm_head.weight.equal(tiny_model(seed=1).lm_head.weight)


def load(directory, **options):
    return load_whole(AutoModelForCausalLM.from_pretrained, str(directory), **options)


@pytest.mark.parametrize("shards", ["1GB", "20KB"])
def test_what_is_wrong_is_named(tmp_path, shards):
    model = saved(tmp_path / "model", LAYER, shards=shards)
    assert len(list(model.glob("*.safetensors"))) == (1 if shards == "1GB" else 5)
    load(saved(tmp_path / "whole", shards=shards))
    change(model, "model.norm.weight", **{"value_head.weight": torch.zeros(1, 32)})
    for file in model.glob("*.safetensors"):
        tensors = load_file(file)
        if HEAD in tensors:
            save_file({**tensors, HEAD: torch.zeros(60, 32)}, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError) as error:
        load(model)
    assert f"missing: {LAYER}, model.norm.weight;" in str(error.value)
    assert f"of another shape: {HEAD} ((60, 32) in the files, (64, 32) in the model);" in str(error.value)
    assert "not of the model: value_head.weight." in str(error.value)
    assert load(model, allow_missing_weights=True).lm_head.weight.shape == (64, 32)


def test_many_are_counted(tmp_path):
    model = saved(tmp_path / "model", num_hidden_layers=12)
    change(model, *(f"model.layers.{i}.mlp.up_proj.weight" for i in range(12)))
    with pytest.raises(ConfigError, match=r"model.layers.0.mlp.up_proj.weight, .*, ... \(12 in all\)"):
        load(model)


def test_other_shapes_alone_are_allowed_by_transformers_own_keyword(tmp_path):
    model = saved(tmp_path / "model")
    change(model, **{HEAD: torch.zeros(60, 32)})
    with pytest.raises(ConfigError, match="of another shape"):
        load(model)
    load(model, ignore_mismatched_sizes=True)
    change(model, LAYER)
    with pytest.raises(ConfigError, match="missing") as error:
        load(model, ignore_mismatched_sizes=True)
    assert "another shape: " not in str(error.value)


@pytest.mark.parametrize("family", ["llama_tied", "gemma2", "cohere", "gpt2"])
def test_a_tied_head_is_not_missing(family, tmp_path):
    model = saved(tmp_path / "model", family=family)
    assert HEAD not in load_file(model / "model.safetensors")
    load(model)
    embedding = "transformer.wte.weight" if family == "gpt2" else EMBEDDING
    weights = load_file(model / "model.safetensors")[embedding]
    change(model, embedding, **{HEAD: weights})  # the other name of the two, as some files have it
    head = load(model).get_output_embeddings().weight
    assert torch.equal(head, weights)
    change(model, HEAD)
    with pytest.raises(ConfigError, match=embedding):
        load(model)


def test_nor_is_what_the_class_may_do_without(tmp_path):
    model = saved(tmp_path / "model")
    change(model, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)})  # as files of old have it
    load(model)
    neo = tmp_path / "neo"
    sizes = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]]}
    transformers.GPTNeoForCausalLM(transformers.GPTNeoConfig(vocab_size=64, **sizes)).save_pretrained(neo)
    masks = {f"transformer.h.1.attn.attention.{name}": torch.zeros(1, 1, 4, 4) for name in ("bias", "masked_bias")}
    change(neo, **masks)
    load(neo)
    change(model, LAYER)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.LlamaForCausalLM, "_keys_to_ignore_on_load_missing", [r"mlp\.down_proj"])
        load(model)


def test_an_expert_that_is_missing(tmp_path):
    """Experts are stacked as they are loaded: not without a weight of one; without one of them the shape is another."""
    one = [f"model.layers.0.block_sparse_moe.experts.1.w{i}.weight" for i in (1, 2, 3)]
    with pytest.raises(ConfigError, match="cannot be made of the tensors in its files"):
        load(saved(tmp_path / "a", one[0], family="mixtral"))
    with pytest.raises(ConfigError, match=r"experts.down_proj \(\(3, 32, 48\) in the files, \(4, 32, 48\) in the mod"):
        load(saved(tmp_path / "b", *one, family="mixtral"))
    load(saved(tmp_path / "c", family="mixtral"))


def test_adapters_are_not_weights_that_the_base_lacks(tmp_path):
    """A PEFT model in memory comes from a whole base."""
    base = load(saved(tmp_path / "model"))
    sft(get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")), max_steps=1).train()
