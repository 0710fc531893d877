"""The ms-swift plugin in ms-swift itself: its command on a tiny model, and what the plugin refuses."""

import pytest
from tiny_files import write
from tool_runs import attempt, logged, run

pytest.importorskip("swift", reason="ms-swift is not installed: docs/extras.md has the commands")

ARGUMENTS = {
    "model": "student", "model_type": "qwen3", "template": "qwen3", "dataset": "chats.jsonl", "torch_dtype": "float32",
    "max_steps": 3, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "learning_rate": 1e-3,
    "logging_steps": 1, "lr_scheduler_type": "constant", "max_length": 128, "split_dataset_ratio": 0, "seed": 1,
    "save_only_model": "true", "report_to": "none", "dataset_num_proc": 1, "dataloader_num_workers": 0,
    "use_hf": "true", "lora_dropout": 0,
}  # fmt: skip
OURS = {"external_plugins": "plugin.py", "callbacks": "liger_trainer"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("swift"))


def swift(folder, name, plugin="", launch=run, **options):
    (folder / "plugin.py").write_text(plugin)
    words = {**ARGUMENTS, "output_dir": name, **options}
    return launch("swift", "sft", *(w for k, v in words.items() for w in (f"--{k}", v)), cwd=folder)


@pytest.mark.slow
@pytest.mark.parametrize("tuner", ["full", "lora"])
def test_losses_and_accuracy_are_those_of_ms_swift_alone(folder, tuner):
    swift(folder, f"stock-{tuner}", tuner_type=tuner)
    printed = swift(folder, f"ours-{tuner}", "import liger_trainer.integrations.ms_swift", tuner_type=tuner, **OURS)
    for metric in ("loss", "token_acc"):
        stock, ours = (logged(folder / f"{which}-{tuner}", metric) for which in ("stock", "ours"))
        assert len(ours) >= 3 and ours == pytest.approx(stock, rel=2e-4, abs=1e-6)
    assert "qwen3: QK norm + rope, RMSNorm 3," in printed and "MaterializedLogitsWarning" not in printed
    assert ("LoRA linear 7" in printed) == (tuner == "lora")


@pytest.mark.slow
def test_a_teacher_teaches(folder):
    plugin = "from liger_trainer.integrations.ms_swift import register\nregister(teacher={!r}, losses={!r})"
    kl = [{"type": "forward_kl"}]
    swift(folder, "copied", plugin.format("student", kl), tuner_type="full", **OURS)
    assert logged(folder / "copied")[0] == pytest.approx(0, abs=1e-5)
    swift(folder, "taught", plugin.format("teacher", kl), tuner_type="full", **OURS)
    taught = logged(folder / "taught")
    assert taught[-1] < taught[0] and taught[0] > 1e-3


@pytest.mark.slow
def test_liger_at_once_is_refused(folder):
    done = swift(folder, "both", "import liger_trainer.integrations.ms_swift", attempt, use_liger_kernel="true", **OURS)
    assert done.returncode != 0
    assert "would replace too. Take one of them" in done.stdout or "use_liger_kernel requires" in done.stdout


@pytest.mark.parametrize(
    "options, message",
    [
        ({"liger_kernel_config": {"rop": True}}, "Unknown patch options: rop"),
        ({"losses": [{"type": "forward_kl"}]}, r"losses is about distillation. Name its teacher"),
        ({"teacher": "x", "temprature": 1.0}, "unexpected keyword argument 'temprature'"),
    ],
    ids=["patch", "teacher", "option"],
)
def test_what_it_refuses(options, message):
    from liger_trainer.errors import ConfigError
    from liger_trainer.extras.integrations.ms_swift import register

    with pytest.raises(ConfigError, match=message):
        register(**options)
