"""The fields of LigerDistillConfig about teachers: their kind, their number, their place, their server.

What goes together is checked where a configuration is made; what needs a model or a server, in the teachers' classes.
"""

from dataclasses import dataclass, field
from typing import Any

from .losses import Distillation

KINDS = ("model", "cache", "self")
SPARSE = {"cache": "A teacher cache"}


def _choice(default: Any, help: str, *choices: str) -> Any:
    return field(default=default, metadata={"help": help, "choices": list(choices)})


@dataclass
class TeacherConfig:
    """Teachers of `LigerDistillTrainer`; docs/teachers.md.

    Args:
        teacher: "model", in this process; "cache", what `liger-trainer cache` wrote down of one (docs/cache.md);
            "self", the student without its adapters.
        teacher_tokenizer_name_or_path: where the teacher's tokenizer is, if not beside the teacher.
    """

    teacher: str = _choice("model", "model: in this process; cache: teacher_cache_dir; self: adapters off.", *KINDS)
    teacher_tokenizer_name_or_path: str | None = field(
        default=None, metadata={"help": "The teacher's tokenizer, if it is not in the teacher's own directory."}
    )

    def check_teacher(self, distillation: Distillation) -> None:
        """Raise ValueError for what does not go together."""
        _one_of(self, "teacher", KINDS)
        if self.teacher in SPARSE:
            self._check_sparse(SPARSE[self.teacher], distillation)

    def _check_sparse(self, who: str, distillation: Distillation) -> None:
        used = {kind for kind, weight in distillation.weights.items() if weight}
        if used != {"forward_kl"}:
            raise ValueError(
                f"{who} determines the forward KL alone, with or without ce beside it; the loss asks for "
                f"{', '.join(sorted(used)) or 'no divergence'}. Use beta=0, or losses with forward_kl and ce."
            )
        if getattr(self, "label_smoothing_factor", 0.0):
            raise ValueError(
                f"label_smoothing_factor is not part of the loss against {who[0].lower()}{who[1:]}: leave it at 0."
            )


def _one_of(args: Any, name: str, choices: tuple[str, ...]) -> None:
    if getattr(args, name) not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {getattr(args, name)!r}.")
