"""Training from a teacher cache equals the teacher, and a cache that does not belong to the run is refused."""

import pickle
import warnings

import pytest
import torch
from caches import FORMS, STEP, captured, config, keys_of, logits_by_hand, other_tokenizer, teacher_model, trainer_of
from datasets import Dataset
from quick_cases import by_turns
from tiny import completions, kl, shift_labels_of, texts, tiny_model, tiny_tokenizer

from liger_trainer.errors import ConfigError, DataError, MaterializedLogitsWarning
from liger_trainer.teachers.cache.store import TeacherCache
from liger_trainer.teachers.cached import RECORDS, CacheCollator
from liger_trainer.teachers.row_keys import documents

pytestmark = pytest.mark.filterwarnings("error::liger_trainer.MaterializedLogitsWarning")

KINDS = {"topk": {"cache_kind": "topk"}, "sampled": {"cache_kind": "sampled"}, "both": {"cache_tail_draws": 4}}


@pytest.mark.parametrize("form, kind", by_turns(FORMS, KINDS))
def test_rows_packed_or_masked_give_the_loss_of_the_sparse_target_computed_live(tmp_path, form, kind):
    """By hand: each supervised position's own entries, from the teacher's forward over only that document."""
    rows, options = FORMS[form]
    options = {**KINDS[kind], "cache_entries": 6, "cache_bits": 16, **options, **STEP}
    teacher, student, data = teacher_model(), tiny_model(), rows(10)
    args = captured(tmp_path / "c", data, teacher=teacher, per_device_train_batch_size=3, **options)
    trainer = trainer_of(args, data, student=student)
    batch = trainer.data_collator(list(trainer.train_dataset))
    got = loss_of_batch(trainer, dict(batch))

    cache, total, tokens = TeacherCache(tmp_path / "c"), 0.0, 0
    for document in documents(trainer.train_dataset):
        keep = shift_labels_of(torch.from_numpy(document.labels.copy())[None])[0] != -100
        if not keep.any():
            continue
        p, q = (logits_by_hand(m, document.input_ids.tolist())[keep].log_softmax(-1) for m in (teacher, student))
        if kind == "topk":
            values, ids = p.topk(6, -1)
            rest = [x.scatter(-1, ids, -torch.inf).logsumexp(-1, keepdim=True) for x in (p, q)]
            total += kl(torch.cat([values, rest[0]], -1), torch.cat([q.gather(-1, ids), rest[1]], -1)).sum()
        else:
            targets = cache.format.decode(cache.records(document.key))  # type: ignore[arg-type]
            share = targets.log_probs.exp().double()
            chosen = q.gather(-1, targets.ids.long().clamp(min=0))
            total += (torch.special.xlogy(share, share) - share * chosen).sum()
        tokens += int(keep.sum())
    assert got.label_mask.sum() == tokens > 10
    assert got.token_loss.item() == pytest.approx(float(total) / tokens, rel=2e-3)
    assert (got.divergence[~got.label_mask] == 0).all()


def loss_of_batch(trainer, batch):
    batch.pop("max_length_q", None), batch.pop("max_length_k", None)
    answer = trainer.teaching.answer(batch)  # takes its records out of the batch
    with torch.no_grad():
        return trainer.model(**batch, teacher_logits=answer, fused_lm_head=True, use_cache=False)


@pytest.mark.parametrize("kind", KINDS)
def test_a_student_whose_logits_must_be_stored_has_the_same_loss(tmp_path, kind):
    args = captured(tmp_path / "c", **KINDS[kind], cache_entries=6, temperature=1.5, **STEP)
    trainer = trainer_of(args)
    batch = trainer.data_collator(list(trainer.train_dataset.select(range(7))))
    fused = loss_of_batch(trainer, dict(batch))
    trainer.model.get_output_embeddings().forward = trainer.model.get_output_embeddings().forward
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MaterializedLogitsWarning)
        plain = loss_of_batch(trainer, dict(batch))
    for name in ("loss", "log_probs", "entropy", "is_top1", "divergence", "agrees", "teacher_log_probs"):
        torch.testing.assert_close(getattr(fused, name), getattr(plain, name), rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    "kind", [{"cache_kind": "sampled", "cache_entries": 32}, {"cache_entries": 2, "cache_tail_draws": 30}], ids=str
)
def test_sampled_entries_estimate_the_kl_they_teach(tmp_path, kind):
    """Per token noisy, over a data set near the truth; a student equal to its teacher has a KL of about 0."""
    data, teacher = completions(40), teacher_model()
    args = captured(tmp_path / "c", data, data, teacher=teacher, **kind)
    live = trainer_of(config(None, teacher="model"), data, data, teacher=teacher)
    truth, got = live.evaluate(), trainer_of(args, data, data).evaluate()
    assert got["eval_forward_kl"] == pytest.approx(truth["eval_forward_kl"], rel=0.1)
    assert got["eval_kd_loss"] > 1.3 * truth["eval_forward_kl"]  # less the sample's own entropy, which is less
    equal = trainer_of(args, data, data, student=teacher_model()).evaluate()
    assert abs(equal["eval_forward_kl"]) < 0.02


def test_rows_in_any_order_and_batch_and_process(tmp_path):
    """Shuffled, twice, in another batch size, by workers of the data loader; a cache of more rows than are used."""
    args = captured(tmp_path / "c", completions(30), cache_entries=4, **STEP)
    some = completions(30).select([4, 9, 4, 17, 29, 2, 8])
    args = config(tmp_path / "c", dataloader_num_workers=2, per_device_train_batch_size=7, **STEP)
    trainer_of(args, some).train()
    again = pickle.loads(pickle.dumps(TeacherCache(tmp_path / "c")))
    key = keys_of(args, some)[0]
    assert torch.equal(again.records(key), TeacherCache(tmp_path / "c").records(key))
    assert again.records(b"\0" * 16) is None and key in again and b"\0" * 16 not in again


def other_template():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("<user> ", "<user>  ")
    return tokenizer


def exchanged(data):
    """The same texts, one of them with another mask."""
    rows = list(data)
    first = rows[0]["completion"].split()
    rows[0] = {"prompt": f"{rows[0]['prompt']} {first[0]}", "completion": " " + " ".join(first[1:])}
    return Dataset.from_list(rows)


REFUSALS = {
    "tokenizer": ({}, {"tokenizer": other_tokenizer}, "with another tokenizer"),
    "template": ({}, {"tokenizer": other_template}, "with another chat template"),
    "max_length": ({"max_length": 512}, {}, "with max_length 1024, and this run has 512"),
    "temperature": ({"temperature": 2.0}, {}, "with temperature 1.0, and this run has 2.0"),
    "data": ({}, {"data": lambda: completions(seed=1)}, "from other data: 24 of 24 rows of the train dataset"),
    "one row": (
        {},
        {"data": lambda: Dataset.from_list([*completions(), {"prompt": "w1 w2", "completion": " w3"}])},
        "from other data: 1 of 25 rows of the train dataset are not in it, the first being row 24 with 4 tokens",
    ),
    "mask": ({}, {"data": lambda: exchanged(completions())}, "from other data: 1 of 24 rows"),
    "held-out rows": ({}, {"test": lambda: completions(3, seed=8)}, "3 of 3 rows of the eval dataset"),
    "loss on prompts too": ({"completion_only_loss": False}, {}, "from other data: 24 of 24 rows"),
    "other teacher": ({}, {"teacher": "stranger"}, "from another teacher .*: its weights are not those of .*stranger"),
    "teacher that is nowhere": ({}, {"teacher": "no/such"}, "no/such are not on this machine"),
    "teacher in memory": ({}, {"teacher": teacher_model}, "captured from a model in files, .* one in memory"),
    "collator": ({}, {"data_collator": lambda: list}, "data_collator"),
}


@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_cache_that_does_not_belong_is_refused_before_the_gpu(whole_cache, monkeypatch, refusal):
    options, given, message = REFUSALS[refusal]
    if refusal == "other teacher":
        stranger = whole_cache / "stranger"
        tiny_model("gemma2", seed=6, hidden_size=48).save_pretrained(stranger)
        given = {"teacher": str(stranger)}
    given = {name: make() if callable(make) else make for name, make in given.items()}
    monkeypatch.setattr("transformers.Trainer.__init__", lambda *_, **__: pytest.fail("too late"))
    with pytest.raises(ConfigError, match=message):
        trainer_of(config(whole_cache / "c", **options), **given)


def test_the_teacher_and_the_tokenizer_that_it_was_captured_with_are_accepted(whole_cache, tmp_path):
    """By its weights, however they lie in files, under whatever name; a tokenizer in whatever state."""
    tokenizer = tiny_tokenizer()
    tokenizer(["w1 w2", "w1"], padding=True, truncation=True, max_length=3)
    trainer_of(config(whole_cache / "c"), teacher=str(whole_cache / "teacher"), tokenizer=tokenizer)
    teacher_model().save_pretrained(tmp_path / "copy", max_shard_size="20KB")
    assert len(list((tmp_path / "copy").glob("*.safetensors"))) > 1
    trainer = trainer_of(config(whole_cache / "c", teacher_model_name_or_path=str(tmp_path / "copy")))
    assert trainer.teacher is None


def test_a_teacher_in_memory_is_compared_by_its_state(tmp_path):
    args, moved = captured(tmp_path / "c", teacher=teacher_model()), teacher_model()
    trainer_of(args, teacher=teacher_model())
    with torch.no_grad():
        moved.model.norm.weight[3] += 1e-6
    for other in (moved, tiny_model("gemma2", seed=6, hidden_size=48)):
        with pytest.raises(ConfigError, match="from another teacher"):
            trainer_of(args, teacher=other)
    with pytest.raises(ConfigError, match="captured from a model in memory"):
        trainer_of(args, teacher="some/name")


def test_draws_do_not_determine_any_divergence(tmp_path):
    """Whatever the configuration says of what the cache holds."""
    losses = [{"type": "jsd", "beta": 0.4}, {"type": "reverse_kl", "weight": 0.3}, {"type": "tvd"}, {"type": "ce"}]
    captured(tmp_path / "draws", cache_entries=8, cache_tail_draws=4)
    with pytest.raises(ConfigError, match="holds draws, which determine only the forward KL.* asks for jsd, reverse"):
        trainer_of(config(tmp_path / "draws", **STEP, losses=losses))


def test_a_student_without_some_tokens(tmp_path):
    args = captured(tmp_path / "c")
    with pytest.raises(ConfigError, match="The student knows 60 tokens, but the tokenizer has 64"):
        trainer_of(args, student=tiny_model(vocab_size=60, pad_token_id=1, eos_token_id=2))


def test_labels_that_are_not_the_rows_own(tmp_path):
    """Packed rows without the ends of their documents let one predict the next one's first token: no target for it."""
    args = captured(tmp_path / "c", texts(), max_length=32)
    trainer = trainer_of(args, texts())
    collator = CacheCollator(trainer.data_collator.collator, TeacherCache(tmp_path / "c"))
    first, second = (trainer.train_dataset[i]["input_ids"] for i in (0, 1))
    with pytest.raises(DataError, match="with eval_packing, use packing too"):
        collator([{"input_ids": first + second, "seq_lengths": [len(first), len(second)]}])
    with pytest.raises(DataError, match=r"A row of 3 tokens, beginning with \[1, 2, 3\], is not in the teacher cache"):
        collator([{"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}])
    nothing = collator([{"input_ids": [1, 2, 3], "labels": [-100] * 3}])[RECORDS]
    assert nothing.shape == (1, 3, collator.cache.format.bytes) and not nothing.any()
