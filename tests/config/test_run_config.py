"""From YAML and the command line to a checked configuration: what is accepted, and what each mistake is told."""

import dataclasses
import os
from pathlib import Path

import pytest
from trl import ModelConfig, SFTConfig

from liger_trainer.config import run_config
from liger_trainer.config.conflicts import GONE
from liger_trainer.config.run_config import load_run_config
from liger_trainer.config.schema import Schema, installed_versions, shipped_schema, shipped_text
from liger_trainer.config.yaml_reader import parse_overrides, setting
from liger_trainer.errors import ConfigError
from liger_trainer.extras.schema_writer import installed_schema
from liger_trainer.trainers.config import LigerDistillConfig

NEEDED = "model_name_or_path: some/model\ndataset_name: some/data\n"


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Load a configuration from text, under the name run.yaml."""
    monkeypatch.chdir(tmp_path)

    def load_text(text: str, *overrides: str):
        (tmp_path / "run.yaml").write_text(text)
        return load_run_config("run.yaml", overrides)

    return load_text


def refused(load, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(text, *overrides)
    return str(caught.value)


def test_every_field_of_trl_is_a_key():
    """But for those that nothing reads any more."""
    for recipe, training in (("sft", SFTConfig), ("distill", LigerDistillConfig)):
        keys = installed_schema().of(recipe).keys
        for cls in (training, ModelConfig):
            assert {field.name for field in dataclasses.fields(cls)} <= keys.keys() | GONE.keys()


def test_an_sft_file_of_trl_runs_unchanged(load):
    text = """
learning_rate: 2e-4
eval_strategy: no
packing: yes
gradient_checkpointing: off
lora_target_modules: all-linear
use_peft: true
packing_strategy: bfd
max_length: 512
seed: "7"
weight_decay: "1e-2"
run_name: "8"
"""
    config = load(NEEDED + text)
    assert config.recipe == "sft" and isinstance(config["learning_rate"], float)
    want = {"learning_rate": 2e-4, "eval_strategy": "no", "packing": True, "gradient_checkpointing": False,
            "lora_target_modules": "all-linear", "seed": 7, "weight_decay": 0.01, "run_name": "8"}  # fmt: skip
    assert {key: config[key] for key in want} == want  # text that is a number too


def test_command_line_beats_file_beats_recipe_beats_trl(load):
    config = load(NEEDED + "max_steps: 5\nlearning_rate: 1e-3\noutput_dir: mine\n", "max_steps=7")
    assert config["max_steps"] == 7 and config.settings["max_steps"].where == "command line"
    assert config["learning_rate"] == 1e-3 and config.settings["learning_rate"].where == "run.yaml:4"
    assert config["output_dir"] == "mine"
    assert load(NEEDED)["output_dir"].startswith("outputs")  # ours
    assert load(NEEDED)["per_device_train_batch_size"] == 8  # TRL's


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        # values
        ("use_peft: maybe\nload_in_4bit: true", "use_peft: expected true or false, got 'maybe' (text)."),  # and no more
        ("bf16: 1", "bf16: expected true or false or null, got 1 (an integer)."),
        ("max_steps: true", "max_steps: expected an integer, got true."),
        ("learning_rate: true", "learning_rate: expected a number, got true."),
        ("learning_rate: '2e-4x'", "learning_rate: expected a number, got '2e-4x' (text)."),
        ("learning_rate: .nan", "learning_rate: expected a finite number, got nan."),
        (f"max_steps: {10**400}", "max_steps: expected a number of 64 bits, got one of 401 digits."),
        ("adam_beta2: 1.0", "adam_beta2: expected a number below 1, got 1.0."),
        ("adam_epsilon: 0", "adam_epsilon: expected a number above 0, got 0."),
        ("seed: 4294967296", "seed: expected a number of at most 4,294,967,295, got 4294967296."),
        ("output_dir: $HOME/out", "output_dir: expected a path without control characters, and without variables"),
        ("output_dir: out/{{ name }}", "output_dir: expected a path without control characters, and without variables"),
        ('output_dir: "C:\\new"', "output_dir: expected a path without control characters"),
        ("env: {HF_HOME: null}", "env: .HF_HOME: expected text or an integer or a number or true or false, got null."),
        ('env: {HF_HOME: "a\\0b"}', "env: .HF_HOME: expected text without null characters, got"),
        ("lr_scheduler_kwargs: ''", "lr_scheduler_kwargs: expected a mapping, or JSON text of one, got ''."),
        ("dataset_kwargs: hello", "dataset_kwargs: expected a mapping, or JSON text of one, got 'hello'."),
        ("model_init_kwargs: '{a'", "model_init_kwargs: expected a mapping, got text that is no JSON"),
        ("gradient_checkpointing_kwargs: {use_rentrant: false}", "unknown key. Did you mean use_reentrant?"),
        ("optim_args: hello", "optim_args: expected names and values such as a=1,b=2, got 'hello'."),
        ("include_num_input_tokens_seen: some", "expected one of False, True, no, all, non_padding, got 'some'"),
        ("pad_to_multiple_of: hello", "pad_to_multiple_of: expected an integer, auto or null, got 'hello'."),
        ("neftune_noise_alpha: -1", "neftune_noise_alpha: expected a number of at least 0, got -1."),
        ("learning_rate: -1", "learning_rate: expected a number of at least 0, got -1."),
        ("holdout_fraction: 1.0", "holdout_fraction: expected a number below 1, got 1.0."),
        ("lora_modules_to_save: [1]", "lora_modules_to_save: [0]: expected text, got 1 (an integer)."),
        ("keep_layers: 3", "keep_layers: expected a list of integers or null, got 3 (an integer)."),
        ("seed: null", "seed: expected an integer, got null."),
        ("run_name: 2024", "run_name: expected text or null, got 2024 (an integer)."),
        ("lora_rank: 9", "lora_rank: unknown key. It is called lora_r here."),
        ("max_seq_length: long", "max_length: expected an integer or null, got 'long' (text)."),
        ("quuxification: 9", "quuxification: unknown key."),
        ("logging_steps: -1", "logging_steps: expected a number of at least 0, got -1."),
        ("recipe: distil", "recipe: expected one of sft, distill, got 'distil' (text). Did you mean distill?"),
        ("env: {OMP_NUM_THREADS: 1, PYTHONPATH: /x}", "env: PYTHONPATH is none of the variables that a configuration"),

        ("report_to: tensorbord", "got 'tensorbord'. Did you mean tensorboard?"),
        ("report_to: [wandb, none]", "'none' cannot be combined"),
        ("report_to: 5", "report_to: expected null or text or a list of text, got 5"),
        # keys that have no effect here, or are gone
        ("do_predict: true", "do_predict: not supported: a run ends with an evaluation"),
        ("max_seq_length: 9\nmax_length: 8", "is the former name of max_length, which is set too"),
        ("load_in_4bit: true", "load_in_4bit: quantized weights cannot be trained"),
        ("bnb_4bit_quant_type: fp4", "has no effect without `load_in_4bit: true`"),
        ("padding_free: true", "padding_free: without packing it does not enforce max_length"),
        ("eval_packing: true", "eval_packing: without `packing: true` or `padding_free: true` TRL's collator"),
        ("dataloader_prefetch_factor: 2", "dataloader_prefetch_factor: has no effect without workers"),
        ("dataloader_persistent_workers: true", "dataloader_persistent_workers: has no effect without workers"),
        ("use_cpu: true\nactivation_offloading: true", "activation_offloading: takes activations from a GPU's memory"),
        ("test_split_size: 0.1", "test_split_size: belongs to `datasets`"),
        ("dataset_test_split: dev\nholdout_fraction: 0.1", "has no effect with dataset_test_split"),
        ("recipe: distill_two_stage", "recipe: distill_two_stage was removed: run the second stage by itself"),
        ("second_stage: {lmbda: 0.5}", "second_stage: was removed: run the second stage by itself"),
        ("teacher_correction: {max_steps: 2}", "teacher_correction: was removed: fine-tune the teacher by itself fir"),
        ("teacher_model_name_or_path: t\nlosses: [{type: adaptive_kl}]",
         "losses: [0].type: adaptive_kl was removed: use symmetric_kl"),
        # keys that do not go together, or need another
        ("datasets: [{path: json}]", "give either dataset_name or datasets, not both"),
        ("keep_layers: [0]\nkeep_every_nth_layer: 2", "give either keep_every_nth_layer or keep_layers"),
        ("optim: lomo\non_non_finite: skip_step", "on_non_finite: skip_step leaves the optimizer's step out"),
        ("logging_steps: 0", "logging_steps: expected a number above 0 with `logging_strategy: steps`"),
        ("load_best_model_at_end: true\neval_strategy: epoch", "load_best_model_at_end: needs checkpoints where eval"),
        ("lr_scheduler_type: greedy", "lr_scheduler_type: greedy follows the evaluations"),
        ("metric_for_best_model: entropy", "metric_for_best_model: neither more nor less of entropy is better"),
        ("recipe: distill", "teacher_model_name_or_path: missing"),
    ],
)  # fmt: skip
def test_what_is_refused(load, line, complaint):
    """In one sentence, with the line; test_commands.py has a file with many mistakes, test_options.py those of ours."""
    (said,) = (each.strip() for each in refused(load, f"{NEEDED}{line}\n").splitlines() if complaint in each)
    assert said.startswith("run.yaml")


def test_keys_at_their_default_and_lora_switched_off_are_no_mistake(load):
    load(NEEDED + "dataset_streaming: false\ndo_train: true\ndo_eval: true\n")
    load(NEEDED + "lora_r: 8\nuse_peft: true\n", "use_peft=false")
    assert load(NEEDED + "teacher_model_name_or_path: some/teacher\n").recipe == "distill"


def test_arguments_are_built_from_the_values(load, tmp_path):
    config = load(
        NEEDED
        + "teacher_model_name_or_path: t\nbeta: 1\nuse_peft: true\nlora_target_modules: [q_proj]\nuse_cpu: true\n"
        + 'model_init_kwargs: \'{"attn_implementation": "eager"}\'\nresume_from_checkpoint: true\n'
    )
    args = config.training_args()
    assert isinstance(args, LigerDistillConfig)
    assert args.beta == 1.0 and args.bf16 is False
    assert args.output_dir == f"outputs/{tmp_path.name}/run" or args.output_dir == "outputs/run"
    assert args.model_init_kwargs is None and args.resume_from_checkpoint is None
    assert config.init_kwargs("model_init_kwargs") == {"attn_implementation": "eager"}
    assert config.model_args().lora_target_modules == ["q_proj"]


@pytest.mark.parametrize(
    ("words", "key", "expected"),
    [
        (["lora_target_modules=[q_proj]"], "lora_target_modules", ["q_proj"]),
        (["lora_target_modules=q_proj"], "lora_target_modules", ["q_proj"]),
        (["--lora_target_modules", "q_proj"], "lora_target_modules", ["q_proj"]),
        (["--lora_target_modules", "attn.q", "v_proj"], "lora_target_modules", ["attn.q", "v_proj"]),
        (["lora_target_modules=[all-linear]"], "lora_target_modules", "all-linear"),
        (["lora_target_modules=[.*q_proj]"], "lora_target_modules", ".*q_proj"),
        (["--lora_target_parameters", "experts.up"], "lora_target_parameters", ["experts.up"]),
        (["--lora_modules_to_save", "lm_head"], "lora_modules_to_save", ["lm_head"]),
    ],
)
def test_one_name_of_a_module_is_a_list_of_one(load, words, key, expected):
    assert getattr(load(NEEDED, "use_peft=true", *words).model_args(), key) == expected


def test_what_the_arguments_refuse_is_a_config_error(load):
    config = load(NEEDED + "eval_steps: 2.5\neval_strategy: steps\nuse_cpu: true\n")
    with pytest.raises(ConfigError, match="eval_steps: LigerConfig refuses this: .*eval_steps must be an integer"):
        config.training_args()


def test_the_written_configuration_gives_the_same_run(load):
    config = load(NEEDED + "learning_rate: 2e-4\nhub_token: secret\nsave_strategy: no\n", "max_steps=3")
    text = config.to_yaml()
    assert "secret" not in text and "# warmup_steps: 0\n" in text
    again = load(text)
    assert {**again.values, "hub_token": None} == {**config.values, "hub_token": None}


def test_environment_variables_of_the_file(load, monkeypatch):
    monkeypatch.delenv("WANDB_TEST_VARIABLE", raising=False)
    load(NEEDED + "env: {WANDB_TEST_VARIABLE: 3}\n")
    assert os.environ.pop("WANDB_TEST_VARIABLE") == "3"
    monkeypatch.delenv("PYTHONSTARTUP", raising=False)
    load(NEEDED + "env: {PYTHONSTARTUP: x.py}\n", "--allow-env", "max_steps=3")
    assert os.environ.pop("PYTHONSTARTUP") == "x.py"


MAY_RUN_CODE = """
GCC_EXEC_PREFIX COMPILER_PATH TRITON_PTXAS_PATH TRITON_CACHE_DIR NCCL_NET_PLUGIN LD_PRELOAD CUDA_INJECTION64_PATH
PYTHONPATH BASH_ENV TORCHINDUCTOR_CACHE_DIR HF_MODULES_CACHE WANDB__EXECUTABLE path
""".split()
CHOOSE_WHAT_IS_THERE = """
HF_ENDPOINT MLFLOW_TRACKING_URI CUDA_VISIBLE_DEVICES NCCL_DEBUG OMP_NUM_THREADS no_proxy PYTORCH_CUDA_ALLOC_CONF
PYTHONHASHSEED TOKENIZERS_PARALLELISM RAYON_NUM_THREADS
""".split()


@pytest.mark.parametrize("name", [*MAY_RUN_CODE, *CHOOSE_WHAT_IS_THERE])
def test_variables_are_set_unless_they_may_run_code(load, name, monkeypatch):
    monkeypatch.setenv(name, "before")
    text = f"{NEEDED}env: {{{name}: after}}\n"
    if name in CHOOSE_WHAT_IS_THERE:
        load(text)
    else:
        assert f"env: {name} is none of the variables that a configuration may set" in refused(load, text)
    assert os.environ[name] == ("after" if name in CHOOSE_WHAT_IS_THERE else "before")


@pytest.mark.parametrize(
    "line",
    ["trust_remote_code: true", "model_init_kwargs: {trust_remote_code: true}", "attn_implementation: owner/kernel",
     "model_init_kwargs: '{\"attn_implementation\": \"owner/kernel\"}'"],
)  # fmt: skip
def test_a_configuration_that_was_found_runs_no_code(load, tmp_path, line, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "https://mine")
    load(f"{NEEDED}{line}\n")  # it was named
    text = f"{NEEDED}{line}\nenv: {{HF_ENDPOINT: https://theirs}}\n"
    (tmp_path / "run.yaml").write_text(text)
    key = line.partition(":")[0]
    with pytest.raises(ConfigError, match=rf"run.yaml:3: {key}: .* add {key}=... to the command line"):
        load_run_config("run.yaml", found=True)
    said = "trust_remote_code=true" if key == "trust_remote_code" else f"{key}={line.partition(': ')[2].strip(chr(39))}"
    assert load_run_config("run.yaml", [said], found=True).given(key)
    assert os.environ["HF_ENDPOINT"] == "https://mine"


@pytest.mark.parametrize("name", ["out", "exp #2", "1e3", "null", "[a]", "x ", "~", "a: b", "'q'"])
def test_a_setting_of_a_command_line_is_the_text_that_it_was(name):
    assert parse_overrides([setting("output_dir", name)]).values["output_dir"].value == name


def test_a_key_that_is_no_longer_read_is_left_out(load):
    config = load(NEEDED + "num_draft_prompts: 4\n")
    assert "num_draft_prompts" not in config.values and "drafts are no longer measured" in str(config.notices[0])


def test_paths_that_are_not_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.jsonl").touch()
    text = (
        "model_name_or_path: ./nowhere\nteacher_model_name_or_path: owner/name\n"
        "datasets:\n  - {path: json, data_files: [here.jsonl, gone.jsonl]}\nchat_template_path: ~/none.jinja\n"
    )
    (tmp_path / "run.yaml").write_text(text)
    load_run_config("run.yaml")  # only on demand: another machine may have them
    with pytest.raises(ConfigError) as caught:
        load_run_config("run.yaml", paths=True)
    assert [line.strip() for line in str(caught.value).splitlines()[1:]] == [
        "run.yaml:1: model_name_or_path: no such file or folder: ./nowhere",
        "run.yaml:4: datasets: no such file or folder: gone.jsonl",
        "run.yaml:5: chat_template_path: no such file or folder: ~/none.jinja",
    ]


def test_the_shipped_schema_and_reference_are_current():
    """Renewed by `liger-trainer schema --write`. Beside other versions of TRL, only our own keys can be compared."""
    from liger_trainer.extras.schema_writer import OWN, json_schema, markdown, schema_text

    if shipped_schema().versions == installed_versions():
        assert shipped_text() == schema_text(json_schema()), "run: liger-trainer schema --write"
    for section in OWN:
        shipped, installed = (
            {name: key for name, key in schema.keys.items() if key.section == section}
            for schema in (shipped_schema(), installed_schema())
        )
        assert shipped == installed, "run: liger-trainer schema --write"
    written = (Path(__file__).parents[2] / "docs" / "configs.md").read_text()
    assert written == markdown(), "run: liger-trainer schema --write"


def test_keys_that_only_the_installed_trl_knows_are_found_there(load, monkeypatch):
    """With other versions than the shipped schema's, what it complains about is checked against the installed ones."""
    older = {name: key for name, key in shipped_schema().keys.items() if name != "neftune_noise_alpha"}
    line = NEEDED + "neftune_noise_alpha: 5\n"
    monkeypatch.setattr(run_config, "shipped_schema", lambda: Schema(older, shipped_schema().versions))
    if shipped_schema().versions == installed_versions():
        assert "neftune_noise_alpha: unknown key" in refused(load, line)
    monkeypatch.setattr(run_config, "shipped_schema", lambda: Schema(older, {"trl": "0.1", "transformers": "5.0"}))
    assert load(line)["neftune_noise_alpha"] == 5
    assert "quuxification: unknown key" in refused(load, line + "quuxification: 9\n")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["metric_for_best_model=perplexity"], ["less perplexity is better: the lowest is chosen."]),
        (["metric_for_best_model=eval_rows_mean_token_accuracy"], ["more eval_rows_mean_token_accuracy is better:"]),
        (["metric_for_best_model=loss", "greater_is_better=true"], ["less loss is better: the highest is chosen,"]),
        (["metric_for_best_model=loss", "greater_is_better=false"], []),
        (["eval_steps=5"], ["has no effect without `eval_strategy: steps`."]),
        (["eval_steps=5", "eval_strategy=steps"], []),
    ],
)
def test_notices_are_said(load, words, told):
    notices = [notice.message for notice in load(NEEDED, *words).notices]
    assert len(notices) == len(told) and all(n.startswith(t) for n, t in zip(notices, told, strict=True))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["teacher_model_name_or_path=some/model"], True),
        (["teacher_model_name_or_path=some/model", "use_peft=true"], True),
        (["teacher_model_name_or_path=other/model"], False),
        (["teacher_model_name_or_path=some/model", "keep_every_nth_layer=2"], False),
        (["teacher_model_name_or_path=some/model", "losses=[{type: forward_kl}, {type: ce}]"], False),
    ],
)
def test_a_teacher_that_is_the_student_too_is_pointed_out(load, words, told):
    notices = [notice.message for notice in load(NEEDED, "recipe=distill", *words).notices]
    assert len(notices) == told and all("learns nothing" in notice for notice in notices)
