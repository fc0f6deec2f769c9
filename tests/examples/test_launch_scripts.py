"""The launch scripts of examples/launch start what they say, and the Kubernetes file has only fields that exist."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import moesaic

LAUNCH = Path(__file__).resolve().parents[2] / "examples" / "launch"

# Field names of kubeflow.org/v1 PyTorchJob, from the Go types of the training operator (pytorch_types.go and
# common_types.go), and of what is used of Kubernetes' pod template (core/v1). None: any value; a dict: its fields.
CONTAINER: dict[str, Any] = {
    **dict.fromkeys(("name", "image", "workingDir", "command", "args")),
    "env": [{"name": None, "value": None, "valueFrom": None}],
    "ports": [{"name": None, "containerPort": None, "protocol": None}],
    "resources": {"limits": None, "requests": None},
    "volumeMounts": [{"name": None, "mountPath": None, "subPath": None, "readOnly": None}],
}
REPLICA: dict[str, Any] = {
    "replicas": None,
    "restartPolicy": {"Always", "OnFailure", "Never", "ExitCode"},
    "template": {
        "metadata": None,
        "spec": {
            "terminationGracePeriodSeconds": None,
            "nodeSelector": None,
            "tolerations": None,
            "containers": [CONTAINER],
            "volumes": [
                {
                    "name": None,
                    "persistentVolumeClaim": {"claimName": None, "readOnly": None},
                    "emptyDir": {"medium": {"Memory", ""}, "sizeLimit": None},
                }
            ],
        },
    },
}
PYTORCHJOB: dict[str, Any] = {
    "apiVersion": {"kubeflow.org/v1"},
    "kind": {"PyTorchJob"},
    "metadata": {"name": None, "namespace": None, "labels": None, "annotations": None},
    "spec": {
        "nprocPerNode": None,
        "elasticPolicy": {
            **dict.fromkeys(("minReplicas", "maxReplicas", "rdzvPort", "rdzvHost", "rdzvId", "rdzvConf")),
            **dict.fromkeys(("standalone", "nProcPerNode", "maxRestarts", "metrics")),
            "rdzvBackend": {"c10d", "etcd", "etcd-v2"},
        },
        "runPolicy": {
            "cleanPodPolicy": {"All", "Running", "None", ""},
            **dict.fromkeys(("ttlSecondsAfterFinished", "activeDeadlineSeconds", "backoffLimit")),
            "schedulingPolicy": dict.fromkeys(
                ("minAvailable", "queue", "minResources", "priorityClass", "scheduleTimeoutSeconds")
            ),
        },
        "pytorchReplicaSpecs": {"Master": REPLICA, "Worker": REPLICA},
    },
}


def unknown(value: Any, schema: Any, path: str = "") -> list[str]:
    """Fields and values that the schema does not have."""
    if schema is None:
        return []
    if isinstance(schema, set):
        return [] if value in schema else [f"{path}={value!r}"]
    if isinstance(schema, list):
        return [found for i, each in enumerate(value) for found in unknown(each, schema[0], f"{path}[{i}]")]
    return [
        found
        for key, inner in value.items()
        for found in ([f"{path}.{key}"] if key not in schema else unknown(inner, schema[key], f"{path}.{key}"))
    ]


@pytest.fixture(scope="module")
def job() -> dict[str, Any]:
    return yaml.safe_load((LAUNCH / "pytorchjob.yaml").read_text(encoding="utf-8"))


def test_the_pytorchjob_has_only_fields_that_exist(job):
    assert not unknown(job, PYTORCHJOB)
    assert unknown({"spec": {"elasticPolicy": {"maxRestart": 3}}}, PYTORCHJOB) == [".spec.elasticPolicy.maxRestart"]


def test_the_pytorchjob_fits_together(job):
    spec = job["spec"]
    worker = spec["pytorchReplicaSpecs"]["Worker"]
    pod = worker["template"]["spec"]
    (container,) = pod["containers"]
    assert container["name"] == "pytorch", "the operator looks for that name"
    assert isinstance(spec["nprocPerNode"], str), "the API takes a text"
    processes = int(spec["nprocPerNode"])
    assert f"--nproc-per-node={processes}" in container["args"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == processes
    elastic = spec["elasticPolicy"]
    assert elastic["minReplicas"] <= worker["replicas"] <= elastic["maxReplicas"]
    assert spec["runPolicy"]["schedulingPolicy"]["minAvailable"] == elastic["minReplicas"]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    (grace,) = (int(each.split("=")[1]) for each in container["args"] if each.startswith("--shutdown-timeout="))
    assert grace < pod["terminationGracePeriodSeconds"]
    assert container["args"][container["args"].index("-m") :][:3] == ["-m", "moesaic", "train"]


@pytest.mark.parametrize("missing", ["HEAD", "NODES", "arguments"])
def test_torchrun_sh_says_what_it_needs(missing):
    environment = {"PATH": os.environ["PATH"], "TORCHRUN": "echo"} | {"HEAD": "node0", "NODES": "2"}
    environment.pop(missing, None)
    arguments = [] if missing == "arguments" else ["run.toml"]
    done = subprocess.run(
        ["bash", str(LAUNCH / "torchrun.sh"), *arguments], env=environment, capture_output=True, text=True
    )
    assert done.returncode != 0 and not done.stdout
    assert ("usage" if missing == "arguments" else f"set {missing} to") in done.stderr


@pytest.mark.long
@pytest.mark.slow
def test_the_dry_run_trains_on_two_machines_of_two_processes():
    source = str(Path(moesaic.__file__).parents[1])
    done = subprocess.run(
        ["bash", str(LAUNCH / "check.sh")],
        env=os.environ | {"PYTHON": sys.executable, "PYTHONPATH": source},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "torchrun.sh trains on two machines of two processes." in done.stdout
