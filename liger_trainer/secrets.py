"""Keep secrets out of what is written: settings by their names, and values wherever they turn up.

What counts as a secret: an environment variable or a setting whose name says so (`names_a_secret`), what `remember` was
told, the user and password in a URL, and what has the form of a well-known kind of key. Imports nothing of ours, so
that `errors` can use it.
"""

import functools
import html
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import quote, quote_plus, unquote

SECRET = "<secret>"
"""What stands where a secret was."""
SHORTEST = 6
"""characters; a shorter value may be part of any word, and is left out only by its name"""

_NAMED = re.compile(
    r"TOKEN(?!IZ)|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|AUTH(?!OR(?!IZ))|COOKIE"
    r"|(?:^|_|API|ACCESS|PRIVATE)KEYS?(?=_|\d|$)|_(?:PASS|PWD|PAT)$",
    re.I,
)
_NOT_SECRET = re.compile(r"(?:^|_)(?:eos|bos|pad|unk|sep|cls|mask|image|audio|video|new|special)_tokens?$|_env$", re.I)
_NO_NUMBERS = ("nan", "inf", "-inf")  # as JSON has them: `mean_token_accuracy` may be one
_NO_VALUES = ("disabled", "default", "enabled", "optional", "offline", "online", "dryrun", "dry-run", "anonymous")
_LOGIN = re.compile(r"(?<=://)(?!git@)[^\s/?#\"'\\<>]+(?=@)")
_QUERY = re.compile(
    r"(?<=[?&])((?:[\w-]{0,40}(?:token|key|secret|passw|signature|credential)[\w-]{0,40}|sig|auth)=)[^&\s\"'#<>]+", re.I
)
_HEADER = re.compile(r"(authorization\W{1,4}(?:bearer|basic)\s+)[^\s\"',]+", re.I)
# name=value, {name: value and what is like them
_NAMED_VALUE = re.compile(r"([\w-]+)(?=\s*[:=][\s\[{'\"]*([^\s,:'\"{}\[\]]+))")
_SCHEME = re.compile(r"^(?:bearer|basic|token)\s+", re.I)
_FORMS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{30,}|sk-[\w-]{20,}|gh[pousr]_\w{20,}|github_pat_\w{20,}|AKIA[0-9A-Z]{16}|xox[abpr]-[\w-]{10,}"
    r"|eyJ[\w-]{10,200}\.[\w-]{10,}\.[\w-]{5,})"
)
_remembered: set[str] = set()


def names_a_secret(name: str) -> bool:
    """Whether a variable or a setting of this name holds a secret: `HF_TOKEN` and `api_key`, not `eos_token`."""
    return bool(_NAMED.search(name)) and not _NOT_SECRET.search(name)


def remember(value: str | None) -> None:
    """Keep a value out of everything that is written from now on."""
    if value and _can_be_found(value):
        _remembered.add(value)


def remember_settings(name: str, value: Any) -> None:
    """Remember the secrets in a setting, at any depth: by name, in a URL, and in the variable that `..._env` names."""
    if isinstance(value, dict):
        for key, item in value.items():
            remember_settings(str(key), item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            remember_settings(name, item)
    elif isinstance(value, str):
        if names_a_secret(name):
            remember(value)
        if name.endswith("_env"):
            remember(os.environ.get(value, "").strip())
        for login in _logins(value):
            remember(login)
        if value.lstrip().startswith("{"):  # TRL takes dictionaries as JSON too
            remember_settings(name, _parsed(value))


def remember_words(words: Iterable[str]) -> None:
    """Remember the secrets in the words of a command line, in any form: an error may quote one that is wrong."""
    for word, following in itertools.pairwise([*words, ""]):
        if word.startswith("--") and "=" not in word and names_a_secret(word[2:].replace("-", "_")):
            remember(following)
        for name, value in _NAMED_VALUE.findall(word):
            if names_a_secret(name.replace("-", "_")):
                remember(value)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def redact(text: str) -> str:
    """Return a text with every secret replaced by `<secret>`."""
    if len(text) < SHORTEST:  # it holds none
        return text
    text = _LOGIN.sub(SECRET, text)
    text = _HEADER.sub(rf"\1{SECRET}", _QUERY.sub(rf"\1{SECRET}", text))
    text = _pattern(frozenset(_remembered), tuple(os.environ.items())).sub(SECRET, text)
    return _FORMS.sub(SECRET, text)


def redacted(value: Any) -> Any:
    """Return a value as it may be written: texts redacted, and entries of dictionaries left out that hold a secret."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        told = ("", *_NO_NUMBERS)  # texts that are no secret, whatever their key
        return {
            key: redacted(item) for key, item in value.items()
            if not isinstance(item, str) or item in told or not names_a_secret(str(key))
        }  # fmt: skip
    if isinstance(value, list):
        return [redacted(item) for item in value]
    return value


@functools.lru_cache(maxsize=1)  # each line that is written asks for it
def _pattern(remembered: frozenset[str], environment: tuple[tuple[str, str], ...]) -> re.Pattern[str]:
    """Return what finds the values of secrets, in each form in which a file may hold them."""
    values = set(remembered)
    for name, value in environment:
        if names_a_secret(name):
            values.add(value.strip())
        values.update(_logins(value))
    values |= {_SCHEME.sub("", value) for value in values}  # a header's value may be quoted without its scheme
    values = {value for value in values if _can_be_found(value)}
    ways = (quote, quote_plus, html.escape, lambda value: json.dumps(value)[1:-1], lambda value: repr(value)[1:-1])
    forms = values | {way(value) for value in values for way in ways}
    longest_first = [SECRET, *sorted(forms, key=lambda form: (-len(form), form))]  # what was replaced stays as it is
    return re.compile("|".join(map(re.escape, longest_first)))


def _logins(text: str) -> Iterator[str]:
    """Yield "user:password" and the password of each URL in a text; only a token where it stands for both."""
    for match in _LOGIN.finditer(text) if "://" in text else ():
        user, colon, password = match[0].partition(":")
        yield match[0]
        yield from {password, unquote(password)} if colon else {unquote(user)}


def _can_be_found(value: str) -> bool:
    """Whether a value can be told from others: no short word, switch, small number or path."""
    if len(value) < SHORTEST or value.lower() in _NO_VALUES or (value.isdigit() and len(value) < 10):
        return False
    return not os.path.isabs(os.path.expanduser(value)) or not os.path.exists(os.path.expanduser(value))
