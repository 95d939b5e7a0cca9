"""What several parts of the package use unchanged.

cache          the user's cache folder, and small JSON files in it
build          native code: compiled on first use, kept in the cache folder, loaded
cpu, cuda      native kernels for the two kinds of device: how they are called, and why there may be none
host           Python extensions that make repeated calls cheap
memo           what repeated calls find again
gpu            how many multiprocessors a GPU has
triton_launch  where Triton's kernels run, and how one may be started
"""
