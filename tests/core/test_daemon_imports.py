"""The daemon starts quickly and needs neither torch nor numpy."""

from __future__ import annotations

import subprocess
import sys


def test_the_daemon_loads_neither_torch_nor_numpy() -> None:
    code = "import sys, cachexfs.daemon; print(sorted({'torch', 'numpy', 'scipy', 'click', 'rich'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
