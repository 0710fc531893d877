"""The commands of `liger-trainer`, one a file; `app.py` registers each with a line.

Nothing heavy is imported before a command runs: `ls`, `validate` and their like answer without torch.
"""

from .app import main as main
