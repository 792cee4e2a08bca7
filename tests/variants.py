"""Small specs, one for each way in which types, outputs and ends differ."""

from typing import Any

from mhcgen.plan import Plan, make_plan
from mhcgen.spec import Spec
from tests.shapes import GROUPS


def variant(
    name: str,
    hidden: int = 264,
    hc: int = 4,
    tp: int = 2,
    cluster_size: int | None = 2,
    arch: str = "sm_90a",
    norm_weight: str = "plain",
    pre_mix: str = "fresh",
    groups: list[dict[str, int]] = GROUPS,
    **sections: Any,
) -> Plan:
    """The plan of a variant; with one token or three a cluster, if not said."""
    model = {
        "hidden": hidden,
        "hc": hc,
        "sinkhorn_iters": 2,
        "norm_eps": 1e-20,
        "norm_weight": norm_weight,
        "pre_mix": pre_mix,
    }
    target = {"cluster_size": cluster_size, "token_groups": groups}
    return make_plan(
        Spec.model_validate(
            {
                "name": name,
                "model": model,
                "parallel": {"tp": tp},
                "capacity": {"max_tokens": 8},
                "targets": {arch: target},
                **sections,
            }
        )
    )


FP16 = {"activation": "fp16"}
FP32 = {"fn_weight": "fp32"}
MEANS = {"stream_mean": True}
INVARIANT: dict[str, Any] = {"batch_invariant": True}

VARIANTS = (
    variant("fp16", precision=FP16, moe={"top_k": 2, "weight_dtypes": ["bf16"]}),
    variant(
        "fp16_means", hc=8, precision=FP16, outputs=MEANS, arch="sm_100a", **INVARIANT
    ),
    variant("fp32", hidden=512, precision=FP32, arch="sm_103a", **INVARIANT),
    variant("fp32_in_l2", hidden=1032, hc=8, precision=FP32),
    variant("fp16_and_fp32", hc=2, tp=4, precision=FP16 | FP32),
    variant("fp32_one_stream", hc=1, tp=1, precision=FP32, outputs=MEANS),
    variant("fp32_trips", hidden=1032, hc=8, precision=FP32, cluster_size=1),
    variant("fma_in_registers", hidden=256, precision={"projection": "fma"}),
    variant(
        "fma_of_one_token",
        hidden=256,
        precision={"projection": "fma"},
        groups=[{"max_tokens": 8, "group": 1}],
    ),
    variant("plus_one", norm_weight="plus_one", **INVARIANT),
    variant("no_norm_weight", norm_weight="none", outputs=MEANS),
    variant("delayed", tp=4, pre_mix="delayed", outputs=MEANS, **INVARIANT),
    variant("delayed_fp16", hc=8, pre_mix="delayed", precision=FP16),
    variant(
        "delayed_trips",
        hidden=1032,
        hc=8,
        pre_mix="delayed",
        outputs=MEANS,
        cluster_size=1,
    ),
    variant(
        "split_fn",
        hidden=256,
        groups=[
            {"max_tokens": 2, "group": 1},
            {"max_tokens": 8, "group": 3, "fn_octets": 1},
        ],
    ),
    variant(
        "delayed_split_fn",
        tp=4,
        pre_mix="delayed",
        groups=[
            {"max_tokens": 2, "group": 1, "fn_octets": 0},
            {"max_tokens": 8, "group": 3, "fn_octets": 2},
        ],
    ),
    variant("tail", tp=4, mixes="tail"),
    variant("tail_of_one_rank", hc=1, tp=1, mixes="tail"),
    variant(
        "delayed_tail",
        hc=8,
        pre_mix="delayed",
        mixes="tail",
        ends={"entry": True, "exit": "pre_mix"},
    ),
    variant("ends", outputs=MEANS, ends={"entry": True, "exit": "mean"}),
    variant(
        "ends_by_head",
        hidden=2056,
        hc=2,
        tp=4,
        precision=FP32,
        norm_weight="plus_one",
        ends={"entry": True, "exit": "sigmoid"},
        cluster_size=8,
    ),
    variant(
        "ends_by_pre_mix",
        hc=2,
        precision=FP16,
        pre_mix="delayed",
        norm_weight="none",
        ends={"entry": True, "exit": "pre_mix"},
    ),
    variant("ends_of_one_rank", hc=2, tp=1, ends={"exit": "sigmoid"}),
)
