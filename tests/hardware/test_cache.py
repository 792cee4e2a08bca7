"""A package whose kernels another process compiled, on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mhcgen import reference
from mhcgen.runtime import cache, compiler
from mhcgen.runtime.loader import load_loopback

from .conftest import GENERATED, assert_same_bits


def test_cached_kernels_do_what_compiled_ones_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one launch and in two, with as much room, and in a graph."""
    monkeypatch.setenv(cache.FOLDER, str(tmp_path))
    compiled = load_loopback(GENERATED / "glm53_tp2", 0)

    def compile_kernel(*arguments: Any) -> Any:
        raise AssertionError("compiled again")

    monkeypatch.setattr(compiler, "compile_kernel", compile_kernel)
    cached = load_loopback(GENERATED / "glm53_tp2", 0)
    assert cached._launcher.room == compiled._launcher.room
    for m in (1, 16, 64, 256):
        assert cached.launches(m) == compiled.launches(m)
        given = reference.random_inputs(m, 4096, 4, 2, m, "cuda")
        shared = (given.residual, given.post, given.comb, given.fn, given.scale)
        arguments = (given.parts[0], *shared, given.base, given.norm_weight)
        expected = compiled(*arguments)
        compiled.join()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            found = cached(*arguments)
            cached.join()
        for _ in range(2):
            for tensor in found:
                tensor.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            assert_same_bits([expected, found])
