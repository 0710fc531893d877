"""The weighted list of losses: each type's loss and gradients, the options of entries, what is logged and refused."""

from functools import partial

import pytest
import torch
from splits import capture_gradients
from tiny import (
    assert_same_gradients,
    completions,
    divergence_by_hand,
    double_copy,
    kl,
    train_args,
)
from trainings import distill, supervised_logits, trained

from liger_trainer import DistillationCallback, LigerDistillConfig
from liger_trainer.config.run_config import check_text
from liger_trainer.errors import ConfigError
from liger_trainer.kernels.divergence_kinds import KINDS
from liger_trainer.losses.plan import LOSS_TYPES, entry_rule, plan_of
from liger_trainer.losses.sparse_answer import SparseAnswer, TokenTargets
from liger_trainer.losses.spec import BatchTargets, LossOptions

pytestmark = pytest.mark.filterwarnings("error::liger_trainer.MaterializedLogitsWarning")
EVERY = [{"type": kind, "weight": 0.2 + 0.1 * i} for i, kind in enumerate(KINDS)] + [{"type": "ce", "weight": 0.3}]


def make(**options):
    options = {"max_steps": 1, "optim": "sgd", "learning_rate": 0.0, **options}
    return distill(data=completions(4), eval_data=completions(3, seed=4), **options)


def of_kind(kind, s, t, temperature, beta, alpha):
    """(N,) of logits (N, V)."""
    q, p = (torch.log_softmax(x / temperature, -1) for x in (s, t))
    if kind == "skew_kl":
        return kl(p, (alpha * p.exp() + (1 - alpha) * q.exp()).log())
    if kind == "skew_reverse_kl":
        return kl(q, (alpha * q.exp() + (1 - alpha) * p.exp()).log())
    if kind == "symmetric_kl":
        return (kl(p, q) + kl(q, p)) / 2
    if kind == "tvd":
        return (p.exp() - q.exp()).abs().sum(-1) / 2
    return divergence_by_hand(s, t, kind, temperature, beta)


def values_by_hand(student, teacher, rows, temperature=1.0, beta=0.5, alpha=0.1, share=1.0):
    """{type: mean over the supervised tokens}, times the temperature squared, in fp64."""
    found = {}
    for row in rows:
        s, t, labels = supervised_logits((student, teacher), row)
        t = t.detach()
        mixed = share * t + (1 - share) * s.detach()
        for kind in KINDS:
            each = of_kind(kind, s, mixed, temperature, beta, alpha) * temperature**2
            found.setdefault(kind, []).append(each)
        found.setdefault("ce", []).append(torch.nn.functional.cross_entropy(s, labels, reduction="none"))
        found.setdefault("jsd at 1", []).append(of_kind("jsd", s, t, 1.0, 0.5, 0.0))
    return {name: torch.cat(values).mean() for name, values in found.items()}


@pytest.mark.parametrize(
    "options, how",
    [
        ({"beta": 0.3, "skew_alpha": 0.2}, {"beta": 0.3, "alpha": 0.2}),
        ({"beta": 0.3, "temperature": 4.0, "kd_temperature": 2.0}, {"beta": 0.3, "temperature": 2.0}),
        ({"beta": 0.5, "taid": {"start": 0.6, "adaptive": False}}, {"beta": 0.5, "share": 0.6}),
    ],
    ids=["temperature 1", "temperature 2", "taid"],
)
def test_every_type_at_once_equals_plain_torch_in_loss_gradients_and_logs(options, how):
    trainer = make(losses=EVERY, **options)
    student, teacher = double_copy(trainer.model), double_copy(trainer.teacher)
    evaluated = trainer.evaluate()
    captured = capture_gradients(trainer)
    trainer.train()
    values = values_by_hand(student, teacher, trainer.train_dataset, **how)
    loss = sum(entry["weight"] * values[entry["type"]] for entry in EVERY)
    logs = trainer.state.log_history[0]
    assert logs["loss"] == pytest.approx(loss.item(), rel=1e-5)
    loss.backward()
    assert_same_gradients(captured, {name: p.grad for name, p in student.named_parameters()})
    held_out = values_by_hand(student, teacher, trainer.eval_dataset, **{**how, "share": 1.0})
    for entry in EVERY:
        name = entry["type"]
        assert logs[f"loss/{name}"] == pytest.approx(values[name].item(), rel=1e-5), name
        assert evaluated[f"eval_loss/{name}"] == pytest.approx(held_out[name].item(), rel=1e-5), name
    assert evaluated["eval_jsd"] == pytest.approx(held_out["jsd at 1"].item(), rel=1e-5)
    assert "jsd" not in logs


def test_every_jsd_is_measured_in_evaluations_with_what_else_is_minimised():
    listed = ([{"type": "ce"}], [{"type": "jsd", "beta": 0.5}])
    for options in ({}, {"beta": 1.0}, {"kd_temperature": 2.0}, *({"losses": losses} for losses in listed)):
        trainer = make(**options)
        want = values_by_hand(double_copy(trainer.model), double_copy(trainer.teacher), trainer.eval_dataset)
        evaluated = trainer.evaluate()
        assert evaluated["eval_jsd"] == pytest.approx(want["jsd at 1"].item(), rel=1e-5), options
        terms = {name for name in evaluated if name.startswith("eval_loss/")}
        kind = (
            options["losses"][0]["type"] if "losses" in options else "reverse_kl" if "beta" in options else "forward_kl"
        )
        assert terms == {f"eval_loss/{kind}"}
        assert evaluated["eval_loss"] == pytest.approx(evaluated[f"eval_loss/{kind}"], rel=1e-5)


def test_a_weight_of_0_measures_only():
    losses = [{"type": "forward_kl"}, {"type": "tvd", "weight": 0}, {"type": "ce", "weight": 0}]
    logs = [trained(make(losses=listed)).state.log_history[0] for listed in (losses[:1], losses)]
    assert logs[0]["loss"] == logs[1]["loss"] and logs[0]["grad_norm"] == logs[1]["grad_norm"]
    assert logs[1]["loss/tvd"] > 0.1 and logs[1]["loss/ce"] == logs[1]["ce_loss"] and "loss/tvd" not in logs[0]


def test_an_entrys_option_goes_before_the_common_field():
    plan = plan_of({"losses": [{"type": "jsd", "beta": 0.2}, {"type": "skew_kl", "alpha": 0.3, "weight": 2}],
                    "beta": 0.9, "skew_alpha": 0.7, "temperature": 3.0})  # fmt: skip
    assert (plan.scalars["beta"], plan.scalars["skew_alpha"], plan.scalars["temperature"]) == (0.2, 0.3, 3.0)
    assert plan.scalars["skew_kl_weight"] == 2.0
    assert plan_of({"temperature": 3.0, "kd_temperature": 1.5}).scalars["temperature"] == 1.5
    config = train_args(LigerDistillConfig, losses=[{"type": "skew_reverse_kl"}], skew_alpha=0.4, kd_temperature=2.0)
    assert config.distillation().skew_alpha == 0.4 and config.distillation().temperature == 2.0


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"losses": [{"type": "tvd", "alpha": 0.1}]}, "losses: tvd: alpha: unknown key. Known: type, weight"),
        ({"losses": [{"type": "jsd", "bta": 0.1}]}, "losses: jsd: bta: unknown key. Did you mean beta?"),
        ({"losses": [{"type": "skw_kl"}]}, "got {'type': 'skw_kl'}. Did you mean skew_kl?"),
        ({"losses": [{"type": "jsd"}]}, "losses: jsd: beta is 0.0, where it would be the forward KL. Give it"),
        ({"losses": [{"type": "jsd", "beta": 1}]}, "losses: jsd: beta is 1, where it would be the reverse KL. Give it"),
        ({"losses": [{"type": "jsd", "beta": 1.5}]}, "losses: jsd: beta: expected a number of at most 1, got 1.5"),
        ({"losses": [{"type": "skew_kl", "alpha": 1}]}, "losses: skew_kl: alpha: expected a number below 1, got 1"),
        ({"losses": [{"type": "skew_kl", "alpha": 0.2}, {"type": "skew_reverse_kl"}]},
         "losses: alpha is 0.2 for one of them and 0.1 for skew_reverse_kl; they share it: set skew_alpha instead"),
        ({"losses": [{"type": "hidden_mse", "layers": "first"}]}, "expected pairs .* or one of uniform, last"),
        ({"losses": [{"type": "hidden_mse", "layers": [[0, 1, 2]]}]}, "expected pairs"),
        ({"losses": [{"type": "hidden_mse", "layers": [[0, 1.5]]}]}, "layers.0.1: expected an integer"),
        ({"losses": "[{"}, "losses: expected a list, got text that is no JSON"),
        ({"skew_alpha": 1.0}, "skew_alpha: expected a number below 1, got 1.0"),
        ({"kd_temperature": 0.0}, "kd_temperature: expected a number above 0, got 0.0"),
    ],
)  # fmt: skip
def test_wrong_lists(fields, message):
    with pytest.raises(ValueError, match=message):
        plan_of(fields)


@pytest.mark.parametrize(
    "text, finding",
    [
        ("losses:\n  - {type: ce}\n  - {type: tvd, alpha: 0.1}\n", "r.yaml:4: losses: tvd: alpha: unknown key"),
        ("losses:\n  - {type: ce}\n  - {type: tvd, weigth: 1}\n", r"r.yaml:6: losses: \[1\].weigth: unknown key"),
        ("schedules: {temperature: {to: -1.0}}\n", "r.yaml:4: schedules: temperature: expected a number above 0"),
        ("schedules: {ce_weight: {to: 1.0}}\n", "r.yaml:4: schedules: 'ce_weight' is no scalar of this loss"),
        (
            "schedules: {max_completion_length: {from: 8, to: 64}}\n",
            "r.yaml:4: schedules: max_completion_length: nothing is sampled: set lmbda or seq_kd",
        ),
        (
            "schedules: {max_completion_length: {from: 8, to: 64}}\nlmbda: 1.0\nmax_completion_length: 32\n",
            "r.yaml:4: schedules: max_completion_length: from 8 to 64 goes beyond max_completion_length, 32",
        ),
        (
            "schedules: {max_completion_length: {from: 0, to: 64}}\nlmbda: 1.0\nmax_completion_length: 64\n",
            "r.yaml:4: schedules: max_completion_length: expected a number of at least 1",
        ),
        ("taid: {start: 0.9, end: 0.1}\n", "r.yaml:4: taid: the teacher's share rises"),
        ("skew_alpha: 0.2\n", "r.yaml:4: skew_alpha: has no effect"),
        ("label_smoothing_factor: 0.1\n", "r.yaml:4: label_smoothing_factor: has no effect: it is of"),
        ("teacher_tokenizer_name_or_path: d\nteacher: self\nuse_peft: true\n", "r.yaml:4: teacher_tok.* no effect"),
        ("kd_temperature: 2\nlosses: [{type: ce}]\n", "r.yaml:4: kd_temperature: has no effect"),
        ("taid: {}\nteacher: cache\nteacher_cache_dir: x\n", "r.yaml:4: taid: it mixes logits of the whole vocabulary"),
    ],
)
def test_a_file_is_told_its_mistakes_with_their_lines(text, finding):
    named = "model_name_or_path: a\nteacher_model_name_or_path: b\ndataset_name: c\n"
    with pytest.raises(ConfigError, match=finding):
        check_text(named + text, "r.yaml")


def test_and_so_is_python():
    message = "skew_alpha: has no effect: nothing in the loss depends on it"
    for make_it in (partial(train_args, LigerDistillConfig), partial(DistillationCallback, "some/teacher")):
        with pytest.raises(ValueError, match=message):
            make_it(skew_alpha=0.2)


def test_the_table_of_types_is_what_the_schema_offers():
    offered = entry_rule()["properties"]
    assert offered["type"]["enum"] == list(LOSS_TYPES)
    assert {*KINDS, "ce", "hidden_mse", "hidden_cosine"} <= set(LOSS_TYPES)
    assert {"type", "weight", "beta", "alpha", "layers", "projector"} <= offered.keys()


def test_a_cache_has_its_term_too():
    torch.manual_seed(0)
    logits, labels = torch.randn(1, 4, 10), torch.tensor([[1, 2, -100, 3]])
    teacher = torch.randn(1, 4, 10).log_softmax(-1).topk(3)
    fields = {name: torch.zeros(1, 4) for name in ("unnamed", "label_log_prob", "entropy")}
    targets = TokenTargets(ids=teacher.indices, log_probs=teacher.values, top_ids=teacher.indices[..., 0], **fields)
    distillation = train_args(LigerDistillConfig, losses=[{"type": "forward_kl", "weight": 0.5}]).distillation()
    answer = SparseAnswer(targets, "bucket", 10)
    result = answer.loss(logits, BatchTargets.of(None, labels, None), LossOptions(distillation=distillation))
    assert torch.allclose(result.terms["forward_kl"] * 0.5, result.divergence) and result.divergence.sum() > 0
