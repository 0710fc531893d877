"""What `benchmarks.students` makes before its trainings: rows, students of fewer units, compiled kernels."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from typing import Any

from .student_ways import CONFIG, STUDENTS, Setup, on_gpu, train


def layers_of(teacher: str) -> int:
    """Return the number of its layers; a demo model is built first if it is not there."""
    from transformers import AutoConfig

    from liger_trainer.run.data.demo_model import resolve_model

    return AutoConfig.from_pretrained(resolve_model(teacher)).num_hidden_layers


def warm(way: str, setup: Setup) -> dict[str, Any]:
    """Train for some seconds, so that the kernels are compiled before all trainings ask for them at once."""
    return train(way, 1000, replace(setup, seconds=min(4.0, setup.seconds), rows=16, prompts=1))


def make_student(name: str, setup: Setup) -> dict[str, Any]:
    """Make a student of fewer units by `init-student`: their activation is measured on training rows."""
    from liger_trainer.config.run_config import load_run_config
    from liger_trainer.extras.students.make import make_student as make
    from liger_trainer.run.models import open_model

    student, folder = STUDENTS[name], setup.folder / "students" / name
    settings = [*setup.common("docstrings"), f"model_name_or_path={setup.teacher}", *student.settings(setup.layers)]
    settings += [f"dataset_name={setup.data('docstrings') / 'train.jsonl'}", "dataset_test_split=train"]
    settings += [f"student_output_dir={folder}", "max_eval_rows=64"]
    files = open_model(load_run_config(CONFIG, settings, exact=True), "model_name_or_path")
    units = round(student.width * files.config.get_text_config(decoder=True).intermediate_size)
    config = load_run_config(CONFIG, [*settings, f"student_intermediate_size={units}"], exact=True)
    _, record, _ = make(config.on_this_machine())
    return {"layers": record.layers_kept, "intermediate_size": units, "parameters": record.parameters}


def export_rows(setup: Setup, dataset: str) -> dict[str, int]:
    """Write the docstrings once, so that not every training has to collect them."""
    from liger_trainer.config.run_config import load_run_config
    from liger_trainer.run.data.datasets import load_run_datasets

    data = load_run_datasets(load_run_config(CONFIG, [f"dataset_name={dataset}", "~max_eval_rows"], exact=True))
    folder = setup.data("docstrings")
    folder.mkdir(parents=True)
    for split, rows in (("train", data.train), ("test", data.test)):
        rows.to_json(folder / f"{split}.jsonl", force_ascii=False)
    return {"train": len(data.train), "test": len(data.test)}


def sample_rows(kind: str, part: int, setup: Setup, count: int, batch: int, tokens: int) -> dict[str, Any]:
    """Have the teacher write rows by `liger-trainer generate`; `part` is one of several that are joined."""
    from liger_trainer.extras.generate.options import GenerateOptions
    from liger_trainer.extras.generate.run import generate

    began, folder = time.monotonic(), setup.folder / "generated" / f"{kind}-{part}"
    dtype = "bfloat16" if on_gpu() else "float32"
    common: dict[str, Any] = {"num_rows": count, "batch_size": batch, "seed": part, "keep_unfinished": True}
    if kind == "answers":
        common["prompts"] = str(setup.data("docstrings"))
    options = GenerateOptions(**common, dtype=dtype, max_new_tokens=tokens, max_prompt_tokens=96)
    result = generate(setup.teacher, folder, options)
    return {**asdict(result), "examples": {}, "seconds": time.monotonic() - began}


def join_rows(kind: str, setup: Setup) -> int:
    """Write the rows of all parts that are done to one file, and return how many they are."""
    lines = [
        line for part in sorted((setup.folder / "generated").glob(f"{kind}-*/train.jsonl")) for line in part.open()
    ]
    folder = setup.data(kind)
    folder.mkdir(parents=True)
    (folder / "train.jsonl").write_text("".join(lines))
    return len(lines)
