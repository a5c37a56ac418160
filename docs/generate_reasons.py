"""Print the table of reasons for docs/reasons.md: ``python docs/generate_reasons.py > docs/reasons.md``."""

from slipway.errors import REASONS

HEAD = """# Reasons

Every failure carries one of these. They are stable: recovery rules, exit codes and gRPC status codes follow from them. On the wire
a failure is a `google.rpc.Status` whose `ErrorInfo` has the reason and the domain `slipway`.

| reason | exit code | gRPC status | meaning |
|---|---|---|---|"""


def main() -> None:
    """Print the page."""
    print(HEAD)
    for name, reason in REASONS.items():
        print(f"| `{name}` | {reason.category.exit_code} | `{reason.category.status_code}` | {reason.meaning} |")


if __name__ == "__main__":
    main()
