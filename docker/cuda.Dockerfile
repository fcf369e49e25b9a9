# For NVIDIA GPUs: docker build -f docker/cuda.Dockerfile -t ejdist:cuda .
# CUDA comes with the packages of JAX; the machine needs a driver for CUDA 13 and the container toolkit.
FROM python:3.12-slim-bookworm
# Triton compiles the launcher of each kernel with a C compiler.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/ejdist
COPY pyproject.toml README.md LICENSE ./
COPY kernels kernels
COPY ejdist ejdist
COPY recipes recipes
COPY launch launch
# The extras bound every version.
# hadolint ignore=DL3013
RUN pip install --no-cache-dir '.[train,cuda,gcs]'
# Runs write to outputs/ here: mount a volume, or give run.dir.
WORKDIR /work
CMD ["python", "-m", "launch"]
