"""Write numbers and values as text for reports."""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import yaml

MINUS = "\u2212"


def figure(value: float | None, digits: int = 3) -> str:
    """Write a measurement with `digits` decimals, none for large numbers, and an exponent where they show nothing."""
    if value is None:
        return ""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "infinite"
    if value and not 10**-digits <= abs(value) < 1e9:
        text = f"{value:.{digits}g}"
    else:
        text = f"{value:,.{0 if abs(value) >= 1e4 else digits}f}"
    return text.replace("-", MINUS)


def change(old: float | None, new: float | None) -> str:
    """Write the relative change; nothing if it has no meaning."""
    if old is None or new is None or not (math.isfinite(old) and math.isfinite(new)) or old == 0:
        return ""
    share = (new - old) / abs(old)
    return f"{share:+.1%}".replace("-", MINUS) if abs(share) < 10 else f"{new / old:,.0f}×"


def duration(seconds: float | None) -> str:
    """Write `2 h 5 min`, `3 min 20 s` or `4.2 s`."""
    if seconds is None:
        return ""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = round(seconds) // 60
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min {round(seconds) % 60} s"


def count(value: Any) -> str:
    """Write an integer with thousands separators; anything else as `shown`."""
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else shown(value)


def parameters(value: int) -> str:
    """Write three digits: `135 M`, `1.24 B`."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return str(value)


def memory(mib: float) -> str:
    """Write MiB, from 10 GiB on GiB."""
    return f"{mib / 1024:,.1f} GiB" if mib >= 10240 else f"{mib:,.0f} MiB"


def shown(value: Any) -> str:
    """Write a setting as YAML does; a list of plain values with commas."""
    if value is None:
        return "none"
    if isinstance(value, (list, tuple)) and all(isinstance(item, (str, int, float)) for item in value):
        return ", ".join(map(str, value))
    if isinstance(value, str):
        return value
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...")


def teacher_text(values: Mapping[str, Any], named: Callable[[str], str] = str) -> str | None:
    """Say who teaches in a configuration; None if it names nobody.

    Args:
        values: keys of a configuration, `teachers` as a list or as JSON.
        named: writes the name of a model.
    """
    several = values.get("teachers")
    if several:
        entries = json.loads(several) if isinstance(several, str) else several
        return ", ".join(teacher_text(entry, named) or named(entry["name"]) for entry in entries)
    if values.get("teacher") == "self":
        return "itself without its adapters"
    if values.get("teacher") == "server":
        model = values.get("teacher_server_model")
        return f"{named(model)} on a server" if model else "a server"
    name = values.get("teacher_model_name_or_path")
    return named(name) if name else "a cache" if values.get("teacher") == "cache" else None
