"""`recipe: distill_two_stage` as two distillations, one after the other.

The first has the keys of the configuration without `second_stage`, the second has those with `second_stage` over them,
and starts from what the first has saved. GKD (Agarwal et al. 2023, arXiv:2306.13649) and Qwen3 (arXiv:2505.09388) train
like this: on the completions of a dataset first, on the student's own afterwards.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..common.files import FIRST_STAGE
from .schema import Schema
from .settings import Checked, Finding, Setting

KEY = "second_stage"
_OF_THE_WHOLE_RUN = (
    "recipe", KEY, "output_dir", "overwrite_output_dir", "resume_from_checkpoint", "force_resume", "max_hours", "env",
    "keep_every_nth_layer", "keep_layers", "student_num_layers", "student_intermediate_size", "student_output_dir",
    "push_to_hub", "bf16", "fp16", "use_cpu", "fsdp", "fsdp_config", "deepspeed", "ddp_backend",
)  # fmt: skip


def settings_inside(setting: Setting) -> dict[str, Setting]:
    """Return the settings in the value of `second_stage`, each with its place."""
    return {
        str(key): Setting(
            value,
            setting.place((key,)),
            {path[1:]: place for path, place in setting.inside.items() if path[0] == key and len(path) > 1},
        )
        for key, value in setting.value.items()
    }


def beside_the_stage(settings: Mapping[str, Setting], schema: Schema) -> Iterable[Finding]:
    """Yield the settings of `second_stage` that are of the whole run."""
    for key, setting in settings.items():
        section = schema.keys[key].section if key in schema.keys else None
        if key in _OF_THE_WHOLE_RUN or section in ("model", "launch"):
            yield Finding(setting.where, f"{KEY}.{key}", f"is the same in both stages: set it beside {KEY}.")


def joined(whole: Checked, second: Checked) -> Checked:
    """Return `whole` with its two stages, and with what is wrong with the second one alone.

    Args:
        whole: the configuration, checked as its first stage.
        second: the settings of the second stage, checked as a distillation.
    """
    problems = [*whole.problems, *_in_second(second.problems, whole.problems)]
    seldom = [finding for finding in whole.notices if finding in second.notices]
    notices = [*seldom, *_in_second(second.notices, whole.notices)]
    folder = Path(whole.values["output_dir"], FIRST_STAGE)
    first = _stage(whole, output_dir=str(folder), push_to_hub=False)
    return replace(whole, problems=problems, notices=notices, stages=(first, _stage(second)))


def _stage(checked: Checked, **changes: Any) -> Checked:
    changes |= {"recipe": "distill", KEY: None}
    settings = {key: setting for key, setting in checked.settings.items() if key not in changes}
    settings |= {
        key: replace(checked.settings[key], value=changes[key])
        for key in ("output_dir", "recipe", "push_to_hub")
        if key in changes and key in checked.settings
    }
    return replace(checked, recipe="distill", values={**checked.values, **changes}, settings=settings, notices=[])


def _in_second(findings: Iterable[Finding], known: Iterable[Finding]) -> list[Finding]:
    known = set(known)
    return [_inside(finding) for finding in findings if finding not in known]


def _inside(finding: Finding) -> Finding:
    return finding._replace(key=f"{KEY}.{finding.key}" if finding.key else KEY)
