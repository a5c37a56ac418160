"""What only some workers reach: the service that gives roles, and the hub."""

from __future__ import annotations

import pytest

from support.manifests.chart import PRODUCTION, changed, needs_helm, render_chart
from support.manifests.chart_values import MERGE, spec
from support.manifests.overlay import Cluster, Object, stages_of

pytestmark = needs_helm

NARROW = {"ipBlock": {"cidr": "192.0.2.3/32"}}
STS = {"ipBlock": {"cidr": "192.0.2.6/32"}}
PORT = [{"port": 443, "protocol": "TCP"}]
ROLE = {"annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::111122223333:role/slipway"}}


@pytest.mark.parametrize(
    ("values", "peers"),
    [
        ({"serviceAccounts": ROLE}, "public"),
        ({"workers": {"merge": {"serviceAccount": ROLE}}}, "public"),
        ({"serviceAccounts": ROLE, "networkPolicies": {"sts": {"to": [STS]}}}, STS),
        ({"networkPolicies": {"sts": {"to": [STS]}}}, STS),
        ({}, None),
    ],
)
@pytest.mark.parametrize("endpoint", ["", "http://minio.minio.svc:9000"])
def test_pods_with_a_role_by_irsa_reach_the_service_that_gives_it(values: Object, peers: object, endpoint: str) -> None:
    """Also where the bucket has an address of its own; without IRSA, nothing more is open."""
    own = {} if endpoint else {"networkPolicies": {"store": {"to": [NARROW]}}}
    store = {"endpoint": endpoint, "existingSecret": "", "workloadIdentity": True}
    cluster = Cluster(render_chart(changed(changed(changed(PRODUCTION, {"store": store}), own), values)))
    first, *more, agent = spec(cluster, "NetworkPolicy", "slipway-artifacts")["egress"]
    assert first["to"] == [NARROW] or "namespaceSelector" in first["to"][0]
    assert agent["ports"] == [{"port": 80, "protocol": "TCP"}]
    match peers:
        case None:
            assert more == []
        case "public":
            assert [(rule["to"][0]["ipBlock"]["cidr"], rule["ports"]) for rule in more] == [("0.0.0.0/0", PORT)]
        case _:
            assert more == [{"to": [peers], "ports": PORT}]


def test_every_importing_worker_reaches_the_hub_and_no_other() -> None:
    pools = {"merge-big": {"worker": "merge"}, "gguf-big": {"worker": "gguf"}}
    cluster = Cluster(render_chart(changed(PRODUCTION, {"import": {"from": ["hf://Qwen"]}, "pools": pools})))
    importing = {one.name for one in cluster.workers() if "import" in stages_of(one)}
    assert importing == {MERGE, "slipway-merge-big"}
    selected = cluster.selected(spec(cluster, "NetworkPolicy", "slipway-hub")["podSelector"])
    assert {one.name for one in selected} == importing
