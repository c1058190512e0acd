"""Names that commit a checkpoint, point to one, or mark one as unfinished.

Role: what the commit order (promise 3) and ``latest`` must know about a name before anybody reads the
file. Pure functions of the last path component, as the kernel's bytes. Called from the engine's ordering,
the drain and the command line; ``formats`` says what a commit file names.
"""

from __future__ import annotations

import re

_COMMIT_NAMES = frozenset(
    {
        b".metadata",  # DCP
        b"latest",  # DeepSpeed's tag, many users' symlink
        b"latest_checkpointed_iteration.txt",  # Megatron
        b"trainer_state.json",  # HuggingFace Trainer
        b"metadata.json",  # Megatron
        b"integrity.json",  # Megatron
        b"meta.pt",  # Lightning, sharded
        b"_CHECKPOINT_METADATA",  # Orbax
    }
)
_POINTER_NAMES = frozenset({b"latest", b"latest_checkpointed_iteration.txt"})
_RANK_METADATA = re.compile(rb"__[0-9]+\.metadata")
_INDEX_SUFFIX = b".index.json"
_SUCCESS = b"commit_success"
UNFINISHED = b"-unfinished"

POINTER_BYTES_MAX = 4096
_COMPONENT_BYTES_MAX = 255
_ITERATION_DIGITS_MAX = 18
_MEGATRON_DIGITS = 7  # iter_0000100; more digits grow the name
_STEP = re.compile(r"[0-9]+")
_STEP_DIGITS_MAX = 255


def is_commit_name(name: bytes) -> bool:
    """Whether a file of this name claims that its checkpoint is whole (``name``: last component)."""
    return (
        name in _COMMIT_NAMES
        or name.endswith(_INDEX_SUFFIX)
        or _SUCCESS in name
        or _RANK_METADATA.fullmatch(name) is not None
    )


def is_pointer_name(name: bytes) -> bool:
    """Whether a regular file of this name names another checkpoint in its content."""
    return name in _POINTER_NAMES


def pointer_target(name: bytes, data: bytes) -> bytes | None:
    """The path, relative to the tracker's directory, that the content of tracker ``name`` points to.

    ``latest`` holds the path itself (DeepSpeed); ``latest_checkpointed_iteration.txt`` an iteration or
    ``release`` (Megatron). White space around it does not count. None: not intelligible, empty, absolute,
    or out of the directory.
    """
    if len(data) > POINTER_BYTES_MAX:
        return None
    text = data.strip()
    if name == b"latest_checkpointed_iteration.txt":
        if text == b"release":
            return text
        if text.isdigit() and len(text) <= _ITERATION_DIGITS_MAX:
            return b"iter_%0*d" % (_MEGATRON_DIGITS, int(text))
        return None
    if name != b"latest":
        return None
    parts = text.split(b"/")
    if any(part in (b"", b".", b"..") or len(part) > _COMPONENT_BYTES_MAX for part in parts):
        return None
    if any(byte < 0x20 or byte == 0x7F for byte in text):
        return None
    return text


def is_unfinished_marker(name: bytes) -> bool:
    """Whether this is NeMo's marker ``X-unfinished``: while it exists, checkpoint X does not count."""
    return name.endswith(UNFINISHED) and len(name) > len(UNFINISHED)


def unfinished_target(marker: bytes) -> bytes:
    """The name X that the marker ``X-unfinished`` speaks of, beside it."""
    return marker.removesuffix(UNFINISHED)


def step_of(name: str) -> int | None:
    """The training step in a checkpoint's name: its last run of ASCII digits, or None."""
    found = _STEP.findall(name)
    if not found or len(found[-1]) > _STEP_DIGITS_MAX:
        return None
    return int(found[-1])
