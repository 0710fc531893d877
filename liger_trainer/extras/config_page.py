"""What `liger-trainer schema --write` renews in a checkout: schema.json, and docs/configs.md with every key."""

import json
from collections.abc import Iterator
from pathlib import Path

from ..config.schema import FILE, SECTIONS, shipped_schema
from ..config.schema_writer import json_schema, schema_text


def markdown() -> str:
    """docs/configs.md: every key of the shipped schema with type and default, by where it comes from."""
    schema = shipped_schema()
    versions = " and ".join(f"{package} {number}" for package, number in schema.versions.items())
    tables = "\n".join(_tables())
    return f"""# Keys of a configuration

<!-- Written by `liger-trainer schema --write`; do not edit. -->

Every key that `liger-trainer run` knows, with {versions}. `liger-trainer config` prints them
with their effective values and where each was set; `liger-trainer schema` prints this as JSON Schema,
and with `--describe` also the texts that the installed TRL and transformers have for theirs. How values
are given, and what is accepted in addition to these names: [the command line](cli.md).
{tables}
"""


def _tables() -> Iterator[str]:
    for section, title in SECTIONS.items():
        keys = {name: key for name, key in shipped_schema().keys.items() if key.section == section}
        if not keys:
            continue
        described = any(key.description for key in keys.values())
        yield from ("", f"## {title[0].upper()}{title[1:]}", "")
        if section == "sampling":
            yield from ("With `lmbda` above 0 or `seq_kd`; otherwise reported as without effect.", "")
        if section == "elsewhere":
            yield from ("Accepted, so that files of TRL run, and reported as without effect.", "")
        yield "| key | value | default |" + (" meaning |" if described else "")
        yield "|---|---|---|" + ("---|" if described else "")
        for name, key in keys.items():
            expects = key.expects if len(key.expects) < 120 else f"{key.expects[:100].rpartition(',')[0]}, ..."
            default = json.dumps(key.default, ensure_ascii=False)
            meaning = f" {key.description} |" if described else ""
            yield f"| `{name}` | {expects} | `{default}` |{meaning}"


def write(root: Path) -> list[Path]:
    """Write both files into the checkout at `root`, and return their paths."""
    schema, reference = root / "liger_trainer" / "config" / FILE, root / "docs" / "configs.md"
    schema.write_text(schema_text(json_schema()), encoding="utf-8")
    # The page below is written from the schema that was just written.
    shipped_schema.cache_clear()
    reference.write_text(markdown(), encoding="utf-8")
    return [schema, reference]
