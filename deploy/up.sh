#!/usr/bin/env bash
# Start everything of deploy/compose.yaml; arguments go to "compose", by default "up --detach".
set -euo pipefail
cd "$(dirname "$0")"

compose() {
    if docker compose version >/dev/null 2>&1 && docker info >/dev/null 2>&1; then docker compose "$@"
    elif command -v podman >/dev/null && podman compose version >/dev/null 2>&1; then podman compose "$@"
    else
        echo "make up needs docker with its compose plugin and its daemon running, or podman with podman-compose;" >&2
        echo "without them: make demo runs everything inside one command, k8s/ is for clusters" >&2
        exit 7
    fi
}

for name in POSTGRES_PASSWORD S3_SECRET_KEY GRAFANA_PASSWORD; do
    grep -qs "^$name=" .env && continue
    (umask 077 && printf '%s=%s\n' "$name" "$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')" >>.env)
    echo "wrote a new $name into deploy/.env" >&2
done
if (($# == 0)); then set -- up --detach; fi
compose "$@"
if [[ $1 == up ]]; then
    echo "coordinator localhost:7070 · console http://localhost:7080/ui/ · Grafana http://localhost:3000 (admin, password in deploy/.env) · Jaeger http://localhost:16686"
fi
