"""Steps with the head's rows kept on their ranks, in two processes, against those in one with the whole head."""

import importlib.util
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from engines.heads_on_ranks import ENGINES, OBJECTIVES, STEPS, gradients_of, step, student_of
from processes import run_on
from tiny import assert_same_gradients, texts, tiny_model
from trainings import distill, sft

from liger_trainer.errors import ConfigError
from liger_trainer.extras.vocab_parallel.heads import ShardedHead, kept_sharded, mark_sharded, why_gathered
from liger_trainer.extras.vocab_parallel.trainer import shard_head, why_whole_head
from liger_trainer.trainers.config import LigerConfig

DTENSORS = importlib.util.find_spec("transformers.distributed.tensor_parallel") is not None
assert set(ENGINES) == {engine for engine, _ in STEPS}


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    path = tmp_path_factory.mktemp("heads") / "results.pt"
    run_on(2, "engines/heads_on_ranks.py", path)
    return torch.load(path)


@pytest.fixture(scope="module")
def one_process():
    return {objective: step(objective, 8, 1) for objective in OBJECTIVES}


@pytest.mark.slow  # two processes
@pytest.mark.parametrize(("engine", "objective"), STEPS)
def test_a_step_is_that_of_one_process(two_processes, one_process, engine, objective):
    got, want = two_processes[engine, objective], one_process[objective]
    assert_same_gradients(got["gradients"], want["gradients"])
    assert got["logs"] == pytest.approx(want["logs"], rel=1e-5)
    torch.testing.assert_close(got["logits"], want["logits"], rtol=1e-4, atol=1e-5)


@pytest.mark.slow  # two processes
@pytest.mark.parametrize(("engine", "objective"), STEPS)
def test_no_head_is_gathered(two_processes, engine, objective):
    result = two_processes[engine, objective]
    assert len(result["walks"]) >= 4  # two micro-batches, two evaluated ones
    assert set(result["walks"]) == {33}  # of 65 rows
    teacher = {"kd": [False], "tied teacher": [None], "longer teacher": [None]}  # the latter two are gathered
    assert result["gathered"] == [False, *teacher.get(objective, [])]


@pytest.mark.skipif(not DTENSORS, reason="this transformers shards without DTensor")
@pytest.mark.slow
def test_tensor_parallel_heads_stay_sharded(two_processes):
    got, want = two_processes["tensor parallel"], gradients_of(student_of("ce"))
    assert got["walks"] == [33]
    assert got["loss"] == pytest.approx(want["loss"], rel=1e-6)
    torch.testing.assert_close(got["entropy"], want["entropy"])
    torch.testing.assert_close(got["logits"], want["logits"])
    assert_same_gradients(got["gradients"], want["gradients"])
    assert_same_gradients(got["whole"], want["whole"])  # of a loss that reads a whole head


def trainer_with(vocab_parallel, model=None):
    return sft(model, texts(), config=LigerConfig, vocab_parallel=vocab_parallel)


def test_what_is_in_the_way_is_an_error_where_it_must_stay_sharded():
    with pytest.raises(ConfigError, match="vocab_parallel: always, but this training is not on FSDP2"):
        trainer_with("always")


def test_auto_gathers_where_there_is_one_process():
    trainer_with("auto").train()


def test_a_mark_does_not_outlive_its_trainer():
    model = tiny_model()
    mark_sharded(model)
    trainer_with("never", model)
    assert not kept_sharded(model)


def test_tied_heads_are_gathered():
    assert "tied" in (why_gathered(tiny_model("llama_tied")) or "")
    assert why_gathered(tiny_model("llama")) is None


@pytest.mark.parametrize(
    ("losses", "teacher"), [([{"type": "hidden_mse"}, {"type": "ce"}], "model"), ([{"type": "forward_kl"}], "several")]
)
def test_losses_that_need_whole_heads_say_so(losses, teacher):
    models = tiny_model(seed=1) if teacher == "model" else {"a": tiny_model(seed=1), "b": tiny_model(seed=2)}
    trainer = distill(None, models, texts(), losses=losses)
    assert why_whole_head(trainer) is not None


def test_a_loss_that_reads_a_whole_head_refuses_rows():
    with pytest.raises(ConfigError, match="reads a whole output head"):
        ShardedHead(tiny_model().lm_head, "sharded").whole()


def host(model, **args):
    """As much of a trainer on FSDP2 as `shard_head` reads."""
    plugin = SimpleNamespace(fsdp_version=2, cpu_offload=None)
    accelerator = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin), num_processes=2, prepare=None)
    options = {"max_length": 8, "per_device_train_batch_size": 2, "torch_compile": False, **args}
    return SimpleNamespace(
        model=model, accelerator=accelerator, args=SimpleNamespace(**options), is_fsdp_enabled=True,
        compute_loss_func=None, shards_sequences=lambda: False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "max_length", "kept", "why"),
    [
        (48, 8, True, "its 48 rows stay on 2 ranks"),  # 2 * 48 numbers against 3 * 32
        (47, 8, False, "a batch of 32 tokens on all ranks is more to move than its 47 rows"),
        (48, None, False, "max_length is not set"),
    ],
)
def test_auto_moves_fewer_numbers(rows, max_length, kept, why, capsys):
    model = tiny_model(vocab_size=rows, pad_token_id=None, eos_token_id=None)
    shard_head(host(model, max_length=max_length), "auto")
    assert kept_sharded(model) == kept
    assert why in capsys.readouterr().out


@pytest.mark.parametrize("wanted", ["auto", "always"])
def test_tied_heads_are_gathered_or_refused(wanted, capsys):
    model = tiny_model("llama_tied", vocab_size=96)
    with pytest.raises(ConfigError, match="tied") if wanted == "always" else nullcontext():
        shard_head(host(model), wanted)
    assert not kept_sharded(model)
    assert wanted == "always" or "gathered, since its embeddings are tied" in capsys.readouterr().out


def test_what_fsdp2_does_otherwise_is_in_the_way():
    trainer = host(tiny_model())
    trainer.accelerator.state.fsdp_plugin.fsdp_version = 1
    with pytest.raises(ConfigError, match="not on FSDP2"):
        shard_head(trainer, "always")
    with pytest.raises(ConfigError, match="torch_compile"):
        shard_head(host(tiny_model(), torch_compile=True), "always")
