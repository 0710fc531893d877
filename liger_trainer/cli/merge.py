"""`merge`: turn a LoRA adapter and its base into one model that transformers loads."""

from pathlib import Path
from typing import Annotated

import typer

from ._shared import Force, RunDir, quieten_deprecations


def merge(
    run_dir: RunDir,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder for the merged model.", show_default=False)],
    base: Annotated[
        str | None, typer.Option(metavar="MODEL", help="The base, if it is no longer where the adapter says.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(metavar="DTYPE", help="dtype of the merged weights. Default: the base's on disk.")
    ] = None,
    gguf: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write one GGUF file, by llama.cpp's convert_hf_to_gguf.py."),
    ] = None,
    force: Force = False,
) -> None:
    """Merge a run's or a checkpoint's LoRA adapter into its base. The sum is computed in float32.

    Nothing is kept unless the merged model's logits are the adapter's.
    """
    from ..extras.merge import merge as run

    quieten_deprecations()
    run(run_dir, out, base, dtype, gguf, force)
