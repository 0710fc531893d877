"""What is installed, and what importing it costs.

Hugging Face publishes a package named `kernels`, and transformers imports it where it finds one. So the
folder of that name at the root of this repository must never become a package, in a checkout or in a wheel.
"""

import ast
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers.utils import is_kernels_available

ROOT = Path(__file__).parents[2]
SOURCES = ("liger_trainer", "kernels", "recipes", "benchmarks", "tests")
FOLDERS = ("kernels", "recipes", "configs")  # at the root, and by links in liger_trainer/
HUGGING_FACE = ("transformers", "trl", "peft", "datasets", "accelerate")

BUILD = """
import sys
from setuptools import build_meta
folder, *kinds = sys.argv[1:]  # a build changes sys.argv
for kind in kinds:
    getattr(build_meta, f"build_{kind}")(folder)
"""

# argv: the modules to find, as JSON. Finding a submodule imports its parents.
FIND = """
import importlib.resources, importlib.util, json, sys
families = [p for p in importlib.resources.files("liger_trainer.configs").iterdir() if p.is_dir()]
kernels = importlib.util.find_spec("kernels")
print(json.dumps({
    "origins": {name: importlib.util.find_spec(name).origin for name in json.loads(sys.argv[1])},
    "configs": sorted(file.name for family in families for file in family.iterdir()),
    "kernels": kernels and kernels.origin,
}))
"""

# argv, as JSON: lists of what may not be imported, and for each the modules to import again.
IMPORT_WITHOUT = """
import importlib, json, sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"{name} is blocked", name=name)
sys.meta_path.insert(0, Blocker())
for blocked in json.loads(sys.argv[1]):
    for name in [name for name in sys.modules if name.startswith("liger_trainer")]:
        del sys.modules[name]
    for name in json.loads(sys.argv[2]):
        importlib.import_module(name)
    assert not set(blocked) & set(sys.modules)
"""

USE_TRANSFORMERS = """
import sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import is_kernels_available
sizes = dict(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
LlamaForCausalLM(LlamaConfig(**sizes))(torch.tensor([[1, 2]]))
origin = getattr(sys.modules.get("kernels"), "__file__", None)
print(is_kernels_available(), origin, sep="\\n")
"""

FAKE_KERNELS = '''
__version__ = "{version}"

class Anything:
    """Takes any arguments; as a decorator it changes nothing."""

    def __init__(self, *args, **kwargs):
        pass

    def __call__(self, decorated):
        return decorated

def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Anything
'''


def python(code: str, *args: str, cwd: Path = ROOT, path: Path | None = None, options: tuple[str, ...] = ()) -> str:
    """Runs code as `python -c` in cwd, with path before the installed packages; returns what it printed."""
    env = {**os.environ, "PYTHONPATH": str(path or ""), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, *options, "-c", code, *args]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def files_below(folder: str, suffix: str) -> set[str]:
    """Paths of the files below a top-level folder, as a wheel names them."""
    paths = (p for p in (ROOT / folder).rglob(f"*{suffix}") if "__pycache__" not in p.parts)
    return {(Path("liger_trainer") / p.relative_to(ROOT)).as_posix() for p in paths}


def expected_files() -> set[str]:
    """What a wheel must hold, from what lies in the checkout."""
    paths = (path.relative_to(ROOT) for path in (ROOT / "liger_trainer").rglob("*.*"))
    kept = (path for path in paths if path.suffix in (".py", ".json", ".jinja", ".md", ".typed"))
    own = {path.as_posix() for path in kept if path.parts[1] not in FOLDERS}
    return own.union(files_below("kernels", ".py"), files_below("recipes", ".py"), files_below("configs", ".yaml"))


def modules(folder: str) -> list[str]:
    return sorted(path.removesuffix(".py").replace("/", ".") for path in files_below(folder, ".py"))


def copy_source(target: Path) -> Path:
    """The files a build reads, links as links. A build writes next to them, so none runs in the checkout."""
    target.mkdir()
    unwanted = shutil.ignore_patterns("__pycache__")
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, target)
    for name in ("liger_trainer", *FOLDERS):
        shutil.copytree(ROOT / name, target / name, symlinks=True, ignore=unwanted)
    return target


def build(source: Path, *kinds: str) -> Path:
    """Builds wheel, sdist or editable with the installed setuptools; returns the folder of the results."""
    python(BUILD, str(source / "dist"), *kinds, cwd=source)
    return source / "dist"


def wheel_files(folder: Path) -> set[str]:
    """The files of the one wheel in folder, without its metadata."""
    (wheel,) = folder.glob("*.whl")
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with the wheel and the sdist of this checkout."""
    return build(copy_source(tmp_path_factory.mktemp("checkout") / "source"), "sdist", "wheel")


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory) -> Path:
    """A folder with what the wheel holds, as pip would put it there."""
    target = tmp_path_factory.mktemp("installed")
    (wheel,) = built.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(target)
    return target


def find(cwd: Path, path: Path | None = None, prelude: str = "") -> dict:
    """Where `python -c` in cwd finds each module of kernels/ and recipes/, and the configs.

    With -S: no other installed package is in reach, least of all an installed liger_trainer.
    """
    names = json.dumps(["liger_trainer", *modules("kernels"), *modules("recipes")])
    return json.loads(python(prelude + FIND, names, cwd=cwd, path=path, options=("-S",)))


def check_found(found: dict, root: Path) -> None:
    for name, origin in found["origins"].items():
        below = Path(origin).relative_to(root).with_suffix("").parts
        assert ".".join(below).removesuffix(".__init__") == name
    assert found["configs"] == sorted(Path(path).name for path in files_below("configs", ".yaml"))
    assert found["kernels"] is None or not Path(found["kernels"]).is_relative_to(root)


def test_top_level_folders_are_no_packages_and_links_to_them_are_committed():
    for folder in (*FOLDERS, "tests"):  # pytest would import tests/kernels as `kernels`
        assert list((ROOT / folder).rglob("__init__.py")) == []
    links = [f"liger_trainer/{folder}" for folder in FOLDERS]
    assert [os.readlink(ROOT / link) for link in links] == [f"../{folder}" for folder in FOLDERS]
    if (ROOT / ".git").exists():
        git = ["git", "ls-files", "-s", *links]
        listed = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
        assert len(listed) == 3 and all(line.startswith("120000 ") for line in listed), listed  # as links


def test_wheel_holds_every_file_and_nothing_else_and_so_does_that_of_the_sdist(built, tmp_path):
    assert wheel_files(built) == expected_files()
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    assert wheel_files(build(source, "wheel")) == expected_files()


def test_checkout_without_links_builds_the_same_wheel(built, tmp_path):
    source = copy_source(tmp_path / "source")
    for folder in FOLDERS:  # as zip archives and Windows check links out
        (source / "liger_trainer" / folder).unlink()
        (source / "liger_trainer" / folder).write_text(f"../{folder}")
    assert wheel_files(build(source, "wheel")) == wheel_files(built)


def test_editable_install(tmp_path):
    source = copy_source(tmp_path / "source")
    (wheel,) = build(source, "editable").glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    found = find(tmp_path, prelude=f"import site; site.addsitedir({str(tmp_path / 'site')!r})\n")
    check_found(found, source)


def test_a_bare_checkout_and_an_installed_wheel(installed, tmp_path):
    check_found(find(ROOT), ROOT)
    check_found(find(tmp_path, installed), installed)
    check_found(find(ROOT, installed), ROOT)  # python -c puts the working directory first
    script = "import sys; del sys.path[0]\n"  # the console script does not
    check_found(find(ROOT, installed, prelude=script), installed)


def test_console_script_exists(installed):
    (metadata,) = installed.glob("*.dist-info")
    (entry,) = importlib.metadata.Distribution.at(metadata).entry_points
    assert (entry.group, entry.name) == ("console_scripts", "liger-trainer")
    assert entry.value == "liger_trainer.cli:main"


def test_kernels_and_modules_need_torch_alone():
    """Where Triton is, too. It is blocked first: what torch has imported of it stays."""
    layers = [f"liger_trainer.extras.modules.{name}" for name in ("layers", "losses", "rope")]
    blocked = [(*HUGGING_FACE, "triton"), HUGGING_FACE]
    python(IMPORT_WITHOUT, json.dumps(blocked), json.dumps([*modules("kernels"), *layers]))


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Each imported module's name, with its leading dots, and the line; also inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or ""), node.lineno


def test_kernels_import_torch_and_triton_only():
    allowed = {"", "torch", "triton", *sys.stdlib_module_names}  # "": relative, from within kernels/
    for path in (ROOT / "kernels").rglob("*.py"):
        for name, line in imports(path):
            wrong = name.startswith("..") or name.partition(".")[0] not in allowed
            assert not wrong, f"kernels/{path.name}:{line} imports {name}"


def test_nobody_imports_the_folders_by_their_bare_names():
    """`import kernels.x` from the root would work, and make a second copy of the module."""
    bare = re.compile(rf"(import|from|,)\s+({'|'.join(FOLDERS)})\b")
    paths = (path for folder in SOURCES for path in (ROOT / folder).rglob("*.py"))
    for path in (path for path in paths if bare.search(path.read_text())):
        for name, line in imports(path):
            assert name.partition(".")[0] not in FOLDERS, f"{path}:{line}: write liger_trainer.{name}"


def test_transformers_works_beside_the_folder():
    """In this process, whose path has the root of the repository too."""
    import trl  # noqa: F401

    assert str(ROOT) in sys.path
    exec(USE_TRANSFORMERS, {})
    origin = getattr(sys.modules.get("kernels"), "__file__", None)
    assert origin is None or not Path(origin).is_relative_to(ROOT / "kernels")
    if not any(d.name == "kernels" for d in importlib.metadata.distributions()):
        assert not is_kernels_available()


@pytest.mark.slow
def test_transformers_finds_hugging_face_kernels_beside_the_folder(tmp_path):
    from transformers.utils.import_utils import KERNELS_MIN_VERSION as version

    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text(FAKE_KERNELS.replace("{version}", version))
    metadata = tmp_path / f"kernels-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {version}\n")
    available, origin = python(USE_TRANSFORMERS, path=tmp_path).splitlines()[-2:]
    assert available == "True"
    assert Path(origin) == tmp_path / "kernels" / "__init__.py"
