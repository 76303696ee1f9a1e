"""The CPU backend: a native library for the hot ops, and its binding."""
