"""Several teachers: by weight and by route, losses, gradients and logs are those of the parts, by hand."""

import random

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from splits import capture_gradients
from tiny import (
    VOCAB,
    WORDS,
    completions,
    divergence_by_hand,
    double_copy,
    shift_labels_of,
    tiny_model,
    tiny_tokenizer,
    train_args,
)

from liger_trainer import LigerDistillConfig, LigerDistillTrainer
from liger_trainer.config.run_config import check_text
from liger_trainer.errors import ConfigError, DataError
from liger_trainer.trainers.metrics import TokenMetrics

pytestmark = pytest.mark.filterwarnings("error::liger_trainer.MaterializedLogitsWarning")
LOSSES = [{"type": "forward_kl"}, {"type": "jsd", "weight": 0.5}, {"type": "ce", "weight": 0.3}]
BETA, TEMPERATURE = 0.3, 2.0
WEIGHTS = {"math": 0.7, "code": 0.2, "prose": 1.5}


def teachers():
    return {
        "math": tiny_model("gemma2", seed=5, hidden_size=48),
        "code": tiny_model("llama", seed=6),
        "prose": tiny_model("phi", seed=7, vocab_size=VOCAB + 8),
    }


def entries(weights=None, **more):
    return [{"name": name, "weight": w, **more.get(name, {})} for name, w in (weights or WEIGHTS).items()]


def rows(n=8, seed=0, names=("math", "code", "prose")):
    rng = random.Random(seed)
    return completions(n, seed).add_column("domain", [rng.choice(names) for _ in range(n)])


def make(models, data, eval_data=None, student=None, **options):
    options = {"losses": LOSSES, "beta": BETA, "temperature": TEMPERATURE, "max_steps": 1, "optim": "sgd",
               "per_device_train_batch_size": 8, "per_device_eval_batch_size": 3, "learning_rate": 0.0,
               "shuffle_dataset": False, **options}  # fmt: skip
    return LigerDistillTrainer(
        student or tiny_model(), teacher_model=models, args=train_args(LigerDistillConfig, **options),
        train_dataset=data, eval_dataset=eval_data, processing_class=tiny_tokenizer(),
    )  # fmt: skip


def step(trainer):
    gradients = capture_gradients(trainer)
    trainer.train()
    return trainer.state.log_history[0], gradients


def by_hand(models, data, of_row):
    """Return loss and gradients in fp64, where `of_row` gives {name: weight} of a row, and what logs should say."""
    student = double_copy(tiny_model())
    models = {name: double_copy(model) for name, model in models.items()}
    prepared = make(tiny_model(seed=5), data).train_dataset
    total, tokens, sums, counts = 0.0, 0, dict.fromkeys(models, 0.0), dict.fromkeys(models, 0)
    for row, ids_and_labels in zip(data, prepared, strict=True):
        ids, labels = (torch.tensor([ids_and_labels[name]]) for name in ("input_ids", "labels"))
        targets = shift_labels_of(labels)[0]
        keep = targets != -100
        s = student(input_ids=ids).logits[0, keep]
        total = total - 0.3 * s.log_softmax(-1).gather(-1, targets[keep, None]).sum()
        tokens += int(keep.sum())
        for name, weight in of_row(row).items():
            t = models[name](input_ids=ids).logits[0, keep, :VOCAB].detach()
            divergence = divergence_by_hand(s, t, "forward_kl", TEMPERATURE)
            divergence = divergence + 0.5 * divergence_by_hand(s, t, "jsd", TEMPERATURE, BETA)
            total = total + weight * TEMPERATURE**2 * divergence.sum()
            sums[name] += float(divergence_by_hand(s, t, "forward_kl", 1.0).sum())
            counts[name] += int(keep.sum())
    (total / tokens).backward()
    gradients = {name: parameter.grad for name, parameter in student.named_parameters()}
    kls = {name: sums[name] / counts[name] for name in models if counts[name]}
    return float(total.detach()) / tokens, gradients, kls, {name: n / tokens for name, n in counts.items()}


def assert_same(got, want, rtol=1e-4):
    for name, gradient in want.items():
        torch.testing.assert_close(got[name].double(), gradient, rtol=rtol, atol=1e-5, msg=name)


def test_weighted():
    data = completions(8)
    logs, gradients = step(make(teachers(), data, teachers=entries()))
    loss, want, kls, _ = by_hand(teachers(), data, lambda row: WEIGHTS)
    assert logs["loss"] == pytest.approx(loss, rel=1e-5)
    assert_same(gradients, want)
    for name, kl in kls.items():
        assert logs[f"{name}/forward_kl"] == pytest.approx(kl, rel=1e-5)
    mean = sum(WEIGHTS[name] * kl for name, kl in kls.items()) / sum(WEIGHTS.values())
    assert logs["forward_kl"] == pytest.approx(mean, rel=1e-5)
    assert not any(name.endswith("/share") for name in logs)


@pytest.mark.parametrize(
    "options", [{"packing": True, "max_length": 40}, {"padding_free": True, "max_length": None}],
    ids=["packing", "padding-free"],
)  # fmt: skip
def test_routed(options):
    data = rows(8)
    logs, gradients = step(make(teachers(), data, teachers=entries(), teacher_column="domain", **options))
    loss, want, kls, shares = by_hand(teachers(), data, lambda row: {row["domain"]: WEIGHTS[row["domain"]]})
    assert len(kls) == 3
    assert logs["loss"] == pytest.approx(loss, rel=1e-5)
    assert_same(gradients, want)
    for name, kl in kls.items():
        assert logs[f"{name}/forward_kl"] == pytest.approx(kl, rel=1e-5)
        assert logs[f"{name}/share"] == pytest.approx(shares[name], rel=1e-6)
    assert logs["forward_kl"] == pytest.approx(sum(kls[name] * shares[name] for name in kls), rel=1e-5)


def test_one_teacher_among_several_is_that_teacher():
    """The weights of several equal teachers add up; one alone is as without a list. All logs agree."""
    model, data = teachers()["math"], completions(6)
    want, want_gradients = step(make(model, data))
    for weights in ({"a": 1.0}, {"a": 0.75, "b": 0.25}):
        logs, gradients = step(make({name: model for name in weights}, data, teachers=entries(weights)))
        for name in set(want) - {"epoch", "step"}:
            assert logs[name] == pytest.approx(want[name], rel=2e-5), name
        assert_same(gradients, {name: g.double() for name, g in want_gradients.items()}, rtol=1e-3)


def test_micro_batches_and_evaluation():
    data, options = rows(8), {"teachers": entries(), "teacher_column": "domain"}
    whole, want = step(make(teachers(), data, data, **options))
    trainer = make(teachers(), data, data, **{**options, "per_device_train_batch_size": 2,
                                              "gradient_accumulation_steps": 4,
                                              "per_device_eval_batch_size": 8})  # fmt: skip
    evaluated = trainer.evaluate()
    assert evaluated["eval_loss"] == pytest.approx(
        evaluated["eval_kd_loss"] + 0.3 * evaluated["eval_ce_loss"], rel=1e-5
    )
    logs, gradients = step(trainer)
    assert_same(gradients, {name: g.double() for name, g in want.items()})
    names = [name for name in whole if "/" in name or name in ("kd_loss", "ce_loss", "forward_kl", "teacher_entropy")]
    assert len(names) >= 10
    for name in names:
        assert logs[name] == pytest.approx(whole[name], rel=1e-5), name
        assert evaluated[f"eval_{name}"] == pytest.approx(whole[name], rel=1e-5), name


def test_a_teacher_with_nothing_to_teach_does_not_run():
    data = rows(6, names=["code", "prose"])
    trainer = make(teachers(), data, teachers=entries(), teacher_column="domain", max_steps=3,
                   per_device_train_batch_size=1)  # fmt: skip
    ran = []
    for name, model in trainer.teaching.models.items():
        model.register_forward_pre_hook(lambda *_, name=name: ran.append(name))
    trainer.train()
    assert ran == data["domain"][:3]
    assert "math/forward_kl" not in trainer.state.log_history[0]
    assert trainer.state.log_history[0]["math/share"] == 0.0


def test_routes_of_their_own():
    options = {"math": {"routes": ["algebra", "7"]}, "code": {"routes": ["python"]}}
    data = completions(3).add_column("domain", ["7", "python", "algebra"])
    trainer = make({k: v for k, v in teachers().items() if k != "prose"}, data,
                   teachers=entries({"math": 1.0, "code": 1.0}, **options), teacher_column="domain")  # fmt: skip
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(3)])
    assert batch["teacher_routes"].tolist() == [[0], [1], [0]] and batch["teachers_present"] == (0, 1)


@pytest.mark.parametrize("options", [
    {"max_length": 8}, {"max_length": 8, "truncation_mode": "keep_end"}, {"max_length": 10, "packing": True},
], ids=["start", "end", "packing"])  # fmt: skip
def test_routes_survive_truncation(options):
    data = rows(8, seed=3)
    trainer = make(teachers(), data, teachers=entries(), teacher_column="domain", **options)
    assert trainer.row_facts["train"].rows_truncated
    trainer.train()


def test_numbers_in_the_column():
    data = completions(2).add_column("domain", [1, 2])
    two = {"one": {"routes": [1]}, "two": {"routes": ["2"]}}
    models = dict(zip(("one", "two"), teachers().values(), strict=False))
    make(models, data, teachers=entries(dict.fromkeys(two, 1.0), **two), teacher_column="domain").train()


def test_the_student_without_adapters_among_them():
    def lora():
        torch.manual_seed(0)
        return get_peft_model(tiny_model(), LoraConfig(target_modules="all-linear", r=2, init_lora_weights=False))

    other, data = teachers()["math"], rows(6, names=["math", "base"])
    given = [{"name": "math", "teacher_model_name_or_path": "x"}, {"name": "base", "teacher": "self"}]
    column = {"teachers": given, "teacher_column": "domain"}
    logs, gradients = step(make({"math": other}, data, student=lora(), **column))
    want_logs, want = step(make({"math": other, "base": tiny_model()}, data, student=lora(), teachers=None,
                                teacher_column="domain"))  # fmt: skip
    assert logs["loss"] == pytest.approx(want_logs["loss"], rel=1e-5)
    assert_same(gradients, {name: g.double() for name, g in want.items()})


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


ON_POLICY = {"lmbda": 1.0, "max_completion_length": 7, "temperature": 1.0, "teachers": entries(),
             "teacher_column": "domain", "losses": [term for term in LOSSES if term["type"] != "ce"]}  # fmt: skip


def sampled_by_hand(seen, domain_of):
    """Return loss and gradients, in fp64, of sampled micro-batches, each row taught by the teacher of its prompt."""
    student, models = double_copy(tiny_model()), {name: double_copy(model) for name, model in teachers().items()}
    total, tokens, used = 0.0, 0, set()
    for inputs in seen:
        for ids, labels in zip(inputs["input_ids"], inputs["labels"], strict=True):
            start = int((labels != -100).nonzero()[0])
            name = domain_of[tuple(ids[:start].tolist())]
            targets = shift_labels_of(labels[None])[0]
            keep = targets != -100
            s, t = (model(input_ids=ids[None]).logits[0, keep, :VOCAB] for model in (student, models[name]))
            divergence = divergence_by_hand(s, t.detach(), "forward_kl", 1.0)
            divergence = divergence + 0.5 * divergence_by_hand(s, t.detach(), "jsd", 1.0, BETA)
            total, tokens = total + WEIGHTS[name] * divergence.sum(), tokens + int(keep.sum())
            used.add(name)
    (total / tokens).backward()
    return float(total.detach()) / tokens, {n: p.grad for n, p in student.named_parameters()}, used


@pytest.mark.parametrize("alone", [False, True], ids=["completions", "prompts alone"])
def test_routed_on_policy(alone):
    """A row keeps its teacher when the student completes it anew, in training and in evaluation."""
    data, test = rows(16), rows(6, seed=9)
    if alone:
        data, test = data.remove_columns("completion"), test.remove_columns("completion")
    trainer = make(teachers(), data, test, per_device_train_batch_size=4, gradient_accumulation_steps=4, **ON_POLICY)
    tokenizer, seen, answer = tiny_tokenizer(), [], trainer.teaching.answer
    domain_of = {tuple(tokenizer(row["prompt"])["input_ids"]): row["domain"] for row in [*data, *test]}

    def recorded(inputs):
        seen.append({name: inputs[name].clone() for name in ("input_ids", "labels")})
        return answer(inputs)

    trainer.teaching.answer = recorded
    logs, gradients = step(trainer)
    loss, want, used = sampled_by_hand(seen, domain_of)
    assert used == set(WEIGHTS) and sum(len(inputs["labels"]) for inputs in seen) == 16
    assert logs["loss"] == pytest.approx(loss, rel=1e-4)
    assert_same(gradients, want)
    assert sum(logs[f"{name}/share"] for name in WEIGHTS) == pytest.approx(1.0)
    seen.clear()
    metrics = trainer.evaluate()
    if alone:
        domains = [{domain_of[tuple(ids[: int((labels != -100).nonzero()[0])].tolist())] for ids, labels in zip(
            inputs["input_ids"], inputs["labels"], strict=True)} for inputs in seen]  # fmt: skip
        assert len(domains) == 2 and {name for names in domains for name in names} == set(test["domain"])
    for name in set(test["domain"]):
        share = metrics[f"eval_{name}/share"]
        assert 0 < share < 1 and metrics[f"eval_{name}/forward_kl"] > 0


def test_routed_on_policy_half_of_the_time():
    """Micro-batches of the dataset's completions and of sampled ones take turns, each row with its teacher."""
    options = {**ON_POLICY, "lmbda": 0.5}
    trainer = make(teachers(), rows(32), per_device_train_batch_size=4, gradient_accumulation_steps=8, **options)
    logs, _ = step(trainer)
    assert (
        0 < logs["on_policy_share"] < 1 and {"on_policy/math/forward_kl", "off_policy/code/forward_kl"} <= logs.keys()
    )


def test_routed_prompts_that_are_refused():
    prompts = rows(8).remove_columns("completion")
    with pytest.raises(DataError, match="Row 1 of the train dataset has 'law' .* Known: math, code, prose"):
        wrong = prompts.remove_columns("domain").add_column("domain", ["math", "law", *["code"] * 6])
        make(teachers(), wrong, **ON_POLICY)
    with pytest.raises(DataError, match="train dataset has no column 'domain'"):
        make(teachers(), prompts.remove_columns("domain"), **ON_POLICY)
    with pytest.raises(ConfigError, match="teacher_column needs rows that the trainer prepares"):
        make(teachers(), prompts.to_iterable_dataset(), **ON_POLICY)
    trainer = make(teachers(), prompts, **ON_POLICY)
    with pytest.raises(DataError, match="is of no dataset that the trainer prepared"):
        trainer.data_collator([{"input_ids": [1, 2, 3], "labels": [-100] * 3}])


def test_means_over_kinds():
    metrics = TokenMetrics()
    for kl, share in ((6.0, 3.0), (2.0, 1.0)):
        sums = {"kl": kl, "a/kl": kl, "a/share": share, "b/kl": 0.0, "b/share": 0.0, "c/kl": kl}
        metrics.add({name: torch.tensor(x).double() for name, x in sums.items()}, torch.tensor(8.0).double())
    assert metrics.flush() == {"kl": 0.5, "a/kl": 2.0, "a/share": 0.25, "b/share": 0.0, "c/kl": 0.5}


def test_rows_that_are_refused():
    column = {"teachers": entries(), "teacher_column": "domain"}
    with pytest.raises(DataError, match="Row 2 of the train dataset has 'law' .* Known: math, code, prose"):
        make(teachers(), completions(4).add_column("domain", ["math", "code", "law", "math"]), **column)
    with pytest.raises(DataError, match="Row 1 of the eval dataset has None in the column 'domain'"):
        make(teachers(), rows(4), completions(2, seed=9).add_column("domain", ["math", None]), **column)
    with pytest.raises(DataError, match="train dataset has no column 'domain'.*prompt"):
        make(teachers(), completions(4), **column)
    twice = Dataset.from_list([{"prompt": "w1 w2", "completion": " w3", "domain": name} for name in ("math", "code")])
    with pytest.raises(
        DataError, match="Row 1 of the train dataset.* stands in the data twice.*code, the other by math"
    ):
        make(teachers(), twice, **column)
    trainer = make(teachers(), rows(4), **column)
    with pytest.raises(DataError, match="is of no dataset that the trainer prepared"):
        trainer.data_collator([{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}])


@pytest.mark.parametrize("strategy", ["wrapped", "bfd_split"])
def test_packing_that_cuts_documents_is_refused(strategy):
    long = Dataset.from_list([{"text": " ".join(WORDS[:30]), "domain": "math"}, {"text": "w1 w2 w3", "domain": "code"}])
    with pytest.raises(ConfigError, match=f"does not go with packing_strategy: {strategy}"):
        make(teachers(), long, teachers=entries(), teacher_column="domain", packing=True, max_length=16,
             packing_strategy=strategy)  # fmt: skip


@pytest.mark.parametrize(
    "options, message",
    [
        ({"teachers": []}, r"teachers must be a list such as .*, got \[\]"),
        ({"teachers": [{"weight": 1}]}, "needs a name, text without a slash; got None"),
        ({"teachers": [{"name": "a/b", "teacher": "self"}]}, "needs a name, text without a slash; got 'a/b'"),
        ({"teachers": [{"name": "a", "teacher": "self", "teacher_model_name_or_path": "x"}]},
         "leave teacher_model_name_or_path out"),
        ({"teachers": [{"name": "a", "teacher": "self", "teacher_dtype": "auto"}]}, "leave teacher_dtype out"),
        ({"teachers": [{"name": "a", "teacher": "cache"}]}, "must be of kind model or self, got 'cache'"),
        ({"teachers": [{"name": "a", "teacher_model_name_or_path": "x", "weight": 0}]}, "a number above 0, got 0"),
        ({"teachers": [{"name": "a", "teacher": "self", "weight": True}]}, "a number above 0, got True"),
        ({"teachers": [{"name": "a", "path": "x"}]}, "a dictionary with keys out of name, teacher, weight"),
        ({"teachers": [{"name": "a", "teacher": "self"}] * 2}, "'a' belongs to two of them"),
        ({"teachers": [{"name": "a", "teacher": "self", "routes": ["x"]}]}, "no effect without teacher_column"),
        ({"teachers": [{"name": "a", "teacher": "self", "routes": ["b"]}, {"name": "b", "teacher": "self"}],
          "teacher_column": "d"}, "'b' belongs to two of them"),
        ({"teachers": [{"name": "a", "teacher": "self"}], "teacher": "self"}, "teachers: are models"),
        ({"teachers": [{"name": "a", "teacher": "self"}], "teacher_model_name_or_path": "x"}, "either teachers or"),
        ({"teachers": '[{"name": "a", "weight": -1}]'}, "a number above 0, got -1"),
    ],
)  # fmt: skip
def test_settings_that_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        train_args(LigerDistillConfig, **options)


START = "recipe: distill\nmodel_name_or_path: m\ndataset_name: d.jsonl\n"


@pytest.mark.parametrize(
    "lines, found",
    [
        (["teacher: self"], ["teacher: self is the student without its adapters; add `use_peft: true`"]),
        (["teacher: self", "use_peft: true", "teacher_model_name_or_path: t"], [
            "teacher_model_name_or_path: has no effect with `teacher: self`"]),
        (["teacher: self", "use_peft: true", "keep_every_nth_layer: 2"],
            ["keep_every_nth_layer: the base that teaches would lack these layers too; leave `teacher: self` out"]),
        (["teachers: [{name: a, teacher: self}]", "use_peft: true", "keep_layers: [0]"],
            ["keep_layers: the base that teaches would lack these layers too"]),
        (["teacher: self", "use_peft: true", "deepspeed: d.json"], ["deepspeed: no such file"]),
        (["teacher: server", "teacher_server_top_k: 2000"], [
            "teacher_server_top_k: expected a number of at most 1024", "teacher_server_base_url: missing",
            "teacher_server_model: missing"]),
        (["teacher_model_name_or_path: t", "teacher_column: c"], ["teacher_column: has no effect without `teachers`"]),
        (["teacher_model_name_or_path: t", "teacher_offload: true", "fsdp: full_shard"], [
            "teacher_offload: does not go with FSDP"]),
        (["teachers: [{name: a}]"], ["teachers: a needs teacher_model_name_or_path"]),
        (["teachers: [{name: a, teacher: self, wieght: 1}]"], ["[0].wieght: unknown key. Did you mean weight"]),
        (["teachers: [{teacher: self}]"], ["[0]: name is missing"]),
    ],
)  # fmt: skip
def test_what_validate_finds(lines, found):
    with pytest.raises(ConfigError) as error:
        check_text(START + "\n".join(lines), "my.yaml")
    for message in found:
        assert message in str(error.value)
    assert str(error.value).count("my.yaml:") == max(len(found), 1) + (len(found) > 1), str(error.value)


def test_rows_that_cannot_be_read_beforehand_are_refused():
    prepared = make(teachers(), rows(), teachers=entries()).train_dataset
    as_they_are = {"dataset_kwargs": {"skip_prepare_dataset": True}}
    for data, options in ((rows().to_iterable_dataset(), {}), (prepared, as_they_are)):
        with pytest.raises(ConfigError, match="teacher_column needs rows that the trainer prepares"):
            make(teachers(), data, teachers=entries(), teacher_column="domain", **options)
        make(teachers(), data, teachers=entries(), **options)


def test_models_and_names_that_do_not_match():
    data = completions(4)
    with pytest.raises(ConfigError, match="teachers: code needs teacher_model_name_or_path, or a model of that name"):
        make({"math": tiny_model()}, data, teachers=entries())
    with pytest.raises(ConfigError, match="has a teacher 'law', and args.teachers has models for math, code, prose"):
        make({**teachers(), "law": tiny_model()}, data, teachers=entries())
    with pytest.raises(ConfigError, match="pass teacher_model as a dictionary"):
        make(tiny_model(), data, teachers=entries())
    with pytest.raises(ConfigError, match="uld has one teacher"):
        make(teachers(), data, losses=[{"type": "uld"}])
    with pytest.raises(ConfigError, match="Hidden-state losses need one teacher"):
        make(teachers(), data, losses=[{"type": "forward_kl"}, {"type": "hidden_mse"}])
    with pytest.raises(ConfigError, match="teacher_column chooses among several teachers"):
        make(tiny_model(), data, teacher_column="domain")
