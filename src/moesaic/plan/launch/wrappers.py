"""How processes are started: torchrun on each node, and Slurm and Kubernetes around it.

All three say the same: one torchrun a node, a process per accelerator, a meeting point by c10d.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from .parts import Draft, comment, heading
from .plan import Plan

PORT = 29400
"""Where torchruns meet, unless PORT says otherwise."""
GRACE_SECONDS = 120
"""Time that the processes have to end by themselves when the job is stopped."""


def train_script(
    plan: Plan, draft: Draft, command: Sequence[str], usage: Sequence[str] = (), graceful: bool = False
) -> str:
    """The script that every node runs. `command` is what torchrun starts, a line each, already quoted for the shell.
    `graceful` processes save when they are told to stop, and get time for it."""
    grace = f" --shutdown-timeout {GRACE_SECONDS}" if graceful else ""
    lines = heading(plan, draft.target, draft.notes, usage)
    nodes, each = plan.nodes, plan.gpus_per_node
    start = f"HEAD=node0 bash train.sh   # on each of {nodes} nodes" if nodes > 1 else "bash train.sh"
    lines += [
        "",
        f"  {start}",
        "",
        "  HEAD      name or address of one of the nodes, at which all meet",
        f"  PORT      a free port on HEAD ({PORT})",
        f"  JOB       a name that no other job on HEAD uses at the same time ({plan.name})",
        "  RESTARTS  how often to start anew after a failure (0)",
        "  TORCHRUN  another torchrun than the one on the PATH; `echo` shows the command",
    ]
    head = "HEAD:?set HEAD to the node at which all meet" if nodes > 1 else "HEAD:=127.0.0.1"
    environment = "".join(f"export {name}={value}\n" for name, value in sorted(draft.env.items()))
    shown = " \\\n  ".join(command)
    return f"""#!/usr/bin/env bash
{comment(lines)}set -euo pipefail
cd "$(dirname "$0")"

{environment}# Nodes that come in later find the others only with this.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
meet=()
# Kubernetes' training operator says where to meet; elsewhere HEAD does.
if [ -z "${{PET_RDZV_ENDPOINT:-}}" ]; then
  : "${{{head}}}"
  meet=(--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint "$HEAD:${{PORT:-{PORT}}}")
  meet+=(--rdzv-id "${{JOB:-{plan.name}}}")
fi
exec ${{TORCHRUN:-torchrun}} ${{meet[@]+"${{meet[@]}}"}} \\
  --nproc-per-node {each} --max-restarts "${{RESTARTS:-0}}"{grace} \\
  {shown}
"""


def wrapped(plan: Plan, draft: Draft, files: dict[str, str], checkout: str | None = None) -> dict[str, str]:
    """The files of a target with `slurm.sbatch` and `pytorchjob.yaml`, which start its `train.sh`. `checkout` names an
    environment variable that says where the target's sources are."""
    return {
        **files,
        "slurm.sbatch": _slurm(plan, draft, checkout),
        "pytorchjob.yaml": _kubernetes(plan, draft, checkout),
    }


def _slurm(plan: Plan, draft: Draft, checkout: str | None) -> str:
    nodes, each = plan.nodes, plan.gpus_per_node
    segment = plan.cluster.fast_domain // each
    options = [
        f"--job-name={plan.name}",
        f"--nodes={nodes}",
        "--ntasks-per-node=1",
        *([f"--gpus-per-node={each}"] if _resource(plan) else []),
        # Nodes of one fast domain next to each other, where a domain is more than a node.
        *([f"--segment={min(segment, nodes)}"] if segment > 1 and nodes > 1 else []),
        "--exclusive",
        "--time=24:00:00",
        "--output=%x-%j.log",
    ]
    what = [f"{plan.name} for {draft.target} under Slurm: a torchrun per node, a process per accelerator.", ""]
    what += [f"  {f'{checkout}=/path/to/checkout ' if checkout else ''}sbatch slurm.sbatch"]
    lines = "".join(f"#SBATCH {option}\n" for option in options)
    return f"""#!/usr/bin/env bash
{comment(what)}{lines}set -euo pipefail
cd "$SLURM_SUBMIT_DIR"

HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export HEAD JOB="$SLURM_JOB_ID" PORT=$(({PORT} + SLURM_JOB_ID % 1000))
# On nodes with several networks, name the one to use:
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0
if [ "$SLURM_JOB_NUM_NODES" != {nodes} ]; then
  echo "this plan is for {nodes} nodes, not $SLURM_JOB_NUM_NODES" >&2
  exit 2
fi
srun bash train.sh
"""


def _resource(plan: Plan) -> str | None:
    """The name under which Kubernetes hands out the accelerator; None for one that it does not."""
    vendor = plan.cluster.gpu.vendor.lower()
    return f"{vendor}.com/gpu" if vendor in ("nvidia", "amd") else None


def _kubernetes(plan: Plan, draft: Draft, checkout: str | None) -> str:
    nodes, each, resource = plan.nodes, plan.gpus_per_node, _resource(plan)
    what = [
        f"{plan.name} for {draft.target} with Kubeflow's training operator (v1 API, PyTorchJob): {nodes} pods with",
        f"{each} accelerators. The operator tells torchrun in every pod where and how many (PET_RDZV_…, PET_NNODES).",
        "To change: image, claim, network. The files lie in the claim's folder of the plan's name.",
        "",
        "  kubectl apply -f pytorchjob.yaml",
    ]
    env = {"NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "eth0"}
    if checkout:
        env = {checkout: f"/shared/{checkout.lower()}"} | env
    variables = "".join(
        f"                - name: {name}\n                  value: {json.dumps(value)}\n" for name, value in env.items()
    )
    limits = (
        f"""              resources:
                limits:
                  {resource}: {each}
"""
        if resource
        else ""
    )
    return f"""{comment(what)}apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata:
  name: {json.dumps(plan.name)}
spec:
  nprocPerNode: "{each}"
  elasticPolicy:
    rdzvBackend: c10d
    minReplicas: {nodes}
    maxReplicas: {nodes}
  runPolicy:
    cleanPodPolicy: None
    schedulingPolicy:
      minAvailable: {nodes}
  pytorchReplicaSpecs:
    Worker:
      replicas: {nodes}
      restartPolicy: OnFailure
      template:
        spec:
          terminationGracePeriodSeconds: {GRACE_SECONDS + 30}
          containers:
            # The operator looks for this name.
            - name: pytorch
              image: YOUR-IMAGE:YOUR-TAG
              workingDir: {json.dumps(f"/shared/{plan.name}")}
              command: ["bash", "train.sh"]
              env:
{variables}              ports:
                # At which torchruns meet, on worker 0.
                - name: pytorchjob-port
                  containerPort: 23456
{limits}              volumeMounts:
                - name: shared
                  mountPath: /shared
                - name: memory
                  mountPath: /dev/shm
          volumes:
            - name: shared
              persistentVolumeClaim:
                claimName: YOUR-CLAIM
            # NCCL talks through /dev/shm inside a pod, and the default of 64 MB is too little.
            - name: memory
              emptyDir:
                medium: Memory
                sizeLimit: 16Gi
"""
