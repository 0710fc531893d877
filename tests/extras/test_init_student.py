"""`init-student`: what importance measures, what narrowing keeps, and what the command writes and refuses."""

import json
import re
import shlex
from pathlib import Path

import commands
import pytest
import torch
import torch.nn.functional as F
from commands import done, refused, write_rows
from quick_cases import slow_but
from tiny import VOCAB, WORDS, divergence_by_hand, spread_weights, tiny_model, tiny_tokenizer
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, Phi3Config

from liger_trainer.config.run_config import load_run_config
from liger_trainer.errors import ConfigError, DataError
from liger_trainer.extras.students.drop_layers import drop_layers
from liger_trainer.extras.students.importance import Importance, eliminate_layers, measure_importance
from liger_trainer.extras.students.make import build_student
from liger_trainer.extras.students.narrowing import layer_mlps, narrow_mlps
from liger_trainer.run.data.datasets import load_run_datasets

LAYERS, IDENTITY = 5, 2
SIZES = {"num_hidden_layers": LAYERS}


def planted(family: str = "llama", **options):
    """A model whose layer IDENTITY adds a thousandth of what the others add."""
    model = tiny_model(family, **SIZES, **options)
    layer = model.model.layers[IDENTITY]
    with torch.no_grad():
        for name, scale in (("input_layernorm", 1), ("self_attn.o_proj", 1e-3), ("mlp.down_proj", 1e-3)):
            layer.get_submodule(name).weight.mul_(scale)
        for name in ("post_attention_layernorm", "post_feedforward_layernorm"):
            if family == "gemma2":  # which normalises what a layer adds: (1 + weight) is the scale
                layer.get_submodule(name).weight.fill_(1e-3 - 1)
    return model


def batches() -> list[dict[str, torch.Tensor]]:
    """Three padded rows, and one row without a mask."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCAB, (3, 11), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, -4:] = mask[2, -1:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    return [
        {"input_ids": ids, "attention_mask": mask, "labels": labels},
        {"input_ids": torch.randint(VOCAB, (1, 6), generator=generator)},
    ]


def by_hand(model, rows: list[torch.Tensor]) -> list[float]:
    """Row by row without padding; the last hidden state is taken before the final norm."""
    model.model.norm = nn.Identity()
    cosines: list[list[torch.Tensor]] = [[] for _ in range(LAYERS)]
    for row in rows:
        states = model(row[None], output_hidden_states=True).hidden_states
        for layer in range(LAYERS):
            cosines[layer].append(F.cosine_similarity(states[layer][0], states[layer + 1][0], dim=-1))
    return [1 - torch.cat(values).mean().item() for values in cosines]


def rows_of(inputs: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
    padded, plain = inputs
    return [ids[m.bool()] for ids, m in zip(padded["input_ids"], padded["attention_mask"], strict=True)] + [
        *plain["input_ids"]
    ]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@torch.no_grad()
def test_importance_is_one_minus_the_mean_cosine_over_tokens(family):
    """A layer that is nearly the identity ranks lowest."""
    model = planted(family)
    measured = measure_importance(model.train(), batches())
    assert model.training and not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert measured.tokens == 11 + 7 + 10 + 6
    assert measured.layers == pytest.approx(by_hand(model.eval(), rows_of(batches())), abs=2e-6)
    others = [value for index, value in enumerate(measured.layers) if index != IDENTITY]
    assert measured.layers[IDENTITY] < 0.01 * min(others)
    for count in range(1, LAYERS):
        kept = measured.most_important(count)
        assert kept == sorted(set(kept)) and len(kept) == count and IDENTITY not in kept
        assert min(measured.layers[i] for i in kept) >= max(measured.layers[i] for i in range(LAYERS) if i not in kept)


@torch.no_grad()
def test_units_are_ranked_by_their_mean_absolute_activation():
    model = tiny_model("llama", **SIZES)
    downs = [mlp.down for mlp in layer_mlps(model)]
    measured = measure_importance(model, batches(), downs)
    inputs: list[list[torch.Tensor]] = [[] for _ in range(LAYERS)]
    for index, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_pre_hook(lambda _, args, index=index: inputs[index].append(args[0][0]))
    for row in rows_of(batches()):
        model(row[None])
    for layer, xs, units in zip(model.model.layers, inputs, measured.units, strict=True):
        x = torch.cat(xs)
        active = (F.silu(layer.mlp.gate_proj(x)) * layer.mlp.up_proj(x)).abs().mean(0)
        torch.testing.assert_close(units.float(), active, rtol=1e-4, atol=1e-6)


def with_layers_that_return(output):
    return lambda model: model.model.layers[1].register_forward_hook(output)


def wrap_head(model):
    model.lm_head = nn.Sequential(model.lm_head)


@pytest.mark.parametrize(
    ("measure", "change", "error", "message"),
    [
        (lambda model: measure_importance(model, []), lambda model: None, DataError, "no token"),
        (lambda model: measure_importance(model, batches()), with_layers_that_return(lambda *_: "nothing"), ConfigError,
         "LlamaDecoderLayer does not"),
        (lambda model: eliminate_layers(model, supervised(), 1), with_layers_that_return(lambda *a: (a[-1], None)),
         ConfigError, "LlamaDecoderLayer does not take .* block_influ"),
        (lambda model: eliminate_layers(model, supervised(), 1), wrap_head, ConfigError,
         "head of LlamaForCausalLM is no linear map"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_refused(measure, change, error, message):
    model = tiny_model("llama")
    change(model)
    with pytest.raises(error, match=message):
        measure(model)


def distance(whole, part, rows) -> float:
    """The forward KL per supervised token, from logits of one row after the other."""
    total, tokens = 0.0, 0
    for row in rows:
        p, q = (model(row[None]).logits[0, :-1].double() for model in (whole, part))
        total += divergence_by_hand(q, p, "forward_kl", 1.0).sum().item()
        tokens += len(row) - 1
    return total / tokens


def supervised() -> list[dict[str, torch.Tensor]]:
    """The batches with labels for every token."""
    return [{"labels": batch["input_ids"], **batch} for batch in batches()]


@pytest.mark.parametrize("family", slow_but(["llama", "llama_tied", "gemma2"], "gemma2"))
@torch.no_grad()
def test_the_layer_that_is_missed_least_is_left_out_each_time(family):
    model = planted(family)
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    reported = []
    left_out = eliminate_layers(model.train(), supervised(), LAYERS - 1, reported.append)
    assert model.training and reported == left_out and left_out[0].layer == IDENTITY
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())
    assert not any("forward" in vars(module) or module._forward_hooks for module in model.modules())
    kept = list(range(LAYERS))
    for one in left_out:
        each = {i: distance(model.eval(), drop_layers(model, keep=[k for k in kept if k != i]), rows_of(batches()))
                for i in kept}  # fmt: skip
        assert one.layer == min(each, key=lambda i: each[i])
        assert one.forward_kl == pytest.approx(each[one.layer], rel=1e-4, abs=1e-7)
        kept.remove(one.layer)


def test_only_supervised_tokens_count():
    model, inputs = planted(), supervised()
    inputs[0]["labels"] = torch.full_like(inputs[0]["labels"], -100)
    inputs[1]["labels"] = inputs[1]["labels"].clone()
    inputs[1]["labels"][:, :4] = -100
    (first,) = eliminate_layers(model, inputs, 1)
    with torch.no_grad():
        row = inputs[1]["input_ids"]
        p, q = (m(row).logits[0, 3:-1].double() for m in (model, drop_layers(model, keep=[0, 1, 3, 4])))
    expected = divergence_by_hand(q, p, "forward_kl", 1.0).mean().item()
    assert first.layer == IDENTITY and first.forward_kl == pytest.approx(expected, rel=1e-4, abs=1e-7)
    with pytest.raises(DataError, match="no supervised token"):
        eliminate_layers(model, inputs[:1], 1)


def phi3():
    """gate and up in one packed layer"""
    config = Phi3Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return spread_weights(AutoModelForCausalLM.from_config(config)).eval()


NARROWED = {
    "llama": lambda: tiny_model("llama", mlp_bias=True),
    "tied": lambda: tiny_model("llama_tied"),
    "gemma2": lambda: tiny_model("gemma2"),
    "packed": phi3,
}


@pytest.mark.parametrize("name", NARROWED)
@torch.no_grad()
def test_the_kept_units_compute_what_they_did(name):
    model = NARROWED[name]()
    generator = torch.Generator().manual_seed(0)
    units = [torch.randperm(48, generator=generator)[:20].sort().values for _ in range(2)]
    narrow = narrow_mlps(model, units)
    assert narrow.config.intermediate_size == 20 and model.config.intermediate_size == 48
    assert all(mlp.down.weight.shape == (32, 20) for mlp in layer_mlps(narrow))
    ids = batches()[0]["input_ids"]
    got = narrow(ids).logits
    for mlp, kept in zip(layer_mlps(model), units, strict=True):
        gone = torch.ones(48, dtype=torch.bool).index_fill(0, kept, False)
        mlp.down.weight[:, gone] = 0
    torch.testing.assert_close(got, model(ids).logits, rtol=1e-5, atol=1e-5)
    same = (narrow.get_output_embeddings().weight is narrow.get_input_embeddings().weight) == (
        name in ("tied", "gemma2")
    )
    assert same and not any(t.is_meta for t in [*narrow.parameters(), *narrow.buffers()])


def test_mlps_that_cannot_be_narrowed():
    for family, path in (("gpt2", "transformer.h.0"), ("mixtral", "model.layers.0")):
        with pytest.raises(ConfigError, match=f"width 48 .* in {path}, found none"):
            layer_mlps(tiny_model(family))
    model = tiny_model("gpt2")
    vars(model.config).pop("intermediate_size")
    with pytest.raises(ConfigError, match="no single intermediate_size"):
        layer_mlps(model)
    with pytest.raises(ConfigError, match="same number for each of 2 layers"):
        narrow_mlps(tiny_model("llama"), [torch.arange(3), torch.arange(4)])


SETTINGS = """\
model_name_or_path: teacher
dataset_name: rows.jsonl
output_dir: out
student_num_layers: 3
per_device_eval_batch_size: 3
max_length: 16
holdout_fraction: 0.25
use_cpu: true
"""


@pytest.fixture(scope="module")
def teachers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("teachers")
    for name, model in (("teacher", planted()), ("gemma", planted("gemma2", sliding_window=4))):
        model.save_pretrained(folder / name)
        tiny_tokenizer().save_pretrained(folder / name)
    return folder


@pytest.fixture
def call(teachers, tmp_path, monkeypatch, capsys):
    """`init-student` in a folder with teachers, rows and a configuration: exit code, stdout in one line, stderr."""
    monkeypatch.chdir(tmp_path)
    for name in ("teacher", "gemma"):
        (tmp_path / name).symlink_to(teachers / name)
    rows = [(WORDS[i : i + 3], WORDS[i + 3 : i + 6 + i % 4]) for i in range(24)]
    write_rows(tmp_path / "rows.jsonl", [{"prompt": " ".join(a), "completion": " " + " ".join(b)} for a, b in rows])
    (tmp_path / "make.yaml").write_text(SETTINGS)

    def run_main(*overrides: str, command: str = "init-student") -> tuple[int, str, str]:
        code, out, err = commands.call(capsys, command, "make.yaml", *overrides)
        return code, " ".join(out.split()), err

    return run_main


def record_in(folder: str) -> dict:
    return json.loads(Path(folder, "student.json").read_text())


def held_out_metrics(student, teacher) -> dict[str, float]:
    """Of the rows that the configuration holds out, one at a time, in plain torch."""
    tokenizer, values = AutoTokenizer.from_pretrained("teacher"), []
    for row in load_run_datasets(load_run_config("make.yaml")).test:
        prompt = len(tokenizer(row["prompt"])["input_ids"])
        ids = torch.tensor([[*tokenizer(row["prompt"] + row["completion"])["input_ids"], tokenizer.eos_token_id]])
        q, p = (model(ids).logits[0, prompt - 1 : -1].double() for model in (student, teacher))
        kls = [divergence_by_hand(q, p, kind, 1.0) for kind in ("forward_kl", "reverse_kl")]
        losses = [F.cross_entropy(x, ids[0, prompt:], reduction="none") for x in (q, p)]
        values.append(torch.stack([*kls, (q.argmax(-1) == p.argmax(-1)).double(), *losses]))
    means = torch.cat(values, 1).mean(1)
    means[3:].exp_()
    names = ("forward_kl", "reverse_kl", "agreement_at_1", "student_perplexity", "teacher_perplexity")
    return dict(zip(names, means.tolist(), strict=True))


@torch.no_grad()
def test_the_most_important_layers_are_kept_bit_for_bit_and_measured(call):
    Path("out-student").mkdir()  # empty: it is taken
    out, _ = done(call())
    record = record_in("out-student")
    kept = record["layers_kept"]
    assert len(kept) == 3 and IDENTITY not in kept and record["teacher"] == "teacher"
    assert min(record["layer_importance"]) == record["layer_importance"][IDENTITY] < 1e-3
    assert record["chosen_by"] == {"student_num_layers": 3, "student_layer_choice": "block_influence"}
    assert record["layers_left_out"] is None
    student, loading = AutoModelForCausalLM.from_pretrained("out-student", output_loading_info=True)
    teacher = AutoModelForCausalLM.from_pretrained("teacher")
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    for layer, old in zip(student.model.layers, kept, strict=True):
        for name, weight in teacher.model.layers[old].state_dict().items():
            assert torch.equal(layer.state_dict()[name], weight)
    assert torch.equal(student.lm_head.weight, teacher.lm_head.weight)
    assert record["metrics"] == pytest.approx(held_out_metrics(student, teacher), rel=1e-4)
    assert record["parameters"]["student"] == student.num_parameters() < teacher.num_parameters()
    assert student.config.use_cache and AutoTokenizer.from_pretrained("out-student").get_vocab()
    assert "dropped" in out and "kept as 0" in out and "forward KL" in out and "agreement@1" in out
    assert not list(Path().glob(".*partial*")) and not Path("out").exists()

    printed = shlex.split(out[out.index("Train it: ") + len("Train it: ") :])
    assert printed == ["liger-trainer", "run", "make.yaml", "model_name_or_path=out-student", "~student_num_layers"]
    settings = load_run_config("make.yaml", printed[3:])
    assert settings["model_name_or_path"] == "out-student" and not settings.drops_layers()

    before = Path("out-student", "student.json").read_bytes()
    refused(call("student_num_layers=2"), 2, "choose another student_output_dir")
    assert Path("out-student", "student.json").read_bytes() == before


def test_greedy_choice_is_recorded_and_the_command_takes_it_out(call):
    Path("make.yaml").write_text(SETTINGS + "student_layer_choice: greedy_kl\n")
    out, _ = done(call())
    assert out.endswith("model_name_or_path=out-student '~student_num_layers' '~student_layer_choice'")
    record = record_in("out-student")
    assert record["chosen_by"] == {"student_num_layers": 3, "student_layer_choice": "greedy_kl"}
    first, second = record["layers_left_out"]
    assert first["layer"] == IDENTITY and f"left out layer {second['layer']}: {second['forward_kl']:.4f} nats" in out
    assert record["layers_kept"] == sorted(set(range(LAYERS)) - {first["layer"], second["layer"]})
    assert record["metrics"]["forward_kl"] == pytest.approx(second["forward_kl"], rel=1e-4)

    # what the file says is taken out, also where the command line has put something in its place
    Path("make.yaml").write_text(SETTINGS.replace("student_num_layers: 3", "keep_every_nth_layer: 2"))
    out, _ = done(call("~keep_every_nth_layer", "keep_layers=[1,2]", "student_output_dir=made"))
    assert out.endswith("run make.yaml model_name_or_path=made '~keep_every_nth_layer'")
    record = record_in("made")  # layers that are named have an importance too
    assert record["layers_kept"] == [1, 2] and len(record["layer_importance"]) == LAYERS
    assert record["intermediate_size"] is None and record["chosen_by"].keys() == {"keep_layers"}


@torch.no_grad()
def test_narrower_too(call):
    out, _ = done(call("student_intermediate_size=16", "student_num_layers=4"))
    record = record_in("out-student")
    assert record["intermediate_size"] == {"teacher": 48, "student": 16} and "narrowed from 48 to 16" in out
    assert all(16 / 48 < share < 1 for share in record["activation_kept"])  # more than any 16 have on average
    student, teacher = (AutoModelForCausalLM.from_pretrained(name) for name in ("out-student", "teacher"))
    for layer, old in zip(student.model.layers, record["layers_kept"], strict=True):
        theirs = teacher.model.layers[old].mlp
        assert layer.mlp.gate_proj.weight.shape == (16, 32)
        same = (layer.mlp.gate_proj.weight[:, None] == theirs.gate_proj.weight).all(-1)
        units = same.int().argmax(1)
        assert same.any(1).all() and torch.equal(units, units.sort().values)
        assert torch.equal(layer.mlp.up_proj.weight, theirs.up_proj.weight[units])
        assert torch.equal(layer.mlp.down_proj.weight, theirs.down_proj.weight[:, units])
        assert torch.equal(layer.self_attn.q_proj.weight, teacher.model.layers[old].self_attn.q_proj.weight)
    assert record["metrics"] == pytest.approx(held_out_metrics(student, teacher), rel=1e-4)


def test_each_kept_layer_keeps_its_own_most_active_units(call):
    generator = torch.Generator().manual_seed(0)
    units = [torch.rand(48, generator=generator, dtype=torch.float64) for _ in range(LAYERS)]
    every_nth = load_run_config("make.yaml", ["~student_num_layers", "keep_every_nth_layer=2"])
    assert build_student(every_nth, planted(), Importance([0.0] * LAYERS, [], 1))[1] == [0, 2, 4]
    config = load_run_config("make.yaml", ["student_intermediate_size=16", "student_num_layers=2"])
    teacher = planted()
    student, kept, shares = build_student(config, teacher, Importance([0.1, 0.9, 0.2, 0.3, 0.8], units, 1))
    assert kept == [1, 4] and shares is not None
    for layer, old, share in zip(student.model.layers, kept, shares, strict=True):
        best = sorted(range(48), key=lambda unit: -units[old][unit])[:16]
        assert torch.equal(layer.mlp.up_proj.weight, teacher.model.layers[old].mlp.up_proj.weight[sorted(best)])
        assert share == pytest.approx(float(units[old][best].sum() / units[old].sum()))


@torch.no_grad()
def test_sliding_and_full_layers_stay_what_they_were_and_generate(call):
    """In bfloat16 on disk, and in no other dtype afterwards; its rows are longer than the sliding window."""
    teacher = AutoModelForCausalLM.from_pretrained("gemma").to(torch.bfloat16)
    teacher.save_pretrained("half")
    tiny_tokenizer().save_pretrained("half")
    out, _ = done(call("model_name_or_path=half"))
    record, student = record_in("out-student"), AutoModelForCausalLM.from_pretrained("out-student")
    kinds = teacher.config.layer_types
    assert len(set(kinds)) == 2 and IDENTITY not in record["layers_kept"]
    assert student.config.layer_types == [kinds[old] for old in record["layers_kept"]]
    assert [layer.self_attn.layer_idx for layer in student.model.layers] == [0, 1, 2]
    assert student.dtype == torch.bfloat16 and record["dtype"] == "bfloat16" and "kept as 0, " in out
    student.float()
    ids = batches()[0]["input_ids"]
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    made = student.generate(ids, use_cache=True, **options)
    assert made.shape == (3, 19) and torch.equal(made, student.generate(ids, use_cache=False, **options))


def test_the_same_configuration_may_distil_from_another_teacher_or_a_cache(call):
    """Whatever the run learns from, the student is compared with what it was made of."""
    done(call("teacher=cache", "teacher_cache_dir=nowhere", "losses=[{type: forward_kl}]"))
    assert record_in("out-student")["metrics"]["forward_kl"] > 0
    several = "teachers=[{name: a, teacher_model_name_or_path: nowhere}, {name: b, teacher_model_name_or_path: none}]"
    done(call(several, "student_output_dir=of-several", "losses=[{type: forward_kl}]"))
    assert record_in("of-several")["metrics"] == record_in("out-student")["metrics"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["~student_num_layers"], "nothing says what the student keeps.*keep_every_nth_layer, keep_layers"),
        (["student_num_layers=5"], "make.yaml|command line: student_num_layers: expected less than 5"),
        (["student_layer_choice=perplexity"], "expected one of block_influence, greedy_kl"),
        (["~student_num_layers", "keep_layers=[0]", "student_layer_choice=greedy_kl"], "no effect without"),
        (["student_intermediate_size=48"], "student_intermediate_size: expected less than 48"),
        (["student_num_layers=0"], "expected a number of at least 1"),
        (["keep_layers=[0]"], "leave keep_every_nth_layer and keep_layers out"),
        (["~student_num_layers", "keep_layers=[7]"], "keep_layers: expected indices from 0 to 4"),
        (["fsdp=full_shard"], "one process; take it out with ~fsdp"),
        (["student_output_dir=teacher"], "teacher is there already and is not empty"),
        (["student_output_dir=rows.jsonl"], "rows.jsonl is there already"),
        (["student_output_dir=rows.jsonl/x"], "not a directory that can be written to"),
        (["WORLD_SIZE"], "without a launcher"),
        (["run", "max_steps=1"], "student_num_layers.*init-student.*~student_num_layers"),
    ],
)
def test_refused_before_weights_are_loaded(call, monkeypatch, overrides, message):
    """Under a launcher too; and a run does not measure."""
    command = "init-student"
    if overrides[0] == "WORLD_SIZE":
        monkeypatch.setenv(overrides.pop(), "2")
    elif overrides[0] == "run":
        command, *overrides = overrides
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("weights were loaded"))
    before = sorted(Path().iterdir())
    code, _, err = call(*overrides, command=command)
    assert code == 2 and re.search(message, " ".join(err.split())), err
    assert sorted(Path().iterdir()) == before


def test_nothing_is_left_of_a_student_that_is_not_finite(call):
    model = planted()
    model.lm_head.weight.data[3] = float("nan")
    model.save_pretrained("broken")
    tiny_tokenizer().save_pretrained("broken")
    before = sorted(Path().iterdir())
    refused(call("model_name_or_path=broken"), 5, "forward_kl")
    assert sorted(Path().iterdir()) == before
