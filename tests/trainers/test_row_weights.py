"""`weight_column`: the step of a weighted batch is the weighted sum over its tokens, whatever is minimised."""

import contextlib
import copy
import os
import random
import warnings
from pathlib import Path

import pytest
import torch
import yaml
from commands import call, done, refused, save_models, settings, without_report, write_rows
from datasets import Dataset, concatenate_datasets
from quick_cases import by_turns, slow_but
from served import served
from tiny import WORDS, tiny_model, tiny_tokenizer
from torch.nn.functional import cross_entropy, kl_div
from trainings import distill, logged, sft, trained, weights_of

from liger_trainer import LigerConfig
from liger_trainer.errors import ConfigError, DataError

N = 12


def rows(weights=None, seed=None) -> Dataset:
    rng = random.Random(os.urandom(4) if seed is None else seed)
    made = [
        {"prompt": f"{WORDS[i]} {WORDS[i + 1]}", "completion": " " + " ".join(rng.choices(WORDS, k=rng.randint(2, 9)))}
        for i in range(N)
    ]
    return Dataset.from_list([{**r, "weight": w} for r, w in zip(made, weights or [1.0] * N, strict=True)])


def trainer_of(data: Dataset, weighted: bool, teacher=None, eval_data=None, **options):
    """A trainer whose one step is minus the gradient, over all rows at once."""
    options = {
        "max_steps": 1, "optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant", "weight_decay": 0.0,
        "warmup_steps": 0, "per_device_train_batch_size": N, "weight_column": "weight" if weighted else None, **options,
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if teacher is None:
            return sft(tiny_model(seed=1), data, eval_data, config=LigerConfig, **options)
        return distill(tiny_model(seed=1), teacher, data, eval_data, **options)


def step(*args, **options) -> tuple[dict[str, torch.Tensor], float]:
    """The gradient of one step by the change of the weights, and the logged loss."""
    trainer = trainer_of(*args, **options)
    before = weights_of(trainer)
    after = weights_of(trained(trainer))
    return {name: before[name] - after[name] for name in before}, logged(trainer)[0]


def assert_close(got, want, factor: float = 1.0, rtol: float = 2e-4):
    scale = max(float(x.abs().max()) for x in want.values()) * abs(factor)
    for name, value in want.items():
        assert float((got[name] - factor * value).abs().max()) <= rtol * scale, name


@pytest.mark.parametrize(("teacher", "accumulation"), by_turns([None, 7], [1, 3]), ids=str)
def test_a_step_is_that_of_plain_torch(teacher, accumulation):
    """In fp64: sum of w l over the tokens of all micro-batches, divided by their number."""
    rng = random.Random(os.urandom(4))
    weights = [rng.choice([0.0, 0.3, 1.0, 2.5]) for _ in range(N - 1)] + [1.7]
    data = rows(weights)
    batch = {"per_device_train_batch_size": N // accumulation, "gradient_accumulation_steps": accumulation}
    losses = {} if teacher is None else {"losses": [{"type": "forward_kl"}, {"type": "ce", "weight": 0.3}]}
    model = None if teacher is None else tiny_model(seed=teacher)
    got, logged = step(data, True, None if model is None else copy.deepcopy(model), **batch, **losses)

    student, tokenizer = tiny_model(seed=1).double(), tiny_tokenizer()
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row in data:
        prompt = tokenizer(row["prompt"])["input_ids"]
        ids = torch.tensor([tokenizer(row["prompt"] + row["completion"])["input_ids"] + [tokenizer.eos_token_id]])
        first = len(prompt) - 1
        logits = student(ids).logits[0, first:-1]
        ce = cross_entropy(logits, ids[0, first + 1 :], reduction="sum")
        if model is not None:
            with torch.no_grad():
                p = copy.deepcopy(model).double()(ids).logits[0, first:-1].log_softmax(-1)
            ce = kl_div(logits.log_softmax(-1), p, log_target=True, reduction="sum") + 0.3 * ce
        total, count = total + row["weight"] * ce, count + logits.shape[0]
    (total / count).backward()
    assert logged == pytest.approx(float(total.detach() / count), rel=1e-4)
    assert_close(got, {name: p.grad.float() for name, p in student.named_parameters()})


PACKED = {"packing": True, "max_length": 32, "per_device_train_batch_size": 64}
MIX = [
    {"type": "jsd", "weight": 0.7, "beta": 0.3}, {"type": "tvd"}, {"type": "ce", "weight": 0.2},
    {"type": "hidden_mse", "weight": 0.5},
]  # fmt: skip
CASES = {
    "sft plain": {}, "sft dft": {"loss_type": "dft"}, "sft smoothing": {"label_smoothing_factor": 0.1},
    "sft packing": PACKED, "kd forward_kl": {}, "kd mixed": {"losses": MIX}, "kd packing": PACKED,
    "kd padding_free": {"padding_free": True, "max_length": None},
    "kd cut at the start": {"max_length": 6, "truncation_mode": "keep_end"},
    "kd temperature": {"temperature": 2.0, "losses": [{"type": "reverse_kl"}]},
    "server": {"losses": [{"type": "forward_kl"}, {"type": "ce", "weight": 0.5}]},
}  # fmt: skip


@contextlib.contextmanager
def taught(case: str):
    """The options of a case with its teacher, which is made again for each trainer."""
    with served(tiny_model(seed=7)) as server:
        by_server = {"teacher_server_base_url": server.url, "teacher_server_model": "tiny"}
        yield lambda: {
            **CASES[case], **(by_server if case == "server" else {}),
            "teacher": "server" if case == "server" else tiny_model(seed=7) if case.startswith("kd") else None,
        }  # fmt: skip


@pytest.mark.parametrize("case", slow_but(CASES, "sft plain", "sft packing", "kd mixed", "kd padding_free", "server"))
def test_rows_of_weight_0_are_as_if_they_were_not_there(case):
    """But for the divisor, which counts them."""
    weights = [float(i % 3 != 0) for i in range(N)]
    data = rows(weights)
    kept = data.select([i for i, w in enumerate(weights) if w])
    with taught(case) as options:
        got, loss = step(data, True, **options())
        want, of_kept = step(kept, False, **options())
    tokens = [len(text.split()) + 1 for text in data["completion"]]  # and the end
    if "cut" in case:
        tokens = [min(count, 5) for count in tokens]  # the first of six is not predicted
    share = sum(t * w for t, w in zip(tokens, weights, strict=True)) / sum(tokens)
    assert_close(got, want, share)
    assert loss == pytest.approx(of_kept * share, rel=1e-4)


def test_evaluations_are_not_weighted_and_weights_of_1_change_nothing():
    data = rows([2.0, *[0.5] * (N - 1)])
    held_out = rows(seed=3).remove_columns("weight")
    logs = [trainer_of(data, weighted, eval_data=held_out).evaluate()["eval_loss"] for weighted in (True, False)]
    assert logs[0] == logs[1]
    seen = trainer_of(data, True, eval_data=data.remove_columns("weight")).evaluate()["eval_loss"]
    assert seen == trainer_of(data, False, eval_data=data).evaluate()["eval_loss"]
    (got, loss), (want, plain) = (step(rows(seed=4), weighted) for weighted in (True, False))
    assert loss == plain
    assert_close(got, want, rtol=1e-6)


WRONG = {
    "column": (lambda: rows().remove_columns("weight"), {}, DataError, "no column 'weight', which weight_column names"),
    "negative": (lambda: rows([-0.5, *[1.0] * 11]), {}, DataError, "Row 0 of the training dataset has -0.5"),
    "nan": (lambda: rows([*[1.0] * 11, float("nan")]), {}, DataError, "Row 11 of the training dataset has nan"),
    "none": (lambda: rows([*[1.0] * 11, None]), {}, DataError, "Row 11 of the training dataset has None"),
    "zeros": (lambda: rows([0.0] * N), {}, DataError, "Every row of the training dataset has weight 0"),
    "twice": (
        lambda: concatenate_datasets([rows(seed=1), rows([2.0] * N, seed=1)]), {}, DataError,
        "stands in it twice, with the weights 1 and 2",
    ),
    "cut documents": (rows, {"packing": True, "packing_strategy": "bfd_split", "max_length": 5}, ConfigError, "cuts"),
    "stream": (lambda: rows().to_iterable_dataset(), {}, ConfigError, "no stream"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_weight_is_refused(name):
    data, options, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        trainer_of(data(), True, per_device_train_batch_size=4, **options)


def test_a_run_takes_the_column_of_a_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    without_report(monkeypatch)
    save_models(tmp_path, "student", "teacher")

    def chat(i):
        return {"conversations": [{"from": "human", "value": WORDS[i]}, {"from": "gpt", "value": WORDS[i + 1]}]}

    write_rows(tmp_path / "rows/train.jsonl", [{**chat(i), "weight": i % 3} for i in range(20)])
    write_rows(tmp_path / "rows/test.jsonl", [chat(i) for i in range(20, 24)])
    kd = {"teacher_model_name_or_path": "teacher"}
    keys = yaml.safe_load(settings(weight_column="weight", dataset_name="rows", **kd))
    Path("run.yaml").write_text(yaml.safe_dump({k: v for k, v in keys.items() if k != "holdout_fraction"}))
    done(call(capsys, "run", "run.yaml"))
    no_column = "no column 'wait', which weight_column names; they have conversations, weight"
    refused(call(capsys, "run", "run.yaml", "weight_column=wait", "output_dir=other"), 4, no_column)
    sampled = "weight_column: does not go with completions that are sampled"
    refused(call(capsys, "validate", "run.yaml", "lmbda=0.5"), 2, sampled)
