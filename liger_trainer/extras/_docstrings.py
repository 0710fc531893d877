"""Print the docstrings of the Python standard library as JSON: [[kind, module, name, docstring], ...].

Run as a script, in a separate interpreter and without site-packages: importing some 200 modules then
changes nothing in the process that trains, and libraries that patch the standard library cannot change the
result. Imports nothing of this package. Source: the running interpreter's own documentation (PSF-2.0).
"""

import importlib
import inspect
import json
import os
import sys
import warnings

# Prints, opens a window or a browser, or takes hold of the terminal on import.
SIDE_EFFECTS = {"antigravity", "this", "idlelib", "turtle", "turtledemo", "tkinter", "readline", "rlcompleter"}
# Tests, installers, removed modules, and the platform's half of `os` and `os.path` (the same texts twice).
NOT_DOCUMENTATION = {
    "test", "lib2to3", "distutils", "imp", "ensurepip", "venv", "pydoc_data",
    "posix", "nt", "posixpath", "ntpath",
}  # fmt: skip
SUBMODULES = (
    "asyncio.events", "asyncio.locks", "asyncio.queues", "asyncio.runners", "asyncio.streams",
    "asyncio.tasks", "collections.abc", "concurrent.futures", "email.message", "email.policy",
    "email.utils", "encodings.idna", "html.entities", "html.parser", "http.client", "http.cookiejar",
    "http.cookies", "http.server", "importlib.abc", "importlib.machinery", "importlib.metadata",
    "importlib.resources", "importlib.util", "json.decoder", "json.encoder", "logging.config",
    "logging.handlers", "multiprocessing.managers", "multiprocessing.pool",
    "multiprocessing.shared_memory", "os.path", "sqlite3.dbapi2", "unittest.mock", "urllib.error",
    "urllib.parse", "urllib.request", "urllib.robotparser", "wsgiref.handlers", "wsgiref.headers",
    "wsgiref.simple_server", "wsgiref.util", "wsgiref.validate", "xml.dom.minidom", "xml.dom.pulldom",
    "xml.etree.ElementTree", "xml.sax.handler", "xml.sax.saxutils", "xml.sax.xmlreader", "xmlrpc.client",
    "xmlrpc.server",
)  # fmt: skip


def module_names() -> list[str]:
    """Return the public modules of the standard library, sorted."""
    excluded = SIDE_EFFECTS | NOT_DOCUMENTATION
    top = [name for name in sys.stdlib_module_names if not name.startswith("_") and name not in excluded]
    return sorted([*top, *SUBMODULES])


def public_members(module) -> list[tuple[str, object]]:
    """Return the members in `__all__`, or the public classes and functions that the module defines."""
    listed = getattr(module, "__all__", None)
    names = sorted(listed if listed is not None else vars(module))
    members = [(name, getattr(module, name, None)) for name in names if not name.startswith("_")]
    return [
        (name, member)
        for name, member in members
        if (inspect.isroutine(member) or inspect.isclass(member))
        and (listed is not None or getattr(member, "__module__", None) == module.__name__)
    ]


def rows_of(module_name: str, module) -> list[tuple[str, str, str, str]]:
    """Return rows for the module, its functions and classes, and what each class itself defines."""
    rows = [("module", module_name, module_name, module.__doc__)]
    prefix = "" if module_name == "builtins" else module_name + "."
    for name, member in public_members(module):
        kind = "class" if inspect.isclass(member) else "function"
        rows.append((kind, module_name, prefix + name, member.__doc__))
        attributes = sorted(vars(member).items()) if inspect.isclass(member) else []
        for attribute, value in attributes:
            if attribute.startswith("_"):
                continue
            if inspect.isdatadescriptor(value):
                rows.append(("property", module_name, f"{prefix}{name}.{attribute}", value.__doc__))
            elif isinstance(value, (classmethod, staticmethod)) or inspect.isroutine(value):
                rows.append(("method", module_name, f"{prefix}{name}.{attribute}", value.__doc__))
    return [row for row in rows if isinstance(row[3], str)]


def collect() -> list[tuple[str, str, str, str]]:
    rows = []
    for name in module_names():
        try:
            module = importlib.import_module(name)
        except ImportError:  # belongs to another platform, or is left out of this build
            continue
        rows += rows_of(name, module)
    return rows


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    out = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what modules print must not mix with the JSON
    with os.fdopen(out, "w", encoding="utf-8") as stream:
        json.dump([[*names, inspect.cleandoc(doc)] for *names, doc in collect()], stream)
