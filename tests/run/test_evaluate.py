"""`eval`: every metric against plain torch on the same rows; runs, adapters and configurations side by side."""

import json

import numpy as np
import pytest
import torch
import yaml
from commands import call, done, save_models, write_rows
from peft import LoraConfig, get_peft_model
from tiny import WORDS, kl, tiny_tokenizer
from transformers import AutoModelForCausalLM

from liger_trainer.cli.evaluate import split_targets

SETTINGS = {
    "recipe": "distill", "model_name_or_path": "student", "teacher_model_name_or_path": "teacher",
    "dataset_name": "rows", "bf16": False, "use_cpu": True, "per_device_eval_batch_size": 4, "max_length": 32,
    "disable_tqdm": True, "beta": 1.0, "temperature": 2.0, "output_dir": "out",
}  # fmt: skip


def rows(count: int, start: int) -> list[dict]:
    return [
        {"prompt": " ".join(WORDS[start + i : start + i + 3]), "completion": " " + " ".join(WORDS[i : i + 3 + i % 5])}
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two models, rows, a configuration, a run with whole weights and one with adapters."""
    folder = tmp_path_factory.mktemp("eval")
    save_models(folder, "student", "teacher", "run")
    adapted = get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder / "student"),
        LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False),
    )
    adapted.save_pretrained(folder / "adapters")
    for split, (count, start) in {"train": (6, 20), "test": (9, 5)}.items():
        write_rows(folder / "rows" / f"{split}.jsonl", rows(count, start))
    for place in ("run.yaml", "run/config.yaml", "adapters/config.yaml"):
        (folder / place).write_text(yaml.safe_dump(SETTINGS))
    return folder


@pytest.fixture
def evaluate(folder, monkeypatch, capsys):
    """Exit code, JSON or text, stderr of `eval` in that folder."""
    monkeypatch.chdir(folder)

    def run(*arguments: str):
        code, out, err = call(capsys, "eval", *arguments)
        return code, json.loads(out) if "--json" in arguments and out else out, err

    return run


def load(path):
    return AutoModelForCausalLM.from_pretrained(path).eval()


def by_hand(student, teacher) -> dict[str, float]:
    """Over the supervised tokens of the held-out rows: those of the completion, and the end."""
    tokenizer, values = tiny_tokenizer(), []
    for row in rows(9, 5):
        prompt = tokenizer(row["prompt"])["input_ids"]
        ids = tokenizer(row["prompt"] + row["completion"])["input_ids"] + [tokenizer.eos_token_id]
        x, first = torch.tensor([ids]), len(prompt)
        with torch.no_grad():
            q, p = (m(input_ids=x).logits[0, first - 1 : -1].double().log_softmax(-1) for m in (student, teacher))
        labels = x[0, first:]
        m = torch.logaddexp(q, p) - np.log(2)
        right = q.argmax(-1) == labels
        values.append(torch.stack([
            kl(p, q), kl(q, p), (kl(p, m) + kl(q, m)) / 2, (q.argmax(-1) == p.argmax(-1)).double(),
            -q.gather(-1, labels[:, None])[:, 0], -p.gather(-1, labels[:, None])[:, 0],
            -(q.exp() * q).sum(-1), -(p.exp() * p).sum(-1), torch.where(right, 1.0, -1.0) * q.amax(-1).exp(),
        ]))  # fmt: skip
    *means, signed = torch.cat(values, 1)
    names = ("forward_kl", "reverse_kl", "jsd", "agreement_at_1", "student", "teacher", "entropy", "teacher_entropy")
    found = {name: x.mean().item() for name, x in zip(names, means, strict=True)}
    found |= {f"{side}_perplexity": np.exp(found.pop(side)) for side in ("student", "teacher")}
    return {**found, "calibration_error": _binned(signed)}


def _binned(signed: torch.Tensor) -> float:
    """The calibration error by its definition."""
    confidence, right, total = signed.abs(), (signed > 0).double(), 0.0
    for i in range(15):
        of_bin = (confidence >= i / 15) & ((confidence < (i + 1) / 15) | (i == 14))
        if of_bin.any():
            total += of_bin.double().mean().item() * abs((right[of_bin].mean() - confidence[of_bin].mean()).item())
    return total


def test_every_metric_is_that_of_plain_torch(folder, evaluate):
    found, _ = done(evaluate("run", "run.yaml", "adapters", "--json"))
    assert [e["name"] for e in found["evaluations"]] == ["run", "run.yaml", "adapters"]
    teacher, *students = (load(folder / n) for n in ("teacher", "run", "student", "adapters"))
    for evaluation, student in zip(found["evaluations"], students, strict=True):
        truth = by_hand(student, teacher)
        got = {name: evaluation["metrics"][name] for name in truth}
        # entropy is a mean over batches, as TRL logs it
        assert got.pop("entropy") == pytest.approx(truth.pop("entropy"), rel=0.05)
        assert got == pytest.approx(truth, rel=1e-4)


def test_several_teachers_and_the_students_own_base(folder, evaluate, tmp_path):
    config = {key: value for key, value in SETTINGS.items() if key != "teacher_model_name_or_path"}
    for name, teachers in (("two", ["teacher", "run"]), ("none", ["teacher", "nowhere/at/all"])):
        entries = [{"name": f"of_{n[:3]}", "teacher_model_name_or_path": n, "weight": i + 1} for i, n in
                   enumerate(teachers)]  # fmt: skip
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({**config, "teachers": entries}))
    (tmp_path / "self.yaml").write_text(yaml.safe_dump({**config, "teacher": "self", "use_peft": True}))
    found, _ = done(evaluate(str(tmp_path / "two.yaml"), str(tmp_path / "self.yaml"), "--json"))
    two, own = found["evaluations"]
    assert two["teacher"] == "teacher, run" and own["teacher"] is None
    student, *teachers = (load(folder / n) for n in ("student", "teacher", "run"))
    want = [by_hand(student, teacher)["forward_kl"] for teacher in teachers]
    assert [two["metrics"][f"of_{n}/forward_kl"] for n in ("tea", "run")] == pytest.approx(want, rel=1e-4)
    assert two["metrics"]["forward_kl"] == pytest.approx((want[0] + 2 * want[1]) / 3, rel=1e-4)
    assert own["metrics"]["forward_kl"] == pytest.approx(0, abs=1e-6)
    code, _, error = evaluate(str(tmp_path / "none.yaml"))
    assert code == 2 and "of_now: " in error and "no such directory: nowhere/at/all" in error


@pytest.mark.parametrize("projector", [True, False])
def test_no_value_of_a_projector_that_was_not_learned(evaluate, tmp_path, projector):
    losses = [{"type": "forward_kl"}, {"type": "hidden_mse", "projector": projector}]
    (tmp_path / "hidden.yaml").write_text(yaml.safe_dump({**SETTINGS, "losses": losses}))
    found, _ = done(evaluate(str(tmp_path / "hidden.yaml"), "~beta", "--json"))
    metrics = found["evaluations"][0]["metrics"]
    assert {name in metrics for name in ("loss", "loss/hidden_mse")} == {not projector}
    assert "loss/forward_kl" in metrics and "kd_loss" in metrics


def test_one_table_and_the_file(folder, evaluate, tmp_path):
    file = tmp_path / "found.json"
    out, error = done(evaluate("run", "run.yaml", "max_eval_rows=4", "--output", str(file)))
    for title in ("forward KL", "reverse KL", "JSD", "agreement@1", "teacher entropy", "calibration error"):
        assert title in out
    written = json.loads(file.read_text())
    assert [e["data"]["test_rows"] for e in written["evaluations"]] == [4, 4]
    assert "torch" in written["versions"] and "it/s" not in error
    assert evaluate("run", "--output", str(file))[0] == 2  # without --force


def test_fine_tuning_has_its_own_rows(evaluate):
    code, found, error = evaluate(
        "run.yaml", "recipe=sft", "~beta", "~teacher_model_name_or_path", "~temperature", "disable_tqdm=true", "--json"
    )
    assert code == 0, error
    metrics = found["evaluations"][0]["metrics"]
    assert metrics["perplexity"] == pytest.approx(np.exp(metrics["loss"]), rel=0.05)
    assert 0 <= metrics["calibration_error"] <= 1 and found["evaluations"][0]["teacher"] is None


def test_targets_come_before_settings():
    assert split_targets(["a", "b", "max_length=3", "--seed", "4"]) == (["a", "b"], ["max_length=3", "--seed", "4"])
