"""What the integrations owe to those who have none of the tools."""

import subprocess
import sys

import pytest

from liger_trainer.errors import ConfigError


def test_the_package_imports_no_tool():
    pytest.importorskip(
        "trl", minversion="1.16", reason="the trainers need it; a tool's own environment may not have it"
    )
    code = (
        "import sys, liger_trainer; [getattr(liger_trainer, name) for name in liger_trainer.__all__]; "
        "print(sorted({m.split('.')[0] for m in sys.modules} & {'axolotl', 'swift', 'llamafactory'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


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
