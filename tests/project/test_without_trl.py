"""What needs no TRL: the layers, losses and kernels, `patch`, `enable`, and distillation by the callback."""

import subprocess
import sys

import pytest

# What imports and the metadata of packages say where TRL is not installed, or an old one is.
WITHOUT = """
import importlib.machinery, importlib.metadata, sys
finder = importlib.machinery.PathFinder
def find_spec(cls, name, *where, known=finder.find_spec):
    return None if name.partition(".")[0] == "trl" else known(name, *where)
finder.find_spec = classmethod(find_spec)
found, of_trl = importlib.metadata.version, None
def version(name):
    if name == "trl" and of_trl is None:
        raise importlib.metadata.PackageNotFoundError(name)
    return of_trl if name == "trl" else found(name)
importlib.metadata.version = version
"""
TRAINERS = "LigerConfig", "LigerDistillConfig", "LigerDistillTrainer", "LigerTrainer"
ASK_FOR_TRAINERS = f"""
for of_trl in (None, "1.14.2"):
    for name in {TRAINERS!r}:
        try:
            getattr(liger_trainer, name)
        except liger_trainer.errors.ConfigError as error:
            print(error)
"""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def without_trl() -> list[str]:
    """What a process prints that uses all but the trainers, and then asks for those."""
    code = f"""
import liger_trainer
loads_rows = {{"capture_teacher_cache", "generate_dataset", "import_teacher_cache"}}
for name in set(liger_trainer.__all__) - set({TRAINERS!r}) - loads_rows:
    getattr(liger_trainer, name)
import torch, transformers
def model(layers):
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, bos_token_id=None, eos_token_id=None,
    )
    return transformers.LlamaForCausalLM(config)
liger_trainer.enable()
print(liger_trainer.patch(model(1)).report.swapped["fused loss"])
row = torch.arange(1, 13)
args = transformers.TrainingArguments("/nonexistent", max_steps=2, use_cpu=True, report_to="none", save_strategy="no",
                                      per_device_train_batch_size=2, disable_tqdm=True)
trainer = transformers.Trainer(
    model(1), args, train_dataset=[{{"input_ids": row, "labels": row}}] * 4,
    callbacks=[liger_trainer.DistillationCallback(model(2), losses=[{{"type": "forward_kl"}}])],
)
trainer.train()
print("trl" in sys.modules, trainer.state.log_history[-1]["train_loss"] > 0)
"""
    return run(WITHOUT + code + ASK_FOR_TRAINERS).splitlines()


def test_every_other_name_is_there_and_a_callback_distils(without_trl):
    assert without_trl[0] == "1" and without_trl[-2 * len(TRAINERS) - 1] == "False True"


@pytest.mark.parametrize("installed", ["none", "1.14.2"])
def test_the_trainers_say_in_a_sentence_which_trl_they_need(without_trl, installed):
    absent, old = without_trl[-2 * len(TRAINERS) : -len(TRAINERS)], without_trl[-len(TRAINERS) :]
    said = absent if installed == "none" else old
    sentence = (
        f"LigerTrainer and LigerDistillTrainer need TRL 1.15 or later, and {installed} is installed: pip install "
        "--upgrade trl. With any TRL, or none, patch(model), enable() and DistillationCallback serve a "
        "transformers.Trainer."
    )
    assert said == [sentence] * len(TRAINERS)


def test_no_name_imports_what_few_trainings_need():
    code = """
import sys, liger_trainer
for name in liger_trainer.__all__:
    getattr(liger_trainer, name)
ours = ("kernels.causal_conv", "extras.adamw_8bit", "extras.teachers.server", "trainers.fsdp_memory")
print(sorted({"matplotlib", "gguf", *(f"liger_trainer.{name}" for name in ours)} & sys.modules.keys()))
"""
    assert run(code) == "[]\n"
