"""The public path of Llama 4 rotary embeddings in extras/modules/rope.py."""

from ..extras.modules.rope import *  # noqa: F403
