"""What we rely on in other libraries without a promise of theirs: private names, and their code itself.

One file for each kind; table.py lists every name, with what it is for, and a test compares the list with the installed
releases and with our source. Everything else of the package goes through these functions, so a release that changes
one of the names is served by a change here.
"""

import warnings

_MISSED: dict[str, str] = {}


def missed(what: str, consequence: str) -> None:
    """Warn, once a process, that another library is not as we know it, and say what follows.

    Call it where a library is the reason, and not a model that merely has another structure: such a model is reported
    where it is patched.

    Args:
        what: a clause, such as "transformers' eager attention is not the code we know".
        consequence: another, such as "packed rows take the slower path".
    """
    if what not in _MISSED:
        _MISSED[what] = consequence
        warnings.warn(f"{what}: {consequence}.", stacklevel=3)  # the line that asked for the recognition


def all_missed() -> dict[str, str]:
    """Return what was missed in this process so far, and what follows of each."""
    return dict(_MISSED)
