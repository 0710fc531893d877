"""`init-student`: make a smaller model from a larger one, measure it, and save it for a run to train."""

from ._shared import Config, Overrides, checked, out_of_memory

TAKES_LESS = (
    "Teacher and student must fit at once. What takes less, in this order: a smaller "
    "per_device_eval_batch_size, a smaller max_length, dtype=bfloat16, use_cpu=true."
)


def init_student(config: Config, overrides: Overrides = None) -> None:
    """Make a student of model_name_or_path: drop layers, narrow MLPs, compare with the original, save it."""
    settings = checked(config, overrides)
    from ..extras.students.make import make_student, print_student

    with out_of_memory(TAKES_LESS):
        path, record, student = make_student(settings.on_this_machine())
    print_student(settings, path, record, student)
