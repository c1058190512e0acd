"""Names in the PFS directory that are not the users'. Imports nothing: processes that touch the PFS are to be small."""

STATE_DIR = b".cachexfs"  # at the top
#: Temporaries beside their destination (only where a rename from ``.cachexfs`` gives EXDEV).
BESIDE_PREFIX = b".cachexfs-tmp-"
WHY = "this name belongs to CacheX FS"
