"""The commands of `liger-trainer`; those that are alike share a file. `app.py` registers each with one line.

A command imports heavy packages only when it runs: `ls`, `validate` and others like them answer without torch.
"""

from .app import main as main
