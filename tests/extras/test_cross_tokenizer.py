"""Teachers of another tokenizer: the losses uld and alm against plain torch in fp64, and what they share."""

import itertools
import json
import math
import random
import re
from types import SimpleNamespace

import pytest
import torch
from byte_level import CODE, ENGLISH, byte_level, saved
from commands import call, settings, without_report
from datasets import Dataset
from mtp_heads import Definition, head_of, save_with_head
from peft import LoraConfig
from splits import capture_gradients
from tiny import assert_same_gradients, double_copy, tiny_model, train_args
from tokenizers_of_kinds import TEMPLATE, bpe, unigram, word_piece
from torch.distributed.utils import _apply_to_tensors
from trainings import batches_of, distill, logged, trained

from liger_trainer import DistillationCallback, LigerDistillConfig
from liger_trainer.errors import ConfigError, DataError
from liger_trainer.extras.cross_tokenizer.teacher import CrossTokenizerTeacher, UldAnswer
from liger_trainer.extras.cross_tokenizer.text_alignment import TextRun, aligned, partners, runs
from liger_trainer.kernels.linear_alm import alm_reference
from liger_trainer.kernels.linear_uld import uld_reference
from liger_trainer.losses.model_parts import decoder_layers
from liger_trainer.losses.spec import BatchTargets, Distillation, LossOptions
from liger_trainer.run import samples
from liger_trainer.teachers.row_keys import row_key
from liger_trainer.trainers.on_policy import prompts_of

pytestmark = pytest.mark.filterwarnings("error::liger_trainer.MaterializedLogitsWarning")

CE, TAU = {"type": "ce", "weight": 0.25}, 10.0
MIXED = {"uld": [{"type": "uld", "weight": 1.5}, CE], "alm": [{"type": "alm", "weight": 1.5, "tau": TAU}, CE]}
STUDENT, TEACHER = {"vocab_size": 336}, {"family": "gemma2", "vocab_size": 340, "hidden_size": 48, "seed": 5}
WORDS = ["the cat", "sat", "on the mat", "return x", "def f(x)", "she said", "🙂", "日本", "naïve", "+ 1", "w1", "(i)"]
BOTH = pytest.mark.parametrize("kind", MIXED)


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
    return Dataset.from_list([{"prompt": words(rng, 1, 3), "completion": f" {words(rng, 2, 5)}"} for _ in range(n)])


def chats(n: int, seed: int = 0) -> Dataset:
    rng, roles = random.Random(seed), ("user", "assistant", "user", "assistant")
    return Dataset.from_list(
        [{"messages": [{"role": r, "content": words(rng, 1, 4)} for r in roles]} for _ in range(n)]
    )


def texts(n: int, seed: int = 0) -> Dataset:
    rng = random.Random(seed)
    return Dataset.from_list([{"text": words(rng, 3, 6)} for _ in range(n)])


ROWS = {"completions": completions, "chats": chats, "texts": texts}


def make(teacher, tokenizer, kind="alm", data=None, eval_data=None, student=None, **options):
    options = {"losses": [{"type": kind}], "max_steps": 1, "max_length": 256, **options}
    data = completions(6) if data is None else data
    student = tiny_model(**STUDENT) if student is None else student
    return distill(student, teacher, data, eval_data, processing_class=tokenizer, **options)


# By hand


def kept(trainer, row):
    """What the teacher reads in the place of a row, and how its tokens belong to the row's."""
    return trainer.teaching.rows.find(row_key(row["input_ids"], row["labels"]))


def spans_kept(trainer, row):
    """What the teacher reads and the spans that the trainer found, as pairs of (first token, behind the last)."""
    read = kept(trainer, row)
    supervised = [i for i in range(1, len(row["labels"])) if row["labels"][i] != -100]
    return read.input_ids, [[(supervised[a], supervised[a] + b), (c, c + d)] for a, b, c, d in read.each()]


def logits_of(model, ids: list[int], vocab: int) -> torch.Tensor:
    return model(input_ids=torch.tensor([ids])).logits[0, :-1, :vocab]


def states_of(model, ids: list[int], block: int) -> torch.Tensor:
    """(length, width) behind a block."""
    states = []
    hook = decoder_layers(model)[1][block].register_forward_hook(
        lambda _, inputs, output: states.append(output[0] if isinstance(output, tuple) else output)
    )
    model(input_ids=torch.tensor([ids]))
    hook.remove()
    return states[0][0]


def alm_by_hand(log_probs: list[torch.Tensor], row, theirs: list[int], spans) -> dict[str, torch.Tensor]:
    """Sums over the spans of a row."""
    zero = log_probs[0].new_zeros(1)  # the first token of a row is not predicted
    s, t = (
        torch.cat([zero, x.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]])
        for x, ids in zip(log_probs, (row["input_ids"], theirs), strict=True)
    )
    t, sums = t.detach(), dict.fromkeys(("alm", "inside", "student", "teacher"), zero.sum())
    for (a, b), (c, d) in spans:
        sums["alm"] = sums["alm"] + alm_reference(s[a:b].sum(), t[c:d].sum(), TAU)
        sums["inside"] = sums["inside"] + (b - a)
        sums["student"], sums["teacher"] = sums["student"] - s[a:b].sum(), sums["teacher"] - t[c:d].sum()
    return sums


def by_hand(kind, trainer, student, rows, spans=None, temperature=1.0, projector=None) -> dict[str, torch.Tensor]:
    """Each term per supervised token, from stored logits in fp64, row by row; hidden_mse is of blocks 1 and 0."""
    teacher, tokens, sums = double_copy(trainer.teacher), 0, {}
    sizes = [len(t) for t in (trainer.tokenizer, trainer.teaching.tokenizer)]
    for place, row in enumerate(rows):
        keep = torch.tensor(row["labels"])[1:] != -100
        s = logits_of(student, row["input_ids"], sizes[0])
        of_row = {"ce": torch.nn.functional.cross_entropy(
            s[keep], torch.tensor(row["labels"])[1:][keep], reduction="sum")}  # fmt: skip
        if kind == "alm":
            theirs, found = spans[place] if spans else spans_kept(trainer, row)
            t = logits_of(teacher, theirs, sizes[1])
            of_row |= alm_by_hand([s.log_softmax(-1), t.log_softmax(-1)], row, theirs, found)
        else:
            partner = torch.tensor(kept(trainer, row).partners)
            theirs, paired = kept(trainer, row).input_ids, partner >= 0
            t = logits_of(teacher, [*theirs, 0], sizes[1])[partner[paired]].detach()
            of_row["uld"] = uld_reference(s[keep][paired], t, temperature).sum() * temperature**2
            if projector is not None:
                target = states_of(teacher, theirs, 0)[partner[paired]].detach()
                block = states_of(student, row["input_ids"], 1)[:-1][keep][paired]
                of_row["hidden_mse"] = (block @ projector.t() - target).square().mean(-1).sum()
        sums = {name: sums.get(name, 0.0) + value for name, value in of_row.items()}
        tokens += int(keep.sum())
    return {name: total / tokens for name, total in sums.items()}


# The trainer


@pytest.mark.parametrize("family", ROWS)
@BOTH
def test_loss_gradients_and_logs_equal_plain_torch(teacher, ours, kind, family):
    rows, heat = ROWS[family](5), 2.0 if kind == "uld" else 1.0
    trainer = make(
        teacher, ours, kind, rows, rows, losses=MIXED[kind], optim="sgd", learning_rate=0.0,
        per_device_train_batch_size=5, per_device_eval_batch_size=2, assistant_only_loss=family == "chats",
        kd_temperature=2.0 if kind == "uld" else None,
    )  # fmt: skip
    assert trainer.distillation.vocab_size == len(ours) < 336
    captured, plain = capture_gradients(trainer), double_copy(trainer.student)
    trainer.train()
    values = by_hand(kind, trainer, plain, trainer.train_dataset, temperature=heat)
    loss = 1.5 * values[kind] + 0.25 * values["ce"]
    want = {f"loss/{kind}": values[kind], "kd_loss": 1.5 * values[kind], "ce_loss": values["ce"], "loss": loss,
            "student_perplexity": values["ce"].exp()}  # fmt: skip
    assert 0.01 < want[f"loss/{kind}"] < 50
    if kind == "alm":
        want["spans/share"] = values["inside"]
        want |= {f"spans/{side}_nll": values[side] / values["inside"] for side in ("student", "teacher")}
        assert 0.7 < want["spans/share"] <= 1
    logs, evaluated = trainer.state.log_history[0], trainer.evaluate()
    for name, value in want.items():
        assert logs[name] == pytest.approx(value.item(), rel=1e-4), name
        assert evaluated[f"eval_{name}"] == pytest.approx(value.item(), rel=1e-4), name
    of_one_vocabulary = {"forward_kl", "reverse_kl", "jsd", "agreement_at_1", "teacher_perplexity", "teacher_entropy"}
    assert not of_one_vocabulary & logs.keys() and not {f"eval_{x}" for x in of_one_vocabulary} & evaluated.keys()
    loss.backward()
    assert_same_gradients(captured, {name: p.grad for name, p in plain.named_parameters()}, 1e-4)


def test_uld_of_stored_logits_is_that_of_the_formula():
    s, t = (torch.randn(2, 4, v, dtype=torch.float64, requires_grad=g) for v, g in ((9, True), (12, False)))
    labels = torch.tensor([[1, 2, -100, 4], [0, 5, 6, 3]])
    partners = torch.tensor([[0, -1, 2, 3], [5, 4, -1, 7]])
    how = Distillation(uld_weight=1.5, ce_weight=0.25, temperature=2.0, vocab_size=8)
    answer = UldAnswer(t, partners, vocab_size=11)
    result = answer.loss(s.float(), BatchTargets.of(None, labels, None), LossOptions(distillation=how))
    s_kept, learned = s.flatten(0, 1)[:, :8], labels.flatten() >= 0
    paired = learned & (partners.flatten() >= 0)
    distances = uld_reference(s_kept[paired], t.flatten(0, 1)[partners.flatten()[paired], :11], 2.0)
    ce = torch.nn.functional.cross_entropy(s_kept[learned], labels.flatten()[learned], reduction="sum")
    want = (1.5 * 4.0 * distances.sum() + 0.25 * ce) / learned.sum()
    assert result.loss.item() == pytest.approx(want.item(), rel=1e-5)
    torch.testing.assert_close(*(torch.autograd.grad(loss, s)[0] for loss in (result.loss, want)), rtol=1e-4, atol=1e-7)


def test_hidden_states_at_the_partners_of_uld(teacher, ours):
    losses = [{"type": "uld"}, {"type": "hidden_mse", "weight": 0.3, "layers": [[1, 0]]}]
    trainer = make(teacher, ours, "uld", losses=losses, optim="sgd", per_device_train_batch_size=8)
    projector = trainer.loss_state.hidden.projectors["hidden_mse_1_0"].weight.detach().double()
    captured, plain = capture_gradients(trainer), double_copy(trainer.student)
    logs = trained(trainer).state.log_history[0]
    values = by_hand("uld", trainer, plain, trainer.train_dataset, projector=projector)
    (values["uld"] + 0.3 * values["hidden_mse"]).backward()
    for name in ("uld", "hidden_mse"):
        assert logs[f"loss/{name}"] == pytest.approx(values[name].item(), rel=1e-5)
    gradients = {name: p.grad for name, p in plain.named_parameters()}
    assert_same_gradients({name: captured[name] for name in gradients}, gradients, 1e-4)


def test_hidden_states_at_the_first_tokens_of_alms_spans(teacher, ours):
    trainer = make(teacher, ours, losses=[{"type": "alm"}, {"type": "hidden_mse", "layers": [[1, 0]]}])
    batch = trainer.data_collator([dict(trainer.train_dataset[i]) for i in range(3)])
    length, expected = batch["alm_input_ids"].shape[1], []
    for number in range(3):
        spans = spans_kept(trainer, trainer.train_dataset[number])[1]
        expected.append({a - 1: number * length + c - 1 for (a, _), (c, _) in spans})
    answer = trainer.teaching.answer(dict(batch))
    for number, places in enumerate(expected):
        row = answer.teacher_positions[number].tolist()
        assert row == [places.get(i, -1) for i in range(len(row))]
    before = answer.log_prob.clone()
    (rounded,) = _apply_to_tensors(lambda x: x.bfloat16(), (answer,))  # as FSDP2 would
    assert rounded.log_prob.dtype == torch.float32 and torch.equal(rounded.log_prob, before)
    assert logged(trained(trainer), "loss/hidden_mse")[0] > 0


EPOCH = {"learning_rate": 0.0, "max_steps": -1, "num_train_epochs": 1, "logging_strategy": "epoch"}


@pytest.fixture(scope="module")
def one_batch(teacher, ours):
    """The logs of eight rows in one batch."""
    eight = {"data": completions(8), "per_device_train_batch_size": 8, **EPOCH}
    return {
        kind: trained(make(teacher, ours, kind, losses=MIXED[kind], **eight)).state.log_history[0] for kind in MIXED
    }


@pytest.mark.parametrize(
    "options",
    [{"packing": True, "max_length": 90}, {"padding_free": True, "max_length": None},
     {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "shuffle_dataset": True}],
    ids=["packing", "padding-free", "smaller batches, shuffled, accumulated"],
)  # fmt: skip
@BOTH
def test_however_rows_are_put_into_batches(teacher, ours, one_batch, kind, options):
    trainer = trained(make(teacher, ours, kind, completions(8), losses=MIXED[kind], **EPOCH, **options))
    if options.get("packing"):
        assert len(trainer.train_dataset) < 8 and trainer.row_facts["train"].rows == 8
    for name in (f"loss/{kind}", "ce_loss", *(["spans/share", "spans/teacher_nll"] if kind == "alm" else [])):
        assert logged(trainer, name)[0] == pytest.approx(one_batch[kind][name], rel=1e-5), name


@BOTH
def test_the_student_comes_nearer_and_the_teacher_stays_as_it_was(teacher, ours, kind, capsys):
    trainer = make(teacher, ours, kind, texts(16), texts(6, seed=8), max_steps=12, learning_rate=2e-2)
    line = rf"{kind}: (\d+) of (\d+) supervised tokens \((.*)%\) of the train dataset\s+(are in (\d+) spans|begin)"
    told = re.search(line, capsys.readouterr().out)
    assert told and 0 < int(told[1]) <= int(told[2])
    if kind == "alm":
        spans = [spans_kept(trainer, row)[1] for row in trainer.train_dataset]
        assert int(told[5]) == sum(map(len, spans))
        assert int(told[1]) == sum(b - a for row in spans for (a, b), _ in row)
    before, weights = trainer.evaluate(), {name: x.clone() for name, x in trainer.teacher.named_parameters()}
    assert trained(trainer).evaluate()[f"eval_loss/{kind}"] < 0.7 * before[f"eval_loss/{kind}"]
    assert all(torch.equal(weights[name], x) and x.grad is None for name, x in trainer.teacher.named_parameters())


@BOTH
def test_adapters_a_word_piece_student_and_a_teacher_in_memory(teacher, kind):
    loaded = type(tiny_model("gemma2")).from_pretrained(teacher)
    student, adapters = tiny_model(vocab_size=160), LoraConfig(r=4, target_modules=["q_proj", "lm_head"])
    trainer = trained(make(loaded, word_piece(), kind, student=student, peft_config=adapters, max_steps=2))
    assert all(map(math.isfinite, logged(trainer))) and logged(trainer, f"loss/{kind}")[0] > 0
    unnamed = tiny_model(**TEACHER)
    with pytest.raises(ConfigError, match="needs the teacher's tokenizer, and the teacher's folder has none"):
        make(unnamed, word_piece(), kind, student=tiny_model(vocab_size=160))
    assert make(unnamed, word_piece(), kind, student=student, teacher_tokenizer_name_or_path=teacher).teacher


@BOTH
def test_rows_of_weight_0_are_as_if_they_were_not_there(teacher, ours, kind):
    """But for the divisor, which counts them. The rows are prepared twice, once as the teacher reads them."""
    rows = completions(8).add_column("weight", [float(i % 2) for i in range(8)])
    losses = [*MIXED[kind], *([{"type": "hidden_mse", "weight": 0.5}] if kind == "uld" else [])]
    common = {"losses": losses, "optim": "sgd", "learning_rate": 0.0}
    weighted = make(teacher, ours, kind, rows, **common, per_device_train_batch_size=8, weight_column="weight")
    only = make(teacher, ours, kind, rows.select(range(1, 8, 2)), **common, per_device_train_batch_size=4)
    got, want = (capture_gradients(trainer) for trainer in (weighted, only))
    losses = [logged(trained(trainer))[0] for trainer in (weighted, only)]
    all_tokens, tokens = (trainer.row_facts["train"].supervised_tokens for trainer in (weighted, only))
    assert losses[0] * all_tokens == pytest.approx(losses[1] * tokens, rel=1e-5)
    for name, gradient in want.items():
        torch.testing.assert_close(got[name] * all_tokens, gradient * tokens, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    ("kind", "family"), [("uld", "completions"), ("alm", "completions"), ("alm", "texts")], ids=lambda value: value
)
def test_a_drafting_head_learns_what_the_model_does(teacher, ours, tmp_path, kind, family):
    """A span with the second token of a row is of no draft: there is none of that token."""
    source = save_with_head(tmp_path / "source", vocab_size=336)
    how = {"losses": MIXED[kind], "learning_rate": 0.0, "per_device_train_batch_size": 30, "mtp_loss_weight": 0.3}
    trainer = make(teacher, ours, kind, ROWS[family](30), student=str(source), **how)
    captured, truth = capture_gradients(trainer), Definition(source)
    trainer.train()
    rows = [dict(row) for row in trainer.train_dataset]
    spans = [spans_kept(trainer, row) for row in rows] if kind == "alm" else None
    if family == "texts":
        assert any(a == 1 and b > 2 for _, found in spans for (a, b), _ in found), "of several tokens"
        spans = [(theirs, [span for span in found if span[0][0] > 1]) for theirs, found in spans]
        rows = [{**row, "labels": [-100, -100, *row["labels"][2:]]} for row in rows]

    def drafts(input_ids):  # in the places of the model's logits
        return SimpleNamespace(logits=torch.nn.functional.pad(truth.drafts(input_ids[0].tolist()), (0, 0, 1, 1))[None])

    values = by_hand(kind, trainer, drafts, rows, spans)
    tokens = sum(label != -100 for row in rows for label in row["labels"])
    batches = [trainer.data_collator(list(trainer.train_dataset))]
    share = tokens / int(trainer._get_num_items_in_batch(batches, trainer.args.device))
    want = truth.gradients(0.3 * share * (1.5 * values[kind] + 0.25 * values["ce"]))
    assert logged(trainer, "mtp_loss") == [pytest.approx(values["ce"].item(), rel=1e-4)]
    assert_same_gradients(head_of(captured), want, 1e-4)


def test_tau_on_a_schedule(teacher, ours):
    schedule = {"alm_tau": {"from": 1.0, "to": 50.0, "kind": "linear", "steps": 2}}
    how = {"max_steps": 3, "learning_rate": 0.0, "per_device_train_batch_size": 6}
    trainer = trained(make(teacher, ours, schedules=schedule, **how))
    assert logged(trainer, "schedule/alm_tau") == [1.0, 25.5, 50.0] and logged(trainer)[0] != logged(trainer)[2]


# Which tokens belong together


def runs_of(labels: list[int]) -> list[tuple[int, int]]:
    """(first, behind the last) of each stretch of supervised tokens."""
    groups = itertools.groupby(range(len(labels)), lambda i: labels[i] != -100)
    stretches = [list(places) for supervised, places in groups if supervised]
    return [(places[0], places[-1] + 1) for places in stretches]


@pytest.mark.parametrize("family", ROWS)
def test_spans_of_prepared_rows(teacher, ours, family):
    """That they are the shortest: test_span_alignment.py."""
    trainer = make(teacher, ours, "alm", ROWS[family](8), assistant_only_loss=family == "chats")
    other = trainer.teaching.tokenizer
    for row in trainer.train_dataset:
        theirs, spans = spans_kept(trainer, row)
        assert kept(trainer, row).tokens == sum(label != -100 for label in row["labels"][1:])
        read_by_each = ((ours, row["input_ids"]), (other, theirs))
        texts = [
            [t.decode(ids[a:b]).strip() for (t, ids), (a, b) in zip(read_by_each, span, strict=True)] for span in spans
        ]
        end = ["<|end|>", "[END]"]
        assert texts.count(end) == (2 if family == "chats" else 1)
        assert all(x == y or [x, y] == end for x, y in texts)
        # the whole answer is covered, but for the white space that one of the two writes by itself
        answers = [ours.decode(row["input_ids"][a:b], skip_special_tokens=True) for a, b in runs_of(row["labels"])]
        covered, answers = ("".join("".join(x).split()) for x in ([x for x, y in texts if y != "[END]"], answers))
        # of a plain text, its first token is never predicted, and so its first span is left out
        assert answers.endswith(covered) and (len(covered) == len(answers)) == (family != "texts")
        assert any(b - a != d - c for (a, b), (c, d) in spans)


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


def test_where_texts_part_nothing_more_is_compared_and_ends_meet_whatever_token_ends_a_text(ours):
    english, code = byte_level(ENGLISH), byte_level(CODE)
    rows = [t(x, add_special_tokens=False)["input_ids"] for t, x in ((english, "xy zab cd"), (code, "xy zax cd"))]
    found = aligned(*(runs(ids, ids, t) for ids, t in zip(rows, (english, code), strict=True)))
    before = [english.decode(rows[0][: at + 1]) for at in found]
    assert before and all("xy za".startswith(x) for x in before)
    own, other = ([*t("w1", add_special_tokens=False)["input_ids"], t.eos_token_id] for t in (ours, unigram()))
    found = aligned(runs(own, own, ours), runs(other, other, unigram()))
    assert found[len(own) - 2] == len(other) - 2  # the positions that predict the ends
    assert partners(own, found) == [found.get(i, -1) for i in range(len(own) - 1)]


def test_answers_are_compared_with_their_own_counterparts(ours):
    theirs, (chat,) = unigram(), chats(1)["messages"]
    made = []
    for t in (ours, theirs):
        x = t.apply_chat_template(chat, return_assistant_tokens_mask=True, return_dict=True)
        labels = [i if m else -100 for i, m in zip(x["input_ids"], x["assistant_masks"], strict=True)]
        made.append(runs(x["input_ids"], labels, t))
    assert [len(each) for each in made] == [2, 2]
    answers = [m["content"] for m in chat if m["role"] == "assistant"]
    assert [[run.text.strip() for run in each] for each in made] == [answers] * 2
    assert len(aligned(*made)) >= 4 and aligned(made[0], made[1][:1]) == {}


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


def test_rows_that_the_teacher_makes_nothing_of(teacher, ours, monkeypatch):
    """They have only cross-entropy; the others keep their own partners, in whatever order they come back."""
    rows, read = completions(8), CrossTokenizerTeacher._read_by_teacher
    common = {"losses": MIXED["uld"], "learning_rate": 0.0}
    want = make(teacher, ours, "uld", rows.select([0, 2, 3, 4, 5, 6]), **common, per_device_train_batch_size=6)

    def some(self, raw, formatting_func):
        return read(self, raw, formatting_func).select([6, 5, 4, 3, 2, 0])

    monkeypatch.setattr(CrossTokenizerTeacher, "_read_by_teacher", some)
    got = make(teacher, ours, "uld", rows, **common, per_device_train_batch_size=8)
    sums = [
        logged(trained(trainer), "loss/uld")[0] * trainer.row_facts["train"].supervised_tokens
        for trainer in (got, want)
    ]
    assert sums[0] == pytest.approx(sums[1], rel=1e-5)
    row = got.train_dataset[1]
    for columns in ({name: row[name] for name in ("input_ids", "labels")}, {"input_ids": [1, 2], "labels": [-100] * 2}):
        batch = got.data_collator([columns])
        assert batch["uld_input_ids"].shape == (1, 1) and bool((batch["uld_partners"] == -1).all())
        assert math.isfinite(got.compute_loss(got.model, batch).item()) or columns["labels"][0] == -100


# Completions that the student samples, which alm can compare


def rows_in(batch) -> list[tuple[dict, tuple[list[int], list]]]:
    """(row, (what the teacher reads, spans)) of each row of a batch, from nothing but its tensors."""
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
        rows.append((row, (batch["alm_input_ids"][i, :their_size].tolist(), spans)))
    return rows


@pytest.mark.parametrize("family", ["completions", "chats", "prompts", "chat prompts"])
def test_sampled_completions(teacher, ours, family):
    data = {
        "completions": completions(6), "chats": chats(6), "prompts": completions(6).remove_columns("completion"),
        "chat prompts": chats(6).map(lambda row: {"prompt": row["messages"][:1]}, remove_columns="messages"),
    }  # fmt: skip
    only_prompts = "prompt" in family  # with lmbda below 1 a row must have a completion, and with 1 there is no ce
    trainer = make(
        teacher, ours, "alm", data[family], losses=MIXED["alm"][:1] if only_prompts else MIXED["alm"],
        lmbda=1.0 if only_prompts else 0.999, max_completion_length=12, per_device_train_batch_size=6,
        assistant_only_loss=family == "chats", optim="sgd", learning_rate=0.0, max_steps=2, seed=3,
        generation_kwargs={"eos_token_id": [ours.eos_token_id, *range(40, 60)]},
    )  # fmt: skip
    batches, plain, other = batches_of(trainer), double_copy(trainer.student), trainer.teaching.tokenizer
    captured = capture_gradients(trainer)
    trainer.train()
    rows = rows_in(batches[-1])
    alm = by_hand("alm", trainer, plain, [row for row, _ in rows], [spans for _, spans in rows])["alm"]
    assert logged(trainer, "on_policy_share")[-1] == 1
    assert logged(trainer, "loss/alm")[-1] == pytest.approx(alm.item(), rel=1e-4)
    assert logged(trainer)[-1] == pytest.approx(1.5 * alm.item(), rel=1e-4)  # ce is of given completions
    (1.5 * alm).backward()
    assert_same_gradients(captured, {name: p.grad for name, p in plain.named_parameters()}, 1e-4)
    dataset = {tuple(prompt) for prompt in prompts_of(trainer.data_collator([dict(x) for x in trainer.train_dataset]))}
    for row, (read, spans) in rows:
        start = next(i for i, x in enumerate(row["labels"]) if x != -100)
        assert tuple(row["input_ids"][:start]) in dataset and spans
        prompt = ours.decode(row["input_ids"][:start])
        text = ours.decode(row["input_ids"][start:], skip_special_tokens=True)
        before = other(prompt)["input_ids"]
        if "chat" in family:
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
    trainer = make(teacher, ours, "alm", completions(2), lmbda=1.0, max_completion_length=4)
    prompt = trainer.train_dataset["generation_prompt"][0]
    token = ours.eos_token_id if last == "eos" else next(i for i in ours.all_special_ids if i != ours.eos_token_id)
    written = [*ours(" w1", add_special_tokens=False)["input_ids"], token]
    row = trainer.teaching.sampled_row([*prompt, *written], [-100] * len(prompt) + written)
    end = trainer.teaching.tokenizer.eos_token_id
    assert (row.input_ids[-1] == end) == ended and len(row.spans) // 4 == 1 + ended


def test_half_of_the_micro_batches_and_prompts_alone_in_an_evaluation(teacher, ours):
    prompts = completions(4, seed=3).remove_columns("completion")
    trainer = trained(make(
        teacher, ours, "alm", completions(8), prompts, lmbda=0.5, max_completion_length=6, max_steps=6,
        per_device_train_batch_size=2, learning_rate=0.0, logging_steps=6,
    ))  # fmt: skip
    logs = trainer.state.log_history[0]
    assert 0 < logs["on_policy_share"] < 1 and {"on_policy/loss/alm", "off_policy/loss/alm"} <= logs.keys()
    for data in (None, completions(3, seed=2)):
        assert math.isfinite(trainer.evaluate(data)["eval_loss/alm"])


# What is refused


def test_rows_that_were_not_prepared(teacher, ours):
    with pytest.raises(DataError, match="is none that the trainer prepared"):
        make(teacher, ours, "uld").data_collator([{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}])
    message = "A prompt of 3 tokens, beginning with .* is of no row that the trainer prepared"
    with pytest.raises(DataError, match=message):
        make(teacher, ours, lmbda=1.0).teaching.sampled_row([1, 2, 3, 4], [-100, -100, -100, 4])


KL = {"type": "forward_kl"}


@pytest.mark.parametrize(
    "kind, options, message",
    [
        ("uld", {"more": [KL, {"type": "tvd"}]}, "forward_kl, tvd and uld do not go together"),
        ("alm", {"more": [KL]}, "forward_kl and alm do not go together"),
        ("alm", {"more": [{"type": "uld"}]}, "uld and alm do not go together"),
        ("uld", {"teacher": "self"}, "uld needs the model of a teacher with its own tokenizer"),
        ("alm", {"teacher": "self"}, "alm needs the model of a teacher with its own tokenizer"),
        ("uld", {"teacher": "cache", "teacher_cache_dir": "x"}, "uld needs the model|only the forward KL"),
        ("uld", {"taid": {}}, "taid.* changes what the divergences"),
        ("alm", {"taid": {}}, "taid.* changes what the divergences"),
        ("uld", {"losses": [{"type": "uld", "beta": 0.5}]}, "beta"),
        ("alm", {"losses": [{"type": "alm", "beta": 0.5}]}, "beta"),
        ("alm", {"losses": [{"type": "alm", "tau": 0}]}, "losses: alm: tau: expected a number above 0, got 0"),
        ("alm", {"more": [CE], "label_smoothing_factor": 0.1},
         "label_smoothing_factor: is not part of the loss with alm"),
        ("alm", {"kd_temperature": 2.0}, "kd_temperature: has no effect"),
        ("alm", {"seq_kd": True}, "seq_kd: the teacher's completions would be tokens"),
        ("alm", {"schedules": {"alm_tau": {"to": 0.0}}}, "alm_tau"),
    ],
)  # fmt: skip
def test_what_does_not_go_with_it(kind, options, message):
    losses = [{"type": kind}, *options.pop("more", [])] if "more" in options else [{"type": kind}]
    with pytest.raises(ValueError, match=message):
        train_args(LigerDistillConfig, **{"losses": losses, **options})


UNREADABLE = [
    ({"packing": True, "packing_strategy": "wrapped", "max_length": 32}, "finds .* packing_strategy to 'bfd'"),
    ({"truncation_mode": "keep_end"}, "truncation_mode to 'keep_start'"),
    ({"data": completions(8).to_iterable_dataset()}, "the train dataset is streamed"),
    ({"data": Dataset.from_dict({"input_ids": [[1, 2]], "labels": [[1, 2]]})}, "is tokenized already"),
]
SAMPLED = [
    ({"data": completions(8).remove_columns("completion").to_iterable_dataset(), "lmbda": 1.0},
     "the train dataset is streamed"),
    ({"lmbda": 0.5, "packing": True}, "need rows one by one"),
]  # fmt: skip


@pytest.mark.parametrize(
    "kind, options, message",
    [
        *((kind, *case) for kind in MIXED for case in UNREADABLE),
        *(("alm", *case) for case in SAMPLED),
        ("uld", {"lmbda": 0.5}, "knows only the completions of the dataset"),
    ],
)
def test_rows_that_it_cannot_take(teacher, ours, kind, options, message):
    with pytest.raises((ConfigError, ValueError), match=message):
        make(teacher, ours, kind, **options)


def other_answers():
    """Each answer begins with a sign, as the teacher writes it."""
    other = unigram()
    other.chat_template = TEMPLATE.replace("m['content'] + '[END]'", "'? ' + m['content'] + '[END]'")
    return bpe(CODE), other


def whole_conversations():
    """The student's template has one run of supervised tokens, the whole conversation; the teacher's has answers."""
    tokenizer = bpe(CODE)
    bare = re.sub("{% (end)?generation %}", "", tokenizer.chat_template)
    tokenizer.chat_template = f"{{% generation %}}{bare}{{% endgeneration %}}"
    return tokenizer, unigram()


NOTHING = {
    "alm": (other_answers, "No text of the train dataset is whole tokens to both"),
    "uld": (whole_conversations, "No supervised token of the train dataset begins where one of the teacher's"),
}


@BOTH
def test_rows_with_nothing_in_common_and_chats_without_a_template(tmp_path, kind):
    tokenizers, message = NOTHING[kind]
    own, other = tokenizers()
    with pytest.raises(DataError, match=message):
        make(saved(tmp_path, other, **TEACHER), own, kind, chats(4), assistant_only_loss=True)
    other.chat_template = None
    with pytest.raises(ConfigError, match="the teacher's tokenizer has no chat template"):
        make(saved(tmp_path / "bare", other, **TEACHER), own, kind, chats(4))


@pytest.mark.parametrize("kind, message", [("uld", "a callback sees only tokens. Use LigerDistillTrainer"),
                                           ("alm", "alm needs the text of the rows")])  # fmt: skip
def test_the_callback_refuses_it(kind, message):
    with pytest.raises(ConfigError, match=message):
        DistillationCallback(tiny_model(), losses=[{"type": kind}])


# From the command line

SHORT = {"teacher_model_name_or_path": "teacher", "max_steps": 2, "max_length": 128, "holdout_fraction": 0.25}
RUNS = {
    "uld": {"losses": [{"type": "uld"}, {"type": "ce", "weight": 0.1}], "num_sample_completions": 2,
            "max_new_tokens": 4},
    "alm": {"losses": [{"type": "alm", "tau": 20}, {"type": "ce", "weight": 0.1}], "lmbda": 0.5,
            "max_completion_length": 5, "assistant_only_loss": True},
}  # fmt: skip


@BOTH
def test_a_run(teacher, ours, tmp_path, monkeypatch, capsys, kind):
    monkeypatch.chdir(tmp_path)
    without_report(monkeypatch)
    saved(tmp_path / "student", ours, **STUDENT)
    (tmp_path / "teacher").symlink_to(teacher)
    chats(8).to_json(tmp_path / "rows.jsonl")
    (tmp_path / "run.yaml").write_text(settings(**SHORT, **RUNS[kind]))
    asked = {}

    def spy(models, tokenizer, prompts, *rest):
        asked.update({prompt.text: tokenizer.decode(prompt.input_ids) for prompt in prompts})
        return samples.complete_by_each(models, tokenizer, prompts, *rest)

    monkeypatch.setattr("liger_trainer.recipes.distill.complete_by_each", spy)
    code, out, err = call(capsys, "run", "run.yaml")
    assert code == 0, err
    written = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert written["after"][f"loss/{kind}"] > 0 and "forward_kl" not in written["after"]
    if kind == "alm":
        card = (tmp_path / "out" / "README.md").read_text()
        assert "1 x alm + 0.1 x ce, alm_tau 20" in card
        assert "| ALM (nats/token) |" in card and "rows that it was not trained on: ALM from" in out
        return
    assert len(asked) == 2 and all(text in read for text, read in asked.items())
    assert all(read.endswith("[A]") for read in asked.values())  # each is asked by its own chat template
    for command, code, message in (
        (["eval", "out"], 0, "student perplexity"),
        (["cache", "run.yaml", "teacher_cache_dir=cache"], 2, "losses: uld needs the model of a teacher"),
    ):
        ended, out, err = call(capsys, *command)
        assert ended == code and message in out + err
