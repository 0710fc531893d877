"""The auxiliary loss of a mixture of experts: in distillation, too, it is stock transformers', value and gradient."""

from itertools import product

import pytest
import torch
from families import build
from peft import LoraConfig
from quick_cases import by_turns
from splits import capture_gradients
from tiny import completions
from trainings import a_teacher, batches_of, distill, sft, trained
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from trl import SFTTrainer

from liger_trainer import DistillationCallback

COEF = 0.3
SHORT = dict(max_steps=1, optim="sgd", learning_rate=0.0)


def student(family):
    model = build(family, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family], experts="grouped_mm", num_experts_per_tok=2)
    return model.train()


def of(make, family, coef, **options):
    return make(student(family), data=completions(8), router_aux_loss_coef=coef, **{**SHORT, **options})


def by_callback(model, **options):
    return sft(model, cls=SFTTrainer, callbacks=[DistillationCallback(a_teacher())], **options)


def step(trainer):
    """(loss, auxiliary loss or None, gradients, the batches) of a step that changes nothing."""
    batches, gradients = batches_of(trainer), capture_gradients(trainer)
    logs = trained(trainer).state.log_history[0]
    return logs["loss"], logs.get("aux_loss"), gradients, batches


def stock(family, batches):
    """The mean auxiliary loss of the batches and its gradients, by transformers' model."""
    model, names = student(family), ("input_ids", "attention_mask", "position_ids")
    inputs = [{name: x for name, x in batch.items() if name in names} for batch in batches]
    loss = torch.stack([model(**each, output_router_logits=True).aux_loss for each in inputs]).mean()
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in product(["mixtral", "granitemoe"], [distill, sft])]


@pytest.mark.parametrize(("family", "make"), by_turns(["qwen3_moe", "gpt_oss"], [distill, sft]) + SLOW)
def test_value_and_gradient_are_stock_transformers(make, family):
    ids = torch.arange(5)[None]
    try:
        student(family)(input_ids=ids, labels=ids, output_router_logits=True)
    except AttributeError:
        pytest.skip("this transformers gets no router logits from it")
    plain_loss, none, plain, _ = step(of(make, family, 0.0))
    loss, aux, gradients, batches = step(of(make, family, COEF))
    want, of_aux = stock(family, batches)
    assert none is None and aux == pytest.approx(want, rel=1e-5) and want > 0.5
    assert loss == pytest.approx(plain_loss + COEF * want, rel=1e-5)
    routers = [name for name in of_aux if "gate.weight" in name or "router" in name]
    assert len(routers) >= 2
    for name in [*routers, "model.embed_tokens.weight"]:
        assert of_aux[name].norm() > 0
        torch.testing.assert_close(gradients[name], plain[name] + COEF * of_aux[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}], ids=str)
def test_the_callback_and_accumulation(options):
    """A stock trainer with the callback, and LigerDistillTrainer, take the same step."""
    (loss, aux, gradients, batches), (other, _, others, _) = (
        step(of(make, "qwen3_moe", COEF, **options)) for make in (distill, by_callback)
    )
    assert aux == pytest.approx(stock("qwen3_moe", batches)[0], rel=1e-5)
    assert loss == pytest.approx(other, rel=1e-5)
    for name in others:
        torch.testing.assert_close(gradients[name], others[name], rtol=1e-4, atol=1e-6)


def test_with_adapters_on_the_experts():
    """The router is frozen; what the auxiliary loss teaches is in the layers before it."""
    config = LoraConfig(r=4, target_modules=["q_proj", "o_proj"], init_lora_weights=False,
                        target_parameters=["experts.gate_up_proj", "experts.down_proj"])  # fmt: skip
    results = {}
    for coef in (0.0, COEF):
        torch.manual_seed(4)
        results[coef] = step(of(distill, "qwen3_moe", coef, peft_config=config))
    loss, aux, gradients, _ = results[COEF]
    plain_loss, _, plain, _ = results[0.0]
    assert loss == pytest.approx(plain_loss + COEF * aux, rel=1e-5)
    changed = [name for name in plain if not torch.allclose(gradients[name], plain[name], rtol=1e-3)]
    assert any("experts" in name for name in changed) and not any("gate.weight" in name for name in plain)
