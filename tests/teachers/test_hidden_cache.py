"""A cache of hidden states teaches as the live teacher does, whatever the loss; damage and mismatches are found."""

import copy
import json
import shutil

import pytest
import torch
from accelerate import dispatch_model
from caches import FORMS, STEP, captured, end_of, files_of, flip, teacher_model, trainer_of
from caches import config as cache_config
from peft import LoraConfig, get_peft_model
from quick_cases import slow_but
from tiny import VOCAB, completions, tiny_model
from trainings import a_teacher, assert_same_step, step

from liger_trainer.errors import ConfigError, CorruptError
from liger_trainer.patching.packing.document_mask import padded_on_the_right
from liger_trainer.patching.patcher import patch, patched_record
from liger_trainer.teachers.cache.records import HEAD, HiddenFormat
from liger_trainer.teachers.cache.store import INDEX, TeacherCache, read_index
from liger_trainer.teachers.row_keys import row_key
from liger_trainer.trainers import capture as cache_capture

pytestmark = pytest.mark.filterwarnings("error::liger_trainer.MaterializedLogitsWarning")
HIDDEN = {"cache_kind": "hidden", "cache_tail_draws": None}


def config(folder, **options):
    return cache_config(folder, **{**HIDDEN, **options})


def hidden_cache(folder, *args, **options):
    return captured(folder, *args, **{**HIDDEN, **options})


def live_args(options):
    return cache_config(None, **{**options, "teacher": "model", "cache_kind": "topk", "cache_tail_draws": None})


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A cache of several shards in fp32, and the teacher it is of."""
    folder = tmp_path_factory.mktemp("hidden")
    hidden_cache(folder / "c", test=completions(6, seed=4), mib=2048, cache_shard_mb=1)
    assert len(read_index(folder / "c").shards) > 3
    return folder


def weighted(n):
    return completions(n).add_column("w", [0.25, 2.0] * (n // 2))


OF_ROWS = {
    **{name: FORMS[name] for name in ("packed", "packed, cut", "wrapped", "padding-free", "assistant")},
    "weighted": (weighted, {"weight_column": "w"}),
}


@pytest.mark.parametrize("form", slow_but(OF_ROWS, "packed", "assistant", "weighted"))
def test_rows_of_every_form(tmp_path, form):
    """Packed rows are looked up document by document; the live teacher reads them packed, under the same masks."""
    rows, options = OF_ROWS[form]
    options, teacher = {"beta": 0.5, **options, **STEP}, tiny_model(seed=3)
    args = hidden_cache(tmp_path / "c", rows(10), teacher=copy.deepcopy(teacher), **options)
    cached, live = trainer_of(args, rows(10)), trainer_of(live_args(options), rows(10), teacher=teacher)
    assert_same_step(cached, live, 2e-6)


@pytest.mark.parametrize(
    "family", slow_but(["granite", "gpt2", "llama_tied", "cohere", "phi", "gemma3"], "granite", "phi")
)
def test_heads_with_scales_caps_and_biases(tmp_path, family):
    options, teacher = {"beta": 0.4, **STEP}, tiny_model(family, seed=3, vocab_size=80)
    bias = teacher.get_output_embeddings().bias
    if bias is not None:
        torch.nn.init.normal_(bias)
    args = hidden_cache(tmp_path / "c", teacher=copy.deepcopy(teacher), **options)
    cache = TeacherCache(tmp_path / "c", verify=True)
    head = cache.head()
    assert head.weight.shape[0] == VOCAB and (head.bias is not None) == (family == "phi")  # padding is cut off
    assert_same_step(trainer_of(args), trainer_of(live_args(options), teacher=teacher))


def assert_teaches_as_the_live_teacher(folder, options, of_step, of_evaluation=1e-5):
    """In evaluation and in a step, by all metrics; return the trainer with the cache."""
    args = hidden_cache(folder, test=completions(6), **options)
    cached = trainer_of(args, test=completions(6))
    live = trainer_of(live_args(options), test=completions(6), teacher=teacher_model())
    got, truth = cached.evaluate(), live.evaluate()
    for name in ("eval_loss", "eval_forward_kl", "eval_reverse_kl", "eval_jsd"):
        assert truth[name] > 0.01 and got[name] == pytest.approx(truth[name], abs=of_evaluation), name
    assert_same_step(cached, live, of_step)
    return cached


def test_bf16_is_stored_in_two_bytes_and_gives_the_live_teachers_kl(tmp_path):
    """Under autocast, products are in bf16 anyway: nothing is lost by storing hidden states and head in it."""
    assert_teaches_as_the_live_teacher(tmp_path / "c", {**STEP, "bf16": True, "beta": 0.5}, 1e-4)
    cache = TeacherCache(tmp_path / "c")
    assert cache.format == HiddenFormat(48, "bfloat16") and cache.format.bytes == 2 * 48


@pytest.mark.parametrize("family, weights", [("gemma2", torch.float32), ("llama", torch.bfloat16)])
def test_what_is_stored_are_the_live_teachers_hidden_states_bit_for_bit(tmp_path, family, weights):
    """Under autocast, with its layers patched: rows of one batch, padded to the longest, as the live teacher reads."""
    made, rows = tiny_model(family, seed=5, hidden_size=48).to(weights), completions(8, seed=11)
    options = {**STEP, "bf16": True, "per_device_eval_batch_size": 8, "per_device_train_batch_size": 8}
    hidden_cache(tmp_path / "c", rows, teacher=made, **options)
    assert patched_record(made) is None, "a capture gives the model back as it was"
    cache, live = TeacherCache(tmp_path / "c"), trainer_of(live_args(options), rows, test=rows, teacher=made)
    assert live.teacher_patched.report.swapped and cache.format.dtype == "bfloat16"
    inputs, compared = next(iter(live.get_eval_dataloader())), 0
    with live.accelerator.autocast(), padded_on_the_right():  # as in a step
        hidden = live.teaching.answer({**inputs, "use_cache": False}).hidden.to(torch.bfloat16)
    for i, (ids, labels) in enumerate(zip(inputs["input_ids"], inputs["labels"], strict=True)):
        length = int(inputs["attention_mask"][i].sum())
        records = cache.records(row_key(ids[:length].numpy(), labels[:length].numpy()))
        assert torch.equal(cache.format.decode(records), hidden[i, :-1][labels[1:] != -100])
        compared += len(records)
    assert compared == cache.index.tokens


@pytest.mark.parametrize("kind", ["topk", "hidden"])
def test_a_teacher_that_was_patched_before_stays_as_it_was(tmp_path, kind):
    made = teacher_model()
    record = patch(made)
    before = made.config._attn_implementation
    captured(tmp_path / "c", teacher=made, cache_kind=kind, cache_tail_draws=None)
    assert patched_record(made) is record and not record.packs_attention
    assert made.config._attn_implementation == before
    record.undo()
    captured(tmp_path / "d", teacher=made, cache_kind=kind, cache_tail_draws=None)
    assert patched_record(made) is None and made.config._attn_implementation == before


def test_a_cache_of_bf16_teaches_a_run_in_fp32(tmp_path):
    """A teacher whose weights are bf16 computes in bf16; the run's own dtype is its own business."""
    teacher = teacher_model().to(torch.bfloat16)
    args = hidden_cache(tmp_path / "c", teacher=copy.deepcopy(teacher), **STEP)
    assert TeacherCache(tmp_path / "c").format.dtype == "bfloat16"
    live, cached = trainer_of(live_args(STEP), teacher=teacher), trainer_of(args)
    got, truth = (step(trainer)[0]["forward_kl"] for trainer in (cached, live))
    assert got == pytest.approx(truth, abs=1e-5)


def test_the_head_of_a_spread_model_is_read_and_one_that_is_more_refused(tmp_path):
    plain, spread = tiny_model(seed=3), tiny_model(seed=3)
    dispatch_model(spread, {"model": "cpu", "lm_head": "cpu"}, force_hooks=True)
    assert "forward" in vars(spread.get_output_embeddings()) and "forward" in vars(spread)
    for name, teacher in (("a", plain), ("b", spread)):
        hidden_cache(tmp_path / name, teacher=teacher)
    shards = [{k: v for k, v in files_of(tmp_path / name).items() if k.endswith("tensors")} for name in "ab"]
    assert shards[0] == shards[1] and len(shards[0]) == 2

    class Scaled(torch.nn.Linear):
        def forward(self, input):
            return super().forward(input) * 2

    other = tiny_model(seed=3)
    other.set_output_embeddings(Scaled(32, VOCAB, bias=False))
    with pytest.raises(ConfigError, match="as one matrix, and its output head is a Scaled"):
        hidden_cache(tmp_path / "c", teacher=other)
    wrapped = get_peft_model(tiny_model(seed=3), LoraConfig(target_modules=["lm_head"], r=2))
    with pytest.raises(ConfigError, match="adapters are on its output head. Merge"):
        hidden_cache(tmp_path / "d", teacher=wrapped)


def test_a_model_that_changes_its_logits_is_refused(tmp_path):
    teacher = tiny_model(seed=3)
    forward = teacher.forward

    def without_some(*args, **kwargs):
        outputs = forward(*args, **kwargs)
        outputs.logits[..., :3] = -1e4
        return outputs

    teacher.forward = without_some
    with pytest.warns(Warning, match="assignment"), pytest.raises(ConfigError, match="more with its logits than scale"):
        hidden_cache(tmp_path / "c", teacher=teacher)


def test_damage_of_the_head_and_of_a_shard(whole, tmp_path, capsys):
    cache = tmp_path / "c"
    shutil.copytree(whole / "c", cache)
    for name in (HEAD, "shard-00001.safetensors"):
        content = (cache / name).read_bytes()
        flip(cache / name, len(content) - 5, 3)
        code, said = end_of(capsys, "cache", "verify", str(cache))
        assert code == 6 and f"{name} is damaged" in said
        with pytest.raises(CorruptError, match=f"{name} is damaged"):
            trainer = trainer_of(config(cache, **STEP))
            assert name != HEAD, "the whole loss depends on it, so it is compared before anything is trained"
            trainer.train()
        (cache / name).write_bytes(content)
    (cache / HEAD).unlink()
    with pytest.raises(CorruptError, match="head.safetensors is missing"):
        trainer_of(config(cache))


def test_interrupted_between_any_two_files(tmp_path, monkeypatch):
    """Whatever was written last, the same command ends with the same files; other kinds and dtypes do not go on."""
    hidden_cache(tmp_path / "whole", per_device_eval_batch_size=4)
    truth, write = files_of(tmp_path / "whole"), cache_capture.write_atomically
    monkeypatch.setattr(cache_capture, "SECONDS_OF_A_PART", 0.0)
    for stop_at in (1, 2, 3):
        folder, calls = tmp_path / str(stop_at), []

        def mortal(path, content, calls=calls, stop_at=stop_at):
            calls.append(path)
            if len(calls) == stop_at:
                raise KeyboardInterrupt
            write(path, content)

        monkeypatch.setattr(cache_capture, "write_atomically", mortal)
        with pytest.raises(KeyboardInterrupt):
            hidden_cache(folder, per_device_eval_batch_size=4)
        monkeypatch.setattr(cache_capture, "write_atomically", write)
        assert not read_index(folder).finished and (read_index(folder).head is None) == (stop_at == 1)
        with pytest.raises(ConfigError, match="settings.kind: hidden there, topk now"):
            captured(folder)
        with pytest.raises(ConfigError, match="settings.dtype: float32 there, bfloat16 now"):
            hidden_cache(folder, bf16=True)
        hidden_cache(folder, per_device_eval_batch_size=4)
        assert files_of(folder) == truth


def test_info_and_what_a_checkpoint_knows_of_it(whole, capsys):
    code, said = end_of(capsys, "cache", "info", str(whole / "c"))
    assert code == 0 and "hidden states of 48 values in float32" in said and "192 in a record" in said
    assert "softcap 2" in said and "the head" in said
    index = read_index(whole / "c")
    prints = trainer_of(config(whole / "c")).teaching.fingerprints()
    assert prints["head"] == index.head.sha256 and prints["settings"]["kind"] == "hidden"  # type: ignore[union-attr]
    assert "head" not in json.loads((whole / "c" / INDEX).read_text())["settings"]


def test_a_run_of_another_kind_is_refused(whole, tmp_path):
    captured(tmp_path / "c")
    for args, teacher, message in (
        (cache_config(whole / "c"), None, "is of cache_kind: hidden, this run has cache_kind: topk.*Set cache_kind"),
        (config(tmp_path / "c"), None, "is of cache_kind: topk, this run has cache_kind: hidden"),
        (config(whole / "c", max_length=512), None, "with max_length 1024, and this run has 512"),
        (config(whole / "c"), a_teacher(seed=6), "from another teacher"),
    ):
        with pytest.raises(ConfigError, match=message):
            trainer_of(args, teacher=teacher)


def test_temperature_and_losses_of_the_capture_leave_no_trace(whole, tmp_path):
    """The files are the same, so that any run may have its own."""
    hidden_cache(tmp_path / "a", temperature=3.0, beta=1.0)
    hidden_cache(tmp_path / "b")
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")
    trainer_of(config(whole / "c", temperature=7.0), teacher=teacher_model())


@pytest.mark.gpu
@pytest.mark.parametrize("bf16", [False, True])
def test_on_gpu(tmp_path, bf16):
    """Captured and trained on the GPU, with records that the host copies there."""
    options = {**STEP, "use_cpu": False, "bf16": bf16, "beta": 0.5, "kd_temperature": 2.0}
    cached = assert_teaches_as_the_live_teacher(tmp_path / "c", options, 5e-3 if bf16 else 1e-4, 1e-3 if bf16 else 1e-4)
    assert next(cached.model.parameters()).is_cuda
