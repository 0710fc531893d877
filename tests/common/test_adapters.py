"""Adapters on disk: merged into the model that they are on their base, told from whole models, or refused by name."""

import json
from pathlib import Path

import pytest
import torch
from commands import call, done, metrics, refused, save_models, settings, without_report, write_rows
from peft import LoraConfig, PrefixTuningConfig, PromptEncoderConfig, PromptTuningConfig, get_peft_model
from tiny import VOCAB, completions, tiny_model, tiny_tokenizer
from trainings import sft
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from liger_trainer.common import weights as adapters
from liger_trainer.common.weights import check_alike, load_merged, logits_of
from liger_trainer.errors import ConfigError
from liger_trainer.losses.model_parts import head_rows
from liger_trainer.teachers.fingerprints import files_fingerprint

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT's, about tied weights and resized embeddings
ADDED = VOCAB + 5
IDS = torch.tensor([[*range(0, VOCAB, 5), VOCAB - 1]])


def lora(*targets: str, **options) -> LoraConfig:
    given = {"r": 4, "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    return LoraConfig(target_modules=["q_proj", *targets], **{**given, **options})


def saved(folder: Path, config, family: str = "llama_tied", rows: int | None = None):
    """Save a base and an adapter that changes each of its own parameters; return the PEFT model."""
    tiny_model(family).save_pretrained(folder / "base")
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    if rows is not None:
        base.resize_token_embeddings(rows)
    model = get_peft_model(base, config).eval()
    for i, parameter in enumerate(p for p in model.parameters() if p.requires_grad):
        parameter.data += torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i)) * 0.1
    model.save_pretrained(folder / "adapter")
    return model


def new(rows: int, stop: int = ADDED) -> list[int]:
    return list(range(rows, stop))


KINDS = {  # the adapter, the family, the rows of embeddings that were resized, whether one matrix is saved
    "of a layer": (lora(), "llama_tied", None, True),
    "on the head of tied weights": (lora("lm_head"), "llama_tied", None, False),
    "on the embedding of tied weights": (lora("embed_tokens"), "llama_tied", None, False),
    "on both, each with its own": (lora("embed_tokens", "lm_head"), "llama_tied", None, False),
    "on both, the same": (lora("embed_tokens", "lm_head", ensure_weight_tying=True), "llama_tied", None, True),
    "DoRA on the head": (lora("lm_head", use_dora=True), "llama_tied", None, False),
    "rsLoRA on the embedding": (lora("embed_tokens", use_rslora=True), "llama_tied", None, False),
    "an embedding to save": (lora(modules_to_save=["embed_tokens"]), "llama_tied", None, False),
    "both saved as one": (lora(modules_to_save=["lm_head"], ensure_weight_tying=True), "llama_tied", None, True),
    "trained tokens": (lora(trainable_token_indices=[5, 7]), "llama_tied", None, True),
    "trained tokens of the embedding alone": (lora(trainable_token_indices=[5, 7]), "llama", None, False),
    "added tokens, trained whole": (lora(modules_to_save=["embed_tokens", "lm_head"]), "llama", ADDED, False),
    "added tokens, trained alone": (lora(trainable_token_indices=new(VOCAB)), "llama_tied", ADDED, True),
    "added tokens, not trained": (lora(), "llama_tied", ADDED, True),
    "added tokens, LoRA on the head": (lora("lm_head"), "llama_tied", ADDED, False),
    "fewer tokens": (lora(modules_to_save=["embed_tokens"]), "llama_tied", VOCAB - 2, False),
    "a head with a cap": (lora("lm_head"), "gemma2", None, False),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_merged_model_is_the_adapters_as_it_is_loaded_again(kind, tmp_path):
    config, family, rows, tied = KINDS[kind]
    model = saved(tmp_path, config, family, rows)
    ids = IDS if rows is None else torch.cat([IDS[:, :-1], torch.tensor([[rows - 1]])], 1)
    expected, base = logits_of(model, ids), logits_of(model.get_base_model(), ids)
    merged = load_merged(AutoModelForCausalLM.from_pretrained, str(tmp_path / "adapter"))
    merged.save_pretrained(tmp_path / "merged")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert base.shape == expected.shape
    for plain in (merged, again):
        torch.testing.assert_close(logits_of(plain, ids), expected, rtol=1e-4, atol=1e-4)
        assert plain.config.tie_word_embeddings == tied
        assert (plain.get_output_embeddings().weight is plain.get_input_embeddings().weight) == tied


PROMPTS = PromptTuningConfig, PrefixTuningConfig, PromptEncoderConfig
UNMERGED = {
    **{kind.__name__: (kind(task_type="CAUSAL_LM", num_virtual_tokens=3), "no change of weights") for kind in PROMPTS},
    "a bias that the head cannot hold": (lora("lm_head", lora_bias=True), "the base layer has no bias"),
    "rows that are in no file": (lora("lm_head"), f"was trained on a model of {ADDED} tokens"),
}


@pytest.mark.parametrize("kind", UNMERGED)
def test_what_cannot_be_merged_is_refused_and_leaves_nothing(kind, tmp_path, monkeypatch, capsys):
    config, message = UNMERGED[kind]
    monkeypatch.chdir(tmp_path)
    no_file = "no file" in kind
    saved(Path(), config, "llama" if no_file else "llama_tied", ADDED if no_file else None)
    tiny_tokenizer().save_pretrained("base")
    refused(call(capsys, "merge", "adapter", "merged"), 2, message)
    assert {path.name for path in Path().iterdir()} == {"base", "adapter"}


def save_tied(model, folder, save=LlamaForCausalLM.save_pretrained):
    model.get_output_embeddings().weight = model.get_input_embeddings().weight
    model.config.tie_word_embeddings = True
    save(model, folder)


@pytest.mark.parametrize(
    ("holder", "name", "other", "message"),
    [
        (adapters, "_untie", lambda base: False, "the merged model is not the adapter's: its logits differ by"),
        (LlamaForCausalLM, "save_pretrained", save_tied, "the saved model is not the adapter's"),
    ],
)
def test_a_merge_that_makes_another_model_is_noticed(tmp_path, monkeypatch, capsys, holder, name, other, message):
    monkeypatch.chdir(tmp_path)
    saved(Path(), lora("lm_head"))
    tiny_tokenizer().save_pretrained("base")
    monkeypatch.setattr(holder, name, other)
    refused(call(capsys, "merge", "adapter", "merged"), 2, message)
    assert {path.name for path in Path().iterdir()} == {"base", "adapter"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_is_allowed_and_no_more(dtype):
    expected, allowed = torch.randn(2, 5, 64), adapters.TOLERANCE[dtype]
    noise = torch.randn_like(expected)
    noise *= expected.norm() / noise.norm()
    check_alike(expected + 0.9 * allowed * noise, expected, allowed)
    for wrong in (expected + 1.1 * allowed * noise, expected * float("nan")):
        with pytest.raises(ConfigError, match="is not the adapter's"):
            check_alike(wrong, expected, allowed)


# An adapter where a model is expected


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """The command line beside a student, a base and its adapter: exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    without_report(monkeypatch)
    save_models(tmp_path, "student")
    saved(tmp_path, lora("lm_head"))
    tiny_tokenizer().save_pretrained("base")
    write_rows(Path("rows.jsonl"), completions(12).to_list())
    Path("run.yaml").write_text(
        settings(recipe="distill", teacher_model_name_or_path="adapter", max_steps=1, bf16=False)
    )
    return lambda *words: call(capsys, *words)


def test_an_adapter_teaches_as_the_model_that_it_is(run):
    assert run("merge", "adapter", "merged")[0] == 0
    kl = {}
    for name in ("adapter", "merged", "base"):
        _, err = done(run("run", "run.yaml", f"teacher_model_name_or_path={name}", f"output_dir=by_{name}"))
        assert "the teacher's is unknown" not in err  # the tokenizer is the base's
        kl[name] = metrics(Path(f"by_{name}"))["before"]["forward_kl"]
    assert kl["adapter"] == pytest.approx(kl["merged"], rel=1e-4) != pytest.approx(kl["base"], rel=1e-2)


def test_the_cache_of_an_adapter_is_that_of_its_settings_and_its_base_too(run):
    done(run("cache", "run.yaml", "teacher_cache_dir=cache"))
    train = ("run", "run.yaml", "teacher=cache", "teacher_cache_dir=cache", "overwrite_output_dir=true")
    done(run(*train))
    first = files_fingerprint("adapter")
    config = json.loads(Path("adapter/adapter_config.json").read_text())
    Path("adapter/adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 99}))
    scaled = files_fingerprint("adapter")
    tiny_model("llama_tied", seed=9).save_pretrained("base")
    assert len({first, scaled, files_fingerprint("adapter")}) == 3
    refused(run(*train), 2, "teacher")


STUDENTS = (
    *((command, "run.yaml", "model_name_or_path=adapter") for command in ("run", "estimate", "eval")),
    ("init-student", "run.yaml", "model_name_or_path=adapter", "keep_layers=[0]"),
    ("cache", "run.yaml", "model_name_or_path=adapter", "teacher_cache_dir=cache"),
)


def test_an_adapter_as_student_is_to_be_merged_first(run):
    told = f"adapter is an adapter (adapter_config.json) of {Path.cwd() / 'base'}"
    for words in STUDENTS:
        refused(run(*words), 2, told, "merge it first: liger-trainer merge adapter MERGED")
    with pytest.raises(ConfigError, match=r"is an adapter \(adapter_config.json\) of"):
        sft("adapter")


def test_an_adapter_samples(run):
    rows = {}
    for teacher in ("adapter", "base"):
        most = ("--max-new-tokens", 4, "--max-prompt-tokens", 20, "--keep-unfinished")
        done(run("generate", teacher, f"from_{teacher}", "--prompts", "rows.jsonl", *most))
        rows[teacher] = Path(f"from_{teacher}", "train.jsonl").read_text()
    assert rows["adapter"] != rows["base"]


def test_adapters_of_a_student_without_layers_are_merged_as_they_were_trained(run):
    lora = ("use_peft=true", "lora_target_modules=[q_proj,lm_head]", "keep_layers=[0]", "learning_rate=0.1")
    out, _ = done(run("run", "run.yaml", *lora, "max_steps=3", "num_sample_completions=0"))
    trained = metrics(Path("out"))["after"]["forward_kl"]
    assert not json.loads(Path("out/config.json").read_text())["tie_word_embeddings"]
    out, _ = done(run("eval", "out", "--json"))
    assert json.loads(out)["evaluations"][0]["metrics"]["forward_kl"] == pytest.approx(trained, rel=1e-4)


@pytest.mark.parametrize("module", ["embed_tokens", "lm_head"])
@pytest.mark.parametrize("family", ["llama_tied", "gemma2"])
def test_modules_that_are_saved_as_one_train(module, family):
    """PEFT's head of theirs has swapped features."""
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=[module], ensure_weight_tying=True)
    trainer = sft(tiny_model(family), max_steps=1, peft_config=config)
    assert head_rows(trainer.model) == VOCAB
    assert trainer.train().training_loss > 0
