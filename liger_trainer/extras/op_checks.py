"""The ops of extras in the table of `selfcheck`: see selfcheck_cases.py."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from ..kernels.add_rms_norm import add_rms_norm
from ..kernels.jsd import jsd, jsd_reference
from ..kernels.kl_div import kl_div
from ..kernels.linear_alm import linear_alm, linear_alm_reference
from ..kernels.linear_uld import linear_uld, linear_uld_reference
from ..kernels.tvd import tvd, tvd_reference
from .selfcheck_cases import (
    EPS,
    HEAD_LEAVES,
    Check,
    Draw,
    Tensors,
    drawn_head,
    drawn_weight,
    loss_of,
    normed,
    plain_rms_norm,
)


def _distributions(log_target: bool, log_input: bool = True) -> Callable[[Draw], Tensors]:
    def tensors(draw: Draw) -> Tensors:
        student, teacher = (draw(draw.sizes.rows, draw.sizes.vocab, std=2.0) for _ in range(2))
        return {
            "input": student.log_softmax(-1) if log_input else student.softmax(-1),
            "target": teacher.log_softmax(-1) if log_target else teacher.softmax(-1),
        }

    return tensors


def _other_vocabulary(draw: Draw) -> Tensors:
    s = draw.sizes
    # The teacher of another tokenizer has another number of tokens.
    fewer = s.vocab - s.vocab // 11
    teacher = {"teacher_hidden": draw(s.rows, s.inner), "teacher_weight": drawn_weight(draw, fewer, s.inner, 2.0)}
    return {**drawn_head(draw), **teacher}


def _spans(draw: Draw) -> Tensors:
    """A student's head, spans of three rows, and how likely a teacher finds them."""
    head = drawn_head(draw)
    rows = torch.arange(draw.sizes.rows, device=head["labels"].device)
    return {**head, "spans": rows - rows % 3, "teacher_log_prob": -4 * draw(draw.sizes.rows).abs()}


CHECKS: tuple[Check, ...] = (
    Check(
        "add_rms_norm", partial(add_rms_norm, eps=EPS),
        lambda x, residual, weight: (plain_rms_norm(x + residual, weight), x + residual),
        normed("x", "residual"), ("x", "residual", "weight"),
    ),
    Check(
        "kl_div", kl_div, lambda input, target: F.kl_div(input, target, reduction="batchmean"),
        _distributions(log_target=False), ("input",),
    ),
    Check("jsd", jsd, jsd_reference, _distributions(log_target=True), ("input",)),
    Check("tvd", tvd, tvd_reference, _distributions(log_target=False, log_input=False), ("input",)),
    Check(
        "linear_uld", loss_of(linear_uld, ce_weight=0.1), loss_of(linear_uld_reference, ce_weight=0.1),
        _other_vocabulary, HEAD_LEAVES,
    ),
    Check(
        "linear_alm", loss_of(linear_alm, ce_weight=0.1), loss_of(linear_alm_reference, ce_weight=0.1), _spans,
        HEAD_LEAVES,
    ),
)  # fmt: skip
