"""The schema of JobSet, of which tests/schemas/jobset.json is the part that is needed here.

Source: https://github.com/kubernetes-sigs/jobset, config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml, Apache-2.0.
Made by: python tests/schemas/jobset.py jobset.x-k8s.io_jobsets.yaml REVISION > tests/schemas/jobset.json
"""

import json
import sys
from pathlib import Path

# Parts of a pod that no YAML of launch.gke has. One that it had would be refused as unknown, and is then taken off here.
LEFT_OUT = {
    "affinity", "ephemeralContainers", "lifecycle", "livenessProbe", "readinessProbe", "startupProbe",
    "topologySpreadConstraints", "volumeClaimPolicies", "resourceClaims", "envFrom",
}  # fmt: skip
VOLUMES = {"name", "emptyDir", "hostPath", "persistentVolumeClaim", "secret"}


def reduced(node, name=""):
    """Returns a part of the schema without prose; an object takes no other fields than those that it names."""
    if not isinstance(node, dict):
        return [reduced(x) for x in node] if isinstance(node, list) else node
    made = {}
    for key, value in node.items():
        if key == "properties":
            kept = {k: v for k, v in value.items() if k not in LEFT_OUT and (name != "volumes" or k in VOLUMES)}
            made[key] = {k: reduced(v, k) for k, v in kept.items()}
            made["additionalProperties"] = False
        elif key == "items":
            made[key] = reduced(value, name)
        elif key in ("type", "required", "enum", "pattern", "anyOf", "additionalProperties", "minimum", "maxLength"):
            made[key] = reduced(value)
    return made


def schema():
    return json.loads((Path(__file__).parent / "jobset.json").read_text())["schema"]


if __name__ == "__main__":
    import yaml

    crd = yaml.safe_load(Path(sys.argv[1]).read_text())
    (version,) = crd["spec"]["versions"]
    whole = version["schema"]["openAPIV3Schema"]
    del whole["properties"]["status"]  # which the cluster writes
    facts = {
        "source": "https://github.com/kubernetes-sigs/jobset config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml",
        "revision": sys.argv[2],
        "licence": "Apache-2.0, Copyright The Kubernetes Authors",
        "changed": "reduced by tests/schemas/jobset.py: no prose, fewer parts of a pod, unknown fields are refused",
        "version": version["name"],
        "schema": reduced(whole),
    }
    print(
        json.dumps(facts, indent=None, separators=(",", ":"))
        .replace('"schema":', '"schema":\n')
        .replace('},"', '},\n"')
    )
