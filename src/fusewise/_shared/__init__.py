"""Infrastructure shared by several parts of the package.

cache          the user's cache folder, and small JSON files in it
build          native code: compiled on first use, stored in the cache folder, loaded
cpu, cuda      native kernels for the two kinds of device: loading, launching, availability
host           Python extensions for the host fast paths
memo           bounded caches for repeated calls
gpu            number of SMs of a GPU
triton_launch  where Triton kernels can run, and how they may be launched
"""
