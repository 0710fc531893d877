"""doctor: what would be patched, from a configuration alone."""

import json
import re
from pathlib import Path

import pytest
import transformers
from commands import call
from steps import only
from tiny import tiny_model
from transformers import AutoModelForCausalLM

from docs import models_page
from liger_trainer.errors import ConfigError
from liger_trainer.extras import doctor
from liger_trainer.patching.patcher import PatchOptions, patch

DOCS = Path(__file__).parents[2] / "docs" / "models.md"
OTHERS = ("MoonshineForConditionalGeneration", "T5ForConditionalGeneration", "ChameleonForConditionalGeneration")


def test_a_model_type():
    report = doctor.diagnose(doctor.config_of("llama"))
    assert report.model == "llama" and not report.left_alone
    assert report.swapped == {"rope": 32, "RMSNorm": 65, "SwiGLU": 32, "shared input": 64, "fused loss": 1}


def test_the_demo_model_need_not_be_built(tmp_path, monkeypatch):
    monkeypatch.setenv("LIGER_TRAINER_CACHE", str(tmp_path / "empty"))
    report = doctor.diagnose(doctor.config_of("demo:smollm2-135m-instruct"))
    assert report.swapped["SwiGLU"] == 30 and not report.left_alone and not (tmp_path / "empty").exists()
    with pytest.raises(ConfigError, match="No demo is called 'demo:smollm'. Choose from: demo:smollm2-135m-instruct"):
        doctor.config_of("demo:smollm")


def test_a_directory_needs_no_weights_and_gives_the_report_of_the_model(tmp_path, monkeypatch):
    model = tiny_model("qwen3")
    model.config.save_pretrained(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]
    built, from_config = [], AutoModelForCausalLM.from_config
    monkeypatch.setattr(
        AutoModelForCausalLM, "from_config", lambda config: built.append(from_config(config)) or built[0]
    )
    report = doctor.diagnose(doctor.config_of(str(tmp_path)))
    assert str(report) == str(patch(model).report)
    assert {parameter.device.type for parameter in built[0].parameters()} == {"meta"}
    assert all("forward" not in vars(module) for module in built[0].modules())  # and it is given back as it was


def test_code_of_a_model_is_neither_run_nor_offered_to_be_run(tmp_path, monkeypatch):
    """Without trust_remote_code=False transformers asks on the terminal, and takes y for an answer."""
    auto_map = {"AutoConfig": "code.Config"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "of-its-own", "auto_map": auto_map}))
    (tmp_path / "code.py").write_text("raise SystemExit('the code of the model was run')")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(ConfigError, match="custom code"):
        doctor.config_of(str(tmp_path))


def test_options_and_a_model_with_nothing_to_patch():
    report = doctor.diagnose(doctor.config_of("llama4_text"), PatchOptions(**only("geglu")))
    assert not report.swapped and "Llama4TextExperts" in report.left_alone


@pytest.mark.parametrize(
    ("family", "reason"), [("bart", "from stored logits"), ("higgs_audio_v2", "no output embeddings")]
)
def test_a_loss_that_is_left_alone_has_a_reason(family, reason):
    """A model computes its loss itself; a head is no output embedding."""
    config = doctor.config_of(family)
    if family == "bart":
        config.encoder_layers = config.decoder_layers = 1
    report = doctor.diagnose(config)
    assert reason in report.left_alone["loss"] and "fused loss" not in report.swapped


def test_classes_that_are_no_causal_lm_of_the_auto_class(tmp_path):
    report = doctor.diagnose(doctor.config_of("moonshine"))
    assert report.swapped["fused loss"] == 1 and doctor.family_of(doctor.config_of("moonshine")).endswith("Generation")
    config = doctor.config_of("gpt2")
    config.n_layer = 1
    config.architectures = ["GPT2DoubleHeadsModel"]  # of a checkpoint, before what its model type stands for
    config.save_pretrained(tmp_path)
    assert "fused loss" not in doctor.diagnose(doctor.config_of(str(tmp_path))).swapped
    config.architectures = ["GPT2ForSequenceClassification"]  # has no such head
    assert doctor.diagnose(config).swapped["fused loss"] == 1


def test_unknown_models_are_errors_with_a_hint(tmp_path):
    with pytest.raises(ConfigError, match=r"'lama' is no directory.*Did you mean llama, "):
        doctor.config_of("lama")
    with pytest.raises(ConfigError, match="is no directory with a config.json"):
        doctor.config_of(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_model"}))
    with pytest.raises(ConfigError, match="no_such_model"):
        doctor.config_of(str(tmp_path))
    with pytest.raises(ConfigError, match=r"has no causal LM for a ViTConfig\. patch\(model\) takes any model"):
        doctor.diagnose(doctor.config_of("vit"))


def test_the_command(capsys):
    code, out, _ = call(capsys, "doctor", "llama4_text")
    assert code == 0
    assert "Llama4ForCausalLM" in out and "RMSNorm" in out and "its experts run by a loop" in " ".join(out.split())
    assert "Left alone: none." in call(capsys, "doctor", "llama")[1]


@pytest.fixture(scope="module")
def some():
    """What `--all` finds where transformers has these alone: all of it would take a minute."""
    every = doctor.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    names = {family: every[family] for family in ("llama", "llama4_text", "reformer")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doctor, "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", names)
        patch.setattr(doctor, "other_classes", lambda: [*OTHERS])
        return doctor.diagnose_all()


def test_other_classes_have_a_causal_lm_head_too(monkeypatch):
    left_out = ["Wav2Vec2ForCTC", "LlamaForCausalLM", "MoonshinePreTrainedModel", "pipeline"]
    monkeypatch.setattr(doctor, "dir", lambda module: [*OTHERS, *left_out], raising=False)
    assert doctor.other_classes() == [*OTHERS]


def test_every_family(some, capsys, monkeypatch):
    monkeypatch.setattr(doctor, "diagnose_all", lambda: some)
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = call(capsys, "doctor", "--all")
    shown = ("llama", "llama4_text", "reformer", "SwiGLU", "fused", "Llama4TextExperts", "is_decoder=True")
    assert code == 0 and [word for word in shown if word not in out] == []


def test_the_page_of_models(some):
    out = models_page.page(some)
    assert f"transformers {transformers.__version__}" in out
    assert "Of 3 families 2 can be built" in out and "norms of 2, the MLPs or experts of 2" in out
    assert "| llama | RMSNorm | SwiGLU | rope |  | fused |  |" in out
    # of Llama and Llama 4 each: norm, MLP, attention; an L2 norm; Llama 4's experts are left alone
    words = "norms, MLPs, experts, convolutions and attention with a rotation"
    assert f"These families have 8 classes of {words}: 1 (12 %)" in out
    assert "Of 3 other classes with a causal-LM head 2 can be built" in out and "loss, which no longer stores" in out
    assert "| MoonshineForConditionalGeneration | LayerNorm |" in out and "| T5ForConditionalGeneration | " in out
    assert re.search(r"\| loss \| .*does not call `loss_function`.* \| T5ForConditionalGeneration \|", out)
    assert re.search(r"\| Llama4TextExperts \| its experts run by a loop .* \| llama4_text \|", out)
    assert "Not compared" not in out
    assert re.search(r"## Not built\n.*\| reformer \| .*is_decoder.*\| ChameleonFor", out, re.DOTALL)


def test_classes_that_no_test_compares_are_listed_with_the_reason():
    diagnosis = doctor.Diagnosis("rag", "RagTokenForGeneration", problem="no default")
    assert "## Not compared\n" in (page := models_page.markdown([diagnosis]))
    assert f"| RagTokenForGeneration | {models_page.NOT_COMPARED['RagTokenForGeneration']} |" in page


DOCUMENTED = ("gemma2", "mamba2", "MoonshineForConditionalGeneration", "T5ForConditionalGeneration")
MORE = ("mixtral", "bart", "cohere2", "arcee", "Florence2ForConditionalGeneration")


@pytest.mark.parametrize("name", [*DOCUMENTED, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_the_documented_table_is_the_commands(some, name):
    text = DOCS.read_text(encoding="utf-8")
    (version,) = re.findall(r"transformers (\d\S+), with the family's default", text)
    if version != transformers.__version__:
        pytest.skip(f"the table is that of transformers {version}")
    reports = {diagnosis.name: diagnosis.report for diagnosis in some}
    if name not in reports:
        family = name in doctor.CONFIG_MAPPING
        config = doctor.config_of(name) if family else getattr(transformers, name).config_class()
        reports[name] = doctor.diagnose(config)
    for row in {name, "llama", "llama4_text"}:
        assert f"\n| {row} | {' | '.join(doctor.cells(reports[row]).values())} |\n" in text
    for row, why in models_page.NOT_COMPARED.items():
        assert f"\n| {row} | {why} |\n" in text
