"""Rows with images on a GPU: Triton kernels in both towers, and decoder layers in CUDA graphs."""

import copy

import pytest
import torch
from datasets import Dataset
from tiny import assert_same_gradients, named_gradients, train_args
from trl import SFTConfig, SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling
from vision import VISION_FAMILIES, picture_answers, picture_chats, vision_model, vision_processor

from liger_trainer import LigerConfig, LigerDistillConfig, LigerDistillTrainer, LigerTrainer, patch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
families = pytest.mark.parametrize("family", VISION_FAMILIES)


@families
def test_loss_and_gradients_are_those_of_the_plain_model(family):
    """In fp32 without TF32; the rotation, norms and MLPs of both towers run as kernels."""
    processor = vision_processor(family)
    rows = picture_chats(3)
    batch = DataCollatorForVisionLanguageModeling(processor)([rows[i] for i in range(3)])
    inputs = {name: value.cuda() for name, value in batch.items()}
    model = vision_model(family, processor).cuda().train()
    plain = copy.deepcopy(model)
    want = plain(**inputs).loss
    with patch(model):
        got = model(**inputs).loss
        assert got.item() == pytest.approx(want.item(), rel=1e-5)
        assert_same_gradients(named_gradients(model, got), named_gradients(plain, want), 1e-4)


def of_one_shape(count=8):
    """Rows of as many tokens and patches, so that graphs are recorded and replayed."""
    row = picture_answers(1)[0]
    return Dataset.from_list([row] * count)


def losses(trainer_class, config_class, family, arguments=None, **options):
    processor = vision_processor(family)
    args = train_args(
        config_class, use_cpu=False, max_steps=6, per_device_train_batch_size=2, max_length=None, **options
    )
    trainer = trainer_class(
        vision_model(family, processor), args=args, train_dataset=of_one_shape(12), processing_class=processor,
        **(arguments or {}),
    )  # fmt: skip
    trainer.train()
    return [log["loss"] for log in trainer.state.log_history if "loss" in log], trainer


@families
def test_layers_in_graphs_train_as_they_do_without(family):
    want, _ = losses(SFTTrainer, SFTConfig, family)
    got, trainer = losses(LigerTrainer, LigerConfig, family, cuda_graphs="always")
    assert got == pytest.approx(want, rel=1e-3)
    if family != "gemma4":  # whose layers write keys and values into a dictionary
        assert "layers of the student" in trainer.graph_reports["student"]


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
def test_distillation_with_graphs_of_both_models(family):
    results = {}
    for graphs in ("never", "always"):
        teacher = vision_model(family, seed=1)
        results[graphs], _ = losses(
            LigerDistillTrainer, LigerDistillConfig, family, {"teacher_model": teacher}, cuda_graphs=graphs
        )
    assert results["always"] == pytest.approx(results["never"], rel=1e-3)
    assert torch.tensor(results["always"]).isfinite().all()
