"""``python -m cachexfs.recovery``: a request (JSON) on standard input, lines of JSON on standard output.

Role: the child process of ``cachexfs recover``. It may hang with the PFS; the command then leaves it behind.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading

import msgspec

from cachexfs.errors import EXIT_CANNOT_TELL, CacheXError
from cachexfs.recovery.report import Line, Request
from cachexfs.recovery.run import run

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Answer one request. Ends with its parent."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.umask(0)
    lock = threading.Lock()

    def say(line: Line) -> None:
        with lock:
            # Not msgspec's own JSON: that refuses the surrogates which stand for bytes of a name that is not UTF-8.
            sys.stdout.write(json.dumps(msgspec.to_builtins(line)) + "\n")
            sys.stdout.flush()

    request = msgspec.convert(json.load(sys.stdin), Request)
    try:
        say(run(request, say))
    except CacheXError as error:
        say(Line(done=True, error=str(error), exit=error.exit_code))
    except OSError as error:
        say(Line(done=True, error=str(error), exit=EXIT_CANNOT_TELL))


if __name__ == "__main__":
    main()
