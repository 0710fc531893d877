"""Row kernels of linear_divergence.py: they turn two chunks of logits into per-token values and the student's gradient.

`divergence_rows` launches the Triton kernel (_divergence_kernels.py), or on a CPU calls its torch twin
(_divergence_torch.py) with the same arguments. Formulas: linear_divergence.py.
"""

from torch import Tensor

from ._divergence_kernels import divergence_kernel
from ._divergence_options import DivergenceOptions, RowInputs
from ._divergence_torch import divergence_rows_torch
from ._triton import kept_launch, use_triton

LANES, WARPS = 1024, 32  # half of each with a second pass, which computes more per number
VECTOR_BYTES = 16  # bytes of a row that a thread reads at once
BIAS, TEACHER_BIAS = 1, 4  # bits of FORM, as in _divergence_pieces.py; `DivergenceOptions.form` sets the others


def divergence_rows(x: RowInputs, out: Tensor, grad: Tensor | None, options: DivergenceOptions) -> None:
    """Fill out (len(FIELDS), n), and grad (n, V) unless it is None. grad may share the student's memory."""
    if not use_triton(out):
        return divergence_rows_torch(x, out, grad, options)
    student, teacher = x.student, x.teacher
    written = student if grad is None else grad
    vocab = student.shape[1]
    padded = -(-vocab // 16) * 16
    if min(student.stride(0), teacher.stride(0), written.stride(0)) < padded:  # no padding: not from `workspace`
        padded = vocab
    flags = options.flags
    measured = flags["MEASURED"]
    launched = kept_launch(
        divergence_kernel, (student.shape[0],),
        student.stride(0), teacher.stride(0), written.stride(0), out.stride(0), vocab, padded, *options.numbers,
        FORM=options.form + BIAS * (x.bias is not None) + TEACHER_BIAS * (x.teacher_bias is not None),
        HAS_LABELS=x.labels is not None, HAS_TOKEN_WEIGHT=x.token_weight is not None,
        **flags, WRITE_GRAD=grad is not None,
        ALIASED=written.dtype != student.dtype, LANES=LANES // 2 if measured else LANES,
        VECTOR=max(1, VECTOR_BYTES // student.element_size()), num_warps=WARPS // 2 if measured else WARPS,
    )(
        student, teacher, student if x.bias is None else x.bias, teacher if x.teacher_bias is None else x.teacher_bias,
        student if x.labels is None else x.labels, student if x.token_weight is None else x.token_weight, written, out,
        has_twin=True,
    )  # fmt: skip
    if not launched:
        divergence_rows_torch(x, out, grad, options)
