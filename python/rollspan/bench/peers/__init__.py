"""Engines that `rollspan bench` compares, each run by `host.py` in a process and an interpreter of its own.

These files are started by path, so that the interpreter of another engine needs nothing of rollspan installed: they
import only the standard library and the engine they are named after. What an engine's file offers is in `host.py`.
"""
