"""Check an installation: ``python -m weightsync.integrations verl``. Exits with 1 if the framework could not update with it.

A framework may hide why a plugin is missing. These checks import what it would import, in the same way, and show every error.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from weightsync.errors import readable
from weightsync.integrations.checks import CHECKS, findings


def main(arguments: Sequence[str]) -> int:
    """Print one finding a line, with its impact below it, and return the exit status: 2 for a name that is not known."""
    if len(arguments) != 1 or arguments[0] not in CHECKS:
        print(f"usage: python -m weightsync.integrations {{{','.join(CHECKS)}}}", file=sys.stderr)
        return 2
    works = True
    try:
        for finding in findings(arguments[0]):
            works = works and finding.status in ("ok", "limited")
            print(f"{finding.status:<9}{finding.name:<13}{readable(finding.value)}")
            if finding.cost:
                print(f"{'':<22}{readable(finding.cost)}")
    except Exception as error:  # noqa: BLE001 - a check that fails is a result
        print(f"{'unknown':<9}{'check':<13}{readable(f'{type(error).__name__}: {error}')}")
        works = False
    return 0 if works else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
