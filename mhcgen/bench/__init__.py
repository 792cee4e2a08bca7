"""Benchmarks: packages beside NCCL, the floor and the unfused path, in one run.

``run.py`` drives a run, ``contenders.py`` says what is timed and ``timing.py`` how;
``result.py`` holds what came out, which ``report.py`` and ``plot.py`` show. Given a
package, a run imports nothing but torch, the CuTe DSL, typer and rich.
"""
