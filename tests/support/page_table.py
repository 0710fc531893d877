"""A table in a page of docs/ whose rows are computed: read by a test, and written where the test runs as a script."""

import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from real_shapes import save_shapes

DOCS = Path(__file__).parents[2] / "docs"


@dataclass(frozen=True)
class PageTable:
    """The lines between `begin`, a comment of its own line, and `end`; rows have the names of their first cells."""

    page: str
    begin: str
    end: str
    head: str
    names: Sequence[str]

    def _cut(self) -> tuple[str, str, str]:
        text = (DOCS / self.page).read_text()
        before, begin, rest = text.partition(f"{self.begin}\n")
        table, end, after = rest.partition(self.end)
        assert begin and end, f"docs/{self.page} lacks {self.begin if not begin else self.end}"
        return before + begin, table, end + after

    def rows(self) -> dict[str, str]:
        """Return the lines of the rows by their names, in the page's order."""
        _, table, _ = self._cut()
        return {line.split(" | ")[0].strip("| `"): line for line in table.removeprefix(self.head).splitlines()}

    def write(self, row: Callable[[str, dict[str, str]], str]) -> None:
        """Compute the rows that the command line names, or all, and write the page after each, since all take minutes.

        row: makes a line of a row's name and the folders of models' shapes (`save_shapes`).
        """
        lines = self.rows()
        with tempfile.TemporaryDirectory() as folder:
            shapes = save_shapes(Path(folder))
            for name in sys.argv[1:] or self.names:
                lines[name] = row(name, shapes)
                ordered = [lines[each] for each in self.names if each in lines]
                before, _, after = self._cut()
                (DOCS / self.page).write_text(before + self.head + "\n".join(ordered) + "\n" + after)
