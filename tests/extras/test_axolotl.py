"""The axolotl plugin in axolotl itself: its command on a tiny model, and what the plugin refuses."""

import pytest
import yaml
from tiny_files import write
from tool_runs import attempt, logged, run

pytest.importorskip("axolotl", reason="axolotl is not installed: docs/extras.md has the commands")

PLUGIN = "liger_trainer.integrations.axolotl.LigerTrainerPlugin"
LORA = {"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_target_linear": True, "lora_dropout": 0.0}
# axolotl's own kernels, which it turns on for LoRA, need a GPU
PLAIN = dict.fromkeys(("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel"), False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("axolotl"))


def config(folder, name, **options):
    base = {
        "base_model": str(folder / "student"), "dataset_prepared_path": str(folder / "prepared"),
        "datasets": [{"path": str(folder / "chats.jsonl"), "ds_type": "json", "type": "chat_template"}],
        "output_dir": str(folder / name), "sequence_len": 128, "micro_batch_size": 4, "max_steps": 3,
        "gradient_accumulation_steps": 2, "num_epochs": 1, "learning_rate": 0.001, "optimizer": "adamw_torch",
        "lr_scheduler": "constant", "logging_steps": 1, "attn_implementation": "sdpa", "bf16": False, "fp16": False,
        "tf32": False, "seed": 1,
    }  # fmt: skip
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(base | options))
    return path


def losses(folder, name, **options):
    printed = run("axolotl", "train", config(folder, name, **options), "--launcher", "python", cwd=folder)
    return logged(folder / name), printed


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"sample_packing": True}, LORA], ids=["packed", "lora"])
def test_losses_are_those_of_axolotl_alone(folder, options):
    name = "-".join(options)
    stock, _ = losses(folder, f"stock-{name}", **options, **PLAIN)
    ours, printed = losses(folder, f"ours-{name}", plugins=[PLUGIN], **options)
    assert len(ours) == 3 and ours == pytest.approx(stock, rel=2e-4)
    assert "qwen3: QK norm + rope, RMSNorm 3," in printed and "fused loss" in printed
    assert ("LoRA linear 7" in printed) == (options is LORA)


@pytest.mark.slow
def test_a_copy_of_the_student_teaches_nothing_on_packed_rows(folder):
    teach = {"distillation": {"teacher": str(folder / "student"), "losses": [{"type": "forward_kl"}]}}
    ours, _ = losses(folder, "identity", plugins=[PLUGIN], liger_trainer=teach, sample_packing=True)
    assert ours == pytest.approx([0, 0, 0], abs=1e-5)


@pytest.mark.slow
def test_a_teacher_teaches(folder):
    teach = {"distillation": {"teacher": str(folder / "teacher"), "losses": [{"type": "forward_kl"}]}}
    ours, printed = losses(folder, "taught", plugins=[PLUGIN], liger_trainer=teach, learning_rate=0.01)
    assert ours[-1] < ours[0]
    assert "teacher: qwen3: QK norm + rope 2" in printed
    assert logged(folder / "taught", "forward_kl") == pytest.approx(ours, rel=1e-3)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"plugins": ["axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin", PLUGIN]}, "CutCrossEntropy"),
        ({"liger_trainer": {"rope": False}}, "It has liger_kernel_config, distillation"),
        ({"liger_trainer": {"liger_kernel_config": {"rop": True}}}, "Unknown patch options: rop"),
        ({"liger_trainer": {"distillation": {"teacher": "x", "temperature": -1}}}, "temperature"),
        ({"liger_trainer": {"distillation": {"teacher": "x"}}, "rl": "dpo"}, "does not go with rl"),
        ({**LORA, "lora_mlp_kernel": True}, "replaces what lora_mlp_kernel would replace too"),
    ],
    ids=["plugin", "option", "patch", "value", "rl", "lora"],
)
def test_what_it_refuses(options, message):
    from axolotl.utils.dict import DictDefault

    from liger_trainer.errors import ConfigError
    from liger_trainer.extras.integrations.axolotl import LigerTrainerPlugin

    with pytest.raises(ConfigError, match=message):
        LigerTrainerPlugin().register(DictDefault({"plugins": [PLUGIN], **options}))


@pytest.mark.slow
def test_the_command_ends_with_the_reason(folder):
    path = config(folder, "wrong", plugins=[PLUGIN], liger_trainer={"rope": False})
    done = attempt("axolotl", "train", path, "--launcher", "python", cwd=folder)
    assert done.returncode != 0 and "liger_trainer in the file for axolotl: rope: Extra inputs" in done.stdout
