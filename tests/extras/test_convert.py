"""Configurations of five other tools, as their users write them: what they become, and what is lost. All are valid."""

import importlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from convert_corpus import count

from liger_trainer.cli.convert import ForeignTool
from liger_trainer.config.run_config import check_text
from liger_trainer.config.schema import shipped_schema
from liger_trainer.errors import ConfigError
from liger_trainer.extras.convert import Converted, convert
from liger_trainer.trainers.options import ELSEWHERE

FILES = Path(__file__).parent / "foreign_configs"
ORIGINS = [origin.value for origin in ForeignTool]


def table(origin: str):
    return importlib.import_module(f"liger_trainer.extras.convert.{origin}").TOOL


def converted(origin: str, text: str | None = None) -> Converted:
    path = FILES / f"{origin}.yaml"
    return convert(path.read_text() if text is None else text, path.name, table(origin))


def settings(origin: str, text: str) -> dict:
    return converted(origin, text).settings


EXPECTED = {
    "trl": {
        "recipe": "distill", "dtype": "bfloat16", "env": {"WANDB_PROJECT": "small-students"}, "warmup_steps": 0.05,
        "beta": 1.0,  # DistillationConfig's default
        "scale_loss_by_temperature_squared": False,  # TRL does not
        "learning_rate": 2e-5, "temperature": 0.9,
        "lmbda": 1.0,  # always on-policy
        "max_completion_length": 512, "use_vllm": True, "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
        "accelerate_config": "zero2", "num_processes": 4,
    },
    "torchtune": {
        "recipe": "distill", "model_name_or_path": "/tmp/Qwen2-0.5B-Instruct",
        "teacher_model_name_or_path": "/tmp/Qwen2-1.5B-Instruct", "lora_r": 32,
        "lora_target_modules": ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        "losses": [{"type": "forward_kl", "weight": 0.25}, {"type": "ce", "weight": 0.75}],
        "max_steps": 1000,  # 500 in each of two epochs
        "max_grad_norm": 0.0,  # null: not clipped
        "optim": "adamw_torch_fused", "learning_rate": 3e-4, "packing": True, "max_length": 4096,
        "completion_only_loss": False,  # of Alpaca the prompt is learned too, unless said otherwise
        "output_dir": "/tmp/torchtune/qwen2_kd", "bf16": True, "dtype": "bfloat16",
    },
    "axolotl": {
        "recipe": "sft", "model_name_or_path": "HuggingFaceTB/SmolLM2-1.7B-Instruct", "use_peft": True,
        "load_in_4bit": True, "lora_target_modules": "all-linear",
        "datasets": [{"path": "mlabonne/FineTome-100k", "split": "train[:20%]"},
                     {"path": "json", "data_files": "./notes.jsonl"}],
        "holdout_fraction": 0.02, "assistant_only_loss": True, "eval_strategy": "steps",
        "eval_steps": pytest.approx(1 / 6, abs=1e-6),  # twice in each of three epochs
        "save_strategy": "epoch", "attn_implementation": "flash_attention_2", "per_device_train_batch_size": 2,
        "warmup_steps": 0.1, "pad_token": "<|im_end|>",
    },
    "distillkit": {
        "recipe": "distill",
        "losses": [  # weights are divided by their sum, 2
            {"type": "ce", "weight": 0.25}, {"type": "forward_kl", "weight": 0.5},
            {"type": "hidden_cosine", "weight": 0.25, "layers": "uniform"},
        ],
        "temperature": 2.0, "dataset_test_split": "validation", "max_eval_rows": 500, "max_length": 8192,
        "teacher_model_init_kwargs": {"dtype": "bfloat16", "attn_implementation": "flash_attention_2"},
        "gradient_checkpointing_kwargs": {"use_reentrant": False}, "warmup_steps": 0.025,
    },
    "llamafactory": {
        "recipe": "sft", "use_peft": True, "load_in_4bit": True, "lora_r": 16,
        "lora_alpha": 32,  # twice the rank, unless said
        "lora_dropout": 0.0, "lora_target_modules": ["q_proj", "v_proj"],
        "datasets": [{"path": "identity"}, {"path": "my_chats"}],
        "assistant_only_loss": True,  # its masks, whatever the rows are
        "holdout_fraction": 0.1, "max_length": 4096, "packing": True, "dtype": "bfloat16",
    },
}  # fmt: skip
LOST = {
    "trl": set(),
    "torchtune": set(),
    "axolotl": {"chat_template", "early_stopping_patience", "special_tokens.unk_token"},
    "distillkit": set(),
    "llamafactory": {"max_samples"},
}


@pytest.mark.parametrize("origin", ORIGINS)
def test_a_real_configuration(origin):
    result = converted(origin)
    assert {key: result.settings.get(key) for key in EXPECTED[origin]} == EXPECTED[origin]
    assert {finding.key for finding in result.lost} == LOST[origin]
    for finding in result.lost:  # each with the line it stands on
        line = (FILES / finding.where.partition(":")[0]).read_text().splitlines()[int(finding.where.split(":")[1]) - 1]
        assert finding.key.rpartition(".")[2] in line

    assert result.supervised[0].startswith("Supervised: ")
    written = result.to_yaml()
    assert all(f"# {line}\n" in written for line in result.supervised)
    assert yaml.safe_load(written) == json.loads(json.dumps(result.settings))
    assert all(f"#   {finding}" in written for finding in result.lost)
    checked = check_text(written, "converted.yaml")
    assert {key: checked[key] for key in EXPECTED[origin]} == EXPECTED[origin]


@pytest.mark.parametrize("origin", ORIGINS)
def test_a_setting_that_no_table_knows_is_told(origin):
    result = converted(origin, (FILES / f"{origin}.yaml").read_text() + "\nfrobnication: 3\n")
    assert "frobnication: 3: no counterpart is known." in [f"{f.key}: {f.message}" for f in result.lost]


@pytest.mark.parametrize("origin", ORIGINS)
def test_tables_name_keys_that_exist(origin):
    tool, keys = table(origin), shipped_schema().keys
    assert set(tool.names.values()) <= keys.keys()
    told = [set(tool.names), set(tool.values), set(tool.unneeded), set(tool.same), set(tool.unsupported)]
    assert sum(map(len, told)) == len(set.union(*told)), "a name is in two tables"


def test_trl_distillation_and_gkd_start_from_other_defaults():
    teacher = "model_name_or_path: s\nteacher_model_name_or_path: t\ndataset_name: d\n"
    stable = settings("trl", teacher)
    assert (stable["beta"], stable["learning_rate"], stable["lmbda"]) == (1.0, 1e-6, 1.0)
    gkd = converted("trl", teacher + "lmbda: 0.3\nseq_kd: false\nmax_new_tokens: 64\n")
    want = {"beta": 0.5, "lmbda": 0.3, "max_completion_length": 64, "temperature": 0.9, "kd_temperature": 1.0}
    want["last_turn_only"] = True
    assert {key: gkd.settings[key] for key in want} == want and "max_new_tokens" not in gkd.settings
    assert not gkd.lost
    shown = converted("trl", teacher + "log_completions: true\n").lost
    assert [str(finding.message) for finding in shown] == [f"True: {ELSEWHERE['log_completions']}."]
    assert settings("trl", "model_name_or_path: s\ndataset_name: d\n")["recipe"] == "sft"


PART = "data_files: x.json, split: 'train[:5%]'"


@pytest.mark.parametrize(
    ("origin", "text", "key", "value"),
    [
        ("torchtune", "dtype: fp32\n", "bf16", False),
        ("torchtune", "clip_grad_norm: 0.5\n", "max_grad_norm", 0.5),
        ("torchtune", "optimizer: {_component_: torch.optim.AdamW}\n", "weight_decay", 0.01),  # torch's default
        ("torchtune", "optimizer: {_component_: bitsandbytes.optim.PagedAdamW8bit}\n", "optim", "paged_adamw_8bit"),
        ("torchtune", "model: {_component_: torchtune.models.llama3.qlora_llama3_8b}\n", "load_in_4bit", True),
        ("torchtune", "batch_size: 2\n", "gradient_checkpointing", False),  # off unless switched on
        ("torchtune", "kd_loss: {_component_: a.SymmetricKLLoss, sym_kd_ratio: 0.75}\nkd_ratio: 1.0\n", "losses",
         [{"type": "forward_kl", "weight": 0.75}, {"type": "reverse_kl", "weight": 0.25}]),
        ("torchtune", "dataset: {_component_: a.chat_dataset, source: json, data_files: x.json}\n", "dataset_name",
         "x.json"),
        ("torchtune", "batch_size: 2\ntokenizer: {max_seq_len: null}\n", "max_length", None),  # rows are not cut
        ("torchtune", "batch_size: 2\n", "max_length", None),
        ("torchtune", "dataset: {_component_: a.wikitext_dataset}\n", "dataset_text_field", "page"),
        ("torchtune", "dataset: {_component_: a.slimorca_dataset}\n", "assistant_only_loss", True),
        ("torchtune", "dataset: {_component_: a.chat_dataset, source: d, train_on_input: true}\n",
         "assistant_only_loss", None),
        ("axolotl", "datasets: [{path: d, type: chat_template}]\ntrain_on_inputs: true\n", "assistant_only_loss", None),
        ("axolotl", "datasets: [{path: d, type: completion, field: body}]\n", "dataset_text_field", "body"),
        ("axolotl", "bf16: full\n", "bf16", False),
        ("axolotl", "base_model: m\n", "max_length", 512),
        ("axolotl", "base_model: m\n", "warmup_steps", 0.03),
        ("axolotl", "base_model: m\nsaves_per_epoch: 0\n", "save_strategy", "epoch"),
        ("axolotl", "gradient_checkpointing: offload\n", "activation_offloading", True),
        ("axolotl", "datasets: [{path: d, type: completion}]\n", "dataset_name", "d"),
        ("axolotl", "datasets: [{path: d, split: 'train[:5%]'}]\n", "datasets", [{"path": "d", "split": "train[:5%]"}]),
        ("axolotl", "fsdp_version: 2\nfsdp: [full_shard]\n", "accelerate_config", "fsdp2"),
        ("axolotl", "qat: {weight_dtype: int4, group_size: 64}\n", "qat_group_size", 64),
        ("axolotl", "qat: {weight_dtype: nvfp4}\n", "qat", "nvfp4"),
        ("distillkit", "model: m\n", "losses", [{"type": "ce", "weight": 0.5}, {"type": "forward_kl", "weight": 0.5}]),
        ("distillkit", "loss_functions: [{function: jsd, weight: 3.0}]\n", "losses", [{"type": "jsd", "weight": 1.0}]),
        ("distillkit", "loss_functions: [{function: jsd, weight: 3.0}]\n", "beta", 0.5),
        ("distillkit", "layer_mapping: [[1, 4], [6, 12]]\nforce_hidden_state_projection: true\nloss_functions: "
         "[{function: hs_mse, weight: 1.0}, {function: tvd, weight: 1.0}]\n", "losses",
         [{"type": "hidden_mse", "weight": 0.5, "layers": [[0, 3], [5, 11]], "projector": True},
          {"type": "tvd", "weight": 0.5}]),
        ("llamafactory", "dataset: d\nuse_dft_loss: true\n", "loss_type", "dft"),
        ("llamafactory", "dataset: d\nmask_history: true\n", "last_turn_only", True),
        ("llamafactory", "dataset: d\nmask_history: true\n", "assistant_only_loss", None),
        ("llamafactory", "dataset: d\ntrain_on_prompt: true\n", "completion_only_loss", False),
        ("llamafactory", "finetuning_type: lora\nlora_target: all\n", "lora_target_modules", "all-linear"),
        ("llamafactory", "stage: sft\nlogging_steps: 3\n", "lora_r", 8),
        ("llamafactory", "finetuning_type: full\nlogging_steps: 3\n", "use_peft", None),
        ("llamafactory", "disable_gradient_checkpointing: true\n", "gradient_checkpointing", False),
        *((origin, text, "datasets", [{"path": "json", "split": "train[:5%]", "data_files": "x.json"}])
          for origin, text in (  # a part of a split becomes a mixture
            ("torchtune", f"dataset: {{_component_: a.chat_dataset, source: json, {PART}}}\n"),
            ("distillkit", "dataset: {train_dataset: {repo_id: x.json, split: 'train[:5%]'}}\nmodel: m\n"))),
    ],
)  # fmt: skip
def test_one_setting(origin, text, key, value):
    assert settings(origin, text).get(key) == value


@pytest.mark.parametrize(
    ("origin", "text", "reason"),
    [
        ("torchtune", "batch_size: 1\nresume_from_checkpoint: true\n", "checkpoints of torchtune cannot be continued"),
        ("torchtune", "batch_size: 1\noptimizer: {_component_: my.Lion9}\n", "optim: expected one of"),
        ("torchtune", "batch_size: 1\nmax_steps_per_epoch: soon\n", "not what torchtune has here"),
        ("axolotl", "base_model: m\nkd_trainer: true\n", "name a teacher in teacher_model_name_or_path"),
        ("axolotl", "base_model: m\nqat: {weight_dtype: int4, activation_dtype: int8}\n", "neither activation_dtype"),
        ("axolotl", "base_model: m\nadapter: ia3\n", "expected lora or qlora"),
        ("distillkit", "model: m\nteacher: {legacy_logit_compression: {k: 9}}\n", "legacy compression are not read"),
        ("distillkit", "model: m\nlayer_mapping: [[0, 1]]\n", "loss_functions compares no hidden states"),
        ("distillkit", "layer_mapping: [[0, 1]]\nloss_functions: [{function: hs_mse, weight: 1.0}]\nmodel: m\n",
         "layer_mapping names the embeddings"),
        ("llamafactory", "cutoff_len: 9\nval_size: 500\n", "a number of rows"),
    ],
)  # fmt: skip
def test_what_cannot_be_said_here_is_told(origin, text, reason):
    (finding,) = converted(origin, text).lost
    assert reason in finding.message and finding.where == f"{origin}.yaml:2"


VLLM = """\
model: m
teacher: {kind: vllm, base_url: "http://localhost:8000/", model: big, top_k: 256, api_key: "${VLLM_KEY}"}
dataset: {train_dataset: {repo_id: d, split: train}}
output_path: out
sequence_length: 2048
loss_functions: [{function: kl, weight: 1.0, temperature: 2.0, missing_probability_handling: zero}]
"""


def test_logits_that_distillkit_captured():
    compression = "{d: 64, k: 9, exact_k: 9, residual_bins: []}"
    text = f"model: m\nteacher: {{kind: dataset, logprob_compressor: {compression}}}\n"
    result = converted("distillkit", text + VLLM.partition("api_key")[2].partition("\n")[2])
    assert (result.settings["teacher"], result.settings["teacher_cache_dir"]) == ("cache", "teacher_cache")
    assert result.lost == [] and any("cache import CONFIG --from distillkit" in note.message for note in result.notes)
    assert check_text(result.to_yaml(), "converted.yaml")["teacher"] == "cache"


def test_a_teacher_behind_vllm():
    result = converted("distillkit", VLLM)
    assert {key: value for key, value in result.settings.items() if key.startswith("teacher")} == {
        "teacher": "server",
        "teacher_server_base_url": "http://localhost:8000/v1",
        "teacher_server_model": "big",
        "teacher_server_top_k": 256,
        "teacher_server_timeout": 120.0,  # DistillKit's defaults
        "teacher_server_retries": 3,
        "teacher_server_api_key_env": "VLLM_KEY",
    }
    assert result.lost == [] and check_text(result.to_yaml(), "converted.yaml")["teacher"] == "server"
    assert any("are of temperature 1" in note.message for note in result.notes)
    secret = converted("distillkit", VLLM.replace("${VLLM_KEY}", "hunter2"))
    assert "hunter2" not in secret.to_yaml() and any("teacher_server_api_key_env" in str(n) for n in secret.notes)
    assert "teacher_server_api_key_env" not in secret.settings


@pytest.mark.parametrize(
    ("origin", "text", "note"),
    [
        ("torchtune", "dataset: {_component_: a.chat_dataset, source: d, conversation_column: talk}\n",
         "column talk must"),
        ("torchtune", "dataset: {_component_: a.instruct_dataset, source: d}\n", "rows of this form are not read"),
        ("axolotl", "datasets: [{path: d, type: chat_template, field_messages: talk}]\n",
         "the column talk must be called"),
        ("axolotl", "datasets: [{path: d, type: alpaca_chat.load_qa}]\n", "rows of this form are not read"),
        # Alpaca needs no note: none but that no rows are held out
        ("torchtune", "dataset: {_component_: torchtune.datasets.alpaca_dataset}\n", None),
        ("axolotl", "datasets: [{path: d, type: alpaca}]\n", None),
    ],
)  # fmt: skip
def test_what_must_be_checked_about_the_rows_is_told(origin, text, note):
    notes = converted(origin, text).notes
    assert any(note in each.message for each in notes) if note else [each.key for each in notes] == [""]


def from_table(folder: Path, about: dict, text: str = "stage: sft\ndataset: rows\n") -> Converted:
    """Of LLaMA-Factory, whose table of datasets says this about the rows."""
    (folder / "data").mkdir(exist_ok=True)
    (folder / "data" / "dataset_info.json").write_text(json.dumps({"rows": about}))
    return convert(text, str(folder / "theirs.yaml"), table("llamafactory"))


def test_llamafactory_finds_files_in_its_table(tmp_path):
    result = from_table(tmp_path, {"file_name": "chats.jsonl", "formatting": "sharegpt"})
    assert result.settings["dataset_name"] == str(tmp_path / "data" / "chats.jsonl")
    assert not result.lost and [note.key for note in result.notes] == ["freeze_vision_tower", ""]
    assert result.settings["assistant_only_loss"]

    columns = {"prompt": "asked", "history": "history"}
    result = from_table(tmp_path, {"file_name": "chats.jsonl", "columns": columns})
    assert "assistant_only_loss" not in result.settings  # Alpaca: the completion is what is learned anyway
    notes = {note.key.removeprefix("dataset_info.json.rows."): note.message for note in result.notes}
    assert notes["columns.prompt"] == "the column asked must be called instruction."
    assert notes["columns.history"] == "these answers are context here; LLaMA-Factory learns them too."

    result = from_table(tmp_path, {"ms_hub_url": "org/rows"})  # another hub
    assert "dataset_info.json.rows.ms_hub_url" in [finding.key for finding in result.unneeded]
    assert any("neither in a file nor on Hugging Face's hub" in note.message for note in result.notes)


ENTRY = """\
base_model: m
datasets:
  - path: d
    type: chat_template
    revision: 0123abc
    shards: 10
    message_property_mappings: {role: speaker, content: utterance, tool_calls: calls}
    chat_template: llama3
    roles_to_train: [user]
    train_on_eos: all
    frob: {nicate: 3}
"""
INFO = {
    "file_name": "rows.jsonl", "formatting": "sharegpt", "num_samples": 9, "split": "part", "folder": "there",
    "columns": {"messages": "conversations", "system": "orders", "rejected": "worse"},
    "tags": {"user_tag": "customer", "function_tag": "call"}, "ranking": True, "frob": {"nicate": 3},
}  # fmt: skip
DISTILLKIT = """\
model: m
teacher: {kind: hf, path: t, frob: 3}
dataset: {train_dataset: {repo_id: d, revision: abc}, eval_dataset: {repo_id: d, split: test, revision: abc}}
loss_functions: [{function: kl, weight: 1.0, margin: 0.5, frob: {nicate: 3}}]
"""
TORCHTUNE = """\
model: {_component_: torchtune.models.llama3.llama3_8b, lora_rank: 8}
dataset: {_component_: a.chat_dataset, source: d, new_system_prompt: x, column_map: {a: b}, frob: {nicate: 3}}
tokenizer: {prompt_template: t, frob: 3}
checkpointer: {checkpoint_dir: m, adapter_checkpoint: a.pt}
loss: {_component_: torchtune.rlhf.loss.DPOLoss}
"""


@pytest.mark.parametrize(
    ("origin", "text", "left"),
    [
        ("axolotl", ENTRY, {"revision", "shards", "message_property_mappings.tool_calls", "chat_template",
                            "roles_to_train", "train_on_eos", "frob.nicate"}),
        ("llamafactory", "dataset: rows\n", {"num_samples", "columns.system", "columns.rejected", "tags.user_tag",
                                             "tags.function_tag", "ranking", "frob.nicate"}),
        ("distillkit", DISTILLKIT, {"teacher.frob", "dataset.train_dataset.revision", "dataset.eval_dataset.revision",
                                    "loss_functions.0.margin", "loss_functions.0.frob.nicate"}),
        ("torchtune", TORCHTUNE, {"model.lora_rank", "dataset.new_system_prompt", "dataset.column_map.a",
                                  "dataset.frob.nicate", "tokenizer.prompt_template", "tokenizer.frob",
                                  "checkpointer.adapter_checkpoint", "loss._component_"}),
    ],
)  # fmt: skip
def test_what_is_left_at_any_depth_is_told_by_its_path(origin, text, left, tmp_path):
    result = from_table(tmp_path, INFO, text) if origin == "llamafactory" else converted(origin, text)
    prefix = {"axolotl": "datasets.0.", "llamafactory": "dataset_info.json.rows."}.get(origin, "")
    assert {finding.key.removeprefix(prefix) for finding in result.lost} == left
    if origin == "axolotl":
        assert "not speaker and utterance" in result.to_yaml()
    if origin == "llamafactory":
        assert result.settings["datasets"][0].items() >= {"split": "part", "data_dir": "there"}.items()


def test_a_null_means_what_it_means_there():
    rows = "model_name_or_path: s\ndataset_name: d\n"
    trl = converted("trl", rows + "max_length: null\nlearning_rate: null\n")
    assert trl.settings["max_length"] is None and [finding.key for finding in trl.lost] == ["learning_rate"]
    assert settings("llamafactory", "stage: sft\nneftune_noise_alpha: null\ndataset: d\n")["max_length"] == 2048
    assert settings("axolotl", "base_model: m\nsequence_len: null\nseed: null\n")["max_length"] == 512
    assert converted("axolotl", "base_model: m\nrl:\nkd_trainer: false\nearly_stopping_patience: 0\n").lost == []


@pytest.mark.parametrize(
    ("origin", "text", "expected"),
    [
        ("llamafactory", "finetuning_type: full\nbf16: true\n", ("float32", True)),  # trained weights stay in fp32
        ("llamafactory", "finetuning_type: full\npure_bf16: true\nstage: sft\nseed: 1\n", ("bfloat16", False)),
        ("llamafactory", "finetuning_type: full\nseed: 1\n", ("float32", False)),
        ("llamafactory", "seed: 1\n", ("auto", False)),
        ("llamafactory", "fp16: true\n", ("float16", False)),
        ("axolotl", "base_model: m\n", ("bfloat16", None)),  # auto
        ("axolotl", "base_model: m\nbf16: false\n", (None, False)),
        ("axolotl", "base_model: m\nfp16: true\n", ("float16", None)),
        ("torchtune", "batch_size: 1\n", (None, False)),
        ("distillkit", "model: m\n", ("bfloat16", None)),  # with flash attention
        ("distillkit", "model: m\nuse_flash_attention: false\n", (None, None)),
    ],
)
def test_precision(origin, text, expected):
    here = settings(origin, text)
    assert (here.get("dtype"), here.get("bf16")) == expected


@pytest.mark.parametrize("origin", ORIGINS)
def test_that_rows_are_held_out_here_is_told(origin):
    text = {"torchtune": "batch_size: 1\n", "distillkit": "model: m\n", "axolotl": "base_model: m\nval_set_size: 0\n"}
    assert "holdout_fraction" in converted(origin, text.get(origin, "model_name_or_path: m\nseed: 1\n")).to_yaml()
    named = {"axolotl": "val_set_size: 0.1\n", "llamafactory": "val_size: 0.1\n", "trl": "holdout_fraction: 0.1\n"}
    if origin in named:
        assert "no rows are held out" not in converted(origin, named[origin]).to_yaml()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("val_set_size: 0.1\neval_steps: 5\n", ("steps", 5, True)),
        ("val_set_size: 0.1\neval_strategy: epoch\n", ("epoch", None, True)),
        ("val_set_size: 0\neval_steps: 5\n", (None, None, None)),
    ],
)
def test_axolotl_evaluates_where_it_has_rows_for_it(text, expected):
    here = settings("axolotl", "base_model: m\n" + text)
    assert tuple(here.get(f"eval_{key}") for key in ("strategy", "steps", "on_start")) == expected


def test_what_quantises_twice():
    four_bits = "base_model: m\nadapter: qlora\nload_in_4bit: true\n"
    assert settings("axolotl", four_bits)["use_bnb_nested_quant"]
    assert not settings("axolotl", four_bits + "bnb_4bit_use_double_quant: false\n")["use_bnb_nested_quant"]
    assert not settings("llamafactory", "quantization_bit: 4\ndouble_quantization: false\n")["use_bnb_nested_quant"]
    assert settings("llamafactory", "quantization_bit: 4\n")["use_bnb_nested_quant"]
    assert "use_bnb_nested_quant" not in settings("llamafactory", "quantization_bit: 8\n")


def test_forms_and_styles_of_axolotl():
    old = converted("axolotl", "datasets: [{path: d, type: sharegpt, conversation: chatml}]\n")
    assert old.settings["assistant_only_loss"] and [finding.key for finding in old.lost] == ["datasets.0.conversation"]
    styled = converted("axolotl", "datasets: [{path: d, type: 'alpaca:chat'}]\n")
    assert any("alpaca:chat writes another prompt" in note.message for note in styled.notes)
    two = "datasets: [{path: a, type: completion, field: body}, {path: b, type: completion, field: text}]\n"
    assert any("which were to differ" in note.message for note in converted("axolotl", two).notes)
    regex = "base_model: m\nadapter: lora\nlora_target_modules: 'layers.[0-9]+.(q|k,v)_proj'\n"
    assert settings("axolotl", regex)["lora_target_modules"] == "layers.[0-9]+.(q|k,v)_proj"
    plugins = "base_model: m\nplugins: [axolotl.integrations.liger.LigerPlugin, axolotl.integrations.kd.KDPlugin]\n"
    assert [finding.key for finding in converted("axolotl", plugins).lost] == ["plugins"]


def test_settings_of_predictions_and_secrets_stay_out():
    text = "cutoff_len: 9\nmax_length: 512\ntemperature: 0.5\nhf_hub_token: hf_abcdef\npacking: true\n"
    result = converted("llamafactory", text)
    assert result.settings["max_length"] == 9 and "temperature" not in result.settings
    assert {finding.key for finding in result.lost} == {"max_length", "temperature", "hf_hub_token"}
    assert "hf_abcdef" not in result.to_yaml() and any("neat_packing" in note.message for note in result.notes)


@pytest.mark.parametrize("origin", ORIGINS)
def test_no_key_of_a_real_configuration_is_unsaid(origin):
    counts, unsaid = count(FILES / f"{origin}.yaml", table(origin))
    assert counts["convert and validate"] == 1 and counts["keys"] > 20 and unsaid == []


def test_a_key_that_is_read_and_not_used_is_unsaid(tmp_path):
    (tmp_path / "theirs.yaml").write_text("model_name_or_path: m\nfrobnication: 3\n")
    careless = replace(table("trl"), values={"frobnication": lambda value, source: {}})
    assert count(tmp_path / "theirs.yaml", careless)[1] == ["frobnication"]


def test_what_is_no_configuration_of_that_tool():
    with pytest.raises(ConfigError, match="nothing in it is known as a setting of DistillKit"):
        converted("distillkit", "learning_rte: 3\n")
    with pytest.raises(ConfigError, match="only sft converts, got 'dpo'"):
        converted("llamafactory", "stage: dpo\n")
