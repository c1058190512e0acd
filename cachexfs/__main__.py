"""``python -m cachexfs`` is ``cachexfs``."""

from cachexfs.cli.main import main

if __name__ == "__main__":
    main()
