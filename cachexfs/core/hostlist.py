"""Host lists, ``host:port`` and comma-separated option strings.

Role: pure. A comma inside brackets belongs to the value: ``nodes=n[1-4,7],memory=4G`` are two options. Called by
``cachexfs.config`` and the mount helper.
"""

from __future__ import annotations

import re

from cachexfs.errors import UsageError

HOSTS_MAX = 65536
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]*")
_IPV6 = re.compile(r"\[([0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(?:%[A-Za-z0-9._-]+)?)\](?::(\d+))?")


def split_outside_brackets(text: str, separators: str) -> list[str]:
    """Parts of ``text`` between any of ``separators``, none of which counts inside ``[...]``; empty parts left out.

    Raises ``UsageError`` for brackets that do not match.
    """
    parts: list[str] = []
    current: list[str] = []
    depth = 0
    for char in text:
        depth += (char == "[") - (char == "]")
        if depth < 0 or depth > 1:
            break
        if char in separators and depth == 0:
            parts.append("".join(current))
            current = []
        else:
            current.append(char)
    if depth != 0:
        raise UsageError(f"brackets do not match in '{text}'")
    parts.append("".join(current))
    return [part.strip() for part in parts if part.strip()]


def _expand_range(text: str, whole: str) -> list[str]:
    numbers: list[str] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if not match:
            raise UsageError(f"'{part}' in '{whole}' is not a number or a range such as 1-4")
        first, last = match.group(1), match.group(2) or match.group(1)
        if int(last) < int(first):
            raise UsageError(f"the range {part} in '{whole}' runs backwards")
        if int(last) - int(first) + len(numbers) >= HOSTS_MAX:
            raise UsageError(f"'{whole}' names more than {HOSTS_MAX} hosts")
        numbers.extend(str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
    return numbers


def _expand_item(item: str) -> list[str]:
    names = [""]
    rest = item
    while rest:
        plain, bracket, after = rest.partition("[")
        names = [name + plain for name in names]
        if not bracket:
            break
        inside, _, rest = after.partition("]")
        numbers = _expand_range(inside, item)
        if len(names) * len(numbers) > HOSTS_MAX:
            raise UsageError(f"'{item}' names more than {HOSTS_MAX} hosts")
        names = [name + number for name in names for number in numbers]
    return names


def expand(text: str) -> list[str]:
    """Names of a host list such as ``n[01-04,7],login`` or ``a;b``, in order.

    An IPv6 address in brackets is taken as it is. Raises ``UsageError`` for bad syntax, a name given twice
    and more than ``HOSTS_MAX`` names.
    """
    names: list[str] = []
    for item in split_outside_brackets(text, ",; \t\n"):
        names.extend([item] if _IPV6.search(item) else _expand_item(item))
        if len(names) > HOSTS_MAX:
            raise UsageError(f"more than {HOSTS_MAX} hosts")
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UsageError(f"'{twice}' is named twice in '{text}'")
    return names


def split_host_port(text: str) -> tuple[str, int]:
    """(host, port) of ``host``, ``host:port``, ``:port`` or ``[IPv6]:port``; port 0 when none is given.

    Raises ``UsageError``.
    """
    match = _IPV6.fullmatch(text)
    if match:
        return match.group(1), _port(match.group(2) or "0", text)
    host, colon, port = text.rpartition(":")
    if not colon:
        return text, 0
    if ":" in host:
        raise UsageError(f"write the address '{text}' as [{text}] or [ADDRESS]:PORT")
    return host, _port(port, text)


def _port(digits: str, text: str) -> int:
    if not digits.isascii() or not digits.isdigit() or int(digits) > 65535:
        raise UsageError(f"'{digits}' in '{text}' is not a port number (1 to 65535)")
    return int(digits)


def check_name(name: str, what: str) -> str:
    """``name`` if it can be part of a path, a key and an xattr's value; raises ``UsageError`` otherwise."""
    if len(name) > 200 or not _NAME.fullmatch(name):
        raise UsageError(f"{what} '{name}' may have only letters, digits and . _ : -")
    return name
