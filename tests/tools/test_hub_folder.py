"""The folder in the layout of Hugging Face's kernel hub: its files alone, and in `kernels` where that is installed."""

import copy
import importlib
import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from tiny import assert_same_gradients, masked_batch, named_gradients, tiny_model
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.utils.import_utils import is_kernels_available

from liger_trainer.cli import main
from liger_trainer.kernels.linear_log_probs import linear_log_probs, linear_log_probs_reference
from liger_trainer.tools.hub_folder import BACKENDS, write_hub_folder

installed = pytest.mark.skipif(not is_kernels_available(), reason="needs Hugging Face's kernels, see CONTRIBUTING.md")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("hub")
    assert write_hub_folder(path) == [f"torch-{backend}" for backend in BACKENDS]
    return path


@pytest.fixture(scope="module")
def package(folder):
    """The package as `kernels` imports it: by its id, without its parents."""
    path = folder / "build" / "torch-cpu"
    name = json.loads((path / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, path / "__init__.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    for loaded in [x for x in sys.modules if x.partition(".")[0] == name]:
        del sys.modules[loaded]


def test_what_each_variant_says_of_itself(folder):
    read = {path.parent.name: json.loads(path.read_text()) for path in folder.glob("build/*/metadata.json")}
    assert {name: x["backend"] for name, x in read.items()} == {f"torch-{b}": {"type": b} for b in BACKENDS}
    assert len({x["id"] for x in read.values()}) == len(BACKENDS) and all(x["id"].isidentifier() for x in read.values())
    assert all(x["name"] == "liger-trainer" and x["license"] == "Apache-2.0" for x in read.values())


def test_it_is_complete_and_needs_nothing_of_ours(package):
    assert {"rms_norm", "rope", "qk_norm_rope", "gated_linear", "linear_cross_entropy", "layers"} <= set(
        package.__all__
    )
    for name in package.__all__:
        value = getattr(package, name)
        assert (value.__name__ if name == "layers" else value.__module__).partition(".")[0] == package.__name__
    text = "".join(path.read_text() for path in Path(package.__file__).parent.glob("*.py"))
    assert "import liger_trainer" not in text and "liger_trainer::" not in text


def test_compiled_ops_of_folder_and_package_do_not_meet(package):
    inputs = {"hidden": torch.randn(5, 8), "weight": torch.randn(11, 8), "labels": torch.arange(5)}
    want = linear_log_probs_reference(**inputs).log_prob
    for op in (package.linear_log_probs, linear_log_probs, package.linear_log_probs):
        compiled = torch.compile(lambda op=op, **x: op(**x).log_prob, backend="aot_eager")
        torch.testing.assert_close(compiled(**inputs), want)


LAYERS = {  # family, attribute of a decoder layer
    "RMSNorm": ("llama", "input_layernorm"),
    "GemmaRMSNorm": ("gemma2", "input_layernorm"),
    "SwiGLUMLP": ("llama", "mlp"),
    "GeGLUMLP": ("gemma2", "mlp"),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_layer_stands_for_that_of_transformers(package, name, dtype):
    family, attribute = LAYERS[name]
    module = getattr(tiny_model(family).to(dtype).model.layers[0], attribute)
    for parameter in module.parameters():
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    x = torch.randn(2, 5, 32, dtype=dtype)
    truth = copy.deepcopy(module).double()(x.double())
    got, plain = getattr(package.layers, name).forward(module, x), module(x)
    assert got.dtype == plain.dtype == dtype
    error, of_plain = ((y.double() - truth).abs().max() for y in (got, plain))
    assert error <= 2 * of_plain + torch.finfo(dtype).eps * truth.abs().max()


@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
def test_the_rotation(package, unsqueeze_dim):
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    if unsqueeze_dim == 2:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    angles = torch.randn(2, 5, 4).repeat(1, 1, 2)
    cos, sin = angles.cos(), angles.sin()
    want = apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
    torch.testing.assert_close(package.layers.Rotary()(q, k, cos, sin, unsqueeze_dim), want)
    with pytest.raises(ValueError, match="unsqueeze_dim must be 1, .* or 2, got 3"):
        package.layers.Rotary()(q, k, cos, sin, 3)


def test_layers_have_a_forward_and_nothing_else(package):
    """What `kernels` checks before it takes one."""
    for name in package.layers.__all__:
        layer = getattr(package.layers, name)
        assert layer.__init__ is torch.nn.Module.__init__
        assert set(dir(layer)) - set(dir(torch.nn.Module)) == {"has_backward", "can_torch_compile"}


@installed
def test_kernels_loads_it_and_replaces_layers(folder):
    from transformers.integrations.hub_kernels import replace_kernel_forward_from_hub

    kernels = importlib.import_module("kernels")
    loaded = kernels.get_local_kernel(folder)
    x = torch.randn(3, 8)
    torch.testing.assert_close(loaded.rms_norm(x, torch.ones(8)), torch.nn.functional.rms_norm(x, (8,), eps=1e-6))
    plain = tiny_model()
    model = copy.deepcopy(plain)
    replace_kernel_forward_from_hub(type(model.model.layers[0].mlp), "MLP")
    names = {"RMSNorm": "RMSNorm", "rotary_pos_emb": "Rotary", "MLP": "SwiGLUMLP"}
    mapping = {name: {"cpu": kernels.LocalLayerRepository(folder, layer_name=layer)} for name, layer in names.items()}
    with kernels.use_kernel_mapping(mapping, inherit_mapping=False):
        kernels.kernelize(model, mode=kernels.Mode.TRAINING)
    layer = model.model.layers[0]
    replaced = [layer.input_layernorm, layer.mlp, *layer.self_attn._kernel_funcs.values()]
    assert all(vars(x)["forward"].__func__.__module__.startswith("_liger_trainer_cpu_") for x in replaced)
    want, got = (x(**masked_batch()).loss for x in (plain, model))
    torch.testing.assert_close(got, want)
    assert_same_gradients(named_gradients(model, got), named_gradients(plain, want))


@installed
@pytest.mark.gpu
def test_use_kernels_takes_it_from_the_folder(folder, tmp_path):
    """transformers takes local kernels on accelerators alone."""
    from transformers import AutoModelForCausalLM, KernelConfig

    tiny_model().save_pretrained(tmp_path)
    names = {"RMSNorm": f"{folder}:RMSNorm", "rotary_pos_emb": f"{folder}:Rotary"}
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, device_map="cuda")
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, device_map="cuda", use_kernels=True, kernel_config=KernelConfig(names, use_local_kernel=True)
    )
    assert vars(model.model.norm)["forward"].__func__.__module__.startswith("_liger_trainer_cuda_")
    batch = {name: x.cuda() for name, x in masked_batch().items()}
    torch.testing.assert_close(model.train()(**batch).loss, plain.train()(**batch).loss, rtol=1e-5, atol=1e-5)


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(["hub-kernels", *words])
    return int(stopped.value.code or 0)


def test_the_command(tmp_path, capsys):
    out = tmp_path / "out"
    assert run(str(out)) == 0 and "Wrote torch-cpu, torch-cuda" in capsys.readouterr().out
    assert run(str(out)) == 2 and "exists and is not empty" in capsys.readouterr().err
    (out / "build" / "torch-cpu" / "rope.py").unlink()
    assert run(str(out), "--force") == 0 and (out / "build" / "torch-cpu" / "rope.py").is_file()
    other = tmp_path / "other"
    other.mkdir()
    (other / "mine.txt").write_text("kept")
    assert run(str(other), "--force") == 2 and (other / "mine.txt").is_file()
