"""Where a teacher lives: its dtype, quantisation, device and offload change no loss; what cannot be is refused."""

import pytest
import torch
from caches import captured
from tiny import completions, tiny_model, tiny_tokenizer, train_args
from trainings import a_teacher, assert_same_step, distill, logged, step, trained
from trl import SFTConfig

from liger_trainer import DistillationCallback, LigerDistillConfig
from liger_trainer.errors import ConfigError
from liger_trainer.kernels.types import Lora
from liger_trainer.losses.deferred_logits import DeferredLogits, DeferredPass
from liger_trainer.losses.model_parts import Head
from liger_trainer.run.samples import Prompt, complete
from liger_trainer.teachers.cache.store import TeacherCache
from liger_trainer.teachers.model import LogitsMover, check_processes

pytestmark = pytest.mark.filterwarnings("error::liger_trainer.MaterializedLogitsWarning")
LOSSES = [{"type": "forward_kl"}, {"type": "jsd", "weight": 0.5}, {"type": "ce", "weight": 0.3}]


@pytest.fixture
def directory(request, tmp_path):
    tiny_model(request.param, seed=5, hidden_size=48).save_pretrained(tmp_path)
    return str(tmp_path)


def make(teacher, **options):
    options = {"losses": LOSSES, "beta": 0.3, "max_steps": 1, "optim": "sgd", **options}
    return distill(None, teacher, completions(4), **options)


@pytest.mark.parametrize(
    "directory, options",
    [(family, {"teacher_offload": True}) for family in ("gemma2", "mixtral")] + [("gemma2", {"teacher_device": "cpu"})],
    indirect=["directory"],
)
def test_it_equals_the_teacher_beside_the_student(directory, options):
    trainer = make(directory, **options)
    streamed = [p.device.type for p in trainer.teacher.parameters()]
    assert ("meta" in streamed) == ("teacher_offload" in options)
    head = trainer.teacher.get_output_embeddings().weight
    assert head.device.type == "cpu" and head.abs().sum() > 0
    assert_same_step(trainer, make(directory))
    assert [p.device.type for p in trainer.teacher.parameters()] == streamed


@pytest.mark.parametrize("directory", ["mixtral"], indirect=True)
def test_a_streamed_teacher_generates(directory):
    prompts = [Prompt("", [i, i + 1], None) for i in range(3)]
    with make(directory, teacher_offload=True).teaching.live() as streamed, make(directory).teaching.live() as resident:
        got, want = (complete(live[""], tiny_tokenizer(), prompts, 2) for live in (streamed, resident))
    assert got == want and any(got)


@pytest.mark.parametrize("directory", ["gemma2"], indirect=True)
def test_a_streamed_teacher_writes_completions_and_is_captured(directory, tmp_path):
    options = {"seq_kd": True, "max_completion_length": 4}
    logs, want = (step(make(directory, **placed, **options))[0] for placed in ({"teacher_offload": True}, {}))
    assert logs["completion_length"] > 0 and logs["loss"] == pytest.approx(want["loss"], rel=1e-5)
    shards = []
    for offload in (False, True):
        folder = tmp_path / f"cache-{offload}"
        captured(folder, completions(4), teacher=directory, teacher_offload=offload)
        shards.append([shard.sha256 for shard in TeacherCache(folder).index.shards])
    assert shards[0] == shards[1]


@pytest.mark.parametrize("directory", ["llama_tied"], indirect=True)
def test_the_dtype(directory):
    dtypes = {None: torch.float32, "bfloat16": torch.bfloat16, "auto": torch.float32}
    assert {name: make(directory, teacher_dtype=name).teacher.dtype for name in dtypes} == dtypes


LOADING = "liger_trainer.teachers.model._from_files"


@pytest.mark.parametrize("bf16, dtype", [(False, "float32"), (True, "bfloat16")])
def test_what_is_asked_of_transformers(monkeypatch, bf16, dtype):
    asked = []

    def create_model_from_path(path, **kwargs):
        asked.append({"path": path, **kwargs})
        return tiny_model("phi"), {"missing_keys": [], "unexpected_keys": [], "mismatched_keys": []}

    monkeypatch.setattr(LOADING, create_model_from_path)
    named = {"teacher_model_revision": "v2", "teacher_model_init_kwargs": {"attn_implementation": "eager"}}
    for options in (named, {"teacher_load_in_4bit": True}, {"teacher_load_in_8bit": True}):
        make("some/teacher", bf16=bf16, **options)
    plain, *quantised = asked
    assert plain == {
        "path": "some/teacher", "revision": "v2", "attn_implementation": "eager", "trust_remote_code": False,
        "dtype": dtype, "output_loading_info": True, "ignore_mismatched_sizes": True,
    }  # fmt: skip
    assert [how["device_map"] for how in quantised] == [{"": "cpu"}] * 2
    four, eight = (how["quantization_config"] for how in quantised)
    assert four.load_in_4bit and not four.load_in_8bit and eight.load_in_8bit and not eight.load_in_4bit
    assert four.bnb_4bit_quant_type == "nf4" and four.bnb_4bit_compute_dtype == getattr(torch, dtype)


def test_without_bitsandbytes(monkeypatch):
    def create_model_from_path(path, **kwargs):
        raise ImportError("Using `bitsandbytes` 4-bit quantization requires bitsandbytes")

    monkeypatch.setattr(LOADING, create_model_from_path)
    with pytest.raises(ConfigError, match="The teacher some/teacher cannot be loaded as asked for: .*requires bitsand"):
        make("some/teacher", teacher_load_in_4bit=True)


def test_what_is_carried_to_another_device():
    """The meta device stands for another one: what is there is whole, and the head goes there once."""
    weight, bias, a, b = torch.randn(7, 4), torch.randn(7), torch.randn(2, 4), torch.randn(7, 2)
    head = Head(weight, bias, (Lora(a, b, 0.5),))
    logits = DeferredLogits(
        torch.randn(2, 3, 4), head, lambda h: h @ weight.T, DeferredPass("tiny", False), capped=True
    )
    carry, meta = LogitsMover(), torch.device("meta")
    first, second = carry(logits, meta), carry(logits, meta)
    for x in (first.hidden, first.head.weight, first.head.bias, *first.head.lora[0][:2]):
        assert x.device == meta
    assert second.head is first.head and first.capped and first.head.lora[0].scaling == 0.5
    assert carry(torch.ones(2, 3, 7), meta).device == meta
    assert logits.hidden.device.type == "cpu"


@pytest.mark.gpu
def test_a_teacher_on_the_cpu_and_a_student_on_the_gpu(tmp_path):
    a_teacher().save_pretrained(tmp_path)
    logs = []
    for options in ({}, {"teacher_device": "cpu"}, {"teacher_offload": True}):
        trainer = trained(make(str(tmp_path), use_cpu=False, **options))
        assert next(trainer.model.parameters()).is_cuda
        logs += logged(trainer)
    assert logs[1:] == pytest.approx([logs[0]] * 2, rel=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_teacher_on_the_gpu(tmp_path, bits):
    pytest.importorskip("bitsandbytes")
    tiny_model("llama", seed=5, hidden_size=128).save_pretrained(tmp_path)
    trainer = make(str(tmp_path), use_cpu=False, bf16=True, **{f"teacher_load_in_{bits}bit": True})
    trainer.train()
    assert trainer.teacher.is_quantized and trainer.state.log_history[0]["loss"] > 0


def test_a_model_that_is_loaded_already():
    loaded, dtype = tiny_model("phi"), {"teacher_model_init_kwargs": {"dtype": "bfloat16"}}
    for call, name in (
        (lambda: make(loaded, teacher_offload=True), "teacher_offload"),
        (lambda: make(loaded, **dtype), "teacher_model_init_kwargs"),
        (lambda: DistillationCallback(loaded, **dtype), "teacher_model_init_kwargs"),
    ):
        with pytest.raises(ConfigError, match=f"{name} is about a teacher that is loaded by its name"):
            call()


@pytest.mark.parametrize("device, gpus", [("cuda:1", 1), ("cpu", 2), (None, 2)])
def test_a_gpu_of_the_teacher_is_none_of_the_students(monkeypatch, device, gpus):
    monkeypatch.setattr(SFTConfig, "n_gpu", 2)
    config = train_args(LigerDistillConfig, teacher_device=device)
    assert (config._n_gpu == 1) == (gpus == 1)
    entry = {"name": "a", "teacher_model_name_or_path": "x", "teacher_device": device}
    assert (train_args(LigerDistillConfig, teachers=[entry])._n_gpu == 1) == (gpus == 1)


def test_several_processes_and_sharding():
    def args(**options):
        return train_args(LigerDistillConfig, **options)

    with pytest.raises(ConfigError, match="teacher_device='cuda:1' would be the same for all 2 processes"):
        check_processes(args(teacher_device="cuda:1"), 2, fsdp=False, deepspeed=False)
    with pytest.raises(ConfigError, match="teacher_load_in_8bit does not go with DeepSpeed"):
        check_processes(args(teacher_load_in_8bit=True), 1, fsdp=False, deepspeed=True)
    with pytest.raises(ConfigError, match="teacher_offload does not go with FSDP"):
        check_processes(args(teacher_offload=True), 1, fsdp=True, deepspeed=False)
    for options in ({"teacher_device": "cpu"}, {"teacher_load_in_8bit": True}):
        check_processes(args(**options), 2, fsdp=True, deepspeed=False)
    check_processes(args(teacher_dtype="bfloat16"), 2, fsdp=False, deepspeed=True)
