"""Builds what the tests on one GPU run: a package for each way in which specs differ.

``python -m tests.hardware.build_packages FOLDER``; it needs no GPU.
"""

import sys
from pathlib import Path
from typing import Any

from mhcgen.build import write_files
from mhcgen.plan import make_plan
from mhcgen.render import render
from mhcgen.spec import Spec

SPLIT = {
    "sm_90a": {
        "token_groups": [
            {"max_tokens": 7, "group": 1},
            {"max_tokens": 60, "group": 2, "fn_octets": 2},
            {"max_tokens": 120, "group": 4, "fn_octets": 1},
            {"max_tokens": 256, "group": 9, "fn_octets": 0},
        ]
    }
}
FP16, FP32 = {"activation": "fp16"}, {"fn_weight": "fp32"}
SPECS: dict[str, dict[str, Any]] = {
    "side_stream": {"mixes": "side_stream", "moe": {}},
    "tail": {"mixes": "tail", "moe": {}, "ends": {"entry": True, "exit": "mean"}},
    "tail_delayed": {
        "mixes": "tail",
        "model": {"hidden": 5120, "pre_mix": "delayed"},
        "outputs": {"stream_mean": True},
    },
    "split_fn": {"moe": {}, "targets": SPLIT},
    "half": {"precision": FP16, "moe": {}},
    "wide_fn": {"precision": FP32, "model": {"norm_weight": "plus_one"}},
    "half_wide_fn": {
        "precision": FP16 | FP32,
        "model": {"hidden": 2048, "hc": 8, "norm_weight": "none"},
        "ends": {"entry": True, "exit": "sigmoid"},
    },
    "delayed": {
        "model": {"hidden": 5120, "pre_mix": "delayed", "norm_eps": 1e-20},
        "ends": {"entry": True, "exit": "pre_mix"},
        "outputs": {"stream_mean": True},
    },
    "delayed_fma": {
        "model": {"hidden": 5120, "pre_mix": "delayed"},
        "precision": FP32,
        "batch_invariant": True,
    },
    "means": {
        "batch_invariant": True,
        "ends": {"entry": True, "exit": "mean"},
        "outputs": {"stream_mean": True},
    },
}


def main() -> None:
    """Writes every package into the folder named by the first argument."""
    folder = Path(sys.argv[1])
    for name, sections in SPECS.items():
        model = {"hidden": 4096} | sections.get("model", {})
        parallel = {"tp": 4, "transports": ["unicast"]}
        data = {**sections, "name": name, "model": model, "parallel": parallel}
        package = folder / name
        package.mkdir(parents=True, exist_ok=True)
        write_files(package, render(make_plan(Spec.model_validate(data))))
        print(package)


if __name__ == "__main__":
    main()
