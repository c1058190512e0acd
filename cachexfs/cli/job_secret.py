"""``cachexfs job-secret``: a job's shared secret from the site's key, for the Slurm prolog."""

from __future__ import annotations

import hashlib
import hmac

import click

from cachexfs.cli.output import write
from cachexfs.cli.secrets_file import check_secret_file
from cachexfs.errors import EXIT_DONE, UsageError

KEY_BYTES_MAX = 1 << 20


@click.command("job-secret")
@click.option("--key", "key_file", required=True, metavar="FILE", help="The site's key: the same on all nodes, root's.")
@click.argument("job")
def command(key_file: str, job: str) -> int:
    """Print HMAC-SHA256 of JOB under the site's key, in hexadecimal. All nodes get the same, each job another."""
    check_secret_file(key_file)
    if not job:
        raise UsageError("the job's id is empty")
    with open(key_file, "rb") as file:
        key = file.read(KEY_BYTES_MAX)
    write(hmac.new(key, b"cachexfs job " + job.encode("utf-8", "surrogateescape"), hashlib.sha256).hexdigest())
    return EXIT_DONE
