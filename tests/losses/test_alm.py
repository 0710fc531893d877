"""Distillation by the likelihood of spans: LigerDistillTrainer beside plain torch in fp64, on-policy too."""

import itertools
import math
import random
import re

import pytest
import torch
from byte_level import CODE, saved
from commands import call, settings
from datasets import Dataset
from peft import LoraConfig
from splits import capture_gradients
from tiny import double_copy, tiny_model, train_args
from tokenizers_of_kinds import TEMPLATE, bpe, unigram, word_piece
from torch.distributed.utils import _apply_to_tensors

from liger_trainer import DistillationCallback, LigerDistillConfig, LigerDistillTrainer
from liger_trainer.errors import ConfigError, DataError
from liger_trainer.kernels.linear_alm import alm_reference
from liger_trainer.teachers.row_keys import row_key
from liger_trainer.trainers.on_policy import prompts_of

pytestmark = pytest.mark.filterwarnings("error::liger_trainer.MaterializedLogitsWarning")

ALM = [{"type": "alm"}]
MIXED = [{"type": "alm", "weight": 1.5, "tau": 10.0}, {"type": "ce", "weight": 0.25}]
STUDENT, TEACHER = {"vocab_size": 336}, {"family": "gemma2", "vocab_size": 340, "hidden_size": 48, "seed": 5}
WORDS = ["the cat", "sat", "on the mat", "return x", "def f(x)", "she said", "🙂", "日本", "naïve", "+ 1", "w1", "(i)"]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> str:
    return saved(tmp_path_factory.mktemp("teacher"), unigram(), **TEACHER)


@pytest.fixture(scope="module")
def ours():
    return bpe(CODE)


def words(rng: random.Random, low: int, high: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(low, high)))


def completions(n: int, seed: int = 0) -> Dataset:
    rng = random.Random(seed)
    rows = [{"prompt": words(rng, 1, 3), "completion": " " + words(rng, 2, 5)} for _ in range(n)]
    return Dataset.from_list(rows)


def chats(n: int, seed: int = 0) -> Dataset:
    rng = random.Random(seed)
    roles = ("user", "assistant", "user", "assistant")
    return Dataset.from_list(
        [{"messages": [{"role": r, "content": words(rng, 1, 4)} for r in roles]} for _ in range(n)]
    )


def texts(n: int, seed: int = 0) -> Dataset:
    rng = random.Random(seed)
    return Dataset.from_list([{"text": words(rng, 3, 6)} for _ in range(n)])


ROWS = {"completions": completions, "chats": chats, "texts": texts}


def make(teacher, tokenizer, data=None, eval_data=None, student=None, peft_config=None, **options):
    return LigerDistillTrainer(
        student or tiny_model(**STUDENT), teacher_model=teacher,
        args=train_args(LigerDistillConfig, **{"losses": ALM, "max_steps": 1, "max_length": 256, **options}),
        train_dataset=completions(6) if data is None else data, eval_dataset=eval_data, processing_class=tokenizer,
        peft_config=peft_config,
    )  # fmt: skip


# By hand


def runs_of(labels: list[int]) -> list[tuple[int, int]]:
    """(first, behind the last) of each stretch of supervised tokens."""
    groups = itertools.groupby(range(len(labels)), lambda i: labels[i] != -100)
    stretches = [list(places) for supervised, places in groups if supervised]
    return [(places[0], places[-1] + 1) for places in stretches]


def texts_before(tokenizer, ids: list[int], start: int, end: int) -> dict[str, int]:
    """{text of a run's tokens before a cut: the cut}, of cuts between characters, from decoding all of them anew."""
    cuts = {}
    for cut in range(start, end + 1):
        text = tokenizer.decode(ids[start:cut], skip_special_tokens=True)
        if not text.endswith("\ufffd"):
            cuts.setdefault(text.lstrip(), cut)
    return cuts


def spans_by_hand(trainer, row, theirs: list[int], their_runs) -> list:
    """Spans of a row: pairs of (first, behind the last)."""
    spans = []
    for (a, b), (c, d) in zip(runs_of(row["labels"]), their_runs, strict=False):
        cuts = [
            texts_before(trainer.tokenizer, row["input_ids"], a, b),
            texts_before(trainer.teaching.tokenizer, theirs, c, d),
        ]
        both = sorted(cuts[0].keys() & cuts[1].keys(), key=len)
        for before, after in zip(both, both[1:], strict=False):
            spans.append([(cut[before], cut[after]) for cut in cuts])
    return spans


def likelihoods(model, ids: list[int], vocab: int) -> torch.Tensor:
    """The log-probability of each token of a row, 0 for the first."""
    log_probs = model(input_ids=torch.tensor([ids])).logits[0, :-1, :vocab].log_softmax(-1)
    return torch.cat([log_probs.new_zeros(1), log_probs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]])


def by_hand(trainer, student, rows, spans_of_rows, tau: float) -> dict[str, torch.Tensor]:
    """Each term per supervised token, from stored logits in fp64, row by row."""
    teacher, tokens = double_copy(trainer.teacher), 0
    sums = dict.fromkeys(("alm", "ce", "inside", "student", "teacher"), torch.zeros((), dtype=torch.float64))
    sizes = [len(t) for t in (trainer.tokenizer, trainer.teaching.tokenizer)]
    for row, (theirs, spans) in zip(rows, spans_of_rows, strict=True):
        s, t = likelihoods(student, row["input_ids"], sizes[0]), likelihoods(teacher, theirs, sizes[1]).detach()
        for (a, b), (c, d) in spans:
            sums["alm"] = sums["alm"] + alm_reference(s[a:b].sum(), t[c:d].sum(), tau)
            sums["inside"] = sums["inside"] + (b - a)
            sums["student"], sums["teacher"] = sums["student"] - s[a:b].sum(), sums["teacher"] - t[c:d].sum()
        keep = torch.tensor(row["labels"]) != -100
        keep[0] = False
        sums["ce"] = sums["ce"] - s[keep].sum()
        tokens += int(keep.sum())
    return {name: total / tokens for name, total in sums.items()}


def kept(trainer, row):
    """What the teacher reads in the place of a row and the spans that the trainer found, as pairs of token indices."""
    read = trainer.teaching.rows.find(row_key(row["input_ids"], row["labels"]))
    supervised = [i for i in range(1, len(row["labels"])) if row["labels"][i] != -100]
    return read, [[(supervised[a], supervised[a] + b), (c, c + d)] for a, b, c, d in read.each()]


# The trainer


@pytest.mark.parametrize("family", ROWS)
def test_spans_of_prepared_rows(teacher, ours, family):
    trainer = make(teacher, ours, ROWS[family](8), assistant_only_loss=family == "chats")
    other = trainer.teaching.tokenizer
    for row in trainer.train_dataset:
        read, spans = kept(trainer, row)
        assert read.tokens == sum(label != -100 for label in row["labels"][1:])
        read_by_each = ((ours, row["input_ids"]), (other, read.input_ids))
        texts = [
            [t.decode(ids[a:b]).strip() for (t, ids), (a, b) in zip(read_by_each, span, strict=True)] for span in spans
        ]
        ends = [x for x in texts if x == ["<|end|>", "[END]"]]
        assert len(ends) == (2 if family == "chats" else 1)
        assert all(x == y or [x, y] == ["<|end|>", "[END]"] for x, y in texts)
        # the whole answer is covered, but for the white space that one of the two writes by itself
        answers = "".join(
            ours.decode(row["input_ids"][a:b], skip_special_tokens=True) for a, b in runs_of(row["labels"])
        )
        covered = "".join(x for x, y in texts if y != "[END]")
        covered, answers = ("".join(x.split()) for x in (covered, answers))
        # of a plain text, its first token is never predicted, and so its first span is left out
        assert answers.endswith(covered) and (len(covered) == len(answers)) == (family != "texts")
        assert any(b - a != d - c for (a, b), (c, d) in spans)


@pytest.mark.parametrize("family", ROWS)
def test_loss_gradients_and_logs_equal_plain_torch(teacher, ours, family):
    rows = ROWS[family](5)
    trainer = make(
        teacher, ours, rows, rows, losses=MIXED, optim="sgd", learning_rate=0.0, per_device_train_batch_size=5,
        per_device_eval_batch_size=2, assistant_only_loss=family == "chats",
    )  # fmt: skip
    assert trainer.distillation.vocab_size == len(ours) < 336
    captured, plain = capture_gradients(trainer), double_copy(trainer.student)
    spans = [(read.input_ids, places) for read, places in (kept(trainer, row) for row in trainer.train_dataset)]
    trainer.train()
    values = by_hand(trainer, plain, trainer.train_dataset, spans, 10.0)
    loss = 1.5 * values["alm"] + 0.25 * values["ce"]
    logs, evaluated = trainer.state.log_history[0], trainer.evaluate()
    want = {
        "loss/alm": values["alm"], "kd_loss": 1.5 * values["alm"], "ce_loss": values["ce"], "loss": loss,
        "spans/share": values["inside"], "spans/student_nll": values["student"] / values["inside"],
        "spans/teacher_nll": values["teacher"] / values["inside"], "student_perplexity": values["ce"].exp(),
    }  # fmt: skip
    assert 0.05 < want["loss/alm"] < 50 and 0.7 < want["spans/share"] <= 1
    for name, value in want.items():
        assert logs[name] == pytest.approx(value.item(), rel=1e-4), name
        assert evaluated[f"eval_{name}"] == pytest.approx(value.item(), rel=1e-4), name
    assert not {"forward_kl", "reverse_kl", "agreement_at_1", "teacher_perplexity", "loss/uld"} & logs.keys()
    loss.backward()
    for name, parameter in plain.named_parameters():
        error = (captured[name].double() - parameter.grad).norm() / parameter.grad.norm()
        assert error < 1e-4, f"{name}: {error:.1e}"


def test_an_alignment_of_its_own_gives_the_same(teacher, ours):
    """The spans that decoding every prefix anew finds."""
    trainer = make(teacher, ours, chats(6), assistant_only_loss=True)
    for row in trainer.train_dataset:
        read, spans = kept(trainer, row)
        ids, end = read.input_ids, trainer.teaching.tokenizer.eos_token_id
        starts = [i + 1 for i, x in enumerate(ids) if x == trainer.teaching.tokenizer.convert_tokens_to_ids("[A]")]
        theirs = [(start, ids.index(end, start)) for start in starts]
        assert [x for x in spans if ids[x[1][0]] != end] == spans_by_hand(trainer, row, ids, theirs)


@pytest.mark.parametrize(
    "options",
    [{"packing": True, "max_length": 90}, {"padding_free": True, "max_length": None},
     {"per_device_train_batch_size": 2, "shuffle_dataset": True},
     {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}],
    ids=["packing", "padding-free", "smaller batches, shuffled", "accumulation"],
)  # fmt: skip
def test_however_rows_are_put_into_batches(teacher, ours, options):
    logs = []
    for changes in ({"per_device_train_batch_size": 8}, options):
        epoch = {"learning_rate": 0.0, "max_steps": -1, "num_train_epochs": 1, "logging_strategy": "epoch"}
        trainer = make(teacher, ours, completions(8), **{"losses": MIXED, **epoch, **changes})
        trainer.train()
        logs.append(trainer.state.log_history[0])
    if options.get("packing"):
        assert len(trainer.train_dataset) < 8 and trainer.row_facts["train"].rows == 8
    for name in ("loss/alm", "ce_loss", "spans/share", "spans/teacher_nll"):
        assert logs[1][name] == pytest.approx(logs[0][name], rel=1e-5), name


def test_the_student_comes_nearer(teacher, ours):
    trainer = make(teacher, ours, texts(16), texts(6, seed=8), max_steps=12, learning_rate=2e-2)
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert after["eval_loss/alm"] < 0.6 * before["eval_loss/alm"]


def test_a_word_piece_student_adapters_and_hidden_states(teacher):
    losses = [*ALM, {"type": "hidden_mse", "weight": 0.3, "layers": [[1, 0]]}]
    trainer = make(teacher, word_piece(), losses=losses, student=tiny_model(vocab_size=160), max_steps=2)
    trainer.train()
    adapters = LoraConfig(r=4, target_modules=["q_proj", "lm_head"])
    other = make(teacher, word_piece(), student=tiny_model(vocab_size=160), peft_config=adapters, max_steps=2)
    other.train()
    for log in (trainer.state.log_history[0], other.state.log_history[0]):
        assert math.isfinite(log["loss"]) and log["loss/alm"] > 0
    assert trainer.state.log_history[0]["loss/hidden_mse"] > 0


def test_hidden_states_at_the_first_tokens_of_spans(teacher, ours):
    trainer = make(teacher, ours, losses=[*ALM, {"type": "hidden_mse", "layers": [[1, 0]]}])
    batch = trainer.data_collator([dict(trainer.train_dataset[i]) for i in range(3)])
    length, expected = batch["alm_input_ids"].shape[1], []
    for number in range(3):
        spans = kept(trainer, trainer.train_dataset[number])[1]
        expected.append({a - 1: number * length + c - 1 for (a, _), (c, _) in spans})
    answer = trainer.teaching.answer(dict(batch))
    for number, places in enumerate(expected):
        row = answer.teacher_positions[number].tolist()
        assert row == [places.get(i, -1) for i in range(len(row))]


def test_an_answer_that_fsdp2_does_not_round(teacher, ours):
    trainer = make(teacher, ours)
    answer = trainer.teaching.answer(trainer.data_collator([dict(trainer.train_dataset[0])]))
    before = answer.log_prob.clone()
    (rounded,) = _apply_to_tensors(lambda x: x.bfloat16(), (answer,))
    assert rounded.log_prob.dtype == torch.float32 and torch.equal(rounded.log_prob, before)


def test_what_is_printed(teacher, ours, capsys):
    trainer = make(teacher, ours)
    line = re.search(r"alm: (\d+) of (\d+) supervised tokens \((.*)%\) of the train dataset\s+are in (\d+) spans",
                     capsys.readouterr().out)  # fmt: skip
    spans = [kept(trainer, row)[1] for row in trainer.train_dataset]
    assert line and int(line[4]) == sum(len(x) for x in spans)
    assert int(line[1]) == sum(b - a for row in spans for (a, b), _ in row) <= int(line[2])


def test_rows_of_weight_0(teacher, ours):
    rows = completions(4).add_column("weight", [float(i % 2) for i in range(4)])
    common = {"losses": MIXED, "optim": "sgd", "learning_rate": 0.0}
    weighted = make(teacher, ours, rows, **common, weight_column="weight")
    only = make(teacher, ours, rows.select([1, 3]), **common)
    got, want = (capture_gradients(trainer) for trainer in (weighted, only))
    for trainer in (weighted, only):
        trainer.train()
    all_tokens, tokens = (trainer.row_facts["train"].supervised_tokens for trainer in (weighted, only))
    for name, gradient in want.items():
        torch.testing.assert_close(got[name] * all_tokens, gradient * tokens, rtol=1e-4, atol=1e-5, msg=name)


def test_tau_on_a_schedule(teacher, ours):
    schedule = {"alm_tau": {"from": 1.0, "to": 50.0, "kind": "linear", "steps": 2}}
    trainer = make(teacher, ours, schedules=schedule, max_steps=3, learning_rate=0.0, per_device_train_batch_size=6)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert [log["schedule/alm_tau"] for log in logs] == [1.0, 25.5, 50.0] and logs[0]["loss"] != logs[2]["loss"]


# Completions that the student samples


def seen_in(trainer) -> list[dict]:
    batches, compute = [], trainer.compute_loss

    def compute_loss(model, inputs, *args, **kwargs):
        batches.append({name: x.clone() if torch.is_tensor(x) else x for name, x in inputs.items()})
        return compute(model, inputs, *args, **kwargs)

    trainer.compute_loss = compute_loss
    return batches


def rows_in(batch) -> list[tuple[dict, list[int], list]]:
    """(row, what the teacher reads, spans) of each row of a batch, from its tensors alone."""
    rows, length = [], batch["input_ids"].shape[1]
    for i in range(len(batch["input_ids"])):
        size, their_size = int(batch["attention_mask"][i].sum()), int(batch["alm_attention_mask"][i].sum())
        row = {name: batch[name][i, :size].tolist() for name in ("input_ids", "labels")}
        ours, theirs = batch["alm_spans"][i].tolist(), batch["alm_teacher_spans"][i].tolist()
        spans = []
        for place in sorted({x for x in ours if x >= 0}):
            sides = [[j + 1 for j, x in enumerate(side) if x == place] for side in (ours, theirs)]
            assert sides[0][0] == place - i * length + 1
            spans.append([(side[0], side[-1] + 1) for side in sides])
        rows.append((row, batch["alm_input_ids"][i, :their_size].tolist(), spans))
    return rows


@pytest.mark.parametrize("family", ["completions", "chats", "prompts", "chat prompts"])
def test_sampled_completions(teacher, ours, family):
    data = {
        "completions": completions(6), "chats": chats(6), "prompts": completions(6).remove_columns("completion"),
        "chat prompts": chats(6).map(lambda row: {"prompt": row["messages"][:1]}, remove_columns="messages"),
    }  # fmt: skip
    alone = "prompt" in family  # with lmbda below 1 a row must have a completion, and with 1 there is no ce
    trainer = make(
        teacher, ours, data[family], losses=MIXED[:1] if alone else MIXED, lmbda=1.0 if alone else 0.999,
        max_completion_length=12, per_device_train_batch_size=6,
        assistant_only_loss=family == "chats", optim="sgd", learning_rate=0.0, max_steps=2, seed=3,
        generation_kwargs={"eos_token_id": [ours.eos_token_id, *range(40, 60)]},
    )  # fmt: skip
    batches, plain, other = seen_in(trainer), double_copy(trainer.student), trainer.teaching.tokenizer
    captured = capture_gradients(trainer)
    trainer.train()
    rows = rows_in(batches[-1])
    values = by_hand(trainer, plain, [row for row, *_ in rows], [(ids, spans) for _, ids, spans in rows], 10.0)
    logs = [log for log in trainer.state.log_history if "loss" in log][-1]
    assert logs["on_policy_share"] == 1 and logs["loss/alm"] == pytest.approx(values["alm"].item(), rel=1e-4)
    assert logs["loss"] == pytest.approx(1.5 * values["alm"].item(), rel=1e-4)  # ce is of given completions
    (1.5 * values["alm"]).backward()
    weight = plain.get_input_embeddings().weight
    got = captured[next(name for name, x in plain.named_parameters() if x is weight)]
    assert (got.double() - weight.grad).norm() < 1e-4 * weight.grad.norm()
    dataset = {tuple(prompt) for prompt in prompts_of(trainer.data_collator([dict(x) for x in trainer.train_dataset]))}
    for row, read, spans in rows:
        start = next(i for i, x in enumerate(row["labels"]) if x != -100)
        assert tuple(row["input_ids"][:start]) in dataset and spans
        prompt, text = (
            ours.decode(row["input_ids"][:start]),
            ours.decode(row["input_ids"][start:], skip_special_tokens=True),
        )
        if "prompt" in family and "chat" not in family or family == "completions":
            before = other(prompt)["input_ids"]
        else:
            asked = prompt.removeprefix("<|user|>\n").removesuffix("<|end|>\n<|bot|>\n")
            before = other(f"[Q]{asked}[A]", add_special_tokens=False)["input_ids"]
        assert read[: len(before)] == before
        answer = other.decode(read[len(before) :], skip_special_tokens=True)
        assert text.strip().startswith(answer.strip()) and len(answer) >= len(text.strip()) - 4
        # the end of the answer is compared where the student has come to it
        assert (row["input_ids"][-1] == ours.eos_token_id) == (read[-1] == other.eos_token_id)


@pytest.mark.parametrize("last, ended", [("eos", True), ("special", False)])
def test_a_completion_that_stops_behind_a_special_token_has_not_ended(teacher, ours, last, ended):
    """`<|user|>` is a special token of the student's, and no end."""
    trainer = make(teacher, ours, completions(2), losses=[{"type": "alm"}], lmbda=1.0, max_completion_length=4)
    prompt = trainer.train_dataset["generation_prompt"][0]
    token = ours.eos_token_id if last == "eos" else next(i for i in ours.all_special_ids if i != ours.eos_token_id)
    written = [*ours(" w1", add_special_tokens=False)["input_ids"], token]
    row = trainer.teaching.sampled_row([*prompt, *written], [-100] * len(prompt) + written)
    end = trainer.teaching.tokenizer.eos_token_id
    assert (row.input_ids[-1] == end) == ended and len(row.spans) // 4 == 1 + ended


def test_half_of_the_micro_batches(teacher, ours):
    trainer = make(
        teacher, ours, completions(8), completions(3, seed=2), lmbda=0.5, max_completion_length=6, max_steps=6,
        per_device_train_batch_size=2, learning_rate=0.0, logging_steps=6,
    )  # fmt: skip
    trainer.train()
    logs = trainer.state.log_history[0]
    assert 0 < logs["on_policy_share"] < 1 and {"on_policy/loss/alm", "off_policy/loss/alm"} <= logs.keys()
    assert math.isfinite(trainer.evaluate()["eval_loss/alm"])


def test_prompts_alone_in_an_evaluation(teacher, ours):
    prompts = completions(4, seed=3).remove_columns("completion")
    trainer = make(teacher, ours, completions(4), prompts, max_completion_length=5)
    assert math.isfinite(trainer.evaluate()["eval_loss/alm"])


def test_a_prompt_that_was_not_prepared(teacher, ours):
    trainer = make(teacher, ours, lmbda=1.0)
    with pytest.raises(
        DataError, match="A prompt of 3 tokens, beginning with .* is of no row that the trainer prepared"
    ):
        trainer.teaching.sampled_row([1, 2, 3, 4], [-100, -100, -100, 4])


# What is refused


@pytest.mark.parametrize(
    "options, message",
    [
        ({"losses": [*ALM, {"type": "forward_kl"}]}, "forward_kl and alm do not go together"),
        ({"losses": [*ALM, {"type": "uld"}]}, "uld and alm do not go together"),
        ({"losses": ALM, "teacher": "self"}, "alm needs the model of a teacher with a tokenizer of its own"),
        ({"losses": ALM, "taid": {}}, "taid.* changes what the divergences"),
        ({"losses": [{"type": "alm", "tau": 0}]}, "losses: alm: tau: expected a number above 0, got 0"),
        ({"losses": [{"type": "alm", "beta": 0.5}]}, "beta"),
        (
            {"losses": MIXED, "label_smoothing_factor": 0.1},
            "label_smoothing_factor: is not part of the loss beside alm",
        ),
        ({"losses": ALM, "kd_temperature": 2.0}, "kd_temperature: has no effect"),
        ({"losses": ALM, "seq_kd": True}, "seq_kd: the teacher's completions would be tokens"),
        ({"losses": ALM, "schedules": {"alm_tau": {"to": 0.0}}}, "alm_tau"),
    ],
)
def test_what_does_not_go_with_it(options, message):
    with pytest.raises(ValueError, match=message):
        train_args(LigerDistillConfig, **options)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"packing": True, "packing_strategy": "wrapped", "max_length": 32}, "alm finds .* packing_strategy to 'bfd'"),
        ({"truncation_mode": "keep_end"}, "truncation_mode to 'keep_start'"),
        ({"data": completions(8).to_iterable_dataset()}, "the train dataset is streamed"),
        ({"data": completions(8).remove_columns("completion").to_iterable_dataset(), "lmbda": 1.0, "max_steps": 1},
         "the train dataset is streamed"),
        ({"data": Dataset.from_dict({"input_ids": [[1, 2]], "labels": [[1, 2]]})}, "is tokenized already"),
        ({"lmbda": 0.5, "packing": True}, "need rows one by one"),
    ],
)  # fmt: skip
def test_rows_that_it_cannot_take(teacher, ours, options, message):
    with pytest.raises((ConfigError, ValueError), match=message):
        make(teacher, ours, **options)


def test_rows_with_nothing_in_common(teacher, ours, tmp_path):
    other = unigram()
    other.chat_template = TEMPLATE.replace("m['content'] + '[END]'", "'? ' + m['content'] + '[END]'")
    with pytest.raises(DataError, match="No text of the train dataset is whole tokens to both"):
        make(saved(tmp_path, other, **TEACHER), ours, chats(4), assistant_only_loss=True)


def test_the_callback_refuses_it():
    with pytest.raises(ConfigError, match="DistillationCallback: alm needs the text of the rows"):
        DistillationCallback(tiny_model(), losses=ALM)


# From the command line

SETTINGS = settings(
    teacher_model_name_or_path="teacher", losses=[{"type": "alm", "tau": 20}, {"type": "ce", "weight": 0.1}],
    lmbda=0.5, max_completion_length=5, assistant_only_loss=True, max_steps=2, max_length=128, holdout_fraction=0.25,
)  # fmt: skip


def test_a_run(teacher, ours, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("liger_trainer.run.output_dir._report", lambda output_dir: None)
    saved(tmp_path / "student", ours, **STUDENT)
    (tmp_path / "teacher").symlink_to(teacher)
    chats(8).to_json(tmp_path / "rows.jsonl")
    (tmp_path / "run.yaml").write_text(SETTINGS)
    code, out, err = call(capsys, "run", "run.yaml")
    assert code == 0, err
    card = (tmp_path / "out" / "README.md").read_text()
    assert "1 x alm + 0.1 x ce, alm_tau 20" in card
    assert "| ALM (nats/token) |" in card and "rows that it was not trained on: ALM from" in out
