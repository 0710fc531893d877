"""The fields of LigerConfig and LigerDistillConfig about rows: which tokens are learned, and Alpaca's prompt."""

from dataclasses import dataclass

from ..common.options import equals, on, option
from ..teachers.config import SAMPLES

ALPACA_PROMPTS = ("instruction", "stanford", "stanford_text")


@dataclass
class RowsConfig:
    """What is learned of rows, beside TRL's `assistant_only_loss` and `completion_only_loss`.

    Args:
        supervised_part: what is learned of each message, or of each answer with `assistant_only_loss`: "message", all
            of it with its header, or "content", from its content to the end of its turn. Any chat template will do, if
            it renders a message alike whatever follows. Default: every token, or what the template marks as generated.
        alpaca_prompt: what becomes of a row of Alpaca. "instruction": the user's message is the instruction, with the
            input on the next line. "stanford": it is Stanford Alpaca's prompt around the two. "stanford_text": that
            prompt and the output are plain text, without a chat template.
        allow_unwritten_fields: learn chats whose tools, tool calls or thoughts the chat template leaves out, without
            them. Default: such a row is an error.
        weight_column: the column with each training row's weight, a number of at least 0. It multiplies the loss of
            the row's tokens; the divisor stays the number of supervised tokens (trainers/row_weights.py).
    """

    supervised_part: str | None = option(
        None,
        "Learn of each message (with assistant_only_loss, of each answer) all with its header, or from the content to "
        "the end of the turn; works with chat templates that mark nothing.",
        choices=["message", "content"],
        conflicts=[
            (
                equals("supervised_part", "message") & ~on("assistant_only_loss"),
                "without `assistant_only_loss: true` the whole of every message is learned anyway.",
            ),
            (
                on("supervised_part") & SAMPLES,
                "does not go with completions that are sampled, which begin behind the header of an answer; leave it "
                "out.",
            ),
        ],
    )
    alpaca_prompt: str = option(
        "instruction",
        "Of Alpaca's rows the user's message is the instruction and the input, or Stanford Alpaca's prompt around "
        "them; or that prompt is plain text.",
        choices=ALPACA_PROMPTS,
    )
    allow_unwritten_fields: bool = option(
        False,
        "Learn chats without the fields that the chat template leaves out (tools, tool_calls, reasoning_content, "
        "thinking, ...); otherwise they are an error of the data.",
    )
    weight_column: str | None = option(
        None,
        "Column with a number of at least 0 for each training row, which multiplies the loss of its tokens; what the "
        "loss is divided by stays the number of tokens. Evaluations are not weighted.",
        conflicts=[
            (
                on("weight_column") & SAMPLES,
                "does not go with completions that are sampled, which belong to no row; leave one of them out.",
            ),
        ],
    )
