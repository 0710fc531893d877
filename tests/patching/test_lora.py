"""patch_lora: which layers run on our ops, when PEFT's forward runs instead, and what the report says."""

import copy
import importlib.util
import itertools
import re
from collections import Counter
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import Linear as LoraLinear
from quick_cases import by_turns
from tiny import assert_same_gradients, masked_batch, named_gradients, tiny_model
from torch import nn

from liger_trainer.kernels import _low_rank
from liger_trainer.kernels._dropout import LEVELS, kept
from liger_trainer.patching.layers import lora as patch_lora
from liger_trainer.patching.patcher import patch

LORA_ONLY = {"rope": False, "rms_norm": False, "fused_linear_cross_entropy": False}


def wrapped(model: Any, autocast_adapter_dtype: bool = True, **options) -> Any:
    torch.manual_seed(1)
    options = {"r": 3, "lora_alpha": 5, "target_modules": "all-linear", "init_lora_weights": False, **options}
    return get_peft_model(model, LoraConfig(**options), autocast_adapter_dtype=autocast_adapter_dtype).train()


def loss_and_gradients(model: Any) -> tuple[float, dict]:
    loss = model(**masked_batch()).loss
    return loss.item(), named_gradients(model, loss)


def assert_as_plain(model: Any, plain: Any) -> None:
    (loss, gradients), (want_loss, want) = loss_and_gradients(model), loss_and_gradients(plain)
    assert loss == pytest.approx(want_loss, rel=1e-6)
    assert_same_gradients(gradients, want)


@pytest.fixture
def calls(monkeypatch) -> Counter[str]:
    """How often our ops and PEFT's forward run, by name."""
    counter: Counter[str] = Counter()

    def counting(name, function):
        def run(*args, **kwargs):
            counter[name] += 1
            return function(*args, **kwargs)

        return run

    for name in ("lora_linear", "lora_linears", "lora_mlp"):
        monkeypatch.setattr(patch_lora, name, counting(name, getattr(patch_lora, name)))
    patch_lora._disproof()  # which calls the forward itself
    monkeypatch.setattr(LoraLinear, "forward", counting("peft", LoraLinear.forward))
    return counter


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_every_layer_on_our_ops(family, calls):
    """Per layer, queries, keys and values, the attention's output, and the MLP."""
    plain, model = wrapped(tiny_model(family)), wrapped(tiny_model(family))
    patched = patch(model, LORA_ONLY)
    assert patched.report.swapped["LoRA linear"] == 14 and patched.report.swapped["LoRA MLP"] == 2
    assert not patched.report.left_alone
    loss_and_gradients(model)
    assert calls == {"lora_linears": 2, "lora_linear": 2, "lora_mlp": 2}
    assert_as_plain(model, plain)


def test_the_mlp_is_one_function(kernels):
    model = wrapped(tiny_model())
    patch(model, LORA_ONLY)
    mlp = model.base_model.model.model.layers[0].mlp
    out = mlp(torch.randn(2, 32, requires_grad=True))
    assert "LoraMLPFunction" in str([node for node, _ in out.grad_fn.next_functions] + [out.grad_fn])


def test_adapters_added_later_reach_the_mlp(calls):
    """PEFT's new layers have PEFT's forward, and the report of `patch`, made before, says nothing of them."""
    plain, model = wrapped(tiny_model()), tiny_model()
    patched = patch(model)
    model = wrapped(model)
    assert not any("LoRA" in kind for kind in patched.report.swapped)
    assert_as_plain(model, plain)
    assert calls == {"lora_mlp": 2, "peft": 8 + 14}  # 14 of the plain model


def test_patched_again_after_wrapping(calls):
    model = tiny_model()
    patch(model).undo()
    model = wrapped(model)
    patch(model)
    loss_and_gradients(model)
    assert calls == {"lora_linears": 2, "lora_linear": 2, "lora_mlp": 2}


def test_lora_option_off(calls):
    model = wrapped(tiny_model())
    report = patch(model, lora=False).report
    loss_and_gradients(model)
    assert calls == {"peft": 14} and not any("LoRA" in kind for kind in report.swapped)


def disable(model, layer):
    model.base_model.disable_adapter_layers()


def merge(model, layer):
    layer.merge()


def train_base(model, layer):
    layer.base_layer.weight.requires_grad_()


def hook(model, layer):
    layer.lora_A.default.register_forward_hook(lambda *_: None)


def hook_base(model, layer):
    layer.base_layer.register_forward_pre_hook(lambda *_: None)


def another_forward(model, layer):
    layer.base_layer.forward = lambda x: nn.functional.linear(x, layer.base_layer.weight)


def no_cast(model, layer):
    layer.cast_input_dtype_enabled = False


def dropout_of_features(model, layer):
    layer.lora_dropout["default"] = nn.FeatureAlphaDropout(0.5)


def hook_base_backward(model, layer):
    layer.base_layer.register_full_backward_hook(lambda *_: None)


def hook_dropout(model, layer):
    layer.lora_dropout["default"].register_forward_hook(lambda module, inputs, output: output * 2)


CHANGES = [
    merge, train_base, hook, hook_base, hook_base_backward, hook_dropout, another_forward, no_cast, dropout_of_features,
]  # fmt: skip


@pytest.mark.parametrize(("change", "name"), by_turns(CHANGES, ["self_attn.q_proj", "mlp.up_proj"]))
def test_what_runs_pefts_forward(change, name, calls):
    """One layer in a state that the ops do not know, changed after patching: the others stay on them."""
    plain, model = wrapped(tiny_model()), wrapped(tiny_model())
    patch(model, LORA_ONLY)
    for each in (plain, model):
        change(each, each.get_submodule(f"base_model.model.model.layers.1.{name}"))
    torch.manual_seed(5)
    loss, gradients = loss_and_gradients(model)
    in_mlp = "mlp" in name
    assert calls == {"lora_linears": 1 + in_mlp, "lora_linear": 4, "lora_mlp": 2 - in_mlp, "peft": 1}
    torch.manual_seed(5)
    want_loss, want = loss_and_gradients(plain)
    assert loss == pytest.approx(want_loss, rel=1e-6)
    assert_same_gradients(gradients, want)


def test_disabled_adapters_are_the_base_model(calls):
    model, base = wrapped(tiny_model()), tiny_model()
    patch(model, LORA_ONLY)
    with model.disable_adapter(), torch.no_grad():
        torch.testing.assert_close(model(**masked_batch()).loss, base(**masked_batch()).loss)
    assert calls == {"peft": 14}
    loss_and_gradients(model)
    assert calls == {"peft": 14, "lora_linears": 2, "lora_linear": 2, "lora_mlp": 2}


@pytest.mark.parametrize(
    ("name", "kind"),
    [("gate_proj", "forward_hook"), ("down_proj", "full_backward_hook"), ("act_fn", "forward_pre_hook"),
     ("down_proj", "full_backward_pre_hook"), ("act_fn", "full_backward_hook")],
)  # fmt: skip
def test_hooks_on_an_mlps_children_run(name, kind):
    """A layer with a hook is called, so that the hook sees what it would."""
    model, seen = wrapped(tiny_model()), []
    patch(model, LORA_ONLY)
    layer = model.base_model.model.model.layers[0].mlp.get_submodule(name)
    getattr(layer, f"register_{kind}")(lambda *_: seen.append(name))
    loss_and_gradients(model)
    assert len(seen) == 1


REASONS = {
    "dora": ({"use_dora": True}, "DoraLinearVariant, not plain LoRA"),
    "everything dropped": ({"lora_dropout": 1.0}, "lora_dropout is 1.0, with which nothing is left"),
    "lora_bias": ({"lora_bias": True}, r"an adapter has a bias \(lora_bias\)"),
}


@pytest.fixture
def seeds(monkeypatch) -> list[torch.Tensor]:
    """The seeds that ops draw, in order."""
    drawn: list[torch.Tensor] = []
    draw = _low_rank.draw_seed

    def drawing(x: torch.Tensor) -> torch.Tensor:
        drawn.append(draw(x))
        return drawn[-1]

    monkeypatch.setattr(_low_rank, "draw_seed", drawing)
    return drawn


class Masked(nn.Dropout):
    """PEFT's dropout with the mask that one of our ops made."""

    def __init__(self, p: float, seed: torch.Tensor, stream: int):
        super().__init__(p)
        self.seed, self.stream = seed, stream

    def forward(self, input):
        threshold = round(self.p * LEVELS)
        rows = input.flatten(0, -2)
        mask = kept(self.seed, self.stream, (rows.shape[0], rows.shape[1]), threshold).view(input.shape)
        return input.where(mask, 0) / (1 - threshold / LEVELS)


# The layers that read their dropout from one seed, in the order of their masks.
OPS = (["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], ["self_attn.o_proj"],
       ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"])  # fmt: skip


def test_dropout_is_peft_s_with_other_masks(kernels, seeds, calls):
    """The loss and gradients of PEFT's own forward with our masks; in eval mode there are none."""
    plain, model = (wrapped(tiny_model(), lora_dropout=0.3) for _ in range(2))
    assert not patch(model, LORA_ONLY).report.left_alone
    got = loss_and_gradients(model)
    assert calls == {"lora_linears": 2, "lora_linear": 2, "lora_mlp": 2} and len(seeds) == 2 * len(OPS)
    assert len({int(seed) for seed in seeds}) == len(seeds)
    places: Any = itertools.product(plain.base_model.model.model.layers, OPS)
    for seed, (layer, names) in zip(seeds, places, strict=True):
        for stream, name in enumerate(names):
            layer.get_submodule(name).lora_dropout["default"] = Masked(0.3, seed, stream).train()
    want = loss_and_gradients(plain)
    assert got[0] == pytest.approx(want[0], rel=1e-6)
    assert_same_gradients(got[1], want[1])
    for each in (plain, model):
        for module in each.modules():
            if isinstance(module, LoraLinear):
                module.lora_dropout["default"] = nn.Dropout(0.3)
        each.eval()
    assert_as_plain(model, plain)


@pytest.mark.parametrize("reentrant", [pytest.param(True, marks=pytest.mark.slow), False])
def test_checkpointing_makes_the_same_masks(kernels, reentrant):
    """Layers that run a second time in the backward: gradients as without, with torch's seed alone."""
    losses, gradients = [], []
    for checkpoints in (False, True):
        model = wrapped(tiny_model(), lora_dropout=0.3)
        model.enable_input_require_grads()
        if checkpoints:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        patch(model, LORA_ONLY)
        torch.manual_seed(7)
        loss = model(**masked_batch()).loss
        loss.backward()
        losses.append(loss.item())
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert_same_gradients(*gradients)


def test_dropout_in_place_is_pefts():
    model = wrapped(tiny_model(), target_modules=["q_proj"], lora_dropout=0.1)
    for module in model.modules():
        if isinstance(module, LoraLinear):
            module.lora_dropout["default"] = nn.Dropout(0.1, inplace=True)
    assert "drops out by Dropout(p=0.1, inplace=True)" in patch(model).report.left_alone["LoRA on q_proj"]


@pytest.mark.parametrize("case", REASONS)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_the_report_says_why(case, training):
    """Also of a model in eval mode, which is trained later."""
    options, reason = REASONS[case]
    model = wrapped(tiny_model("phi"), **{**options, "target_modules": ["q_proj"]}).train(training)
    report = patch(model).report
    assert "LoRA linear" not in report.swapped and list(report.left_alone) == ["LoRA on q_proj"]
    assert re.search(f"PEFT's forward runs: .*{reason}", report.left_alone["LoRA on q_proj"])


def test_other_kinds_of_lora_layers_are_reported():
    model = wrapped(tiny_model(), target_modules=["embed_tokens", "q_proj"])
    report = patch(model).report
    assert report.swapped["LoRA linear"] == 2
    assert report.left_alone == {"LoRA on embed_tokens": "PEFT's forward runs: lora.Embedding is another kind of layer"}


def test_the_output_head_is_left_to_the_loss():
    model = wrapped(tiny_model(), target_modules=["lm_head", "q_proj"])
    report = patch(model).report
    assert report.swapped["LoRA linear"] == 2
    assert "forward" not in vars(model.get_output_embeddings())


def test_a_peft_that_computes_something_else_is_left_alone(monkeypatch):
    forward = LoraLinear.forward
    monkeypatch.setattr(LoraLinear, "forward", lambda self, x: forward(self, x) * 1.001)
    monkeypatch.setattr(patch_lora, "_disproof", patch_lora._disproof.__wrapped__)
    model = wrapped(tiny_model(), target_modules=["q_proj"])
    report = patch(model).report
    assert "LoRA linear" not in report.swapped
    assert "values differ" in report.left_alone["LoRA on q_proj"]


def test_the_proof_leaves_the_random_state_alone():
    state = torch.get_rng_state()
    assert patch_lora._disproof.__wrapped__() is None
    assert torch.equal(torch.get_rng_state(), state)


def test_nothing_else_is_touched_and_undo_gives_all_back():
    model, other = wrapped(tiny_model()), wrapped(tiny_model())
    before = [{name: id(value) for name, value in vars(m).items()} for m in model.modules()]
    forward = LoraLinear.forward
    patched = patch(model)
    assert LoraLinear.forward is forward
    assert not any("forward" in vars(m) for m in other.modules())
    patched.undo()
    assert [{name: id(value) for name, value in vars(m).items()} for m in model.modules()] == before


def test_a_copy_runs_on_its_own_tensors():
    model = wrapped(tiny_model())
    patch(model, LORA_ONLY)
    twin = copy.deepcopy(model)
    for name, parameter in twin.named_parameters():
        if "lora_B" in name:
            parameter.data.zero_()
    want = tiny_model()(**masked_batch()).loss.item()
    assert loss_and_gradients(twin)[0] == pytest.approx(want, rel=1e-6) != loss_and_gradients(model)[0]


@pytest.mark.parametrize(("adapters", "autocast"), [(torch.float32, True), (torch.bfloat16, False)], ids=str)
def test_half_precision_within_twice_pefts_error(adapters, autocast):
    """A bf16 base with PEFT's default adapters (fp32) and with bf16 ones: gradients against the model in fp64."""
    base = tiny_model(dtype=torch.bfloat16)
    plain = wrapped(base, autocast_adapter_dtype=adapters == torch.float32)
    truth = copy.deepcopy(plain).double()
    model = copy.deepcopy(plain)
    patch(model, LORA_ONLY)
    results = []
    for each in (truth, plain, model):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast and each is not truth):
            loss = each(**masked_batch()).loss
        results.append(named_gradients(each, loss))
    want, theirs, ours = results
    assert {g.dtype for g in ours.values()} == {adapters}
    error = [sum((g[name].double() - want[name]).norm() ** 2 for name in want) for g in (ours, theirs)]
    assert error[0] <= 4 * error[1]


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_qlora(dtype, calls):
    """A 4-bit base: the same loss and gradients, and no dense weight is kept for the backward."""
    from bitsandbytes.nn import Linear4bit  # pyright: ignore[reportMissingImports]

    device = "cuda" if torch.cuda.is_available() else "cpu"

    def quantised() -> Any:
        model = tiny_model(dtype=dtype, hidden_size=64, intermediate_size=64)
        for name, module in list(model.model.named_modules()):
            if isinstance(module, nn.Linear):
                layer = Linear4bit(module.in_features, module.out_features, bias=False, compute_dtype=dtype)
                layer.load_state_dict(module.state_dict())
                parent, _, child = name.rpartition(".")
                setattr(model.model.get_submodule(parent), child, layer)
        model.is_loaded_in_4bit = True  # pyright: ignore[reportArgumentType]
        return wrapped(model.to(device))  # pyright: ignore[reportArgumentType]

    plain, model = quantised(), quantised()
    report = patch(model, LORA_ONLY).report
    assert report.swapped["LoRA linear"] == 14 and report.swapped["LoRA MLP"] == 2, str(report)
    batch = {name: x.to(device) for name, x in masked_batch().items()}
    losses = [each(**batch).loss for each in (plain, model)]
    want, got = (named_gradients(each, loss) for each, loss in zip((plain, model), losses, strict=True))
    tolerance = 1e-5 if dtype == torch.float32 else 0.1  # between two orders of rounding
    torch.testing.assert_close(losses[1], losses[0], rtol=tolerance, atol=0)
    assert_same_gradients(got, want, tolerance)
    assert calls == {"lora_linears": 2, "lora_linear": 2, "lora_mlp": 2}
