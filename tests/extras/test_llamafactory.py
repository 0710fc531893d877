"""The kernel `liger_trainer` in LLaMA-Factory itself: its commands, v0 and v1, on a tiny model."""

import importlib.util
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from tiny import assert_same_gradients, gradients, largest_vocabulary_tensor, masked_batch, tiny_model
from tiny_files import write
from tool_runs import logged, run

pytest.importorskip("llamafactory", reason="LLaMA-Factory is not installed: docs/extras.md has the commands")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Rows and models, with the one line in LLaMA-Factory's folder of kernels."""
    folder = write(tmp_path_factory.mktemp("llamafactory"))
    columns = {"prompt": "instruction", "response": "output"}
    (folder / "dataset_info.json").write_text(json.dumps({"tiny": {"file_name": "alpaca.json", "columns": columns}}))
    rows = {"tiny": {"path": str(folder / "alpaca.json"), "source": "local", "converter": "alpaca"}}
    (folder / "rows.yaml").write_text(yaml.safe_dump(rows))
    package = importlib.util.find_spec("llamafactory.v1.plugins.model_plugins.kernels.ops")
    assert package is not None and package.submodule_search_locations
    line = Path(package.submodule_search_locations[0]) / "liger_trainer.py"
    there = line.exists()
    line.write_text("import liger_trainer.integrations.llamafactory\n")
    yield folder
    if not there:
        line.unlink()


def v0(folder, name, **options):
    base = {
        "model_name_or_path": "student", "template": "qwen3_nothink", "dataset_dir": ".", "dataset": "tiny",
        "stage": "sft", "do_train": True, "finetuning_type": "full", "output_dir": name, "max_steps": 3,
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "cutoff_len": 128, "learning_rate": 0.001,
        "lr_scheduler_type": "constant", "logging_steps": 1, "report_to": "none", "seed": 1,
        "disable_gradient_checkpointing": True, "save_strategy": "no",
    }  # fmt: skip
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(base | options))
    printed = run("llamafactory-cli", "train", f"{name}.yaml", cwd=folder)
    return logged(folder / name), printed


def v1(folder, name, **options):
    base = {
        "model": "student", "template": "qwen3_nothink", "train_dataset": "rows.yaml", "output_dir": name,
        "micro_batch_size": 4, "global_batch_size": 8, "cutoff_len": 128, "learning_rate": 0.001, "max_steps": 3,
        "bf16": False, "seed": 1, "logging_steps": 1,
    }  # fmt: skip
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(base | options))
    printed = run("llamafactory-cli", "sft", f"{name}.yaml", cwd=folder, USE_V1="1")
    return [float(x) for x in re.findall(r" loss: ([\d.]+),", printed)], printed


KERNEL = {"use_v1_kernels": "liger_trainer"}
PART = {"kernel_config": {"name": "liger_trainer", "include_kernels": "auto"}}
AUTO = {"kernel_config": {"name": "auto", "include_kernels": "liger_trainer"}}
LORA = {"peft_config": {"name": "lora", "r": 4, "lora_alpha": 8, "target_modules": "all"}}


@pytest.mark.slow
@pytest.mark.parametrize(
    "train, options, kernel",
    [(v0, {}, KERNEL), (v0, {"finetuning_type": "lora"}, KERNEL), (v1, {}, PART), (v1, LORA, AUTO)],
    ids=["v0", "v0-lora", "v1", "v1-lora"],
)
def test_losses_are_those_of_llamafactory_alone(folder, train, options, kernel):
    name = f"{train.__name__}-{len(options)}"
    stock, _ = train(folder, f"stock-{name}", **options)
    ours, printed = train(folder, f"ours-{name}", **options, **kernel)
    assert len(ours) >= 3 and ours == pytest.approx(stock, rel=2e-4)
    assert "qwen3: QK norm + rope, RMSNorm 3," in printed and "fused loss" in printed
    assert ("LoRA linear 7" in printed) == bool(options)


def test_log_probabilities_and_gradients_of_v1_without_logits(monkeypatch):
    from llamafactory.v1.core.base_trainer import BaseTrainer

    from liger_trainer.extras.integrations.llamafactory import apply

    stock, trainer, batch = BaseTrainer.compute_log_probs, SimpleNamespace(device="cpu"), masked_batch()
    models = [tiny_model("qwen3"), tiny_model("qwen3")]
    apply(models[1])
    weights = torch.rand(3, 10)
    want = stock(trainer, models[0], batch)
    (want * weights).sum().backward()
    with largest_vocabulary_tensor(monkeypatch, rows=4) as largest:
        got = BaseTrainer.compute_log_probs(trainer, models[1], batch)
        (got * weights).sum().backward()
    torch.testing.assert_close(got, want)
    assert_same_gradients(gradients(models[1]), gradients(models[0]))
    assert largest.rows < want.numel()


def test_what_it_refuses():
    from liger_trainer.errors import ConfigError
    from liger_trainer.extras.integrations.llamafactory import apply

    with pytest.raises(ConfigError, match="Unknown patch options: rop"):
        apply(tiny_model(), "rop")
    with pytest.raises(ConfigError, match="Nothing was found to patch"):
        apply(tiny_model("llama"), "layer_norm")
    assert apply(tiny_model(), None).forward.__name__ == "forward"
