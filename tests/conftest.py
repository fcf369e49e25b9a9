"""Every test runs on eight virtual CPU devices; tests marked gpu run on the CUDA device instead."""

import os
import sys

if not any("gpu" in argument for argument in sys.argv):
    os.environ["JAX_PLATFORMS"] = "cpu"
    flag = "--xla_force_host_platform_device_count=8"
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
# The metadata server of a cloud TPU is asked for at start and, away from one, waited for.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
