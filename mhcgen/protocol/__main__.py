"""``python -m mhcgen.protocol``: checks our protocol and shows what breaks others."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from mhcgen.console import show_table
from mhcgen.protocol.instances import INSTANCES, LARGE_INSTANCES, VARIANTS, Variant
from mhcgen.protocol.model import Instance, Model, Protocol
from mhcgen.protocol.search import Report, explore

HEADERS = ("instance", "events", "states", "seconds", "verdict")


def check(protocol: Protocol, instances: Sequence[Instance]) -> list[Report]:
    """Searches each instance and prints a table of what was found."""
    models = [Model(protocol, instance) for instance in instances]
    reports = [explore(model) for model in models]
    show_table(
        "",
        HEADERS,
        [
            (
                str(model.instance),
                len(model.events),
                report.states,
                report.seconds,
                "fails" if report.violation else "holds",
            )
            for model, report in zip(models, reports, strict=True)
        ],
    )
    return reports


def check_variant(variant: Variant) -> bool:
    """Searches a variant, prints its traces, and says whether it is as expected."""
    print(f"\n{variant.name}: {variant.question}")
    reports = check(variant.protocol, variant.instances)
    for report in reports:
        if report.violation is not None:
            print(report.violation)
    return all((report.violation is None) == variant.safe for report in reports)


def main() -> None:
    """Runs the command line; the exit status is 1 if a verdict is not as expected."""
    parser = argparse.ArgumentParser(prog="python -m mhcgen.protocol")
    parser.add_argument(
        "--large", action="store_true", help="check the larger instances as well"
    )
    parser.add_argument(
        "--variant",
        choices=[variant.name for variant in VARIANTS],
        help="check one variant only",
    )
    options = parser.parse_args()
    if options.variant:
        chosen = [variant for variant in VARIANTS if variant.name == options.variant]
        sys.exit(not all([check_variant(variant) for variant in chosen]))

    print("The protocol of the generated kernels")
    instances = (*INSTANCES, *(LARGE_INSTANCES if options.large else ()))
    reports = check(Protocol(), instances)
    for report in reports:
        if report.violation is not None:
            print(report.violation)
    verdicts = [report.violation is None for report in reports]
    verdicts += [check_variant(variant) for variant in VARIANTS]
    sys.exit(not all(verdicts))


if __name__ == "__main__":
    main()
