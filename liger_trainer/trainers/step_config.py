"""The fields of LigerConfig and LigerDistillConfig about how a step is computed: attention, CUDA graphs, memory."""

from dataclasses import dataclass

from ..common.options import Fact, OptionValues, equals, on, option

AUTO, MODEL = "auto", "model"
ALWAYS, NEVER = "always", "never"
FAST = "fast"
MEMORY = {FAST: 0, "balanced": 2, "lean": 1}  # in every n-th decoder layer gate and up are made again; 0: in none


def _checkpoints(options: OptionValues) -> bool:
    """transformers 5.23 calls gradient_checkpointing activation_checkpointing; what has the new name counts."""
    renamed = options.values.get("activation_checkpointing")
    return bool(options["gradient_checkpointing"] if renamed is None else renamed)


_CHECKPOINTS = Fact(
    ("gradient_checkpointing",),
    _checkpoints,
    (~equals("gradient_checkpointing", False) & ~equals("activation_checkpointing", False)).rule,
)
_REMAKES = equals("memory", *(name for name in MEMORY if name != FAST))


@dataclass
class StepConfig:
    """How a step is computed. None of these fields changes what is learned.

    Args:
        attention: what reads rows in which several documents stand (packing, padding-free batches). "auto": attention
            over each document by its length, for models that run PyTorch's or eager attention; other
            implementations, such as flash_attention_2, stay. "model": the model's own implementation in any case,
            which masks the row with a matrix of its length squared.
        cuda_graphs: whether decoder layers, of student and teacher, are recorded in CUDA graphs and replayed, so that
            the GPU does not wait for the host. "auto": where the layers are small enough to profit and nothing is
            against it. "always": layers of any size; what is against it is an error. "never".
        memory: in how many decoder layers gate(x) and up(x) of the MLP, the largest tensors of a layer, are made again
            in the backward instead of being kept. "fast": in none. "balanced": in every second. "lean": in all. Where
            no MLP can, that is an error. Experts of a mixture keep theirs.
        vocab_parallel: whether the rows of the output head, of student and teacher, stay on their ranks under FSDP2
            while the loss is computed. "auto": where that moves fewer numbers than gathering the head, and nothing is
            against it. "always": what is against it is an error. "never". See docs/extras.md.
    """

    attention: str = option(
        AUTO,
        "What reads packed rows: auto takes each document by its length where the model runs sdpa or eager attention; "
        "model leaves the model's own attention, whose mask is as large as the row's length squared.",
        choices=[AUTO, MODEL],
    )
    cuda_graphs: str = option(
        AUTO,
        "Record the decoder layers of student and teacher in CUDA graphs once a shape comes again: auto where they are "
        "small enough that the GPU would wait for the host; always; never.",
        choices=[AUTO, ALWAYS, NEVER],
    )
    memory: str = option(
        FAST,
        "Make the MLP's gate(x) and up(x) again in the backward instead of keeping them: fast in no decoder layer; "
        "balanced in every second; lean in all.",
        choices=MEMORY,
        conflicts=[
            (
                _REMAKES & _CHECKPOINTS,
                "has no effect with gradient_checkpointing, which makes whole layers again; set it to false.",
            ),
            (_REMAKES & on("torch_compile"), "has no effect with torch_compile, which decides that itself."),
        ],
    )
    vocab_parallel: str = option(
        NEVER,
        "Keep the rows of the output head on their ranks under FSDP2, and combine the loss over the ranks: auto where "
        "that moves less than gathering the head; always; never.",
        choices=[AUTO, ALWAYS, NEVER],
    )
