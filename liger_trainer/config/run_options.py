"""The keys of a configuration that neither TRL nor transformers has a name for, and those of accelerate's launcher."""

from dataclasses import dataclass, field
from typing import Any

from ..common.non_finite import HELP, POLICIES, STOP
from ..common.weights import ALLOW_MISSING_WEIGHTS


def _option(default: Any, help: str, **limits: float) -> Any:
    return field(default=default, metadata={"help": help, "limits": limits})


@dataclass
class RunOptions:
    """What a run does beside training."""

    recipe: str = field(
        default="sft",
        metadata={
            "choices": ["sft", "distill"],
            "help": "sft, or distill; when absent, distill if a teacher is named and sft otherwise.",
        },
    )
    keep_every_nth_layer: int | None = _option(
        None, "Make the student from model_name_or_path by keeping layers 0, n, 2n, ... and the last.", ge=2
    )
    keep_layers: list[int] | None = _option(
        None, "Make the student from model_name_or_path by keeping the layers with these indices, from 0."
    )
    student_num_layers: int | None = _option(
        None, "Layers that `init-student` keeps: those that change the hidden state most on the held-out rows.", ge=1
    )
    student_intermediate_size: int | None = _option(
        None, "Units that `init-student` keeps of each MLP: those most active on the held-out rows.", ge=1
    )
    student_output_dir: str | None = _option(
        None, "Where `init-student` writes; default: output_dir with -student appended."
    )
    allow_missing_weights: bool = _option(False, ALLOW_MISSING_WEIGHTS)
    on_non_finite: str = field(default=STOP, metadata={"choices": list(POLICIES), "help": HELP})
    holdout_fraction: float = _option(
        0.05, "Share of the training rows held out when the dataset has no split dataset_test_split.", gt=0, lt=1
    )
    max_eval_rows: int | None = _option(None, "Evaluate on the first so many held-out rows instead of all.", ge=1)
    last_turn_only: bool = _option(
        False, "Learn the last message of a chat alone; all before it is the prompt. No change to rows with a prompt."
    )
    num_sample_completions: int = _option(
        3, "Held-out prompts completed greedily by the teacher and by the student before and after training.", ge=0
    )
    max_new_tokens: int = _option(64, "Longest sample completion, in tokens.", ge=1)
    overwrite_output_dir: bool = _option(
        False, "Allow an output_dir that holds an earlier run: its results and checkpoints are removed."
    )
    force_resume: bool = _option(
        False, "Resume from a checkpoint though data, tokenizer, model or teacher are not those that it was saved with."
    )
    env: dict[str, Any] | None = _option(None, "Environment variables of the run, set before anything is imported.")


@dataclass
class LaunchOptions:
    """Options of `accelerate launch`, as TRL takes them from its YAML files: the run is then started through it."""

    accelerate_config: str | None = _option(
        None, "single_gpu, multi_gpu, zero1, zero2, zero3, fsdp1 or fsdp2 of TRL, or a file of accelerate's."
    )
    num_processes: int | None = _option(None, "Processes in all, one a GPU.", ge=1)
    num_machines: int | None = _option(None, "Machines in all.", ge=1)
    machine_rank: int | None = _option(None, "Which of the machines this is, from 0.", ge=0)
    main_process_ip: str | None = _option(None, "Address of machine 0.")
    main_process_port: int | None = _option(None, "Port of machine 0.", ge=0)
    gpu_ids: str | None = _option(None, 'GPUs of this machine to use, such as "0,1", or all.')
