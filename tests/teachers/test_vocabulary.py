"""Which tokens two models share: tokenizers compared by string, padded heads, tokens that only one side has."""

import pytest
import torch
from byte_level import CODE, ENGLISH, byte_level, saved
from datasets import Dataset
from tiny import VOCAB, completions, tiny_model, tiny_tokenizer, train_args
from tokenizers import Tokenizer, models
from trainings import distill, logged, trained
from transformers import PreTrainedTokenizerFast, Trainer

from liger_trainer import DistillationCallback, LigerDistillConfig
from liger_trainer.errors import ConfigError, DataError
from liger_trainer.teachers.vocabulary import compare_tokenizers, teacher_tokenizer, tokenizer_of, tokenizer_size


def extended(*tokens: str) -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<user>", "<assistant>", *tokens]})
    return tokenizer


def test_merges_that_differ_make_other_tokens():
    """The same 256 bytes under the same ids, then other merges: most of the table agrees, and it is another one."""
    ours, theirs = byte_level(ENGLISH), byte_level(CODE)
    table, other = (tokenizer.convert_ids_to_tokens(range(290)) for tokenizer in (ours, theirs))
    different = [i for i, (a, b) in enumerate(zip(table, other, strict=True)) if a != b]
    assert table[:256] == other[:256] and different and min(different) == 256
    with pytest.raises(ConfigError) as error:
        compare_tokenizers(ours, theirs)
    first = different[0]
    told = f"id {first} is {table[first]!r} for the student and {other[first]!r} for the teacher; id {different[1]} is"
    assert f"{len(different)} of 290 shared ids differ; {told}" in str(error.value)
    assert f"id {different[3]} is" not in str(error.value) and "; .... " in str(error.value)
    same = len(set(table) & set(other))
    assert f"The student knows {same} of the teacher's 290 tokens under any id" in str(error.value)
    assert "losses: [{type: alm}]" in str(error.value)


def test_the_same_tokens_under_other_ids_are_another_tokenizer():
    ours = tiny_tokenizer()
    moved = {token: (index + 1) % VOCAB for token, index in ours.get_vocab().items()}
    words = Tokenizer(models.WordLevel(moved, unk_token="<unk>"))
    theirs = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>")
    with pytest.raises(
        ConfigError, match=r"64 of 64 shared ids differ; .* knows 64 of the teacher's 64 tokens under any"
    ):
        compare_tokenizers(ours, theirs)


def test_a_token_added_on_both_sides_must_be_the_same():
    assert compare_tokenizers(extended("<tool>"), extended("<tool>", "<b>")).size == VOCAB + 1
    with pytest.raises(ConfigError, match="1 of 65 shared ids differ; id 64 is '<tool>' for the student and '<call>'"):
        compare_tokenizers(extended("<tool>"), extended("<call>", "<b>"))


def test_the_tokenizer_that_lies_beside_a_model(tmp_path):
    path = saved(tmp_path / "a", byte_level(ENGLISH))
    assert tokenizer_size(tokenizer_of(path)) == 290
    loaded = type(tiny_model()).from_pretrained(path)
    assert tokenizer_size(tokenizer_of(loaded)) == 290
    assert tokenizer_of(tiny_model()) is None and tokenizer_of("no/such-model") is None
    for family in ("llama", "qwen3", "gemma2", "gpt2"):  # some are made out of nothing by transformers
        assert tokenizer_of(saved(tmp_path / family, None, family=family)) is None, family
    assert tokenizer_size(teacher_tokenizer(tiny_model(), path)) == 290
    with pytest.raises(ConfigError, match="teacher_tokenizer_name_or_path: no/where has no tokenizer"):
        teacher_tokenizer(path, "no/where")


def prepared(*ids: list[int]) -> Dataset:
    return Dataset.from_dict({"input_ids": list(ids), "labels": list(ids)})


def make(teacher, tokenizer=None, data=None, **options):
    options = {"processing_class": tokenizer or tiny_tokenizer(), "max_steps": 1, **options}
    return distill(tiny_model(vocab_size=70), teacher, data or completions(8), **options)


def losses(trainer) -> list[float]:
    torch.manual_seed(0)  # the order of the rows
    return logged(trained(trainer))


def test_padding_and_added_tokens_just_work_and_are_told(tmp_path, capsys):
    path = saved(tmp_path, extended("<tool>"), vocab_size=80)
    trainer = make(path)
    assert trainer.distillation.vocab_size == VOCAB
    assert (
        "liger-trainer: vocabulary: 64 tokens, the same in both tokenizers; left out of the loss: 6 rows of padding in "
        "the student's head (ids 64 to 69), 1 token that only the teacher has (64 '<tool>'), 15 rows of padding in the "
        "teacher's head (ids 65 to 79)\n"
    ) in capsys.readouterr().out
    cut = type(tiny_model()).from_pretrained(path)
    cut.resize_token_embeddings(VOCAB)
    assert losses(trainer) == pytest.approx(losses(make(cut)), rel=1e-6)


def test_a_padding_token_that_the_teacher_does_not_have(tmp_path):
    """As of a Llama: the student's padding token was added, and lies beyond the teacher's embeddings."""
    tokenizer, path = extended(), saved(tmp_path, tiny_tokenizer())
    tokenizer.add_special_tokens({"pad_token": "<new-pad>"})
    assert tokenizer.pad_token_id == VOCAB
    assert len({len(row["completion"].split()) for row in completions(8)}) > 1  # so that there is padding
    trainer = make(path, tokenizer)
    assert trainer.distillation.vocab_size == VOCAB
    assert losses(trainer) == pytest.approx(losses(make(path)), rel=1e-6)


def test_a_teacher_of_another_tokenizer_is_refused_before_it_is_loaded(tmp_path, monkeypatch):
    def no_weights(*_, **__):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("liger_trainer.teachers.model._from_files", no_weights)
    path = saved(tmp_path, byte_level(ENGLISH))
    with pytest.raises(ConfigError, match="different tokenizers: 64 of 64 shared ids differ"):
        make(path)
    bare = saved(tmp_path / "bare", None)
    with pytest.raises(ConfigError, match="different tokenizers"):
        make(bare, teacher_tokenizer_name_or_path=path)


def test_a_teacher_in_memory_is_known_by_the_directory_it_came_from(tmp_path):
    teacher = type(tiny_model()).from_pretrained(saved(tmp_path, byte_level(ENGLISH)))
    with pytest.raises(ConfigError, match="different tokenizers"):
        make(teacher)
    trainer = Trainer(
        tiny_model(), args=train_args(LigerDistillConfig, max_steps=1), callbacks=[DistillationCallback(teacher)],
        train_dataset=prepared([1, 2, 3]), processing_class=tiny_tokenizer(),
    )  # fmt: skip
    with pytest.raises(ConfigError, match="different tokenizers"):
        trainer.train()


def test_a_teacher_without_a_tokenizer_is_compared_by_size(tmp_path, capsys):
    make(saved(tmp_path, None, vocab_size=80))
    assert "vocabulary: 64 tokens, in the student's tokenizer (the teacher's is unknown); " in capsys.readouterr().out
    with pytest.raises(ConfigError, match="The teacher knows 40 tokens, but the student's tokenizer has 64"):
        make(tiny_model(vocab_size=40, pad_token_id=1, eos_token_id=2))


def test_tokens_of_the_student_alone_in_the_rows(tmp_path, capsys):
    path, data, own = saved(tmp_path, tiny_tokenizer()), completions(8), extended("<a>", "<b>", "<c>")
    as_they_are = {"dataset_kwargs": {"skip_prepare_dataset": True}}
    used = "^The train dataset uses {} that the teacher's tokenizer does not have, {} times: {}"
    with pytest.raises(DataError, match=used.format("1 token", 8, "64 '<a>'")):
        make(path, own, data=data.map(lambda row: {"prompt": "<a> " + row["prompt"]}))
    with pytest.raises(DataError, match=used.format("2 tokens", 3, "64 '<a>', 66 '<c>'.")):
        make(path, own, data=prepared([1, 64], [66, 3, 66], [5]), **as_they_are)
    stream = prepared([1, 2]).to_iterable_dataset()
    with pytest.raises(ConfigError, match="whether the train dataset uses them cannot be known, because its rows come"):
        make(path, own, data=stream, **as_they_are)
    make(path, data=stream, **as_they_are)
    make(path, own, data=prepared([1, 63, 2]), **as_they_are)
    trainer = make(path, own, data=data)
    assert "3 tokens that only the student has (64 '<a>', 65 '<b>', 66 '<c>')" in capsys.readouterr().out
    assert trainer.distillation.vocab_size == VOCAB and torch.isfinite(torch.tensor(losses(trainer))).all()
