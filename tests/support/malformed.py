"""JSON lines of token IDs with wrong lines of ten kinds among them."""

import json
import re

IDS = {"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}
TEN_KINDS = {
    "no JSON": ('{"input_ids": [1', "not valid JSON"),
    "no UTF-8": (b'{"input_ids": [1], "a": "\xff"}', "expected UTF-8 text"),
    "half a surrogate pair": ('{"input_ids": [1], "a": "\\ud800"}', r"one half of a surrogate pair \(\\ud800\)"),
    "nested": ('{"input_ids": [1], "a": ' + "[" * 3000 + "]" * 3000 + "}", "levels of lists and mappings"),
    "no object": ("true", "expected a JSON object"),
    "no column": ('{"labels": [1]}', "column 'input_ids': expected a list of integers"),
    "booleans": ('{"input_ids": [true, 2, 3]}', "column 'input_ids': expected a list of integers"),
    "floats": ('{"input_ids": [1, 2, 3.5]}', "column 'input_ids': expected a list of integers"),
    "other length": (json.dumps({**IDS, "labels": [1, 2]}), "column 'labels': expected as many values as input_ids"),
    "beyond the vocabulary": (json.dumps({**IDS, "input_ids": [1, 2, 64]}), "ids from 0 to 63"),
}


def malformed(path, rows: int, each: int) -> dict[str, list[int]]:
    """Write so many lines of IDs with `each` of TEN_KINDS among them; return the lines of each kind."""
    lines = [json.dumps(IDS).encode()] * rows
    places = {}
    for number, (kind, (line, _)) in enumerate(TEN_KINDS.items()):
        places[kind] = [1 + number + 10 * i * (rows // (10 * each)) for i in range(each)]
        for place in places[kind]:
            lines[place - 1] = line if isinstance(line, bytes) else line.encode()
    path.write_bytes(b"\n".join(lines) + b"\n")
    return places


def located(message: str) -> set[int]:
    """Return the lines of a rows.jsonl that a message lists."""
    listed = " ".join(re.findall(r"such rows: \S*rows.jsonl:(.*)", message))
    ranges = [span.split("-") for span in re.findall(r"[\d-]+", listed)]
    return {place for span in ranges for place in range(int(span[0]), int(span[-1]) + 1)}
