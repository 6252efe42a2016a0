"""Native CPU kernels: C++ sources, their compilation and cache (build.py), and the ctypes binding (library.py)."""
