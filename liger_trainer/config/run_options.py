"""The keys of a configuration that neither TRL nor transformers has a name for, and those of accelerate's launcher."""

from dataclasses import dataclass, replace
from typing import Any

from ..common.options import given, on, option
from ..trainers.options import ALLOW_MISSING_WEIGHTS

# Each option is declared once, here: limits, choices, what it needs and excludes. YAML, Python, the JSON schema and
# docs/configs.md read it.
RECIPES = ("sft", "distill")


@dataclass
class RunOptions:
    """What a run does besides training."""

    recipe: str = option(
        "sft", "sft or distill; when absent, distill if a teacher is named and sft otherwise.", choices=RECIPES
    )
    keep_every_nth_layer: int | None = option(
        None, "Make the student from model_name_or_path by keeping layers 0, n, 2n, ... and the last.", ge=2
    )
    keep_layers: list[int] | None = option(
        None,
        "Make the student from model_name_or_path by keeping the layers with these indices, from 0.",
        conflicts=[
            (
                on("keep_layers") & on("keep_every_nth_layer"),
                "give either keep_every_nth_layer or keep_layers, not both.",
            )
        ],
    )
    student_num_layers: int | None = option(
        None,
        "Layers that `init-student` keeps: those most important on the held-out rows, as student_layer_choice says.",
        ge=1,
        conflicts=[
            (
                on("student_num_layers") & (on("keep_every_nth_layer") | on("keep_layers")),
                "chooses layers by their measured importance; leave keep_every_nth_layer and keep_layers out.",
            )
        ],
    )
    student_layer_choice: str = option(
        "block_influence",
        "What makes a layer important: block_influence, how much it turns the hidden state; greedy_kl: layers are left "
        "out one by one, each time the one without which the model stays closest to itself.",
        choices=("block_influence", "greedy_kl"),
        needs=replace(on("student_num_layers"), words="`student_num_layers`"),
    )
    student_intermediate_size: int | None = option(
        None, "Units that `init-student` keeps of each MLP: those most active on the held-out rows.", ge=1
    )
    student_output_dir: str | None = option(
        None, "Where `init-student` writes; default: output_dir with -student appended."
    )
    # LigerDistillConfig has it too, for its teachers.
    allow_missing_weights: bool = option(False, ALLOW_MISSING_WEIGHTS)
    holdout_fraction: float = option(
        0.05,
        "Share of the training rows held out when the dataset has no split dataset_test_split.",
        gt=0,
        lt=1,
        conflicts=[
            (
                given("holdout_fraction") & given("dataset_test_split"),
                "has no effect with dataset_test_split; leave one of them out.",
            )
        ],
    )
    task_config: dict[str, Any] | None = option(
        None,
        "Of a dataset_name that begins with reasoning_gym: the settings of the task, by that package's names: its "
        "difficulty, seed (0) and size (5,000 training rows).",
    )
    exact_match: bool = option(
        False,
        "Have the student answer the held-out prompts in each evaluation, greedily, and measure the share of answers "
        "that are the row's own. Tasks of reasoning_gym have checkers, and are always measured.",
    )
    max_eval_rows: int | None = option(None, "Evaluate on the first so many held-out rows instead of all.", ge=1)
    bad_rows: str = option(
        "error",
        "Wrong rows (no JSON, a missing column, another type, token ids beyond the model's) end the run before it "
        "trains, each with its file and line; skip: they are left out, counted and listed in metrics.json.",
        choices=("error", "skip"),
    )
    last_turn_only: bool = option(
        False, "Learn only the last message of a chat; all before it is the prompt. No change to rows with a prompt."
    )
    num_sample_completions: int = option(
        3, "Held-out prompts completed greedily by the teacher and by the student before and after training.", ge=0
    )
    max_new_tokens: int = option(64, "Longest sample completion, and longest answer of exact_match, in tokens.", ge=1)
    overwrite_output_dir: bool = option(
        False, "Allow an output_dir that holds an earlier run: its results and checkpoints are removed."
    )
    force_resume: bool = option(
        False,
        "Resume from a checkpoint though data, tokenizer, model or teacher are not those that it was saved with.",
        needs=given("resume_from_checkpoint", words="`resume_from_checkpoint: true`"),
    )
    max_hours: float | None = option(
        None,
        "Stop after the step in which the run has taken so many hours: save a checkpoint, say how to go on, and end "
        "with exit code 124. Each start, a resumed one too, counts from zero.",
        gt=0,
    )
    # Which variables are allowed: check.py.
    env: dict[str, Any] | None = option(None, "Environment variables of the run, set before anything is imported.")


@dataclass
class LaunchOptions:
    """Options of `accelerate launch`, as TRL takes them from its YAML files: the run is then started through it."""

    accelerate_config: str | None = option(
        None,
        "auto (ddp if it fits, else fsdp2), ddp, fsdp2, zero2 or another of TRL's names, or a file.",
    )
    num_processes: int | None = option(None, "Processes in all: one a GPU, or on the CPU where there is none.", ge=1)
    num_machines: int | None = option(None, "Machines in all.", ge=1)
    machine_rank: int | None = option(None, "Which of the machines this is, from 0.", ge=0)
    main_process_ip: str | None = option(None, "Address of machine 0.")
    main_process_port: int | None = option(None, "Port of machine 0.", ge=0)
    gpu_ids: str | None = option(None, 'GPUs of this machine to use, such as "0,1", or all.')
