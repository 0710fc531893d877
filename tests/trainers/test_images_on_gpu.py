"""Rows with images on a GPU: Triton kernels in both towers, and decoder layers in CUDA graphs."""

import copy

import pytest
import torch
import trainings
from datasets import Dataset
from tiny import assert_same_gradients, named_gradients
from trainings import logged, trained
from trl import SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling
from vision import VISION_FAMILIES, picture_answers, picture_chats, vision_model, vision_processor

from liger_trainer import LigerConfig, patch

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


def run(family, make=trainings.sft, **options):
    processor = vision_processor(family)
    options = {"max_steps": 6, "per_device_train_batch_size": 2, "max_length": None, "use_cpu": False, **options}
    model = vision_model(family, processor)
    return trained(make(model, data=of_one_shape(12), processing_class=processor, **options))


@families
def test_layers_in_graphs_train_as_they_do_without(family):
    want = run(family, cls=SFTTrainer)
    trainer = run(family, config=LigerConfig, cuda_graphs="always")
    assert logged(trainer) == pytest.approx(logged(want), rel=1e-3)
    if family != "gemma4":  # whose layers write keys and values into a dictionary
        assert "layers of the student" in trainer.graph_reports["student"]


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
def test_distillation_with_graphs_of_both_models(family):
    never, always = (
        logged(run(family, trainings.distill, teacher=vision_model(family, seed=1), cuda_graphs=graphs))
        for graphs in ("never", "always")
    )
    assert always == pytest.approx(never, rel=1e-3)
    assert torch.tensor(always).isfinite().all()
