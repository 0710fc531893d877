"""`hub-kernels`: write our kernels as a folder that Hugging Face's `kernels` loads."""

import shutil
from pathlib import Path
from typing import Annotated

import typer

from ..common.files import staged_folder
from ..common.storage import writing_to
from ..errors import ConfigError
from ._shared import Force

MARK = Path("build") / "torch-cuda" / "metadata.json"


def hub_kernels(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write.", show_default=False)],
    force: Force = False,
) -> None:
    """Write the kernels in the layout of Hugging Face's kernel hub, for get_local_kernel and use_kernels."""
    from ..tools.hub_folder import write_hub_folder

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        if not force or not (out / MARK).is_file():
            raise ConfigError(
                f"{out} exists and is not empty: name another folder, or delete it; --force replaces what this command "
                "has written."
            )
    with writing_to(out), staged_folder(out) as staged:
        variants = write_hub_folder(staged)
        if out.exists():
            shutil.rmtree(out.resolve())
    typer.echo(f"Wrote {', '.join(variants)} to {out / 'build'}: kernels.get_local_kernel({str(out.resolve())!r})")
