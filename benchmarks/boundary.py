"""Times one boundary beside NCCL's all-reduce, in one run, by CUDA-graph replay.

On two GPUs, and on one, where the traffic of all ranks loops back::

    python -m torch.distributed.run --nproc-per-node 2 \
        benchmarks/boundary.py generated/glm53_tp2
    python benchmarks/boundary.py generated/glm53

Columns, in microseconds a call, medians over interleaved replays of 100 calls a graph:

- boundary: publish and boundary, the critical path between two sublayers;
- with mixes: whole calls back to back, where each waits for the mixes of the one before
  it, as if the sublayer between them took no time;
- finalize: as boundary, with the MoE finalize of all top_k experts for a publish;
- nccl: NCCL's all-reduce of the same rows, alone.

Below the table: the host's microseconds for one whole eager call.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mhcgen import reference
from mhcgen.runtime import arguments, host, load, loader, mailbox, warm_up

CALLS = 100
REPLAYS = 15
# NCCL guards graphs against collectives outside of them, which more than doubles a
# small all-reduce's time. There are none here: time NCCL at its best.
os.environ.setdefault("NCCL_GRAPH_MIXING_SUPPORT", "0")


def load_loopback(path: Path) -> host.FusedBoundary:
    """One rank whose mailbox holds the traffic of all."""
    loading = loader.Loading.of(path, None)
    box = mailbox.loopback(loading.constants, loading.device)
    launcher = loading.launcher(box)
    warm_up.warm_up_together([launcher])
    return host.FusedBoundary(launcher)


def capture(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of CALLS calls."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(CALLS):
                call()
    return graph


def replay(graph: torch.cuda.CUDAGraph) -> float:
    """Microseconds a call of one replay, begun together on all ranks."""
    if dist.is_initialized():
        dist.barrier()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1000 / CALLS


def calls_for(boundary: Any, m: int) -> dict[str, Callable[[], object]]:
    """What is timed, by column."""
    launcher = boundary._launcher
    c = launcher.constants
    inputs = reference.random_inputs(m, c.HIDDEN, c.HC, c.TP, m, "cuda")
    shared = arguments.BoundaryInput(
        inputs.residual,
        inputs.post,
        inputs.comb,
        inputs.fn,
        inputs.scale,
        inputs.base,
        inputs.norm_weight,
    )
    x = inputs.parts[boundary.rank]
    outputs, mix = launcher.outputs(m), launcher.mix(m)
    kernel = launcher.boundary_kernel(m)

    def critical_path() -> None:
        launcher.publish(x)
        launcher.boundary(kernel, shared, outputs, mix)

    def with_mixes() -> None:
        boundary(x, *shared)
        boundary.join()

    calls: dict[str, Callable[[], object]] = {
        "boundary": critical_path,
        "with mixes": with_mixes,
    }
    if hasattr(c, "TOP_K"):
        experts = m * c.TOP_K
        routed = arguments.RoutedInput(
            torch.randn(experts, c.HIDDEN, device="cuda").bfloat16(),
            torch.rand(m, c.TOP_K, device="cuda"),
            torch.randperm(experts, device="cuda").int().reshape(m, c.TOP_K),
            torch.randn(m, c.HIDDEN, device="cuda").bfloat16(),
        )

        def finalize() -> None:
            launcher.finalize(routed)
            launcher.boundary(kernel, shared, outputs, mix)

        calls["finalize"] = finalize
    if dist.is_initialized():
        row = x.clone()
        calls["nccl"] = lambda: dist.all_reduce(row)
    return calls


def host_time(boundary: Any, m: int = 8, calls: int = 300) -> float:
    """Host microseconds of an eager call; the device may lag behind."""
    call = calls_for(boundary, m)["with mixes"]
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - begin) / calls * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


def measure(boundary: Any, m: int) -> dict[str, float]:
    """The medians of one M, replays of all columns interleaved."""
    graphs = {name: capture(call) for name, call in calls_for(boundary, m).items()}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(REPLAYS):
        for name, graph in graphs.items():
            microseconds = replay(graph)
            if turn >= 2:
                times[name].append(microseconds)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    """Prints a table, and writes it as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package", type=Path)
    parser.add_argument("--tokens", default="1,2,4,8,16,32,64")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        device = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=torch.device("cuda", device))
        boundary = load(options.package)
    else:
        boundary = load_loopback(options.package)
    rows = {}
    for m in map(int, options.tokens.split(",")):
        rows[m] = measure(boundary, m)
    host_microseconds = host_time(boundary)
    if boundary.rank == 0:
        report(options, boundary, ranks, rows, host_microseconds)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def report(
    options: argparse.Namespace,
    boundary: Any,
    ranks: int,
    rows: dict[int, dict[str, float]],
    host_microseconds: float,
) -> None:
    """Prints the table in Markdown."""
    columns = list(next(iter(rows.values())))
    where = f"{ranks} x {torch.cuda.get_device_name()}, {boundary.transport}"
    print(f"{options.package.name}, {where}, microseconds a call")
    ratio = ["boundary / nccl"] if "nccl" in columns else []
    print("| M | " + " | ".join([*columns, *ratio]) + " |")
    print("| --- " * (1 + len(columns) + len(ratio)) + "|")
    for m, row in rows.items():
        cells = [f"{row[name]:.2f}" for name in columns]
        if ratio:
            cells.append(f"{row['boundary'] / row['nccl']:.2f}")
        print(f"| {m} | " + " | ".join(cells) + " |")
    print(f"eager call on the host: {host_microseconds:.1f}")
    if options.json:
        result = {
            "package": options.package.name,
            "device": torch.cuda.get_device_name(),
            "gpus": ranks,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "command": f"benchmarks/boundary.py {options.package} "
            f"--tokens {options.tokens}",
            "host_microseconds": round(host_microseconds, 1),
            "microseconds": {
                str(m): {name: round(value, 2) for name, value in row.items()}
                for m, row in rows.items()
            },
        }
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
