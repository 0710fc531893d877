"""Heads for multi-token prediction of other families than Qwen3.5, by the names and layers that their files have."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from commands import call
from mtp_heads import DEEPSEEK, QWEN, deep_model, save_family, stored_head
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file
from tiny import FirstGradients, assert_same_gradients, completions, texts
from torch import nn
from trainings import logged, sft, trained
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, GenerationConfig

from liger_trainer import LigerConfig
from liger_trainer.common.mtp_head import INDEX, ONE_FILE, SHARD, keep_mtp_head
from liger_trainer.errors import ConfigError
from liger_trainer.extras.mtp import MtpPass

FAMILIES = [family for family in (*DEEPSEEK, *QWEN) if family in CONFIG_MAPPING]  # Mellum is newer than 5.6
WEIGHT = 0.3
RUN: dict[str, Any] = {
    "config": LigerConfig, "max_length": 24, "max_steps": 1, "train_sampling_strategy": "sequential",
    "per_device_train_batch_size": 4, "mtp_loss_weight": WEIGHT,
}  # fmt: skip


@pytest.fixture(params=FAMILIES)
def family(request, monkeypatch) -> str:
    passed_over(request.param, monkeypatch)
    return request.param


def passed_over(family: str, monkeypatch) -> None:
    """Have the class pass over the layer behind two: it names that of the sizes that were published."""
    if family in DEEPSEEK:
        model = AutoModelForCausalLM._model_mapping[type(AutoConfig.for_model(family))]
        monkeypatch.setattr(model, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.2.*"])


def by_definition(folder: Path, family: str, rows: list[tuple[list[int], list[int]]], count: int) -> Any:
    """The head's loss over rows of tokens and labels times their count, and its gradients over `count`, in fp64."""
    model, parts = deep_model(folder, family)
    blocks, norm = model.model.layers, model.model.norm
    layer = blocks[-1]
    del blocks[-1]
    model.config.num_hidden_layers = len(blocks)
    seen: dict[str, Any] = {}
    blocks[-1].register_forward_pre_hook(lambda _, args, kwargs: seen.update(kwargs), with_kwargs=True)
    head = {**{name: nn.Parameter(weight) for name, weight in parts.items()}}
    total = torch.zeros((), dtype=torch.float64)
    for row, wanted in rows:
        ids, labels = torch.tensor([row]), torch.tensor(wanted)
        with torch.no_grad():
            states = model.model(ids, use_cache=False).last_hidden_state
            next_tokens = model.get_input_embeddings()(torch.roll(ids, -1, 1))
        both = [(next_tokens, "pre_fc_norm_embedding"), (states, "pre_fc_norm_hidden")]
        both = [torch.func.functional_call(norm, {"weight": head[name]}, (x,)) for x, name in both]
        x = layer(F.linear(torch.cat(both, -1), head["fc"]), **{k: v for k, v in seen.items() if k != "hidden_states"})
        x = torch.func.functional_call(norm, {"weight": head["norm"]}, (x[0] if isinstance(x, tuple) else x,))
        total = total + F.cross_entropy(model.lm_head(x)[0, :-2], labels[2:], reduction="sum")
    weights = {f"{name}.weight": weight for name, weight in head.items()}
    weights |= {f"layers.0.{name}": weight for name, weight in layer.named_parameters()}
    gradients = torch.autograd.grad(total / count, list(weights.values()), allow_unused=True)
    return total.item(), {n: g for n, g in zip(weights, gradients, strict=True) if g is not None}


def test_loss_and_gradients_are_those_of_the_definition_and_names_and_layout_those_of_the_source(
    family, tmp_path, capsys
):
    source = save_family(tmp_path / "source", family)
    first = FirstGradients()
    trainer = trained(sft(str(source), data=completions(4), callbacks=[first], **RUN, output_dir=str(tmp_path / "out")))
    rows, divisor = rows_of(trainer)
    tokens = sum(label != -100 for _, labels in rows for label in labels[2:])
    total, want = by_definition(source, family, rows, divisor)
    assert logged(trainer, "mtp_loss") == [pytest.approx(total / tokens, rel=1e-5)]
    ours = {name.removeprefix("mtp."): value for name, value in first.values.items() if name.startswith("mtp.")}
    assert_same_gradients(ours, {name: WEIGHT * gradient for name, gradient in want.items()}, rtol=1e-4)

    trainer.save_model()
    assert "is kept" not in capsys.readouterr().out and not (tmp_path / "out" / INDEX).exists()
    before, after = load_file(source / ONE_FILE), load_file(tmp_path / "out" / ONE_FILE)
    assert {name: weight.shape for name, weight in before.items()} == {name: w.shape for name, w in after.items()}
    head = stored_head(source, family)
    assert not any(torch.equal(before[name], after[name]) for name in head if "correction_bias" not in name)
    if family in DEEPSEEK:
        assert torch.equal(after["model.layers.2.embed_tokens.weight"], after["model.embed_tokens.weight"])
        assert torch.equal(after["model.layers.2.shared_head.head.weight"], after["lm_head.weight"])
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    later = sft(again, data=completions(4), **{**RUN, "output_dir": str(tmp_path / "later")})
    ours, theirs = later.model.mtp.state_dict(), trainer.model.mtp.state_dict()
    assert all(torch.equal(weight, theirs[name]) for name, weight in ours.items()) and ours.keys() == theirs.keys()


def rows_of(trainer: Any) -> tuple[list[tuple[list[int], list[int]]], int]:
    """Tokens and labels, and what a step over all of them divides by."""
    batch = trainer.data_collator(list(trainer.train_dataset))
    rows = [(row["input_ids"], row["labels"]) for row in trainer.train_dataset]
    return rows, int(trainer._get_num_items_in_batch([batch], trainer.args.device))


def assert_resumes(source: Path, **options: Any) -> Any:
    """From the second of four steps on as without the stop; return the trainer."""
    options = {**options, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole, resumed = (
        trained(sft(str(source), data=completions(16), **options), checkpoint)
        for checkpoint in (None, f"{options['output_dir']}/checkpoint-2")
    )
    want = whole.model.state_dict()
    assert all(torch.equal(weight, want[name]) for name, weight in resumed.model.state_dict().items())
    return resumed


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next"], indirect=True)
def test_a_resumed_training_goes_on_with_its_head(family, tmp_path):
    """Files have the experts of both one by one."""
    assert_resumes(save_family(tmp_path / "source", family), **RUN, output_dir=str(tmp_path / "out"))


DRAFTERS = [family for family in ("deepseek_v3", "mellum") if family in FAMILIES]  # one of each layout


@pytest.mark.skipif("use_mtp" not in vars(GenerationConfig()), reason="this transformers does not draft by heads")
@pytest.mark.parametrize("family", DRAFTERS, indirect=True)
def test_drafts_that_generate_accepts_are_counted_and_become_more(family, tmp_path):
    """Trained on four rows, which are then drafted. Its count before training is that of random weights."""
    source = save_family(tmp_path / "source", family)
    data = texts(4)
    options = {**RUN, "max_steps": 40, "learning_rate": 1e-2, "mtp_loss_weight": 1.0, "output_dir": str(tmp_path)}
    trainer = sft(str(source), data=data, **options)
    prompt = torch.tensor([trainer.train_dataset[0]["input_ids"][:4]])
    counts = []
    for folder in (source, tmp_path):
        if folder == tmp_path:
            trained(trainer).save_model()
        counts.append(passes_of_generate(folder, prompt))
        row, passes = counts[-1]
        assert passes == passes_by_our_count(trainer, row, prompt.shape[1])
    (_, before), (row, after) = counts
    assert after <= 0.75 * before <= 0.75 * (row.shape[1] - prompt.shape[1])


@pytest.mark.skipif("use_mtp" not in vars(GenerationConfig()), reason="this transformers does not draft by heads")
@pytest.mark.parametrize("family", DRAFTERS, indirect=True)
def test_generate_drafts_with_a_head_that_was_kept_as_it_was(family, tmp_path):
    source = save_family(tmp_path / "source", family)
    model = AutoModelForCausalLM.from_pretrained(source)
    model.save_pretrained(tmp_path / "out")
    assert "is kept as it was" in str(keep_mtp_head(model, tmp_path / "out"))
    prompt = torch.tensor([[3, 4, 5, 6]])
    (row, passes), (again, later) = (passes_of_generate(folder, prompt) for folder in (source, tmp_path / "out"))
    assert torch.equal(row, again) and passes == later


def passes_of_generate(folder: Path, prompt: torch.Tensor, tokens: int = 16) -> tuple[torch.Tensor, int]:
    """What a saved model generates with its head's drafts, and in how many passes."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    calls: list[int] = []
    model.model.register_forward_hook(lambda *_: calls.append(1))
    model.generation_config.eos_token_id = None
    row = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, use_mtp=True)
    assert row.shape[1] == prompt.shape[1] + tokens
    return row, len(calls)


def passes_by_our_count(trainer: Any, row: torch.Tensor, begun: int) -> int:
    """A pass makes a token, and one more where the draft, which stands where the model predicts it, is the same."""
    model = trainer.model.eval()
    with torch.no_grad():
        how = {"fused_lm_head": True, "mtp_pass": MtpPass(model.mtp, 1.0, None), "use_cache": False}
        accepted = model(row, labels=row, **how).parts["mtp_accepted"][0]
    passes, place = 1, begun
    while place < row.shape[1] - 1:
        place += 2 if place < row.shape[1] - 2 and accepted[place] else 1
        passes += 1
    return passes


LORA = {"q_proj": "qwen3_5_text", "o_proj": "glm4_moe"}


@pytest.fixture(params=LORA)
def adapted(request, tmp_path, monkeypatch) -> tuple[str, Path, dict[str, Any]]:
    """A family, its source, and options of a training of adapters."""
    passed_over(LORA[request.param], monkeypatch)
    lora = LoraConfig(r=4, target_modules=[request.param], task_type="CAUSAL_LM")
    options = {**RUN, "peft_config": lora, "output_dir": str(tmp_path / "out"), "learning_rate": 1e-2}
    return LORA[request.param], save_family(tmp_path / "source", LORA[request.param]), options


def test_the_head_learns_beside_an_adapter(adapted, tmp_path):
    """At first the adapter adds nothing, so the definition is that without it."""
    family, source, options = adapted
    first = FirstGradients()
    trainer = trained(sft(str(source), data=completions(4), callbacks=[first], **options))
    _, want = by_definition(source, family, *rows_of(trainer))
    beginning = "base_model.model.mtp."
    ours = {n.removeprefix(beginning): value for n, value in first.values.items() if n.startswith(beginning)}
    assert_same_gradients(ours, {name: WEIGHT * gradient for name, gradient in want.items()}, rtol=1e-4)
    assert all("lora" in name or "mtp" in name for name in first.values) and len(first.values) > len(ours)
    alone = trained(sft(str(source), data=completions(4), **{**options, "mtp_loss_weight": 0.0}))
    after = trainer.model.state_dict()
    assert all(torch.equal(weight, after[name]) for name, weight in alone.model.state_dict().items() if "lora" in name)


def test_the_head_of_an_adapter_is_beside_it_and_merged_with_it(adapted, tmp_path, capsys):
    family, source, options = adapted
    trainer = trained(sft(str(source), data=completions(8), **{**options, "max_steps": 2}))
    trainer.save_model()
    beside, stored = load_file(tmp_path / "out" / SHARD), stored_head(source, family)
    copies = {name for name in stored if "embed_tokens" in name or "head.weight" in name}
    before = {name: weight for name, weight in stored.items() if name not in copies}
    assert {n: w.shape for n, w in beside.items()} == {n: w.shape for n, w in before.items()}
    assert not any("mtp" in name for name in load_file(tmp_path / "out" / "adapter_model.safetensors"))
    base = AutoModelForCausalLM.from_pretrained(source)
    PeftModel.from_pretrained(base, tmp_path / "out")
    code, printed, why = call(capsys, "merge", tmp_path / "out", tmp_path / "merged")
    assert code == 0, why
    assert "is kept as it was trained beside the adapter" in printed
    places = json.loads((tmp_path / "merged" / INDEX).read_text())["weight_map"]
    assert places.keys() == load_file(source / ONE_FILE).keys()
    merged = load_file(tmp_path / "merged" / SHARD)
    assert merged.keys() == stored.keys() and all(torch.equal(merged[name], weight) for name, weight in beside.items())
    assert not any(torch.equal(weight, before[n]) for n, weight in beside.items() if "correction_bias" not in n)
    assert all(torch.equal(merged[name], stored[name]) for name in copies)
    later = sft(str(tmp_path / "merged"), data=completions(4), **RUN)
    ours, theirs = later.model.mtp.state_dict(), trainer.model.get_base_model().mtp.state_dict()
    assert all(torch.equal(weight, theirs[name]) for name, weight in ours.items())


def test_a_resumed_training_of_an_adapter_goes_on_with_its_head(adapted):
    _, source, options = adapted
    resumed = assert_resumes(source, **options, gradient_checkpointing=True)
    assert any("mtp." in name for name, p in resumed.model.named_parameters() if p.requires_grad)


def without(beginning: str):
    return lambda stored: {name: weight for name, weight in stored.items() if not name.startswith(beginning)}


REFUSED = {  # what becomes of the stored weights, and what is said
    "none": (without("mtp."), "hold no head for multi-token prediction"),
    "two layers": (lambda stored: stored | {"mtp.layers.1.mlp.gate.weight": torch.ones(4, 32)},
                   r"mtp\.layers\.1\.mlp\.gate\.weight of Qwen3NextForCausalLM's differs"),
    "other names": (lambda stored: stored | {"model.mtp_block.0.norm.weight": torch.ones(32)},
                    r"model\.mtp_block\.0\.norm\.weight of Qwen3NextForCausalLM's differs"),
    "another width": (lambda stored: stored | {"mtp.fc.weight": torch.ones(32, 32)}, r"fc\.weight of .* differs"),
    "an expert that is missing": (without("mtp.layers.0.mlp.experts.1.up_proj"), "experts.* of .* differs"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_heads_of_another_form_are_refused(case, tmp_path, monkeypatch):
    model = AutoModelForCausalLM._model_mapping[type(AutoConfig.for_model("qwen3_next"))]
    monkeypatch.setattr(model, "_keys_to_ignore_on_load_unexpected", ["mtp"])
    source = save_family(tmp_path, "qwen3_next")
    change, said = REFUSED[case]
    save_file(change(load_file(source / ONE_FILE)), source / ONE_FILE, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=said):
        sft(str(source), data=completions(4), **RUN)
