"""What is verified: the shape of a package, and the numbers that it promises to use."""

from __future__ import annotations

import runpy
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

from mhcgen import reference
from mhcgen.compilation import require_manifest
from mhcgen.errors import MhcgenError, shortened

if TYPE_CHECKING:
    from mhcgen.plan import Plan


@dataclass(frozen=True)
class Subject:
    """A package, as its calls see it.

    Attributes:
        name: Its name.
        tp: Ranks.
        hidden: H.
        hc: Residual streams.
        capacity: The largest M.
        transports: Those that it has kernels for.
        token_groups: By architecture, rows of the largest M and a cluster's tokens.
        top_k: Routed experts of a token; 0 without finalize kernels.
        weight_dtypes: Types of routing weights.
        shared_expert: Whether finalize takes a shared expert's rows; one or both.
        constants: The model's.
        activation: The type of activations.
        fn_weight: The type of fn.
        pre_mix: ``fresh``, or ``delayed`` where a boundary takes the one before's.
        norm_weight: What the norm multiplies by; ``none`` if nothing.
        stream_mean: Whether a boundary returns the mean of its streams.
        mixes: ``side_stream``, or ``tail`` where a boundary computes them itself.
        entry: Whether there is an entry.
        exit_by: What the exit collapses the streams by; None without an exit.
    """

    name: str
    tp: int
    hidden: int
    hc: int
    capacity: int
    transports: tuple[str, ...]
    token_groups: Mapping[str, tuple[tuple[int, int], ...]]
    top_k: int
    weight_dtypes: tuple[str, ...]
    shared_expert: tuple[bool, ...]
    constants: reference.Constants
    activation: str = "bf16"
    fn_weight: str = "bf16"
    pre_mix: str = "fresh"
    norm_weight: str = "plain"
    stream_mean: bool = False
    mixes: str = "side_stream"
    entry: bool = False
    exit_by: str | None = None

    @property
    def archs(self) -> tuple[str, ...]:
        """The architectures that it is built for."""
        return tuple(self.token_groups)

    @classmethod
    def of_plan(cls, plan: Plan) -> Subject:
        """What the plan of a package promises."""
        model, moe = plan.spec.model, plan.spec.moe
        return cls(
            name=plan.name,
            tp=plan.tp,
            hidden=plan.hidden,
            hc=plan.hc,
            capacity=plan.capacity,
            transports=tuple(plan.transports),
            token_groups={
                target.arch: tuple(
                    (row.max_tokens, row.group) for row in target.token_groups
                )
                for target in plan.targets
            },
            top_k=moe.top_k if moe else 0,
            weight_dtypes=tuple(moe.weight_dtypes) if moe else (),
            shared_expert=tuple(plan.shared_expert),
            constants=reference.Constants(
                model.rms_eps,
                model.hc_eps,
                model.norm_eps,
                model.post_mult,
                model.sinkhorn_iters,
                model.norm_weight == "plus_one",
            ),
            activation=plan.spec.precision.activation,
            fn_weight=plan.spec.precision.fn_weight,
            pre_mix=model.pre_mix,
            norm_weight=model.norm_weight,
            stream_mean=plan.stream_mean,
            mixes=plan.spec.mixes,
            entry=plan.spec.ends.entry,
            exit_by=plan.exit_by,
        )

    @classmethod
    def of_package(cls, folder: Path) -> Subject:
        """What the package in a folder says of itself, in its ``constants`` module.

        Raises:
            MhcgenError: The folder is no package, or a damaged one.
        """
        manifest = require_manifest(folder)
        place = folder / "constants.py"
        try:
            # Alone: the package's other modules import the compiler.
            constants = SimpleNamespace(**runpy.run_path(str(place)))
            subject = cls._of_constants(manifest.name, constants)
        except (Exception, SystemExit) as error:
            reason = shortened(f"{type(error).__name__}: {error}", 200)
            raise MhcgenError(
                f"{place} cannot be used: {reason}: run mhcgen build"
            ) from error
        if set(subject.archs) != set(manifest.kernels):
            raise MhcgenError(
                f"{place} is for {', '.join(subject.archs)}, and manifest.json beside "
                f"it for {', '.join(manifest.kernels)}: run mhcgen build"
            )
        return subject

    @classmethod
    def _of_constants(cls, name: str, c: SimpleNamespace) -> Subject:
        return cls(
            name=name,
            tp=c.TP,
            hidden=c.HIDDEN,
            hc=c.HC,
            capacity=c.CAPACITY,
            transports=tuple(c.TRANSPORTS),
            token_groups={
                arch: tuple((row.max_tokens, row.size) for row in target.token_groups)
                for arch, target in c.TARGETS.items()
            },
            top_k=getattr(c, "TOP_K", 0),
            weight_dtypes=tuple(getattr(c, "ROUTING_WEIGHTS", ())),
            shared_expert=tuple(getattr(c, "SHARED_EXPERT", ())),
            constants=reference.Constants(
                c.RMS_EPS,
                c.HC_EPS,
                c.NORM_EPS,
                c.POST_MULT,
                c.SINKHORN_ITERS,
                c.NORM_WEIGHT == "plus_one",
            ),
            activation=c.ACTIVATION,
            fn_weight=c.FN_WEIGHT,
            pre_mix=c.PRE_MIX,
            norm_weight=c.NORM_WEIGHT,
            stream_mean=c.STREAM_MEAN,
            mixes=c.MIXES,
            entry=c.ENTRY,
            exit_by=c.EXIT,
        )

    def differences(self, other: Subject) -> list[str]:
        """The attributes in which two descriptions of one package differ."""
        return [
            f"{each.name} is {getattr(self, each.name)} and {getattr(other, each.name)}"
            for each in fields(self)
            if getattr(self, each.name) != getattr(other, each.name)
        ]
