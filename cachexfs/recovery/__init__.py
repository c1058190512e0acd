"""Recovery without a daemon: what NVMe directories and hidden files hold, brought to the PFS."""
