"""Stage keys: the name of a content's bytes in every staging and NVMe directory.

Role: pure. A key is ``<fid>.<generation it would become>.<nonce>`` in hexadecimal: enough to adopt an unpublished
file after its daemon was killed.
"""

from __future__ import annotations


def make_stage(fid: int, gen: int, nonce: int) -> str:
    """A stage key; ``nonce`` (32 bits) tells two attempts at one generation apart."""
    return f"{fid:x}.{gen:x}.{nonce & 0xFFFFFFFF:08x}"


def parse_stage(stage: str) -> tuple[int, int]:
    """(fid, generation) of a stage key. Raises ``ValueError``."""
    fid, gen, _ = stage.split(".")
    return int(fid, 16), int(gen, 16)
