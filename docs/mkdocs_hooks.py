"""Hooks of mkdocs: what the site has besides the pages of this folder.

    index, contributing, changelog, security   the files at the top of the repository; README is the home page
    pages                                      docs/README.md, the list of all pages
    llms.txt                                   the same list for language models (llmstxt.org)
    api/*                                      the public names, documented from their docstrings

Links that leave docs/ lead to one of these pages; to the repository, where the build knows its
address; and become plain text where it does not. Headings get the anchors that GitHub gives them.
The search prefers pages that say how to do something to results, reference and changelog.
"""

import os
import posixpath
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import liger_trainer

ROOT = Path(__file__).parents[1]
FROM_ROOT = {
    "README.md": "index.md",
    "docs/README.md": "pages.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
RARELY_WANTED = "results/", "api/", "changelog", "decisions/"
TRAINERS = ("LigerTrainer", "LigerConfig", "LigerDistillTrainer", "LigerDistillConfig", "DistillationCallback")
PATCHING = ("patch", "PatchOptions", "Patched", "enable", "disable", "AutoLigerKernelForCausalLM")
_COPY = tempfile.TemporaryDirectory(prefix="liger-trainer-docs-")
_LINK = re.compile(r"(?P<text>\[(?:[^\[\]]|\[[^\]]*\])*\])\((?P<target>[^)\s]+)\)")
_SOURCE = re.compile(r'(?P<name>\b(?:src|srcset))="(?P<target>[^"]+)"')
_FENCED = re.compile(r"^```.*?^```", re.M | re.S)


@event_priority(100)  # before mkdocstrings reads its configuration
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.mdx_configs.setdefault("toc", {})["slugify"] = anchor
    if "GITHUB_REPOSITORY" in os.environ:
        config.repo_url = f"{os.environ['GITHUB_SERVER_URL']}/{os.environ['GITHUB_REPOSITORY']}"
    # mkdocstrings passes over folders without __init__.py: it reads a copy in which kernels/ has one
    copy = Path(_COPY.name) / "liger_trainer"
    shutil.copytree(ROOT / "liger_trainer", copy, dirs_exist_ok=True)
    (copy / "kernels" / "__init__.py").touch()
    config.plugins["mkdocstrings"].config.handlers["python"]["paths"] = [_COPY.name]
    return config


def anchor(title: str, separator: str) -> str:
    """Of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", separator)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    listing = files.get_file_from_path("README.md")
    if listing is not None:
        files.remove(listing)  # else it would be the home page
    for name, page in FROM_ROOT.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text("utf-8")))
    for page, text in api_pages():
        files.append(File.generated(config, page, content=text))
    return files


def api_pages() -> Iterator[tuple[str, str]]:
    """(page, Markdown), from the public names of the package."""
    public = [name for name in liger_trainer.__all__ if not name.startswith("_")]
    modules = [name for name in public if name not in TRAINERS and name not in PATCHING]
    for page, title, names in (
        ("trainers", "Trainers", TRAINERS),
        ("patching", "Patching", PATCHING),
        ("modules", "Modules", modules),
    ):
        where = f"`from liger_trainer import {names[0]}`, and so on."
        yield f"api/{page}.md", documented(title, where, [f"liger_trainer.{name}" for name in names])
    files = sorted((ROOT / "kernels").glob("[!_]*.py"))
    ops = [path.stem for path in files if f"def {path.stem}(" in path.read_text("utf-8")]  # not types, runtime, kinds
    where = f"Each from the module of its name: `from liger_trainer.kernels.{ops[0]} import {ops[0]}`."
    yield "api/ops.md", documented("Ops", where, [f"liger_trainer.kernels.{op}.{op}" for op in ops])
    yield "api/errors.md", documented("Errors", "", ["liger_trainer.errors"])


def on_post_build(config: MkDocsConfig) -> None:
    site = Path(config.site_dir)
    pages = re.findall(r"^- \[.*?\]\((.*?)\): ", llms_txt(""), re.M)
    absent = [page for page in pages if not (site / page / "index.html").is_file()]
    if absent or not pages:
        raise PluginError(f"llms.txt names what is no page of the site: {', '.join(absent) or 'nothing is named'}")
    (site / "llms.txt").write_text(llms_txt(config.site_url or ""), encoding="utf-8")


def llms_txt(site: str) -> str:
    """The pages of docs/README.md under its headings, each with what it is about, and README's first paragraph."""
    title, introduction = (ROOT / "README.md").read_text("utf-8").split("\n\n")[:2]
    parts = [f"{title}\n\n> {' '.join(introduction.splitlines())}\n\n`liger-trainer skill` prints a skill for agents."]
    heading, lines = "Start", []
    for row in re.findall(r"^\| (.*) \|$", (ROOT / "docs" / "README.md").read_text("utf-8"), re.M):
        pages, _, about = row.partition(" | ")
        if pages.startswith("**"):
            parts.append("\n".join([f"## {heading}\n", *lines]))
            heading, lines = pages.strip("*| "), []
        for text, path in re.findall(r"\[([^]]+)\]\(([\w/.-]+)\.md\)", pages):
            address = path.removesuffix("README") if path.endswith("README") else f"{path}/"  # as mkdocs names them
            lines.append(f"- [{text.replace('`', '')}]({site}{address}): {about}")
    return "\n\n".join([*parts, "\n".join([f"## {heading}\n", *lines])]) + "\n"


def documented(title: str, where: str, names: list[str]) -> str:
    return "\n\n".join([f"# {title}", where, *(f"::: {name}" for name in names)])


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The page's text, with links that lead somewhere on the site."""
    if page.file.src_uri.startswith(RARELY_WANTED):
        page.meta["search"] = {"boost": 0.1}
    written = {made: name for name, made in FROM_ROOT.items()}.get(page.file.src_uri)
    folder = posixpath.dirname(written or f"docs/{page.file.src_uri}")

    def link(match: re.Match) -> str:
        target = moved(match["target"], folder, posixpath.dirname(page.file.src_uri), config.repo_url)
        return match["text"][1:-1] if target is None else f"{match['text']}({target})"

    def source(match: re.Match) -> str:  # raw HTML stays as it is: relative to the page's address
        return f'{match["name"]}="{moved(match["target"], folder, page.url, config.repo_url)}"'

    return outside_fences(markdown, lambda text: _SOURCE.sub(source, _LINK.sub(link, text)))


def moved(target: str, folder: str, page_folder: str, repo_url: str | None) -> str | None:
    """Where a link of a file in `folder` leads from a page in `page_folder`; None for nowhere."""
    path, hash_sign, heading = target.partition("#")
    if "://" in target or not path:
        return target
    path = posixpath.normpath(posixpath.join(folder, path))
    inside = FROM_ROOT.get(path, path.removeprefix("docs/") if path.startswith("docs/") else None)
    if inside is not None:
        return posixpath.relpath(inside, page_folder or ".") + hash_sign + heading
    return repo_url and f"{repo_url}/blob/main/{path}{hash_sign}{heading}"


def outside_fences(markdown: str, change: Callable[[str], str]) -> str:
    """The text with `change` made everywhere but in blocks of code."""
    parts, end = [], 0
    for fence in _FENCED.finditer(markdown):
        parts += [change(markdown[end : fence.start()]), fence.group()]
        end = fence.end()
    return "".join([*parts, change(markdown[end:])])
