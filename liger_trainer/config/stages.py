"""A configuration that is several trainings, one after the other, each of them a configuration of its own.

`recipe: distill_two_stage` is two distillations. The first has the keys of the configuration without `second_stage`,
the second has those with `second_stage` over them, and starts from what the first has saved. GKD (Agarwal et al. 2023,
arXiv:2306.13649) and Qwen3 (arXiv:2505.09388) train like this: on the completions of a dataset first, on the student's
own afterwards.

`teacher_correction` is a fine-tuning of the teacher on the rows before all else, with the keys of the configuration
that fine-tuning has, and those of `teacher_correction` over them. Minitron (Sreenivas et al. 2024, arXiv:2408.11796)
corrects its teachers like this, as they were trained on other data than the student sees.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..common.files import CORRECTED_TEACHER, FIRST_STAGE
from .schema import Schema
from .settings import Checked, Finding, Setting

SECOND_STAGE, TEACHER_CORRECTION = "second_stage", "teacher_correction"
_OF_WHOLE_RUN = (
    "recipe", SECOND_STAGE, TEACHER_CORRECTION, "output_dir", "overwrite_output_dir", "resume_from_checkpoint",
    "force_resume", "max_hours", "env", "keep_every_nth_layer", "keep_layers", "student_num_layers",
    "student_layer_choice", "student_intermediate_size", "student_output_dir", "push_to_hub", "bf16", "fp16", "use_cpu",
    "fsdp", "fsdp_config", "deepspeed", "ddp_backend",
)  # fmt: skip
# The student's, or by metrics that a fine-tuning does not have.
_NOT_OF_TEACHER = (
    "recipe", SECOND_STAGE, TEACHER_CORRECTION, "keep_every_nth_layer", "keep_layers", "student_num_layers",
    "student_layer_choice", "student_intermediate_size", "student_output_dir", "load_best_model_at_end",
    "metric_for_best_model", "greater_is_better", "model_init_kwargs", "push_to_hub", "qat",
    "qat_group_size",
)  # fmt: skip
_OF_EVERY_MODEL = ("trust_remote_code", "attn_implementation", "dtype")


def folders(values: Mapping[str, Any]) -> list[str]:
    """Return the folders, in the output directory, of the trainings before the last one."""
    corrects, two = bool(values.get(TEACHER_CORRECTION)), values.get("recipe") == "distill_two_stage"
    return [*([CORRECTED_TEACHER] if corrects else []), *([FIRST_STAGE] if two else [])]


def settings_inside(setting: Setting) -> dict[str, Setting]:
    """Return the settings in the value of a key, each with its place."""
    return {
        str(key): Setting(
            value,
            setting.place((key,)),
            {path[1:]: place for path, place in setting.inside.items() if path[0] == key and len(path) > 1},
        )
        for key, value in setting.value.items()
    }


def misplaced(key: str, inside: Mapping[str, Setting], schema: Schema) -> Iterator[Finding]:
    """Yield the settings of `second_stage` or `teacher_correction` that are of the whole run, and what it lacks."""
    of_stage = key == SECOND_STAGE
    for name, setting in inside.items():
        section = schema.keys[name].section if name in schema.keys else None
        named = name in ("model_name_or_path", "model_revision")
        if name in _OF_WHOLE_RUN or section == "launch" or (section == "model" and (of_stage or named)):
            yield Finding(setting.where, f"{key}.{name}", f"is that of the whole run: set it beside {key}.")
    for name in () if of_stage else ("max_steps", "learning_rate"):
        if name not in inside:
            yield Finding("", f"{key}.{name}", "missing; the teacher's is not the student's.")


def of_second_stage(given: Mapping[str, Setting], inside: Mapping[str, Setting]) -> dict[str, Setting]:
    """Return the settings of the second stage, out of those of the whole run and of `second_stage`."""
    apart = ("recipe", SECOND_STAGE, TEACHER_CORRECTION)
    return {**{key: setting for key, setting in given.items() if key not in apart}, **inside}


def of_correction(given: Mapping[str, Setting], inside: Mapping[str, Setting], schema: Schema) -> dict[str, Setting]:
    """Return the settings of the teacher's fine-tuning, out of those of the whole run and of `teacher_correction`."""
    keys = schema.of("sft").keys
    common = {
        key: setting
        for key, setting in given.items()
        if key in keys and key not in _NOT_OF_TEACHER and (keys[key].section != "model" or key in _OF_EVERY_MODEL)
    }
    names = {"teacher_model_name_or_path": "model_name_or_path", "teacher_model_revision": "model_revision"}
    model = {key: given[name] for name, key in names.items() if name in given}
    return {**common, **model, **inside}


def joined(whole: Checked, correction: Checked | None, second: Checked | None) -> Checked:
    """Return `whole` with its trainings in their order, and with what is wrong with those that are not the first stage.

    Args:
        whole: the configuration, checked as its first distillation.
        correction: the teacher's fine-tuning, checked as such.
        second: the second stage, checked as a distillation.
    """
    problems, notices, stages = [*whole.problems], [*whole.notices], []
    output_dir = Path(whole.values["output_dir"])
    if correction is not None:
        problems += _inside(TEACHER_CORRECTION, correction.problems, whole.problems)
        stages.append(_stage(correction, output_dir=str(output_dir / CORRECTED_TEACHER)))
    if second is None:
        stages.append(_stage(whole))
    else:
        problems += _inside(SECOND_STAGE, second.problems, whole.problems)
        notices = [finding for finding in notices if finding in second.notices]
        notices += _inside(SECOND_STAGE, second.notices, whole.notices)
        stages += [_stage(whole, output_dir=str(output_dir / FIRST_STAGE), push_to_hub=False), _stage(second)]
    return replace(whole, problems=problems, notices=notices, stages=tuple(stages))


def _stage(checked: Checked, **changes: Any) -> Checked:
    recipe = "sft" if checked.recipe == "sft" else "distill"
    changes |= {"recipe": recipe, SECOND_STAGE: None, TEACHER_CORRECTION: None}
    apart = (SECOND_STAGE, TEACHER_CORRECTION)
    settings = {
        key: replace(setting, value=changes.get(key, setting.value))
        for key, setting in checked.settings.items()
        if key not in apart
    }
    return replace(checked, recipe=recipe, values={**checked.values, **changes}, settings=settings, notices=[])


def _inside(key: str, findings: Iterable[Finding], known: Iterable[Finding]) -> list[Finding]:
    known = set(known)
    return [
        finding._replace(key=f"{key}.{finding.key}" if finding.key else key)
        for finding in findings
        if finding not in known
    ]
