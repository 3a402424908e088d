"""The official Kubernetes client of Python against the fake cluster; its kubeconfig is the argument."""

import sys

from kubernetes import client, config, watch
from kubernetes.client.rest import ApiException
from kubernetes.stream import stream

config.load_kube_config(sys.argv[1])
core = client.CoreV1Api()


def pod(name, script):
    return client.V1Pod(
        metadata=client.V1ObjectMeta(name=name, labels={"set": "python"}),
        spec=client.V1PodSpec(
            restart_policy="Never",
            termination_grace_period_seconds=1,
            containers=[
                client.V1Container(
                    name="main", image="host:1", image_pull_policy="IfNotPresent", command=["sh", "-c", script]
                )
            ],
        ),
    )


def refused(code, reason, call, *arguments, **keywords):
    try:
        call(*arguments, **keywords)
    except ApiException as error:
        assert error.status == code, error
        assert f'"reason":"{reason}"' in error.body, error.body
        return error
    raise AssertionError(f"{reason} expected")


def until(name, wanted, **since):
    """Follows a pod through a watch until it is as wanted."""
    watcher = watch.Watch()
    phases = []
    for event in watcher.stream(
        core.list_namespaced_pod, "default", field_selector=f"metadata.name={name}", timeout_seconds=80, **since
    ):
        phases.append((event["type"], event["object"].status.phase))
        if wanted(event):
            watcher.stop()
            return phases
    raise AssertionError(f"{name}: {phases}")


assert client.VersionApi().get_code().minor == "36"
assert "default" in [n.metadata.name for n in core.list_namespace().items]
assert [n.metadata.name for n in core.list_node().items] == ["kubefake-node"]

made = core.create_namespaced_pod("default", pod("a", "echo from python; trap 'exit 0' TERM; while :; do sleep 1000 & wait $!; done"))
assert made.status.phase == "Pending" and made.metadata.uid
refused(409, "AlreadyExists", core.create_namespaced_pod, "default", pod("a", "true"))
phases = until("a", lambda e: e["object"].status.phase == "Running")
assert phases[-1][0] in ("ADDED", "MODIFIED"), phases
# Followed, for it may run and not have written yet.
assert core.read_namespaced_pod_log("a", "default", follow=True, limit_bytes=12) == "from python\n"

said = stream(
    core.connect_get_namespaced_pod_exec, "a", "default", command=["sh", "-c", "echo out; echo err >&2"],
    stdin=False, stdout=True, stderr=True, tty=False,
)
assert sorted(said.split()) == ["err", "out"], said
session = stream(
    core.connect_get_namespaced_pod_exec, "a", "default", command=["sh", "-c", "read line; echo heard $line; exit 6"],
    stdin=True, stdout=True, stderr=True, tty=False, _preload_content=False,
)
session.write_stdin("me\n")
session.run_forever(timeout=60)
assert session.read_stdout() == "heard me\n"
assert session.returncode == 6, session.returncode

found = core.list_namespaced_pod("default", label_selector="set=python", limit=1)
assert [p.metadata.name for p in found.items] == ["a"]
patched = core.patch_namespaced_pod("a", "default", {"metadata": {"labels": {"more": "x"}}})
assert patched.metadata.labels == {"set": "python", "more": "x"}

version = core.list_namespaced_pod("default").metadata.resource_version
core.delete_namespaced_pod("a", "default", grace_period_seconds=1)
until("a", lambda e: e["type"] == "DELETED", resource_version=version)
refused(404, "NotFound", core.read_namespaced_pod, "a", "default")

core.create_namespaced_pod("default", pod("b", "exit 3"))
until("b", lambda e: e["object"].status.phase == "Failed")
state = core.read_namespaced_pod("b", "default").status.container_statuses[0].state
assert state.terminated.exit_code == 3 and state.terminated.reason == "Error"
core.delete_namespaced_pod("b", "default")

wrong = pod("c", "true")
wrong.spec.active_deadline_seconds = 0
error = refused(422, "Invalid", core.create_namespaced_pod, "default", wrong)
assert "spec.activeDeadlineSeconds" in error.body

owner = core.create_namespaced_config_map("default", client.V1ConfigMap(metadata=client.V1ObjectMeta(name="owner"), data={"k": "v"}))
reference = client.V1OwnerReference(api_version="v1", kind="ConfigMap", name="owner", uid=owner.metadata.uid)
owned = client.V1ConfigMap(metadata=client.V1ObjectMeta(name="owned", owner_references=[reference]))
core.create_namespaced_config_map("default", owned)
watcher = watch.Watch()
version = core.list_namespaced_config_map("default").metadata.resource_version
core.delete_namespaced_config_map("owner", "default")
deleted = []
for event in watcher.stream(core.list_namespaced_config_map, "default", resource_version=version, timeout_seconds=60):
    if event["type"] == "DELETED":
        deleted.append(event["object"].metadata.name)
    if len(deleted) == 2:
        watcher.stop()
assert deleted == ["owner", "owned"], deleted

leases = client.CoordinationV1Api()
lease = leases.create_namespaced_lease(
    "default", client.V1Lease(metadata=client.V1ObjectMeta(name="l"), spec=client.V1LeaseSpec(holder_identity="me"))
)
lease.spec.holder_identity = "you"
leases.replace_namespaced_lease("l", "default", lease)
refused(409, "Conflict", leases.replace_namespaced_lease, "l", "default", lease)

print("all is well")
