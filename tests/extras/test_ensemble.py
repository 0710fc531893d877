"""Several teachers: by weight and by route, losses, gradients and logs are those of the parts, by hand."""

import random

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tiny import VOCAB, WORDS, completions, divergence_by_hand, double_copy, tiny_model, tiny_tokenizer
from trainings import a_teacher, distill, step, supervised_logits, trained

from liger_trainer.errors import ConfigError, DataError

pytestmark = pytest.mark.filterwarnings("error::liger_trainer.MaterializedLogitsWarning")
LOSSES = [{"type": "forward_kl"}, {"type": "jsd", "weight": 0.5}, {"type": "ce", "weight": 0.3}]
BETA, TEMPERATURE = 0.3, 2.0
WEIGHTS = {"math": 0.7, "code": 0.2, "prose": 1.5}


def teachers():
    return {
        "math": a_teacher(),
        "code": tiny_model("llama", seed=6),
        "prose": tiny_model("phi", seed=7, vocab_size=VOCAB + 8),
    }


def entries(weights=None, **more):
    return [{"name": name, "weight": w, **more.get(name, {})} for name, w in (weights or WEIGHTS).items()]


def rows(n=8, seed=0, names=("math", "code", "prose")):
    rng = random.Random(seed)
    return completions(n, seed).add_column("domain", [rng.choice(names) for _ in range(n)])


ROUTED = {"teachers": entries(), "teacher_column": "domain"}


def make(models, data, eval_data=None, student=None, **options):
    options = {"losses": LOSSES, "beta": BETA, "temperature": TEMPERATURE, "max_steps": 1, "optim": "sgd",
               "per_device_train_batch_size": 8, "per_device_eval_batch_size": 3, "learning_rate": 0.0,
               "shuffle_dataset": False, **options}  # fmt: skip
    return distill(student, models, data, eval_data, **options)


def by_hand(rows, weights, temperature=TEMPERATURE, ce=0.3):
    """Return loss and gradients, in fp64, of tokenized rows with a {teacher: weight} for each, the teachers' KLs at
    temperature 1, and their shares of the tokens."""
    student, models = double_copy(tiny_model()), {name: double_copy(model) for name, model in teachers().items()}
    total, tokens, sums, counts = 0.0, 0, dict.fromkeys(models, 0.0), dict.fromkeys(models, 0)
    for row, of_row in zip(rows, weights, strict=True):
        s, *answers, targets = supervised_logits((student, *(models[name] for name in of_row)), row)
        total = total - ce * s.log_softmax(-1).gather(-1, targets[:, None]).sum()
        tokens += len(targets)
        for (name, weight), t in zip(of_row.items(), answers, strict=True):
            t = t[:, :VOCAB].detach()
            divergence = divergence_by_hand(s, t, "forward_kl", temperature)
            divergence = divergence + 0.5 * divergence_by_hand(s, t, "jsd", temperature, BETA)
            total = total + weight * temperature**2 * divergence.sum()
            sums[name] += float(divergence_by_hand(s, t, "forward_kl", 1.0).sum())
            counts[name] += len(targets)
    (total / tokens).backward()
    gradients = {name: parameter.grad for name, parameter in student.named_parameters()}
    kls = {name: sums[name] / counts[name] for name in models if counts[name]}
    return float(total.detach()) / tokens, gradients, kls, {name: n / tokens for name, n in counts.items()}


def assert_same(got, want, rtol=1e-4):
    for name, gradient in want.items():
        torch.testing.assert_close(got[name].double(), gradient.double(), rtol=rtol, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    "options", [None, {"packing": True, "max_length": 40}, {"padding_free": True, "max_length": None}],
    ids=["weighted", "routed, packing", "routed, padding-free"],
)  # fmt: skip
def test_loss_gradients_and_logs_are_those_by_hand(options):
    data, routed = rows(8), options is not None
    logs, gradients = step(make(teachers(), data, **({**ROUTED, **options} if routed else {"teachers": entries()})))
    weights = [{domain: WEIGHTS[domain]} if routed else WEIGHTS for domain in data["domain"]]
    loss, want, kls, shares = by_hand(make(tiny_model(seed=5), data).train_dataset, weights)
    assert len(kls) == 3
    assert logs["loss"] == pytest.approx(loss, rel=1e-5)
    assert_same(gradients, want)
    for name, kl in kls.items():
        assert logs[f"{name}/forward_kl"] == pytest.approx(kl, rel=1e-5)
        assert logs.get(f"{name}/share") == (pytest.approx(shares[name], rel=1e-6) if routed else None)
    parts = shares if routed else {name: weight / sum(WEIGHTS.values()) for name, weight in WEIGHTS.items()}
    assert logs["forward_kl"] == pytest.approx(sum(kls[name] * parts[name] for name in kls), rel=1e-5)


def test_one_teacher_among_several_is_that_teacher():
    """The weights of several equal teachers add up; a single one is as without a list. All logs agree."""
    model, data = teachers()["math"], completions(6)
    want, want_gradients = step(make(model, data))
    for weights in ({"a": 1.0}, {"a": 0.75, "b": 0.25}):
        logs, gradients = step(make({name: model for name in weights}, data, teachers=entries(weights)))
        for name in want:
            assert logs[name] == pytest.approx(want[name], rel=2e-5), name
        assert_same(gradients, want_gradients, rtol=1e-3)


def test_micro_batches_and_evaluation():
    data, parts = rows(8), {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    whole, want = step(make(teachers(), data, data, **ROUTED))
    trainer = make(teachers(), data, data, **ROUTED, **parts, per_device_eval_batch_size=8)
    evaluated = trainer.evaluate()
    of_parts = evaluated["eval_kd_loss"] + 0.3 * evaluated["eval_ce_loss"]
    assert evaluated["eval_loss"] == pytest.approx(of_parts, rel=1e-5)
    logs, gradients = step(trainer)
    assert_same(gradients, want)
    names = [name for name in whole if "/" in name or name in ("kd_loss", "ce_loss", "forward_kl", "teacher_entropy")]
    assert len(names) >= 10
    for name in names:
        assert logs[name] == pytest.approx(whole[name], rel=1e-5), name
        assert evaluated[f"eval_{name}"] == pytest.approx(whole[name], rel=1e-5), name


def test_a_teacher_with_nothing_to_teach_does_not_run():
    data = rows(6, names=["code", "prose"])
    trainer = make(teachers(), data, **ROUTED, max_steps=3, per_device_train_batch_size=1)
    ran = []
    for name, model in trainer.teaching.models.items():
        model.register_forward_pre_hook(lambda *_, name=name: ran.append(name))
    log = trained(trainer).state.log_history[0]
    assert ran == data["domain"][:3]
    assert "math/forward_kl" not in log and log["math/share"] == 0.0


def test_routes_of_their_own_numbers_too():
    options = {"math": {"routes": ["algebra", 7]}, "code": {"routes": ["python", "8"]}}
    two = {name: model for name, model in teachers().items() if name in options}
    how = {"teachers": entries(dict.fromkeys(options, 1.0), **options), "teacher_column": "domain"}
    for column, routes in ((["7", "python", "algebra"], [[0], [1], [0]]), ([7, 8, 8], [[0], [1], [1]])):
        trainer = make(two, completions(3).add_column("domain", column), **how)
        batch = trainer.data_collator([trainer.train_dataset[i] for i in range(3)])
        assert batch["teacher_routes"].tolist() == routes and batch["teachers_present"] == (0, 1)


@pytest.mark.parametrize("options", [
    {"max_length": 8}, {"max_length": 8, "truncation_mode": "keep_end"}, {"max_length": 10, "packing": True},
], ids=["start", "end", "packing"])  # fmt: skip
def test_routes_survive_truncation(options):
    data = rows(8, seed=3)
    trainer = make(teachers(), data, **ROUTED, **options)
    assert trainer.row_facts["train"].rows_truncated
    trainer.train()


def test_the_student_without_adapters_among_them():
    def lora():
        torch.manual_seed(0)
        return get_peft_model(tiny_model(), LoraConfig(target_modules="all-linear", r=2, init_lora_weights=False))

    other, data = teachers()["math"], rows(6, names=["math", "base"])
    given = [{"name": "math", "teacher_model_name_or_path": "x"}, {"name": "base", "teacher": "self"}]
    logs, gradients = step(make({"math": other}, data, student=lora(), teachers=given, teacher_column="domain"))
    both = {"math": other, "base": tiny_model()}
    want_logs, want = step(make(both, data, student=lora(), teacher_column="domain"))
    assert logs["loss"] == pytest.approx(want_logs["loss"], rel=1e-5)
    assert_same(gradients, want)


def test_by_their_directories(tmp_path):
    for name, model in teachers().items():
        model.save_pretrained(tmp_path / name)
    dtypes = {"math": "bfloat16", "code": "float32", "prose": None}
    given = [
        {"name": name, "teacher_model_name_or_path": str(tmp_path / name), "weight": WEIGHTS[name], "teacher_dtype": d}
        for name, d in dtypes.items()
    ]
    trainer = make(None, completions(4), teachers=given, teacher_dtype="float16")
    loaded = {name: str(model.dtype).removeprefix("torch.") for name, model in trainer.teaching.models.items()}
    assert loaded == {"math": "bfloat16", "code": "float32", "prose": "float32"}
    assert trainer.teacher is None
    with trainer.teaching.live() as live:
        assert list(live) == ["math", "code", "prose"]


ON_POLICY = {"lmbda": 1.0, "max_completion_length": 7, "temperature": 1.0, **ROUTED,
             "losses": [term for term in LOSSES if term["type"] != "ce"]}  # fmt: skip


@pytest.mark.parametrize("prompts_only", [False, True], ids=["completions", "prompts"])
def test_routed_on_policy(prompts_only):
    """A row keeps its teacher when the student completes it, in training and in evaluation."""
    data, test = rows(16), rows(6, seed=9)
    if prompts_only:
        data, test = data.remove_columns("completion"), test.remove_columns("completion")
    trainer = make(teachers(), data, test, per_device_train_batch_size=4, gradient_accumulation_steps=4, **ON_POLICY)
    tokenizer, seen, answer = tiny_tokenizer(), [], trainer.teaching.answer
    domain_of = {tuple(tokenizer(row["prompt"])["input_ids"]): row["domain"] for row in [*data, *test]}

    def recorded(inputs):
        for ids, labels in zip(inputs["input_ids"].tolist(), inputs["labels"].tolist(), strict=True):
            prompt = ids[: next(i for i, label in enumerate(labels) if label != -100)]
            seen.append(({"input_ids": ids, "labels": labels}, domain_of[tuple(prompt)]))
        return answer(inputs)

    trainer.teaching.answer = recorded
    logs, gradients = step(trainer)
    sampled, domains = zip(*seen, strict=True)
    loss, want, _, shares = by_hand(sampled, [{name: WEIGHTS[name]} for name in domains], temperature=1.0, ce=0.0)
    assert set(domains) == set(WEIGHTS) and len(sampled) == 16
    assert logs["loss"] == pytest.approx(loss, rel=1e-4)
    assert_same(gradients, want)
    assert {name: logs[f"{name}/share"] for name in WEIGHTS} == pytest.approx(shares)
    seen.clear()
    metrics = trainer.evaluate()
    assert {domain for _, domain in seen} == set(test["domain"]) and len(seen) == 6
    for name in set(test["domain"]):
        assert 0 < metrics[f"eval_{name}/share"] < 1 and metrics[f"eval_{name}/forward_kl"] > 0


def test_routed_on_policy_half_of_the_time():
    """Micro-batches of the dataset's completions and of sampled ones take turns, each row with its teacher."""
    options = {**ON_POLICY, "lmbda": 0.5, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 8}
    logs, _ = step(make(teachers(), rows(32), **options))
    assert 0 < logs["on_policy_share"] < 1
    assert {"on_policy/math/forward_kl", "off_policy/code/forward_kl"} <= logs.keys()


def with_domains(*domains, seed=0):
    return completions(len(domains), seed).add_column("domain", list(domains))


LONG = [{"text": " ".join(WORDS[:30]), "domain": "math"}, {"text": "w1 w2 w3", "domain": "code"}]
TWICE = [{"prompt": "w1 w2", "completion": " w3", "domain": name} for name in ("math", "code")]
LAW = "Row {} of the train dataset has 'law' .* Known: math, code, prose"
NO_COLUMN, PREPARED = "train dataset has no column 'domain'", "teacher_column needs rows that the trainer prepares"
REFUSED = {
    "another domain": (lambda: with_domains("math", "code", "law", "math"), {}, DataError, LAW.format(2)),
    "no column": (lambda: completions(4), {}, DataError, f"{NO_COLUMN}.*prompt"),
    "a row twice": (
        lambda: Dataset.from_list(TWICE), {}, DataError,
        "Row 1 of the train dataset.* stands in the data twice.*code, the other by math",
    ),
    "another domain of prompts": (
        lambda: with_domains("math", "law", *["code"] * 6).remove_columns("completion"), ON_POLICY, DataError,
        LAW.format(1),
    ),
    "prompts without": (lambda: rows(8).select_columns("prompt"), ON_POLICY, DataError, NO_COLUMN),
    "streamed prompts": (
        lambda: rows(8).remove_columns("completion").to_iterable_dataset(), ON_POLICY, ConfigError, PREPARED,
    ),
    "a stream": (lambda: rows().to_iterable_dataset(), {}, ConfigError, PREPARED),
    "prepared": (
        lambda: make(teachers(), rows(), teachers=entries()).train_dataset,
        {"dataset_kwargs": {"skip_prepare_dataset": True}}, ConfigError, PREPARED,
    ),
    **{f"cut by {how}": (
        lambda: Dataset.from_list(LONG), {"packing": True, "max_length": 16, "packing_strategy": how}, ConfigError,
        f"does not go with packing_strategy: {how}",
    ) for how in ("wrapped", "bfd_split")},
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_rows_that_are_refused(case):
    data, options, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        make(teachers(), data(), **{**ROUTED, **options})
    if case in ("a stream", "prepared"):
        make(teachers(), data(), teachers=entries(), **options)


def test_rows_that_come_later_are_refused():
    with pytest.raises(DataError, match="Row 1 of the eval dataset has None in the column 'domain'"):
        make(teachers(), rows(4), with_domains("math", None, seed=9), **ROUTED)
    for data, options, labels in (
        (rows(4), {}, [1, 2, 3]),
        (rows(8).remove_columns("completion"), ON_POLICY, [-100] * 3),
    ):
        trainer = make(teachers(), data, **{**ROUTED, **options})
        with pytest.raises(DataError, match="is of no dataset that the trainer prepared"):
            trainer.data_collator([{"input_ids": [1, 2, 3], "labels": labels}])


MISMATCHED = {
    "too few": (lambda: {"math": tiny_model()}, {"teachers": entries()},
                "teachers: code needs teacher_model_name_or_path, or a model of that name"),
    "too many": (lambda: {**teachers(), "law": tiny_model()}, {"teachers": entries()},
                 "has a teacher 'law', and args.teachers has models for math, code, prose"),
    "no names": (tiny_model, {"teachers": entries()}, "pass teacher_model as a dictionary"),
    "uld": (teachers, {"losses": [{"type": "uld"}]}, "uld has one teacher"),
    "hidden states": (teachers, {"losses": [{"type": "forward_kl"}, {"type": "hidden_mse"}]},
                      "Hidden-state losses need one teacher"),
    "a column for one": (tiny_model, {"teacher_column": "domain"}, "teacher_column chooses among several teachers"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISMATCHED)
def test_models_and_names_that_do_not_match(case):
    models, options, message = MISMATCHED[case]
    with pytest.raises(ConfigError, match=message):
        make(models(), completions(4), **options)
