"""Small specs, one for each way in which shapes differ."""

from typing import Any

from mhcgen.plan import Plan, make_plan
from mhcgen.spec import Spec

GROUPS = [{"max_tokens": 2, "group": 1}, {"max_tokens": 8, "group": 3}]
MOE = {"top_k": 2, "weight_dtypes": ["fp32"]}


def shape(
    name: str,
    hidden: int,
    hc: int,
    tp: int,
    cluster_size: int | None = None,
    arch: str = "sm_90a",
    groups: list[dict[str, int]] = GROUPS,
    **sections: Any,
) -> Plan:
    """The plan of a shape; with one token or three a cluster, if not said."""
    return make_plan(
        Spec.model_validate(
            {
                "name": name,
                "model": {"hidden": hidden, "hc": hc, "sinkhorn_iters": 2},
                "parallel": {"tp": tp, "transports": ["unicast"]},
                "capacity": {"max_tokens": groups[-1]["max_tokens"]},
                "moe": MOE,
                "targets": {
                    arch: {"cluster_size": cluster_size, "token_groups": groups}
                },
                **sections,
            }
        )
    )


SHAPES = (
    shape("smallest", 64, 4, 2),
    shape("idle_lanes", 264, 4, 4),
    shape("one_rank", 64, 1, 1),
    shape("one_stream", 264, 1, 16),
    shape("odd_cluster", 264, 2, 16, cluster_size=5),
    shape("largest_cluster", 1000, 4, 8, cluster_size=16),
    shape("idle_publish", 8 * 67, 2, 4, cluster_size=7),
    shape("eight_streams", 256, 8, 4),
    shape("fn_in_shared", 264, 8, 4),
    shape("fn_in_l2", 512, 8, 2, cluster_size=2, arch="sm_120a"),
    shape("fn_in_l2_idle", 520, 8, 2, cluster_size=2, arch="sm_120a"),
    shape("two_polls_and_fn_in_l2", 520, 8, 16, cluster_size=2, arch="sm_120a"),
    shape("trips", 1024, 8, 1, cluster_size=1),
    shape("trips_idle", 520, 8, 2, cluster_size=1),
)
