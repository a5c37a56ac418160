"""Print the table of reasons for docs/reasons.md: ``python docs/generate_reasons.py > docs/reasons.md``."""

from slipway.reasons import EXIT_CODES, REASONS

HEAD = """# Reasons

Every failure carries one of these. They are stable: recovery rules, exit codes and gRPC status codes follow from them. On the wire
a failure is a `google.rpc.Status` whose `ErrorInfo` has the reason and the domain `slipway`.

{codes}

Of several failures, the one that decides is that of a failed check (4), then a fault of Slipway (1), then what repeating cannot mend
(3, 6), then what may pass (5, 7). `report.json` has the reason of every attempt.

| reason | exit code | gRPC status | meaning |
|---|---|---|---|"""


def main() -> None:
    """Print the page."""
    rows = "\n".join(f"| {code} | {meaning} |" for code, meaning in EXIT_CODES.items())
    print(HEAD.replace("{codes}", f"| exit code | meaning |\n|---|---|\n{rows}"))
    for name, reason in REASONS.items():
        print(f"| `{name}` | {reason.category.exit_code} | `{reason.category.status_code}` | {reason.meaning} |")


if __name__ == "__main__":
    main()
