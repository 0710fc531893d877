"""The output directory of a run: what may be written there, what is written, and in which order.

The trained weights are saved before the last evaluation, and metrics.json last of all: its presence means that the
run is finished, and nothing that follows training can lose the model.
"""

import json
import math
import platform
import shlex
import shutil
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from peft import PeftModel
from transformers import Trainer

from ..common.adapters import merged
from ..common.checkpoints import checkpoints_in
from ..common.console import is_main_process
from ..common.files import CONFIG, DEFAULTS, METRICS, REPORT, write_atomically, writing_to
from ..common.folder_lock import refuse_if_held
from ..errors import LigerTrainerError, NonFiniteError, StorageError
from ..secrets import redact, redacted
from .environment import device_facts, versions

if TYPE_CHECKING:
    from ..config.run_config import RunConfig
    from .results import RunResults

WRITTEN = (  # names that a run writes, and others do, too
    CONFIG, REPORT, "README.md", "config.json", "generation_config.json", "model.safetensors",
    "model.safetensors.index.json", "adapter_config.json", "adapter_model.safetensors", "tokenizer.json",
    "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt", "chat_template.jinja",
    "preprocessor_config.json", "processor_config.json", "training_args.bin",
)  # fmt: skip


def check_output_dir(config: "RunConfig") -> Path:
    """Return the output directory. It is not made yet: most mistakes show later, and should leave nothing behind.

    Raises:
        ConfigError: it holds a finished run, checkpoints that this run does not go on from, or files of no run that it
            would replace, and `overwrite_output_dir` is not set; another process trains in it; it is the directory of
            an input model; or it cannot be written.
    """
    output_dir = Path(config["output_dir"]).expanduser()
    if (output_dir / METRICS).is_file() and not config["overwrite_output_dir"]:
        advice = "choose another output_dir or set overwrite_output_dir=true"
        raise config.error("output_dir", f"{output_dir} holds a finished run ({METRICS}); {advice}.")
    earlier = _earlier_checkpoints(config, output_dir)
    if earlier and not config["overwrite_output_dir"]:
        advice = "set resume_from_checkpoint=true to go on with it, or overwrite_output_dir=true to remove it"
        raise config.error("output_dir", f"{output_dir} holds {earlier[-1].name} of an earlier run; {advice}.")
    for key in ("model_name_or_path", "teacher_model_name_or_path"):
        name = config.values.get(key)
        taken = [
            path for path in (output_dir, *earlier) if name and path.resolve() == Path(name).expanduser().resolve()
        ]
        if taken:
            raise config.error("output_dir", f"{taken[0]} is also {key}, which would be overwritten.")
    foreign = _foreign_files(config, output_dir)
    if foreign and not config["overwrite_output_dir"]:
        advice = "choose another output_dir, or set overwrite_output_dir=true to replace them"
        raise config.error("output_dir", f"{output_dir} holds {', '.join(foreign)}, which no run wrote; {advice}.")
    if is_main_process():  # which takes the lock for all
        refuse_if_held(output_dir)
    check_writable(config, "output_dir", output_dir)
    return output_dir


def check_writable(config: "RunConfig", key: str, path: Path) -> None:
    """Check that a folder can be written to, by making something there.

    The access rights of a network folder do not say what its server will refuse.

    Raises:
        ConfigError: the folder, or the nearest one above it that exists, cannot be written to.
    """
    nearest = next(above for above in (path, *path.absolute().parents) if above.exists())
    try:
        with TemporaryDirectory(dir=nearest, prefix=".liger-trainer-"):
            pass
    except OSError as error:
        why = f" ({error.strerror})" if nearest.is_dir() else ""
        raise config.error(key, f"{nearest} is no directory that can be written to{why}.") from None


def _earlier_checkpoints(config: "RunConfig", output_dir: Path) -> list[Path]:
    """Return checkpoints that this run does not resume from.

    They must not be mixed with its own: resuming and `save_total_limit` go by the number of the step.
    """
    return [] if config["resume_from_checkpoint"] else checkpoints_in(output_dir)


def _foreign_files(config: "RunConfig", output_dir: Path) -> list[str]:
    """Return the names of files that this run would replace, in a folder in which no run has begun yet."""
    written = output_dir / CONFIG
    if config["resume_from_checkpoint"] or written.is_file() and DEFAULTS in written.read_text(errors="replace"):
        return []
    return [name for name in WRITTEN if (output_dir / name).is_file()]


def again(output_dir: Path) -> str:
    """Say how a run is gone on with, for an error that ends it."""
    return f"To go on from the newest checkpoint: {shlex.join(['liger-trainer', 'resume', str(output_dir)])}"


def start_output(trainer: Trainer, config: "RunConfig") -> None:
    """At the start of training, write config.yaml, which `liger-trainer resume` reads, and remove the run that this one
    overwrites."""
    if trainer.is_world_process_zero():
        output_dir = Path(str(trainer.args.output_dir))
        _clear(output_dir, config)
        output_dir.mkdir(parents=True, exist_ok=True)
        write_atomically(output_dir / CONFIG, config.to_yaml())


def _clear(output_dir: Path, config: "RunConfig") -> None:
    for name in (METRICS, REPORT):
        (output_dir / name).unlink(missing_ok=True)
    for checkpoint in _earlier_checkpoints(config, output_dir):
        checkpoint.unlink() if checkpoint.is_symlink() else shutil.rmtree(checkpoint)


def save_student(trainer: Trainer, config: "RunConfig", output_dir: Path) -> None:
    """Save the trained weights and the tokenizer, so that transformers alone can load them.

    A LoRA adapter is saved as an adapter, unless its base model was made by dropping layers: that base is nowhere on
    disk, so the adapter is merged into it first, and the merged model is what is evaluated from then on.

    Raises:
        ConfigError: the merged model's logits are not those with the adapter.
    """
    if isinstance(trainer.model, PeftModel) and config.drops_layers():
        trainer.model = merged(trainer.model)
    model: Any = trainer.model
    model.config.use_cache = True  # off in training; whoever loads the model wants to generate
    trainer.save_model(str(output_dir), _internal_call=True)  # pushed once, with its card, at the end


def finish(trainer: Trainer, config: "RunConfig", output_dir: Path, results: "RunResults") -> None:
    """Write what follows the last evaluation: the model card, the push to the hub, metrics.json, report.html.

    Raises:
        NonFiniteError: a metric of the trained model is NaN; metrics.json says which.
        LigerTrainerError: the hub refused the model, or could not be reached; all files are written by then.
    """
    _write_card(trainer, config, output_dir, results)
    refused = _push(trainer, config) if config["push_to_hub"] else None
    if trainer.is_world_process_zero():
        content = redacted(_for_json({**asdict(results), **_circumstances(config)}))
        write_atomically(output_dir / METRICS, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
        _report(output_dir)
    trainer.accelerator.end_training()  # ends the process group too
    nans = [name for name, value in results.after.items() if math.isnan(value)]
    if nans:
        raise NonFiniteError(f"the trained model's {', '.join(nans)} is NaN; what is in {output_dir} is of no use.")
    if refused is not None:
        upload = shlex.join(["hf", "upload", trainer.hub_model_id or output_dir.name, str(output_dir), "."])
        raise LigerTrainerError(f"{output_dir} is complete, but was not pushed to the hub: {refused} Again: {upload}")


def _push(trainer: Trainer, config: "RunConfig") -> Exception | None:
    """Push the model and return the error, if any: it must not cost the results, which are not written yet."""
    try:
        trainer.push_to_hub(dataset_name=config["dataset_name"])
    except Exception as error:  # errors of huggingface_hub and of its HTTP client
        return error
    return None


def _write_card(trainer: Trainer, config: "RunConfig", output_dir: Path, results: "RunResults") -> None:
    """Write the card of this run in place of the one that TRL and PEFT write; `push_to_hub` writes it once more."""
    from .reports.model_card import NAME, Published, model_card

    model = Published(
        adapter=isinstance(trainer.model, PeftModel),
        chat=bool(getattr(trainer.processing_class, "chat_template", None)),
        tags=list(getattr(trainer, "_tag_names", [])),
        hub_model_id=trainer.hub_model_id if config["push_to_hub"] else None,
    )

    def write(*_: Any, **__: Any) -> None:
        if trainer.is_world_process_zero():
            write_atomically(output_dir / NAME, redact(str(model_card(config, results, model))))

    trainer.create_model_card = write
    write()


def _circumstances(config: "RunConfig") -> dict[str, Any]:
    """Return what a run came from, and where it ran."""
    return {
        "settings": {key: {"value": value, "set_by": where} for key, (value, where) in config.changes().items()},
        "versions": versions(),
        "environment": {"platform": platform.platform(), **device_facts()},
        "finished_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _report(output_dir: Path) -> None:
    """Write report.html. An error in it is printed: the run is done, and everything else is saved.

    Raises:
        StorageError: the disk is full, read-only or over its quota.
    """
    from .reports.html import write_report
    from .reports.read_run import read_runs

    advice = f"again: liger-trainer report {shlex.quote(str(output_dir))}"
    try:
        with writing_to(output_dir / REPORT, f"All else of the run is saved; {advice}"):
            write_report(read_runs([output_dir]), output_dir / REPORT)
    except StorageError:
        raise
    except Exception as error:
        print(f"liger-trainer: no report was written: {type(error).__name__}: {error}; {advice}", file=sys.stderr)


def _for_json(value: Any) -> Any:
    """Replace NaN and infinities, which JSON does not have, by their names."""
    if isinstance(value, dict):
        return {str(k): _for_json(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_for_json(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
