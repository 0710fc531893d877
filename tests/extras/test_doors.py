"""What the integrations owe to those who have none of the tools."""

import re
import sys
from pathlib import Path

import pytest

import liger_trainer
from liger_trainer.errors import ConfigError


def test_nothing_else_imports_a_tool_or_what_is_for_it():
    ours = r"(?:\.+|liger_trainer\.)(?:extras\.)?integrations"
    imports = re.compile(rf"^\s*(?:from|import)\s+(?:axolotl|swift|llamafactory|{ours})\b", re.M)
    package = Path(liger_trainer.__file__).parent
    texts = {file: file.read_text() for file in package.rglob("*.py") if file.parent.name != "integrations"}
    assert len(texts) > 100 and not [file for file, text in texts.items() if imports.search(text)]
    assert all(
        imports.search((package / "extras" / "integrations" / f"{tool}.py").read_text())
        for tool in ("axolotl", "ms_swift")
    )


@pytest.mark.parametrize(
    "name, package", [("axolotl", "axolotl"), ("ms_swift", "swift"), ("llamafactory", "llamafactory")]
)
def test_a_missing_tool_is_named(monkeypatch, name, package):
    for module in [m for m in sys.modules if m.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    module = f"liger_trainer.integrations.{name}"
    monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(ConfigError, match=f"needs {name.replace(chr(95), chr(45))}"):
        __import__(module)
