"""CacheX FS: a checkpoint filesystem between a training job and the parallel filesystem."""

__version__ = "0.1.0"
