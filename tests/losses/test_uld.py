"""Distillation from a teacher of another tokenizer: which positions belong together, the loss, the trainer."""

import functools
import json
import math
import re

import pytest
import torch
from byte_level import CODE, ENGLISH, byte_level, saved
from commands import call, settings
from datasets import Dataset
from peft import LoraConfig
from quick_cases import slow_but
from splits import capture_gradients
from tiny import CHAT_TEMPLATE, VOCAB, chats, completions, double_copy, texts, tiny_model, tiny_tokenizer, train_args
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from liger_trainer import DistillationCallback, LigerDistillConfig, LigerDistillTrainer
from liger_trainer.errors import ConfigError, DataError
from liger_trainer.extras.cross_tokenizer.teacher import CrossTokenizerTeacher
from liger_trainer.extras.cross_tokenizer.text_alignment import TextRun, aligned, partners, runs
from liger_trainer.kernels.linear_uld import uld_reference
from liger_trainer.losses.model_parts import decoder_layers
from liger_trainer.run import samples as evaluation
from liger_trainer.teachers.row_keys import row_key

pytestmark = pytest.mark.filterwarnings("error::liger_trainer.MaterializedLogitsWarning")

ULD = [{"type": "uld"}]
MIXED = [{"type": "uld", "weight": 1.5}, {"type": "ce", "weight": 0.25}]


def letters() -> PreTrainedTokenizerFast:
    """Every character a token; another end and another chat template than tiny_tokenizer's."""
    characters = "abcdefghijklmnopqrstuvwxyz0123456789 "
    vocabulary = {c: i for i, c in enumerate(["<none>", "</s>", "[Q]", "[A]", *characters])}
    model = Tokenizer(models.WordLevel(vocabulary, unk_token="<none>"))
    model.pre_tokenizer, model.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=model, unk_token="<none>", pad_token="</s>", eos_token="</s>",
        additional_special_tokens=["[Q]", "[A]"],
    )  # fmt: skip
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ '[A]' }}{% generation %}{{ m['content'] + '</s>' }}"
        "{% endgeneration %}{% else %}{{ '[Q]' + m['content'] }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '[A]' }}{% endif %}"
    )
    return tokenizer


def words() -> PreTrainedTokenizerFast:
    """tiny_tokenizer, with a template whose answers end in a token: of a space transformers' masks find no end."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE.replace(
        "+ ' <eos> ' }}{% endgeneration %}", "+ ' <eos>' }}{% endgeneration %} "
    )
    return tokenizer


TEACHER = {"family": "gemma2", "vocab_size": 48, "hidden_size": 48, "pad_token_id": 1, "eos_token_id": 1, "seed": 5}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> str:
    return saved(tmp_path_factory.mktemp("teacher"), letters(), **TEACHER)


def make(teacher, data=None, eval_data=None, student=None, peft_config=None, tokenizer=None, **options):
    return LigerDistillTrainer(
        student or tiny_model(vocab_size=70), teacher_model=teacher,
        args=train_args(LigerDistillConfig, **{"losses": ULD, "max_steps": 1, **options}),
        train_dataset=data or completions(8), eval_dataset=eval_data,
        processing_class=tokenizer or words(), peft_config=peft_config,
    )  # fmt: skip


# Which positions belong together


def pairs_of(text: str, ours, theirs, prompt: str = "") -> list[tuple[str, str]]:
    """What stands before each pair of aligned positions, from the beginning of either row."""
    rows = []
    for tokenizer in (ours, theirs):
        before, ids = (tokenizer(x, add_special_tokens=False)["input_ids"] for x in (prompt, text))
        rows.append((before + ids, [-100] * len(before) + ids))
    found = aligned(*(runs(*row, tokenizer) for row, tokenizer in zip(rows, (ours, theirs), strict=True)))
    return [
        tuple(t.decode(row[0][: at + 1]) for t, row, at in zip((ours, theirs), rows, pair, strict=True))
        for pair in found.items()
    ]


@pytest.mark.parametrize("text", ["the cat sat on the mat", "def f(x): return x", "naïve 日本語 \u200d🙂!", "x"])
def test_pairs_stand_behind_the_same_text(text):
    ours, theirs = byte_level(ENGLISH), byte_level(CODE)
    found = pairs_of(text, ours, theirs, prompt="q: ")
    assert all(own == other for own, other in found)
    # every boundary that both have, but those within a character
    ends = []
    for tokenizer in (ours, theirs):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        prefixes = {"q: " + tokenizer.decode(ids[:n]) for n in range(len(ids))}
        ends.append({x for x in prefixes if not x.endswith("\ufffd")})
    assert {own for own, _ in found} == ends[0] & ends[1] and len(found) == len(ends[0] & ends[1])


def test_ends_meet_whatever_token_ends_a_text():
    ours, theirs = tiny_tokenizer(), letters()
    rows = []
    for tokenizer in (ours, theirs):
        ids = tokenizer("w1 w2", add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        rows.append((ids, [-100, *ids[1:]] if tokenizer is theirs else ids))
    own, other = rows[0], (rows[1][0], rows[1][0])
    found = aligned(runs(*own, ours), runs(*other, theirs))
    # the student: w1 | w2 | <eos>; the teacher: w 1 _ w 2 | </s>. The first token of a row is not predicted
    assert found == {0: 1, 1: 4}
    assert partners(own[1], found) == [1, 4]


def test_answers_are_compared_with_their_own_counterparts():
    ours, theirs = words(), letters()
    own, other = (
        t.apply_chat_template(chats(1)[0]["messages"], return_assistant_tokens_mask=True, return_dict=True)
        for t in (ours, theirs)
    )
    rows = [
        (x["input_ids"], [i if m else -100 for i, m in zip(x["input_ids"], x["assistant_masks"], strict=True)])
        for x in (own, other)
    ]
    mine, his = (runs(*row, t) for row, t in zip(rows, (ours, theirs), strict=True))
    assert len(mine) == len(his) == 2 and [x.text for x in mine] == [x.text for x in his]
    found = aligned(mine, his)
    answers = [m["content"] for m in chats(1)[0]["messages"] if m["role"] == "assistant"]
    assert len(found) == sum(len(answer.split()) + 1 for answer in answers)  # each word's beginning and both ends
    assert aligned(mine, his[:1]) == {}


def test_where_texts_part_nothing_more_is_compared():
    ours, theirs = byte_level(ENGLISH), byte_level(CODE)
    rows = [t(text, add_special_tokens=False)["input_ids"] for t, text in ((ours, "xy zab cd"), (theirs, "xy zax cd"))]
    found = aligned(*(runs(ids, ids, t) for ids, t in zip(rows, (ours, theirs), strict=True)))
    before = [ours.decode(rows[0][: at + 1]) for at in found]
    assert before and all("xy za".startswith(x) for x in before)


# The loss of the trainer


def by_hand(trainer, student, rows, temperature=1.0, projector=None) -> dict[str, torch.Tensor]:
    """Each loss per supervised token, from stored logits in fp64, row by row; hidden_mse is of blocks 1 and 0."""
    teacher, tokens = double_copy(trainer.teacher), 0
    sums = dict.fromkeys(("uld", "ce", "hidden_mse"), torch.zeros((), dtype=torch.float64))
    for row in rows:
        labels = torch.tensor(row["labels"])[1:]
        keep, counterpart = labels != -100, trainer.teaching.rows.find(row_key(row["input_ids"], row["labels"]))
        partner = torch.tensor(counterpart.partners)
        paired = partner >= 0
        s = student(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1][keep][:, :VOCAB]
        t = teacher(input_ids=torch.tensor([counterpart.input_ids])).logits[0, partner[paired], :41].detach()
        sums["uld"] = sums["uld"] + uld_reference(s[paired], t, temperature).sum() * temperature**2
        sums["ce"] = sums["ce"] + torch.nn.functional.cross_entropy(s, labels[keep], reduction="sum")
        if projector is not None:
            target = states_of(teacher, counterpart.input_ids, 0)[0, partner[paired]].detach()
            block = states_of(student, row["input_ids"], 1)[0, :-1][keep][paired]
            sums["hidden_mse"] = sums["hidden_mse"] + (block @ projector.t() - target).square().mean(-1).sum()
        tokens += int(keep.sum())
    return {name: total / tokens for name, total in sums.items()}


@pytest.mark.parametrize("family", slow_but(["completions", "chats", "texts"], "chats"))
def test_logs_equal_values_by_hand(teacher, family):
    rows = {"completions": completions, "chats": chats, "texts": texts}[family](7)
    trainer = make(
        teacher, rows, rows, losses=MIXED, temperature=2.0, learning_rate=0.0, per_device_train_batch_size=7,
        per_device_eval_batch_size=3, assistant_only_loss=family == "chats",
    )  # fmt: skip
    assert trainer.distillation.vocab_size == VOCAB
    values = by_hand(trainer, double_copy(trainer.student), trainer.train_dataset, temperature=2.0)
    want = {name: value.item() for name, value in values.items()}
    trainer.train()
    logs, evaluated = trainer.state.log_history[0], trainer.evaluate()
    assert 0.01 < want["uld"] < 8
    for name, value in (("loss/uld", want["uld"]), ("kd_loss", 1.5 * want["uld"]), ("ce_loss", want["ce"])):
        assert logs[name] == pytest.approx(value, rel=1e-5), name
        assert evaluated[f"eval_{name}"] == pytest.approx(value, rel=1e-5), name
    assert logs["loss"] == pytest.approx(1.5 * want["uld"] + 0.25 * want["ce"], rel=1e-5)
    assert logs["student_perplexity"] == pytest.approx(math.exp(want["ce"]), rel=1e-4)
    of_one_vocabulary = {"forward_kl", "reverse_kl", "jsd", "agreement_at_1", "teacher_perplexity", "teacher_entropy"}
    assert not of_one_vocabulary & logs.keys() and not {f"eval_{x}" for x in of_one_vocabulary} & evaluated.keys()


ONE_BATCH = {
    "losses": MIXED, "learning_rate": 0.0, "max_steps": -1, "num_train_epochs": 1, "max_length": 64,
    "per_device_train_batch_size": 8, "logging_strategy": "epoch",
}  # fmt: skip


@functools.cache
def logs_of_one_batch(teacher) -> dict[str, float]:
    trainer = make(teacher, completions(8), **ONE_BATCH)
    trainer.train()
    return trainer.state.log_history[0]


@pytest.mark.parametrize(
    "options",
    [{"packing": True, "max_length": 40},
     pytest.param({"padding_free": True, "max_length": None}, marks=pytest.mark.slow),
     pytest.param({"per_device_train_batch_size": 2, "shuffle_dataset": True}, marks=pytest.mark.slow),
     {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}],
    ids=["packing", "padding-free", "smaller batches, shuffled", "accumulation"],
)  # fmt: skip
def test_however_rows_are_put_into_batches(teacher, options):
    trainer = make(teacher, completions(8), **{**ONE_BATCH, **options})
    if options.get("packing"):
        assert len(trainer.train_dataset) < 8 and trainer.row_facts["train"].rows == 8
    trainer.train()
    for name in ("loss/uld", "ce_loss"):
        assert trainer.state.log_history[0][name] == pytest.approx(logs_of_one_batch(teacher)[name], rel=1e-5)


def test_the_student_comes_nearer(teacher):
    trainer = make(teacher, texts(32), texts(8, seed=8), max_steps=10, learning_rate=2e-2)
    before = trainer.evaluate()["eval_loss/uld"]
    trainer.train()
    assert trainer.evaluate()["eval_loss/uld"] < 0.7 * before


def test_the_teacher_is_told_and_stays_as_it_was(teacher, capsys):
    trainer = make(teacher, max_steps=2)
    told = re.search(r"uld: (\d+) of (\d+) supervised tokens \((.*)%\) of the train dataset", capsys.readouterr().out)
    assert told and 0 < int(told[1]) <= int(told[2])
    before = {name: x.clone() for name, x in trainer.teacher.named_parameters()}
    trainer.train()
    assert all(torch.equal(before[name], x) and x.grad is None for name, x in trainer.teacher.named_parameters())


def test_adapters_and_a_teacher_in_memory(teacher):
    loaded = type(tiny_model("gemma2")).from_pretrained(teacher)
    trainer = make(loaded, peft_config=LoraConfig(r=4, target_modules=["q_proj", "lm_head"]), max_steps=2)
    trainer.train()
    assert all(math.isfinite(log["loss"]) for log in trainer.state.log_history if "loss" in log)
    unnamed = tiny_model(**TEACHER)
    with pytest.raises(ConfigError, match="needs the teacher's tokenizer, and none lies beside"):
        make(unnamed)
    assert make(unnamed, teacher_tokenizer_name_or_path=teacher).teacher is not None


@pytest.mark.parametrize("losses", [MIXED, [*ULD, {"type": "hidden_mse", "weight": 0.3, "layers": [[1, 0]]}]])
def test_loss_and_every_gradient_equal_plain_torch(teacher, losses):
    trainer = make(teacher, losses=losses, optim="sgd", per_device_train_batch_size=8)
    hidden = trainer.progress.hidden
    projector = None if hidden is None else hidden.projectors["hidden_mse_1_0"].weight.detach().double()
    captured, plain = capture_gradients(trainer), double_copy(trainer.student)
    trainer.train()
    values = by_hand(trainer, plain, trainer.train_dataset, projector=projector)
    loss = sum(entry.get("weight", 1.0) * values[entry["type"]] for entry in losses)
    logs = trainer.state.log_history[0]
    assert logs["loss"] == pytest.approx(loss.item(), rel=1e-5)
    for entry in losses:
        assert logs[f"loss/{entry['type']}"] == pytest.approx(values[entry["type"]].item(), rel=1e-5)
    loss.backward()
    for name, parameter in plain.named_parameters():
        error = (captured[name].double() - parameter.grad).norm() / parameter.grad.norm()
        assert error < 1e-4, f"{name}: {error:.1e}"


def states_of(model, input_ids, block: int) -> torch.Tensor:
    """(1, length, width) behind a block."""
    states = []
    hook = decoder_layers(model)[1][block].register_forward_hook(
        lambda _, inputs, output: states.append(output[0] if isinstance(output, tuple) else output)
    )
    model(input_ids=torch.tensor([input_ids]))
    hook.remove()
    return states[0]


# What is refused


@pytest.mark.parametrize(
    "options, message",
    [
        ({"losses": [*ULD, {"type": "forward_kl"}, {"type": "tvd"}]}, "forward_kl, tvd and uld do not go together"),
        ({"losses": ULD, "teacher": "self"}, "uld needs the model of a teacher with a tokenizer of its own"),
        ({"losses": ULD, "teacher": "cache", "teacher_cache_dir": "x"}, "uld needs the model|forward KL alone"),
        ({"losses": ULD, "taid": {}}, "taid.* changes what the divergences"),
        ({"losses": [{"type": "uld", "beta": 0.5}]}, "beta"),
    ],
)
def test_what_does_not_go_with_uld(options, message):
    with pytest.raises(ValueError, match=message):
        train_args(LigerDistillConfig, **options)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"packing": True, "packing_strategy": "wrapped", "max_length": 32}, "packing_strategy to 'bfd'"),
        ({"truncation_mode": "keep_end"}, "truncation_mode to 'keep_start'"),
        ({"data": completions(8).to_iterable_dataset()}, "the train dataset is streamed"),
        ({"data": Dataset.from_dict({"input_ids": [[1, 2]], "labels": [[1, 2]]})}, "is tokenized already"),
        ({"lmbda": 0.5}, "."),
    ],
)
def test_rows_that_it_cannot_find_again(teacher, options, message):
    with pytest.raises((ConfigError, ValueError), match=message):
        make(teacher, **options)


def test_rows_with_nothing_in_common(teacher):
    """The student's template has one run of supervised tokens, the whole conversation; the teacher's has answers."""
    tokenizer = tiny_tokenizer()
    template = re.sub("{% (end)?generation %}", "", CHAT_TEMPLATE)
    tokenizer.chat_template = f"{{% generation %}}{template}{{% endgeneration %}}"
    with pytest.raises(DataError, match="No supervised token of the train dataset begins where one of the teacher's"):
        make(teacher, chats(4), assistant_only_loss=True, tokenizer=tokenizer)


@pytest.mark.parametrize("cut, pairs", [("ab", 3), ("", 1), ("x", 0)], ids=["within", "at the front", "elsewhere"])
def test_runs_of_a_row_that_was_cut_are_compared(cut, pairs):
    """Within its last run, which begins as the teacher's. A row with fewer runs for another reason is not compared."""

    def run(first, text):
        return TextRun(first, text, tuple(range(len(text))), len(text), "")

    both = run(2, "cd")
    student, teacher = [both, run(6, cut)], [both, run(6, "abc"), run(20, "e")]
    compared = aligned(student, teacher)
    assert len([place for place in compared if place < 5]) == (2 if pairs else 0)
    assert aligned(teacher, student) == {}


def test_chats_need_the_teachers_template(tmp_path):
    other = letters()
    other.chat_template = None
    with pytest.raises(ConfigError, match="the teacher's tokenizer has no chat template"):
        make(saved(tmp_path, other, **TEACHER), chats(4))


def test_a_row_that_was_not_prepared(teacher):
    trainer = make(teacher)
    with pytest.raises(DataError, match="is none that the trainer prepared"):
        trainer.data_collator([{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}])


def test_rows_of_weight_0_are_as_if_they_were_not_there(teacher):
    """But for the divisor, which counts them. The rows are prepared twice, once as the teacher reads them."""
    rows = completions(8).add_column("weight", [float(i % 2) for i in range(8)])
    common = {"losses": [*MIXED, {"type": "hidden_mse", "weight": 0.5}], "optim": "sgd", "learning_rate": 0.0}
    weighted = make(teacher, rows, **common, per_device_train_batch_size=8, weight_column="weight")
    kept = make(teacher, rows.select(range(1, 8, 2)), **common, per_device_train_batch_size=4)
    got, want = (capture_gradients(trainer) for trainer in (weighted, kept))
    for trainer in (weighted, kept):
        trainer.train()
    all_tokens, tokens = (trainer.row_facts["train"].supervised_tokens for trainer in (weighted, kept))
    logs, of_kept = (trainer.state.log_history[0]["loss"] for trainer in (weighted, kept))
    assert logs * all_tokens == pytest.approx(of_kept * tokens, rel=1e-5)
    for name, gradient in want.items():
        torch.testing.assert_close(got[name] * all_tokens, gradient * tokens, rtol=1e-4, atol=1e-5, msg=name)


def test_rows_that_the_teacher_makes_nothing_of(teacher, monkeypatch):
    """They have cross-entropy alone; the others keep their own partners, in whatever order they come back."""
    rows, read = completions(8), CrossTokenizerTeacher._read_by_teacher
    common = {"losses": MIXED, "learning_rate": 0.0}
    want = make(teacher, rows.select([0, 2, 3, 4, 5, 6]), **common, per_device_train_batch_size=6)

    def some(self, raw, formatting_func):
        return read(self, raw, formatting_func).select([6, 5, 4, 3, 2, 0])

    monkeypatch.setattr(CrossTokenizerTeacher, "_read_by_teacher", some)
    got = make(teacher, rows, **common, per_device_train_batch_size=8)
    tokens = []
    for trainer in (got, want):
        trainer.train()
        tokens.append(sum(label != -100 for row in trainer.train_dataset for label in row["labels"]))
    logs, of_six = (trainer.state.log_history[0] for trainer in (got, want))
    assert logs["loss/uld"] * tokens[0] == pytest.approx(of_six["loss/uld"] * tokens[1], rel=1e-5)
    row = got.train_dataset[1]
    batch = got.data_collator([{name: row[name] for name in ("input_ids", "labels")}])
    assert batch["uld_input_ids"].shape == (1, 1) and bool((batch["uld_partners"] == -1).all())
    assert math.isfinite(got.compute_loss(got.model, batch).item())
    nothing = got.data_collator([{"input_ids": [1, 2], "labels": [-100, -100]}])
    assert nothing["uld_input_ids"].shape == (1, 1) and bool((nothing["uld_partners"] == -1).all())


def test_the_callback_refuses_it():
    with pytest.raises(ConfigError, match="a callback sees tokens alone. Use LigerDistillTrainer"):
        DistillationCallback(tiny_model(), losses=ULD)


# From the command line

SETTINGS = settings(
    teacher_model_name_or_path="teacher", losses=[{"type": "uld"}, {"type": "ce", "weight": 0.1}], max_steps=2,
    holdout_fraction=0.25, num_sample_completions=2, max_new_tokens=4,
)  # fmt: skip


def test_a_run_with_a_teacher_that_reads_other_tokens(teacher, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("liger_trainer.run.output_dir._report", lambda output_dir: None)
    saved(tmp_path / "student", words(), vocab_size=70)
    (tmp_path / "teacher").symlink_to(teacher)
    chats(8).to_json(tmp_path / "rows.jsonl")
    (tmp_path / "run.yaml").write_text(SETTINGS)
    asked = {}

    def spy(models, tokenizer, prompts, *rest):
        asked.update({prompt.text: tokenizer.decode(prompt.input_ids) for prompt in prompts})
        return evaluation.complete_by_each(models, tokenizer, prompts, *rest)

    monkeypatch.setattr("liger_trainer.recipes.distill.complete_by_each", spy)
    code, _, err = call(capsys, "run", "run.yaml")
    assert code == 0, err
    written = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert 0 < written["after"]["loss/uld"] < 2 and "forward_kl" not in written["after"]
    assert len(asked) == 2 and all(text in read for text, read in asked.items())
    assert all(read.endswith("[A]") for read in asked.values())  # each is asked by its own chat template
    for command, code, message in (
        (["eval", "out"], 0, "student perplexity"),
        (["cache", "run.yaml", "teacher_cache_dir=cache"], 2, "losses: uld needs the model of a teacher"),
    ):
        ended, out, err = call(capsys, *command)
        assert ended == code and message in out + err
